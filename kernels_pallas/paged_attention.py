"""Tree attention over a pool of pages: the contract of `tree_attention`, with a table in place of contiguous rows.

`pages` is [P, 2, K, T, D]: P pages of T positions, keys before values, heads before positions, so that one copy brings
a page's keys and values, and a head's keys lie as the product wants them. `table[b, i]` names the page of positions i*T
to (i+1)*T of row b. A page may be shared by rows as long as nobody writes to it. Entries behind a row's last position
are not looked at.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, UInt32

from kernels_pallas import checks, copies, streaming
from kernels_pallas.checks import KernelError
from kernels_pallas.chips import Chip
from kernels_pallas.tree_attention import tree_attention_reference

PAGE_SIZES = (16, 32, 64, 128)


def check_table(table_BxI, length_B, num_new, num_pages: int, page_size: int) -> None:
    """Checks a page table's values; they must be known, which inside of a compiled program they are not.

    Args:
      table_BxI: pages of each row.
      length_B: positions of each row that are there already, the tail included.
      num_new: positions about to be written behind them, one number or one a row.

    Raises:
      KernelError: a page out of range, a row without room, or a page to be written that another place of the table
        names too.
    """
    table_BxI, length_B, num_new = map(np.asarray, (table_BxI, length_B, num_new))
    end_B = length_B + num_new
    room = table_BxI.shape[1] * page_size
    if end_B.size and end_B.max() > room:
        raise KernelError(
            f"a table of {table_BxI.shape[1]} pages of {page_size} holds {room} positions a row; lengths "
            f"{length_B.tolist()} and {num_new.tolist()} new ones do not fit"
        )
    used_BxI = np.arange(table_BxI.shape[1])[None] * page_size < end_B[:, None]
    bad = used_BxI & ((table_BxI < 0) | (table_BxI >= num_pages))
    if bad.any():
        b, i = np.argwhere(bad)[0]
        raise KernelError(
            f"page {table_BxI[b, i]} of row {b}, place {i}, is out of range: the pool has {num_pages} pages"
        )
    written_BxI = used_BxI & ((np.arange(table_BxI.shape[1])[None] + 1) * page_size > length_B[:, None])
    uses_P = np.bincount(table_BxI[used_BxI], minlength=num_pages)
    shared = written_BxI & (uses_P[np.where(used_BxI, table_BxI, 0)] > 1)
    if shared.any():
        b, i = np.argwhere(shared)[0]
        raise KernelError(
            f"page {table_BxI[b, i]} of row {b}, place {i}, is about to be written and is shared; give the row a copy"
        )


def check_pages(pages_Px2xKxTxD, table_BxI, length_B, num_new, tail=0) -> None:
    """Checks the shapes of a pool and a table, and the table's values where they are known.

    Raises:
      KernelError: they do not agree, or the page size is not supported.
    """
    if pages_Px2xKxTxD.ndim != 5 or pages_Px2xKxTxD.shape[1] != 2:
        raise KernelError(f"pages must be [P, 2, K, T, D], got {pages_Px2xKxTxD.shape=}")
    num_pages, _, _, page_size, _ = pages_Px2xKxTxD.shape
    if page_size not in PAGE_SIZES:
        raise KernelError(f"pages of {page_size} positions are not supported, expected {PAGE_SIZES}")
    if table_BxI.ndim != 2 or table_BxI.shape[:1] != length_B.shape or table_BxI.dtype != jnp.int32:
        raise KernelError(
            f"the page table must be int32 [B, I] with a row for each length, got {table_BxI.dtype} {table_BxI.shape}, "
            f"{length_B.shape=}"
        )
    checks.check_sizes(pages=pages_Px2xKxTxD, lengths=length_B)
    if not any(isinstance(x, jax.core.Tracer) for x in (table_BxI, length_B, num_new, tail)):
        check_table(table_BxI, np.asarray(length_B) + np.asarray(tail), num_new, num_pages, page_size)


def contiguous(
    pages_Px2xKxTxD: Float[Array, "P 2 K T D"], table_BxI: Int[Array, "B I"]
) -> tuple[Float[Array, "B K S D"], Float[Array, "B K S D"]]:
    """Keys and values of all rows, copied side by side, S = I T."""
    kv_BxIx2xKxTxD = jnp.take(pages_Px2xKxTxD, table_BxI, axis=0, mode="clip")
    B, I, _, K, T, D = kv_BxIx2xKxTxD.shape
    kv_2xBxKxSxD = kv_BxIx2xKxTxD.transpose(2, 0, 3, 1, 4, 5).reshape(2, B, K, I * T, D)
    return kv_2xBxKxSxD[0], kv_2xBxKxSxD[1]


def paged_tree_attention_reference(
    q_BxNxHxD: Float[Array, "B N H D"],
    pages_Px2xKxTxD: Float[Array, "P 2 K T D"],
    table_BxI: Int[Array, "B I"],
    length_B: Int[Array, "B"],
    words_BxNxW: UInt32[Array, "B N W"] | None = None,
    scale: float | None = None,
    tail: Int[Array, ""] | int = 0,
) -> Float[Array, "B N H D"]:
    """`tree_attention_reference` over the pages of a table; the other arguments are the same."""
    keys, values = contiguous(pages_Px2xKxTxD, table_BxI)
    return tree_attention_reference(q_BxNxHxD, keys, values, length_B, words_BxNxW, scale, tail)


def paged_tree_attention(
    q_BxNxHxD: Float[Array, "B N H D"],
    pages_Px2xKxTxD: Float[Array, "P 2 K T D"],
    table_BxI: Int[Array, "B I"],
    length_B: Int[Array, "B"],
    words_BxNxW: UInt32[Array, "B N W"] | None = None,
    scale: float | None = None,
    tail: Int[Array, ""] | int = 0,
    *,
    chip: Chip,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B N H D"]:
    """The reference above as a TPU kernel; it has no gradient. Arguments as those of
    `tree_attention_tpu.tree_attention`, but every row needs room for its new positions, and:

    Args:
      pages_Px2xKxTxD: the pool, the N new positions already written; T is 16, 32, 64 or 128.
      table_BxI: int32 pages of each row.

    Raises:
      KernelError: arguments that do not agree or are not supported; a page out of range or shared for writing, where
        the table's values are known (see `check_table` for calls inside of a compiled program).
    """
    checks.check_chip(chip)
    checks.check_queries(q_BxNxHxD)
    num_new = q_BxNxHxD.shape[1]
    check_pages(pages_Px2xKxTxD, table_BxI, length_B, num_new, tail)
    _, _, K, T, D = pages_Px2xKxTxD.shape
    missing = -table_BxI.shape[1] % (checks.LANES // T)
    table_BxI = jnp.pad(table_BxI, ((0, 0), (0, missing)))  # Never looked at: no length reaches there.
    capacity = table_BxI.shape[1] * T
    dtypes = (pages_Px2xKxTxD.dtype,)
    checks.check_attention(q_BxNxHxD, pages_Px2xKxTxD.shape, dtypes, length_B, words_BxNxW, scale, tail, capacity, D, K)
    return streaming.attention(
        q_BxNxHxD,
        (pages_Px2xKxTxD,),
        _fetch,
        (table_BxI,),
        length_B,
        words_BxNxW,
        scale,
        tail,
        num_kv_heads=K,
        capacity=capacity,
        chip=chip,
        name="paged_causal_attention" if words_BxNxW is None else "paged_tree_attention",
        interpret=interpret,
    )


def _fetch(prefetch_refs, kv_refs, buffer, semaphore, row, start, end):
    (table_ref,), (pages_ref,) = prefetch_refs, kv_refs
    page_size = pages_ref.shape[3]
    count = pl.cdiv(jnp.minimum(end - start, buffer.shape[2]), page_size)
    return copies.of_pages(pages_ref, table_ref, row, lax.div(start, page_size), count, buffer, semaphore)
