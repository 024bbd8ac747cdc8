"""The target protocol: everything the decoding loop needs from a model, and no more."""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int, UInt32

from spec_jax.kv import KVBuffer


@runtime_checkable
class Target(Protocol):
    """A causal language model that can be decoded.

    Compiled programs are cached by target object, so an instance must be hashable (the default, by identity, is
    right) and everything that may change between calls must be in `params`.

    Attributes:
      vocab_size: V; logits and token ids range over 0..V-1.
      max_positions: positions the model supports, or None where it has no limit. Scratch nodes may be scored at
        positions beyond it; what comes out there is never used.
      eos_token_ids: tokens that end a text.
      tokenizer: an object with `encode(text) -> list[int]`, `token_bytes(id) -> bytes` and `fingerprint: str`, or
        None for a model of bare token ids.
      params: a pytree of arrays, given to `forward` as an argument of the compiled program.
    """

    vocab_size: int
    max_positions: int | None
    eos_token_ids: tuple[int, ...]
    tokenizer: Any
    params: Any

    def init_kv(self, batch: int, capacity: int) -> KVBuffer:
        """An empty buffer of `capacity` positions a row."""
        ...

    def forward(
        self,
        params: Any,
        tokens_BxN: Int[Array, "B N"],
        positions_BxN: Int[Array, "B N"],
        kv: KVBuffer,
        words_BxNxW: UInt32[Array, "B N W"] | None,
        taps: tuple[int, ...] = (),
    ) -> tuple[Float[Array, "B N V"], tuple[Float[Array, "B N E"], ...], KVBuffer]:
        """Scores N new positions of every row in one pass.

        Args:
          params: the model's parameters.
          tokens_BxN: token ids of the new positions.
          positions_BxN: their absolute positions (siblings in a tree share one).
          kv: the buffer; the new rows are written to its scratch by `kv.write`, and `length` stays.
          words_BxNxW: ancestor bits of the new positions over the buffer's scratch, or None for a chain.
          taps: which hidden states to return. Tap i in 0..L is the residual stream after i blocks (0: the
            embedding); tap L+1 is the final norm's output, the input of the output head.

        Returns:
          Logits after each new position, the taps in the order asked for, and the written buffer.
        """
        ...
