"""What kernels refuse, before any device work: every error names what was given and what was expected."""

import jax.numpy as jnp

from kernels_pallas.chips import Chip

MAX_NODES = 128  # Of a tree that is scored in one pass.
MAX_SCRATCH = 1024  # Rows behind a prefix that may hold nodes: a draft model scores more than it proposes.
HEAD_DIMS = (64, 128, 256)
LANES = 128  # The width of a vector register; capacities are multiples of it.


class KernelError(ValueError):
    """Arguments that a kernel was not made for."""


def check_sizes(**arrays) -> None:
    """Raises KernelError for an array without a value, naming all shapes."""
    if any(0 in array.shape for array in arrays.values()):
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise KernelError(f"there is nothing to do: every array needs a value, got {shapes}")


def check_chip(chip) -> None:
    """Raises KernelError for anything that is not a `Chip`."""
    if not isinstance(chip, Chip):
        raise KernelError(f"chip must be a kernels_pallas.chips.Chip (see chip_named), got {chip!r}")


def check_queries(q) -> None:
    """Raises KernelError for queries that are not [B, N, H, D]."""
    if q.ndim != 4:
        raise KernelError(f"queries must be [B, N, H, D], got {q.shape=}")


def check_attention(
    q, kv_shape, kv_dtypes, length, words, scale, tail, capacity: int, head_dim: int, num_kv_heads: int
) -> None:
    """Checks what both attention kernels take, of queries [B, N, H, D]; `kv_shape` is only named in the errors.

    Raises:
      KernelError: shapes that do not agree, a head_dim or dtype that is not supported, too many nodes, or a scale that
        is not positive (the greatest score would no longer be that of the greatest product).
    """
    check_sizes(queries=q, lengths=length)
    B, N, H, D = q.shape
    if D != head_dim:
        raise KernelError(f"queries and keys disagree about head_dim: {q.shape=}, keys and values {kv_shape}")
    if any(dtype != q.dtype for dtype in kv_dtypes):
        names = ", ".join(str(jnp.dtype(dtype)) for dtype in (q.dtype, *kv_dtypes))
        raise KernelError(f"queries, keys and values must all be float32 or all bfloat16, got {names}")
    check_rows(q.dtype, D)
    if scale is not None and not (isinstance(scale, int | float) and scale > 0):
        raise KernelError(f"the scale of scores must be a positive number, known when it compiles, got {scale}")
    if jnp.ndim(tail) or not jnp.issubdtype(jnp.result_type(tail), jnp.integer):
        raise KernelError(f"the tail must be one whole number, got {tail}")
    if H % num_kv_heads:
        raise KernelError(f"{H} query heads are no multiple of {num_kv_heads} key heads: {q.shape=}, keys {kv_shape}")
    if length.shape != (B,) or length.dtype != jnp.int32:
        raise KernelError(f"lengths must be int32 [{B}], one a row of {q.shape=}, got {length.dtype} {length.shape}")
    if words is not None:
        check_words(words, B, N)
    if capacity % LANES:
        raise KernelError(f"rows hold {capacity} positions, expected a multiple of {LANES}: keys {kv_shape}")
    if N > capacity:
        raise KernelError(f"{N} new positions do not fit rows of {capacity}: {q.shape=}, keys {kv_shape}")


def check_words(words, B: int, N: int) -> None:
    """Checks ancestor words [B, N, W].

    Raises:
      KernelError: too many nodes or bits, fewer bits than new nodes, another shape or dtype.
    """
    if N > MAX_NODES:
        raise KernelError(f"a tree has at most {MAX_NODES} nodes, got {N} with ancestor words {words.shape}")
    if words.ndim == 3 and 32 * words.shape[2] > MAX_SCRATCH:
        raise KernelError(f"ancestor words reach {MAX_SCRATCH} scratch rows at most, got {words.shape}")
    if words.ndim != 3 or words.shape[:2] != (B, N) or words.shape[2] < 1 or words.dtype != jnp.uint32:
        raise KernelError(f"ancestor words must be uint32 [{B}, {N}, W], got {words.dtype} {words.shape}")
    if 32 * words.shape[2] < N:
        raise KernelError(f"{N} nodes need a bit each, and ancestor words {words.shape} have {32 * words.shape[2]}")


def check_rows(dtype, head_dim: int) -> None:
    """Raises KernelError for keys and values of a dtype or head_dim that is not supported."""
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise KernelError(f"keys and values must be float32 or bfloat16, got {dtype}")
    if head_dim not in HEAD_DIMS:
        raise KernelError(f"head_dim {head_dim} is not supported, expected one of {HEAD_DIMS}")


def check_buffers(keys, values) -> None:
    """Checks a contiguous buffer that a kernel changes.

    Raises:
      KernelError: keys and values disagree, or are of a shape or dtype that is not supported.
    """
    if keys.ndim != 4 or keys.shape != values.shape:
        raise KernelError(f"keys and values must both be [B, K, S, D], got {keys.shape=}, {values.shape=}")
    if keys.dtype != values.dtype:
        raise KernelError(f"keys and values must both be float32 or both bfloat16, got {keys.dtype}, {values.dtype}")
    check_rows(keys.dtype, keys.shape[3])
    check_sizes(keys=keys)
    if keys.shape[2] % LANES:
        raise KernelError(f"rows hold {keys.shape[2]} positions, expected a multiple of {LANES}: {keys.shape=}")
