"""Write: new keys and values of each row, at a position of its own.

XLA scatters rows of all heads at once only where heads lie side by side, which no attention kernel wants, and copies
the whole cache to get there; row by row and head by head it is slow. A kernel reads the few tiles around the new rows,
places them, and writes the tiles back.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from kernels_pallas import checks, windows
from kernels_pallas.checks import KernelError
from kernels_pallas.chips import Chip

_MOST = 128  # New positions of a row in one call of the kernel.


def write_reference(
    rows_BxKxSxD: Float[Array, "B K S D"], start_B: Int[Array, "B"], new_BxNxKxD: Float[Array, "B N K D"]
) -> Float[Array, "B K S D"]:
    """Keys or values with N new positions of each row, from `start` on; those past the end of a row are dropped."""
    B, N = new_BxNxKxD.shape[:2]
    position_BxN = start_B[:, None] + jnp.arange(N)[None, :]
    new_BxNxKxD = new_BxNxKxD.astype(rows_BxKxSxD.dtype)
    return rows_BxKxSxD.at[jnp.arange(B)[:, None], :, position_BxN].set(new_BxNxKxD, mode="drop")


def write(
    keys_BxKxSxD: Float[Array, "B K S D"],
    values_BxKxSxD: Float[Array, "B K S D"],
    start_B: Int[Array, "B"],
    new_keys_BxNxKxD: Float[Array, "B N K D"],
    new_values_BxNxKxD: Float[Array, "B N K D"],
    *,
    chip: Chip,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "B K S D"], Float[Array, "B K S D"]]:
    """`write_reference` of keys and values as a TPU kernel, in place where the buffers are donated.

    The gradient is the reference's.

    Raises:
      KernelError: arguments that do not agree or are not supported.
    """
    checks.check_chip(chip)
    checks.check_buffers(keys_BxKxSxD, values_BxKxSxD)
    B, K, S, D = keys_BxKxSxD.shape
    N = new_keys_BxNxKxD.shape[1] if new_keys_BxNxKxD.ndim == 4 else -1
    if not new_keys_BxNxKxD.shape == new_values_BxNxKxD.shape == (B, N, K, D):
        raise KernelError(
            f"new keys and values must both be [B, N, K, D] for {keys_BxKxSxD.shape=}, got "
            f"{new_keys_BxNxKxD.shape=}, {new_values_BxNxKxD.shape=}"
        )
    if start_B.shape != (B,) or start_B.dtype != jnp.int32:
        raise KernelError(f"starts must be int32 [{B}], got {start_B.dtype} {start_B.shape}")
    checks.check_sizes(new=new_keys_BxNxKxD)
    kv = keys_BxKxSxD, values_BxKxSxD
    for first in range(0, N, _MOST):
        part = slice(first, min(first + _MOST, N))
        kv = _write(chip, interpret, kv, start_B + first, new_keys_BxNxKxD[:, part], new_values_BxNxKxD[:, part])
    return kv


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _write(chip, interpret, kv, start_B, new_keys_BxNxKxD, new_values_BxNxKxD):
    K, S, D = kv[0].shape[1:]
    N = new_keys_BxNxKxD.shape[1]
    size = windows.size_for(N, S)

    def start(prefetch_refs, row):  # Behind the end of a row the overhang takes all that is new.
        (start_ref,) = prefetch_refs
        return jnp.minimum(start_ref[row], S)

    origin, transfer = windows.contiguous(start, S, size)

    def edit(prefetch_refs, rows, new_refs, row):
        first = start(prefetch_refs, row) - origin(prefetch_refs, row)

        def place(n, _):  # One by one: a row may begin anywhere in a tile, several may not.
            for i, new_ref in enumerate(new_refs):
                rows[i, :, pl.ds(first + n, 1), :] = new_ref[0, :, pl.ds(n, 1), :]

        lax.fori_loop(0, N, place, None)

    new = (
        x.transpose(0, 2, 1, 3).astype(kv[0].dtype).astype(jnp.float32) for x in (new_keys_BxNxKxD, new_values_BxNxKxD)
    )
    return windows.edit_in_place(
        kv,
        (start_B,),
        tuple(new),
        is_active=lambda prefetch_refs, row: True,
        transfer=transfer,
        edit=edit,
        window=(K, size, D),
        overhang=N,
        chip=chip,
        name="write",
        interpret=interpret,
    )


def _forward(chip, interpret, kv, start_B, *new):
    return _write(chip, interpret, kv, start_B, *new), (kv, start_B, new)


def _backward(chip, interpret, arguments, cotangents):
    kv, start_B, new = arguments
    _, pull_back = jax.vjp(
        lambda kv, new: tuple(write_reference(rows, start_B, x) for rows, x in zip(kv, new, strict=True)), kv, new
    )
    kv_cotangent, new_cotangent = pull_back(cotangents)
    return kv_cotangent, None, *new_cotangent


_write.defvjp(_forward, _backward)
