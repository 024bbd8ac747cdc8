"""Commit: the rows of accepted nodes are moved next to the prefix, in a contiguous buffer or over pages.

The nodes of a tree were written at `length` and on. Of these, `path` names the accepted ones in the order of the text,
ascending, since a node comes after its parent; row `path[i]` is moved to place `i`. Nothing else that a later step may
see is touched: what lies behind the new length is scratch.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas import checks, copies
from kernels_pallas.checks import KernelError
from kernels_pallas.chips import Chip
from kernels_pallas.paged_attention import check_pages

_SUBLANES = 16  # Copies between HBM and VMEM begin at multiples of it.


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
      num_rows: rows behind the prefix that hold nodes; entries of `path` up to `count` are below it, and ascend.
      chip, interpret: see `tree_attention_tpu.tree_attention`.

    Raises:
      KernelError: arguments that do not agree or are not supported.
    """
    checks.check_chip(chip)
    if keys_BxKxSxD.ndim != 4 or keys_BxKxSxD.shape != values_BxKxSxD.shape:
        raise KernelError(
            f"keys and values must both be [B, K, S, D], got {keys_BxKxSxD.shape=}, {values_BxKxSxD.shape=}"
        )
    B, K, S, D = keys_BxKxSxD.shape
    _check(keys_BxKxSxD.dtype, values_BxKxSxD.dtype, D, B, length_B, count_B, path_BxP, num_rows)
    if S % checks.LANES:
        raise KernelError(f"rows hold {S} positions, expected a multiple of {checks.LANES}: {keys_BxKxSxD.shape=}")
    window = min(S, pl.cdiv(num_rows + _SUBLANES - 1, _SUBLANES) * _SUBLANES)

    def origin(prefetch_refs, row):
        length_ref, _, _ = prefetch_refs
        aligned = lax.div(length_ref[row], _SUBLANES) * _SUBLANES
        return pl.multiple_of(jnp.minimum(aligned, S - window), _SUBLANES)

    def transfer(prefetch_refs, hbm_refs, buffer, semaphore, row, reads):
        at = pl.ds(origin(prefetch_refs, row), window)
        places = [(ref.at[row, :, at, :], buffer.at[i]) for i, ref in enumerate(hbm_refs)]
        return copies.together([place if reads else place[::-1] for place in places], semaphore)

    return _call(
        (keys_BxKxSxD, values_BxKxSxD),
        (length_B, count_B, path_BxP),
        transfer,
        origin,
        buffer=(K, window, D),
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
    check_pages(pages_Px2xKxTxD, table_BxI, length_B, num_rows)
    _, _, K, T, D = pages_Px2xKxTxD.shape
    _check(pages_Px2xKxTxD.dtype, pages_Px2xKxTxD.dtype, D, len(table_BxI), length_B, count_B, path_BxP, num_rows)

    def origin(prefetch_refs, row):
        length_ref, _, _, _ = prefetch_refs
        return lax.div(length_ref[row], T) * T

    def transfer(prefetch_refs, hbm_refs, buffer, semaphore, row, reads):
        length_ref, count_ref, path_ref, table_ref = prefetch_refs
        count = count_ref[row]
        last = length_ref[row] + (path_ref[row, count - 1] if reads else count - 1)
        first = lax.div(length_ref[row], T)
        pages = lax.div(last, T) - first + 1
        return copies.of_pages(hbm_refs[0], table_ref, row, first, pages, buffer, semaphore, reads)

    (pages,) = _call(
        (pages_Px2xKxTxD,),
        (length_B, count_B, path_BxP, table_BxI),
        transfer,
        origin,
        buffer=(K, pl.cdiv(num_rows + T - 1, T) * T, D),
        name="paged_commit",
        interpret=interpret,
    )
    return pages


def _check(key_dtype, value_dtype, head_dim, B, length_B, count_B, path_BxP, num_rows) -> None:
    if key_dtype != value_dtype or key_dtype not in (jnp.float32, jnp.bfloat16):
        raise KernelError(f"keys and values must both be float32 or both bfloat16, got {key_dtype} and {value_dtype}")
    if head_dim not in checks.HEAD_DIMS:
        raise KernelError(
            f"head_dim {head_dim} is not supported, expected one of {checks.HEAD_DIMS}; use the reference"
        )
    if not 1 <= num_rows <= checks.MAX_SCRATCH:
        raise KernelError(f"nodes lie in 1 to {checks.MAX_SCRATCH} rows behind the prefix, got {num_rows=}")
    arrays = {"length": length_B, "count": count_B, "path": path_BxP}
    shapes = {"length": (B,), "count": (B,), "path": (B, path_BxP.shape[-1])}
    for name, array in arrays.items():
        if array.shape != shapes[name] or array.dtype != jnp.int32:
            raise KernelError(f"{name} must be int32 {list(shapes[name])}, got {array.dtype} {array.shape}")


def _call(kv: tuple, prefetch: tuple, transfer: Callable, origin: Callable, *, buffer, name, interpret) -> tuple:
    """The kernel over `kv` in HBM; `transfer` copies the rows around a row's tree to VMEM or back."""
    if not interpret:
        kv = tuple(pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in kv)
    any_space = [pl.BlockSpec(memory_space=pl.ANY) for _ in kv]
    out = pl.pallas_call(
        functools.partial(_kernel, transfer=transfer, origin=origin, num_prefetch=len(prefetch), num_kv=len(kv)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetch),
            grid=(1,),
            in_specs=any_space,
            out_specs=any_space,
            scratch_shapes=[
                pltpu.VMEM((2, 2, *buffer), kv[0].dtype),
                pltpu.VMEM((2, *buffer), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) if interpret else pltpu.HBM(x.shape, x.dtype) for x in kv],
        input_output_aliases={len(prefetch) + i: i for i in range(len(kv))},
        name=name,
        interpret=interpret,
    )(*prefetch, *kv)
    # A program whose own result is an array that was held in HBM does not compile; behind a barrier it does.
    return tuple(out if interpret else lax.optimization_barrier(out))


def _kernel(*refs, transfer, origin, num_prefetch: int, num_kv: int):
    # Prefetch: length_ref [B], count_ref [B], path_ref [B, P], and what `transfer` needs.
    # Input and output, the same memory: keys and values in HBM.
    # Scratch: buffer_ref [2, 2, K, rows, D]; rows_ref [2, K, rows, D], where single rows can be addressed (those of 16
    # bits are packed in pairs); read_sems [2], write_sems [2].
    prefetch_refs, hbm_refs = refs[:num_prefetch], refs[num_prefetch + num_kv : num_prefetch + 2 * num_kv]
    buffer_ref, rows_ref, read_sems, write_sems = refs[-4:]
    length_ref, count_ref, path_ref = prefetch_refs[:3]
    num_rows = length_ref.shape[0]

    def moves(row):  # The path ascends: where its last node is in place, all are.
        count = count_ref[row]
        return (count > 0) & (path_ref[row, jnp.maximum(count - 1, 0)] != count - 1)

    def copy(row, reads):
        slot = lax.rem(row, 2)
        sems = read_sems if reads else write_sems
        return transfer(prefetch_refs, hbm_refs, buffer_ref.at[slot], sems.at[slot], row, reads)

    def when_moving(row, action):
        # The condition is read only where there is such a row.
        inside = (row >= 0) & (row < num_rows)
        pl.when(inside & moves(jnp.clip(row, 0, num_rows - 1)))(action)

    def body(row, _):
        when_moving(row - 1, lambda: copy(row - 1, False)[1]())  # The next row takes its buffer.
        when_moving(row + 1, lambda: copy(row + 1, True)[0]())

        @functools.partial(when_moving, row)
        def _():
            copy(row, True)[1]()
            slot, behind = lax.rem(row, 2), length_ref[row] - origin(prefetch_refs, row)
            rows_ref[...] = buffer_ref[slot].astype(jnp.float32)

            def move(i, _):
                rows_ref[:, :, pl.ds(behind + i, 1), :] = rows_ref[:, :, pl.ds(behind + path_ref[row, i], 1), :]

            lax.fori_loop(0, count_ref[row], move, None)
            buffer_ref[slot] = rows_ref[...].astype(buffer_ref.dtype)
            copy(row, False)[0]()

    when_moving(jnp.int32(0), lambda: copy(0, True)[0]())
    lax.fori_loop(0, num_rows, body, None)
    when_moving(num_rows - 1, lambda: copy(num_rows - 1, False)[1]())
