"""A Llama-family model as a decoding target."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, UInt32

from models import sharding
from models.checkpoint import Checkpoint, Params, flat_params
from models.config import LlamaConfig
from models.errors import ModelError
from models.llama import Llama
from models.tokenizer import Tokenizer
from spec_jax.kernels import Kernels
from spec_jax.kv import KVBuffer

_SAMPLED = 64  # Rows and columns of each weight that go into a fingerprint.


class LlamaTarget:
    """Implements `spec_jax.target.Target`. Hashable by identity, as compiled programs are cached by target.

    Attributes:
      config: the model's configuration.
      params: its parameters, an `nnx.State`; `models.checkpoint.flat_params` lists them by path.
      tokenizer: or None for a model of bare token ids; `tokenizer_problem` then says why.
      eos_token_ids: tokens that end a text.
      name: for reports.
      kernels: which implementation of attention, write and commit its buffers use.
    """

    def __init__(
        self,
        config: LlamaConfig,
        params: Params,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
        name: str = "llama",
        tokenizer_problem: str | None = None,
        kernels: Kernels | None = None,
    ):
        self.config = config
        self.params = params
        self.tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        self.name = name
        self.tokenizer_problem = tokenizer_problem
        self.kernels = Kernels.choose("auto", config.head_dim) if kernels is None else kernels
        self._graphdef, _ = nnx.split(Llama(config))

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, name: str | None = None, attention: str = "auto") -> "LlamaTarget":
        """Reads the weights of an opened checkpoint; `attention` as of `spec_jax.kernels.Kernels.choose`.

        Raises:
          ModelError: it does not hold what its configuration needs.
          ValueError: there is no such attention here.
        """
        kernels = Kernels.choose(attention, checkpoint.config.head_dim)  # Refused before any weight is read.
        return cls(
            checkpoint.config,
            checkpoint.params(),
            checkpoint.tokenizer,
            checkpoint.eos_token_ids,
            name or checkpoint.name,
            checkpoint.tokenizer_problem,
            kernels,
        )

    @classmethod
    def random(cls, config: LlamaConfig, seed: int = 0, **kwargs: Any) -> "LlamaTarget":
        """A model of random weights; `kwargs` go to the constructor."""
        _, params = nnx.split(Llama(config, nnx.Rngs(seed)))
        return cls(config, params, **kwargs)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    def sharded(self, mesh: Mesh, axis: str = "model") -> "LlamaTarget":
        """This model on several devices by tensor parallelism, by the rules of `models.sharding`.

        Args:
          mesh: the devices; arrays are partitioned along `axis` and whole along others.

        Raises:
          ModelError: the mesh has no such axis, or heads, MLP or vocabulary cannot be divided along it.
        """
        return self._on_mesh(mesh, axis)

    def replicated(self, mesh: Mesh) -> "LlamaTarget":
        """This model whole on every device of a mesh, e.g. a draft model beside a sharded target."""
        return self._on_mesh(mesh, None)

    def _on_mesh(self, mesh: Mesh, axis: str | None) -> "LlamaTarget":
        kernels = dataclasses.replace(self.kernels, mesh=sharding.automatic(mesh), axis=axis)
        params = jax.device_put(self.params, sharding.param_shardings(self.config, kernels))
        return LlamaTarget(
            self.config, params, self.tokenizer, self.eos_token_ids, self.name, self.tokenizer_problem, kernels
        )

    def init_kv(self, batch: int, capacity: int) -> KVBuffer:
        """An empty buffer of `capacity` positions a row, in the model's dtype."""
        c = self.config
        dtype = jnp.dtype(c.dtype)
        create = functools.partial(
            KVBuffer.create, c.num_layers, batch, c.num_kv_heads, capacity, c.head_dim, dtype, self.kernels
        )
        if self.kernels.mesh is None:
            return create()
        return jax.jit(create, out_shardings=sharding.kv_shardings(jax.eval_shape(create)))()

    def forward(
        self,
        params: Params,
        tokens_BxN: Int[Array, "B N"],
        positions_BxN: Int[Array, "B N"],
        kv: KVBuffer,
        words_BxNxW: UInt32[Array, "B N W"] | None,
        taps: tuple[int, ...] = (),
    ) -> tuple[Float[Array, "B N V"], tuple[Float[Array, "B N E"], ...], KVBuffer]:
        """Scores N new positions of every row; see `spec_jax.target.Target.forward`. Logits are float32."""
        model = nnx.merge(self._graphdef, params)
        return model(tokens_BxN, positions_BxN, kv, words_BxNxW, taps)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the model's tokenizer puts around it.

        Raises:
          ModelError: the model has no tokenizer.
        """
        return self._tokenizer().encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids.

        Raises:
          ModelError: the model has no tokenizer.
        """
        return self._tokenizer().decode(ids)

    def chat(
        self, messages: str | Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a conversation in the model's chat format.

        Args:
          messages: the text of one user turn, or a sequence of {"role": ..., "content": ...}.
          add_generation_prompt: end with the opening of the assistant's turn.
          variables: what the model's template knows beyond that, e.g. `enable_thinking=False` for Qwen3.

        Raises:
          ModelError: the model has no tokenizer or no chat template, or the template refuses the messages.
        """
        tokenizer = self._tokenizer()
        text = tokenizer.render_chat(messages, add_generation_prompt, **variables)
        # The template writes the special tokens itself.
        return tokenizer.encode(text, add_special_tokens=False)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            reason = self.tokenizer_problem or "none was given"
            raise ModelError(f"{self.name} has no tokenizer ({reason}); give token ids")
        return self.tokenizer

    @functools.cached_property
    def fingerprint(self) -> str:
        """A sha256 of the configuration and of a grid of values from every weight: cheap, not tamper-proof.

        The same for a model in float32 and in bfloat16.
        """
        shape = {name: value for name, value in dataclasses.asdict(self.config).items() if name != "dtype"}
        digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode())
        arrays = flat_params(self.config, self.params)
        samples = jax.device_get({path: _grid(array) for path, array in arrays.items()})
        for path, array in arrays.items():
            digest.update(f"{path} {array.shape}".encode())
            digest.update(np.ascontiguousarray(samples[path]).tobytes())
        return digest.hexdigest()

    def __repr__(self) -> str:
        c = self.config
        return f"LlamaTarget({self.name!r}, {c.family}, {c.num_layers} layers, vocabulary {c.vocab_size}, {c.dtype})"


def _grid(array: jax.Array) -> jax.Array:
    return array[tuple(slice(None, None, max(1, size // _SAMPLED)) for size in array.shape)].astype(jnp.bfloat16)
