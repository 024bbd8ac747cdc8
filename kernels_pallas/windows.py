"""The Pallas body of kernels that change a few positions of each row in place: of keys and values that stay in HBM, a
window around those positions is copied to VMEM, changed, and copied back.

Rows take turns with two buffers: while one is worked on, the window of the next is on its way in and that of the one
before on its way out.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import copies
from kernels_pallas.checks import KernelError
from kernels_pallas.chips import Chip

SUBLANES = 16  # Copies between HBM and VMEM begin and end at multiples of it.


def edit_in_place(
    kv: tuple[jax.Array, ...],
    prefetch: tuple[jax.Array, ...],
    new: tuple[jax.Array, ...],
    *,
    is_active: Callable,
    transfer: Callable,
    edit: Callable,
    window: tuple[int, int, int],
    overhang: int = 0,
    chip: Chip,
    name: str,
    interpret,
) -> tuple[jax.Array, ...]:
    """Runs `edit` on the windows of all rows.

    Args:
      kv: arrays in HBM; the results take their memory where they are donated.
      prefetch: int32 arrays that the functions below read as scalars.
      new: [B, ...] arrays of which a row's part is in VMEM when the row is edited.
      is_active: `(prefetch refs, row)`; rows that are not are left alone.
      transfer: `(prefetch refs, kv refs, buffer, semaphore, row, reads)`: copies from HBM to `buffer` or back.
      edit: `(prefetch refs, rows, new refs, row)` changes `rows` [2, K, R, D] float32, keys and values of the window.
      window: K, R and D.
      overhang: so many further rows that `edit` may write to; they are not copied back.
      name: of the kernel.

    Raises:
      KernelError: the windows do not fit the chip's VMEM.
    """
    K, R, D = window
    if not interpret:
        kv = tuple(pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in kv)
    any_space = [pl.BlockSpec(memory_space=pl.ANY) for _ in kv]
    item_bytes = 2 * K * D * (2 * 2 * R + 4 * (R + overhang)) + sum(2 * x.nbytes // len(x) for x in new)
    if 2 * item_bytes > chip.vmem_bytes:
        raise KernelError(
            f"windows of {R} positions of {K} heads of {D}, {kv[0].dtype}, need {item_bytes / 2**20:.0f} MiB, and a "
            f"{chip.name} has {chip.vmem_bytes / 2**21:.0f} MiB to spare; lay the heads over more devices"
        )
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            num_prefetch=len(prefetch),
            num_new=len(new),
            is_active=is_active,
            transfer=transfer,
            edit=edit,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetch),
            grid=(len(prefetch[0]),),
            in_specs=[
                *(pl.BlockSpec((1, *x.shape[1:]), lambda row, *_, rest=x.ndim - 1: (row, *(0,) * rest)) for x in new),
                *any_space,
            ],
            out_specs=any_space,
            scratch_shapes=[
                pltpu.VMEM((2, 2, K, R, D), kv[0].dtype),
                pltpu.VMEM((2, K, R + overhang, D), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) if interpret else pltpu.HBM(x.shape, x.dtype) for x in kv],
        input_output_aliases={len(prefetch) + len(new) + i: i for i in range(len(kv))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=max(16 * 2**20, 3 * item_bytes)
        ),
        name=name,
        interpret=interpret,
    )(*prefetch, *new, *kv)
    # A program whose own result is an array that was held in HBM does not compile; behind a barrier it does.
    return tuple(out if interpret else lax.optimization_barrier(out))


def contiguous(first_position: Callable, capacity: int, size: int) -> tuple[Callable, Callable]:
    """`origin` and `transfer` for windows of `size` positions of [B, K, S, D].

    `first_position` and `origin`, where a window begins in order to contain it, are functions of (prefetch refs, row).
    """

    def origin(prefetch_refs, row):
        aligned = lax.div(first_position(prefetch_refs, row), SUBLANES) * SUBLANES
        return pl.multiple_of(jnp.minimum(aligned, capacity - size), SUBLANES)

    def transfer(prefetch_refs, hbm_refs, buffer, semaphore, row, reads):
        at = pl.ds(origin(prefetch_refs, row), size)
        places = [(ref.at[row, :, at, :], buffer.at[i]) for i, ref in enumerate(hbm_refs)]
        return copies.together([place if reads else place[::-1] for place in places], semaphore)

    return origin, transfer


def size_for(num_rows: int, capacity: int) -> int:
    """Positions of a window around so many, wherever they begin."""
    return min(capacity, pl.cdiv(num_rows + SUBLANES - 1, SUBLANES) * SUBLANES)


def _kernel(*refs, num_prefetch: int, num_new: int, is_active, transfer, edit):
    # Prefetch; then inputs: `new` [1, ...], and keys and values in HBM, which are the outputs too.
    # Scratch: buffer_ref [2, 2, K, R, D]; rows_ref [2, K, R + overhang, D], where single rows can be addressed (those
    # of 16 bits are packed in pairs); read_sems [2], write_sems [2].
    prefetch_refs, refs = refs[:num_prefetch], refs[num_prefetch:]
    new_refs, (*kv_refs, buffer_ref, rows_ref, read_sems, write_sems) = refs[:num_new], refs[num_new:]
    hbm_refs = kv_refs[len(kv_refs) // 2 :]
    row, num_rows = pl.program_id(0), pl.num_programs(0)

    def copy(row, reads):
        slot = lax.rem(row, 2)
        sems = read_sems if reads else write_sems
        return transfer(prefetch_refs, hbm_refs, buffer_ref.at[slot], sems.at[slot], row, reads)

    def when_active(row, condition, action):
        # Whether a row is active is read only where there is such a row.
        pl.when(condition & is_active(prefetch_refs, jnp.clip(row, 0, num_rows - 1)))(action)

    when_active(row, row == 0, lambda: copy(row, True)[0]())
    when_active(row - 1, row > 0, lambda: copy(row - 1, False)[1]())  # The next row takes its buffer.
    when_active(row + 1, row + 1 < num_rows, lambda: copy(row + 1, True)[0]())

    @functools.partial(when_active, row, row >= 0)
    def _():
        copy(row, True)[1]()
        slot, size = lax.rem(row, 2), buffer_ref.shape[3]
        rows_ref[:, :, :size, :] = buffer_ref[slot].astype(jnp.float32)
        edit(prefetch_refs, rows_ref, new_refs, row)
        buffer_ref[slot] = rows_ref[:, :, :size, :].astype(buffer_ref.dtype)
        copy(row, False)[0]()

    when_active(row, row + 1 == num_rows, lambda: copy(row, False)[1]())
