"""The static-shape KV buffer with masked commit.

A buffer never grows or shrinks. Each row has a committed `length`; whatever lies behind it is scratch. Scoring
writes the nodes of a tree into the scratch at `length..length+N`, attention shows a node only the committed
prefix and its own ancestors, and `commit` keeps the accepted nodes by moving them next to the prefix and
advancing `length`. Rejection is no work at all: stale rows are masked by length, never cleared.

Layout: one `[B, K, S, D]` array of keys and one of values per layer, as attention reads them. What touches them is in
`spec_jax.kernels`.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from kernels_pallas import lanes
from kernels_pallas.checks import MAX_SCRATCH
from kernels_pallas.tree_attention import visible
from spec_jax.kernels import REFERENCE, Kernels
from spec_jax.pytree import pytree


@pytree
class KVBuffer:
    """Keys and values of every layer, and how many positions of each row are committed.

    Attributes:
      length_B: committed positions.
      tail: positions behind them that earlier passes of the same cycle wrote and the next one may see (a draft model
        scores a tree level by level); `with_length` and `commit` forget them.
      kernels: static; who reads and moves the rows.
      heads_in_row: static; narrow heads share a row where kernels read it. K and D then count rows and their values.
    """

    keys: tuple[Float[Array, "B K S D"], ...]
    values: tuple[Float[Array, "B K S D"], ...]
    length_B: Int[Array, "B"]
    tail: Int[Array, ""]
    kernels: Kernels = dataclasses.field(default=REFERENCE, metadata={"static": True})
    heads_in_row: int = dataclasses.field(default=1, metadata={"static": True})

    @classmethod
    def create(
        cls,
        num_layers: int,
        batch: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype=jnp.float32,
        kernels: Kernels = REFERENCE,
    ) -> "KVBuffer":
        """An empty buffer for at least `capacity` positions a row, committed and scratch together."""
        heads_in_row, rows, width = kernels.layout(num_kv_heads, head_dim)
        shape = (batch, rows, kernels.capacity(capacity), width)
        return cls(
            keys=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
            values=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
            length_B=jnp.zeros((batch,), jnp.int32),
            tail=jnp.int32(0),
            kernels=kernels,
            heads_in_row=heads_in_row,
        )

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]

    def with_length(self, length_B: Int[Array, "B"]) -> "KVBuffer":
        """The same rows with another committed length (shorter: a rollback; longer: scratch becomes committed)."""
        return dataclasses.replace(self, length_B=length_B, tail=jnp.zeros_like(self.tail))

    def with_tail(self, tail: Int[Array, ""] | int) -> "KVBuffer":
        """The same rows, of whose scratch the first `tail` positions hold nodes of this cycle."""
        return dataclasses.replace(self, tail=jnp.asarray(tail, jnp.int32))

    def visible(self, num_new: int, words_BxNxW: UInt32[Array, "B N W"] | None) -> Bool[Array, "B N S"]:
        """Which rows each new position sees."""
        return visible(self.length_B, num_new, self.capacity, words_BxNxW, self.tail)

    def write(self, layer: int, k_BxNxKxD: Float[Array, "B N K D"], v_BxNxKxD: Float[Array, "B N K D"]) -> "KVBuffer":
        """Writes N positions of one layer into the scratch, at `length + tail` and on.

        A position past the capacity is dropped and never lands elsewhere; the decoder reserves the space so that
        this does not happen to a live row.

        Raises:
          ValueError: more positions than the whole buffer has.
        """
        if k_BxNxKxD.shape[1] > self.capacity:
            raise ValueError(f"{k_BxNxKxD.shape[1]} new positions cannot fit a buffer of {self.capacity}")
        # Attention takes a value that is no number for zero, so that it cannot reach those who do not see it; those who
        # do see its key.
        sound_BxNxKx1 = jnp.all(jnp.isfinite(v_BxNxKxD), axis=-1, keepdims=True)
        k_BxNxKxD = jnp.where(sound_BxNxKx1, k_BxNxKxD, jnp.asarray(jnp.nan, k_BxNxKxD.dtype))
        width = self.keys[layer].shape[3]
        k_BxNxKxD, v_BxNxKxD = (lanes.pack_rows(rows, self.heads_in_row, width) for rows in (k_BxNxKxD, v_BxNxKxD))
        start_B = self.length_B + self.tail
        keys, values = self.kernels.write(self.keys[layer], self.values[layer], start_B, k_BxNxKxD, v_BxNxKxD)
        return dataclasses.replace(
            self, keys=_replaced(self.keys, layer, keys), values=_replaced(self.values, layer, values)
        )

    def commit(
        self, count_B: Int[Array, "B"], path_BxP: Int[Array, "B P"] | None = None, num_rows: int | None = None
    ) -> "KVBuffer":
        """Keeps the first `count` nodes of `path` and drops every other scratch row.

        Args:
          count_B: how many nodes are committed, 0 for a row that is not in this cycle.
          path_BxP: indices of the nodes in the order of the text, ascending; None where node i is the i-th of the text
            (a chain), so that nothing has to move. Entries from `count` on are ignored.
          num_rows: scratch rows that the path chooses from; by default as many as there can be.
        """
        committed = self.with_length(self.length_B + count_B)
        if path_BxP is None:
            return committed
        num_rows = min(self.capacity, MAX_SCRATCH) if num_rows is None else num_rows
        keys, values = self.kernels.commit(self.keys, self.values, self.length_B, count_B, path_BxP, num_rows)
        return dataclasses.replace(committed, keys=keys, values=values)


def _replaced(items: tuple, index: int, item) -> tuple:
    return items[:index] + (item,) + items[index + 1 :]
