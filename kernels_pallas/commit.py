"""Commit: the rows of accepted nodes are moved next to the prefix, in a contiguous buffer or over pages.

The nodes of a tree were written at `length` and on. Of these, `path` names the accepted ones in the order of the text,
ascending, since a node comes after its parent; row `path[i]` is moved to place `i`. Nothing else that a later step may
see is touched: what lies behind the new length is scratch.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas import checks, copies, windows
from kernels_pallas.checks import KernelError
from kernels_pallas.chips import Chip
from kernels_pallas.paged_attention import check_pages


def commit_reference(
    rows_BxKxSxD: Float[Array, "B K S D"],
    length_B: Int[Array, "B"],
    count_B: Int[Array, "B"],
    path_BxP: Int[Array, "B P"],
) -> Float[Array, "B K S D"]:
    """Moves the rows of the first `count` nodes of `path` behind the prefix.

    Args:
      rows_BxKxSxD: keys or values; node n of row b lies at `length[b] + n`.
      length_B: committed positions before.
      count_B: accepted nodes; 0 leaves a row as it is.
      path_BxP: their numbers; entries from `count` on are ignored.
    """
    B, _, S, _ = rows_BxKxSxD.shape
    step_1xP = jnp.arange(path_BxP.shape[1])[None, :]
    source_BxP = length_B[:, None] + path_BxP
    # Out-of-range indices are dropped; a negative one would wrap.
    target_BxP = jnp.where(step_1xP < count_B[:, None], length_B[:, None] + step_1xP, S)
    moved_BxKxPxD = jnp.take_along_axis(rows_BxKxSxD, source_BxP[:, None, :, None], axis=2, mode="clip")
    moved_BxPxKxD = moved_BxKxPxD.transpose(0, 2, 1, 3)
    return rows_BxKxSxD.at[jnp.arange(B)[:, None], :, target_BxP].set(moved_BxPxKxD, mode="drop")


def commit(
    keys_BxKxSxD: Float[Array, "B K S D"],
    values_BxKxSxD: Float[Array, "B K S D"],
    length_B: Int[Array, "B"],
    count_B: Int[Array, "B"],
    path_BxP: Int[Array, "B P"],
    *,
    num_rows: int,
    chip: Chip,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "B K S D"], Float[Array, "B K S D"]]:
    """`commit_reference` of keys and values as a TPU kernel, in place where the buffers are donated.

    Args:
      num_rows: rows behind the prefix that hold nodes; entries of `path` up to `count` are below it, and ascend. What
        would leave these rows or the buffer is not moved.
      chip, interpret: see `tree_attention_tpu.tree_attention`.

    Raises:
      KernelError: arguments that do not agree or are not supported.
    """
    checks.check_chip(chip)
    checks.check_buffers(keys_BxKxSxD, values_BxKxSxD)
    B, K, S, D = keys_BxKxSxD.shape
    _check(B, length_B, count_B, path_BxP, num_rows)
    size = windows.size_for(num_rows, S)
    origin, transfer = windows.contiguous(lambda prefetch_refs, row: prefetch_refs[0][row], S, size)
    return windows.edit_in_place(
        (keys_BxKxSxD, values_BxKxSxD),
        (length_B, count_B, path_BxP),
        (),
        is_active=_moves,
        transfer=transfer,
        edit=functools.partial(_move, origin),
        window=(K, size, D),
        chip=chip,
        name="commit",
        interpret=interpret,
    )


def paged_commit(
    pages_Px2xKxTxD: Float[Array, "P 2 K T D"],
    table_BxI: Int[Array, "B I"],
    length_B: Int[Array, "B"],
    count_B: Int[Array, "B"],
    path_BxP: Int[Array, "B steps"],
    *,
    num_rows: int,
    chip: Chip,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "P 2 K T D"]:
    """`commit` over the pages of `paged_attention`, in place where the pool is donated.

    Raises:
      KernelError: arguments that do not agree or are not supported; a page out of range or shared for writing, where
        the table's values are known (see `paged_attention.check_table` for calls inside of a compiled program).
    """
    checks.check_chip(chip)
    if pages_Px2xKxTxD.ndim == 5:
        checks.check_rows(pages_Px2xKxTxD.dtype, pages_Px2xKxTxD.shape[4])
    _check(len(length_B), length_B, count_B, path_BxP, num_rows)
    # Rows that commit nothing are not looked at.
    check_pages(pages_Px2xKxTxD, table_BxI, jnp.where(count_B > 0, length_B, 0), jnp.where(count_B > 0, num_rows, 0))
    _, _, K, T, D = pages_Px2xKxTxD.shape

    def origin(prefetch_refs, row):
        length_ref, _, _, _ = prefetch_refs
        return lax.div(length_ref[row], T) * T

    def transfer(prefetch_refs, hbm_refs, buffer, semaphore, row, reads):
        length_ref, count_ref, path_ref, table_ref = prefetch_refs
        count = _count(count_ref, path_ref, row)
        last = length_ref[row] + jnp.minimum(path_ref[row, count - 1] if reads else count - 1, num_rows - 1)
        first = lax.div(length_ref[row], T)
        pages = jnp.minimum(lax.div(last, T), table_ref.shape[1] - 1) - first + 1
        return copies.of_pages(hbm_refs[0], table_ref, row, first, pages, buffer, semaphore, reads)

    (pages,) = windows.edit_in_place(
        (pages_Px2xKxTxD,),
        (length_B, count_B, path_BxP, table_BxI),
        (),
        is_active=_moves,
        transfer=transfer,
        edit=functools.partial(_move, origin),
        window=(K, pl.cdiv(num_rows + T - 1, T) * T, D),
        chip=chip,
        name="paged_commit",
        interpret=interpret,
    )
    return pages


def _check(B, length_B, count_B, path_BxP, num_rows) -> None:
    if not 1 <= num_rows <= checks.MAX_SCRATCH:
        raise KernelError(f"nodes lie in 1 to {checks.MAX_SCRATCH} rows behind the prefix, got {num_rows=}")
    arrays = {"length": length_B, "count": count_B, "path": path_BxP}
    shapes = {"length": (B,), "count": (B,), "path": (B, *path_BxP.shape[-1:])}
    for name, array in arrays.items():
        if array.shape != shapes[name] or array.dtype != jnp.int32:
            raise KernelError(f"{name} must be int32 {list(shapes[name])}, got {array.dtype} {array.shape}")
    if path_BxP.ndim != 2:
        raise KernelError(f"path must be int32 [B, P], got {path_BxP.shape}")
    checks.check_sizes(**arrays)


def _count(count_ref, path_ref, row):
    """Accepted nodes of a row: a path has no more."""
    return jnp.minimum(count_ref[row], path_ref.shape[1])


def _moves(prefetch_refs, row):
    """Whether anything moves. The path ascends: where its last node is in place, all are."""
    _, count_ref, path_ref = prefetch_refs[:3]
    count = _count(count_ref, path_ref, row)
    return (count > 0) & (path_ref[row, jnp.maximum(count - 1, 0)] != count - 1)


def _move(origin, prefetch_refs, rows, new_refs, row) -> None:
    """Places the accepted rows. In the order of the path none overwrites one that is still to be moved."""
    length_ref, count_ref, path_ref = prefetch_refs[:3]
    behind = length_ref[row] - origin(prefetch_refs, row)
    room = rows.shape[2] - behind  # None behind the end of a full row.

    def move(i, _):
        source = jnp.minimum(behind + path_ref[row, i], rows.shape[2] - 1)
        rows[:, :, pl.ds(behind + i, 1), :] = rows[:, :, pl.ds(source, 1), :]

    lax.fori_loop(0, jnp.minimum(_count(count_ref, path_ref, row), room), move, None)
