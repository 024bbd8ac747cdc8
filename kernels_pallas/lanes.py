"""Narrow heads side by side in the lanes of a register.

A row of 64 values fills half of a register's 128 lanes, in HBM too. XLA, left to itself, lays such arrays out the other
way, and whenever a kernel reads the cache all of it is copied. So the keys of two heads share a row, [head 0 | head 1],
as do their values, and the queries of either head hold zeros where the other's keys are: every product is what it was,
and the outputs of a head are found in its half. An odd number of heads leaves the other half of each row empty.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.checks import LANES


def layout(num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Heads in a row, rows of a position, and values in a row, for so many heads of that width."""
    heads = LANES // head_dim if head_dim < LANES and num_kv_heads % (LANES // head_dim) == 0 else 1
    return heads, num_kv_heads // heads, -(-heads * head_dim // LANES) * LANES


def pack_rows(rows_BxNxKxD: Float[Array, "B N K D"], heads_in_row: int, width: int) -> Float[Array, "B N rows width"]:
    """Keys or values with `heads_in_row` heads side by side, and zeros up to `width`."""
    B, N, K, D = rows_BxNxKxD.shape
    packed = rows_BxNxKxD.reshape(B, N, K // heads_in_row, heads_in_row * D)
    return jnp.pad(packed, ((0, 0), (0, 0), (0, 0), (0, width - heads_in_row * D)))


def pack_queries(
    q_BxNxHxD: Float[Array, "B N H D"], heads_in_row: int, rows: int, width: int
) -> Float[Array, "B N H width"]:
    """Queries with zeros where a row holds the keys of another head; `rows` hold the keys of a position."""
    B, N, H, D = q_BxNxHxD.shape
    groups = q_BxNxHxD.reshape(B, N, rows, heads_in_row, -1, D)
    placed = [jnp.pad(groups[:, :, :, i], ((0, 0),) * 4 + ((i * D, width - (i + 1) * D),)) for i in range(heads_in_row)]
    return jnp.stack(placed, axis=3).reshape(B, N, H, width)


def unpack(
    out_BxNxHxL: Float[Array, "B N H width"], heads_in_row: int, rows: int, head_dim: int
) -> Float[Array, "B N H D"]:
    """The outputs of each head, of those of all heads that share its row."""
    B, N, H, L = out_BxNxHxL.shape
    groups = out_BxNxHxL.reshape(B, N, rows, heads_in_row, -1, L)
    own = [groups[:, :, :, i, :, i * head_dim : (i + 1) * head_dim] for i in range(heads_in_row)]
    return jnp.stack(own, axis=3).reshape(B, N, H, head_dim)
