"""The TPU kernel of `tree_attention`: a contiguous buffer, prefix by length, tail by ancestor words."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, UInt32

from kernels_pallas import checks, copies, streaming
from kernels_pallas.chips import Chip
from kernels_pallas.tree_attention import tree_attention_reference


def tree_attention(
    q_BxNxHxD: Float[Array, "B N H D"],
    k_BxKxSxD: Float[Array, "B K S D"],
    v_BxKxSxD: Float[Array, "B K S D"],
    length_B: Int[Array, "B"],
    words_BxNxW: UInt32[Array, "B N W"] | None = None,
    scale: float | None = None,
    tail: Int[Array, ""] | int = 0,
    *,
    chip: Chip,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B N H D"]:
    """`tree_attention_reference` as a TPU kernel; without words it is causal, for chains and prefill.

    The softmax is streamed over blocks of keys (Dao et al. 2022, arXiv:2205.14135). The gradient is the reference's: it
    computes the attention again, with all scores in memory.

    Args:
      q_BxNxHxD: queries, float32 or bfloat16; D is 64, 128 or 256; N at most 128 with words.
      k_BxKxSxD, v_BxKxSxD: the buffer in the dtype of the queries, left in HBM; S a multiple of 128.
      length_B: committed positions of each row.
      words_BxNxW: ancestor bits over the tail, W at most 32, or None.
      scale: factor on the scores, 1/sqrt(D) by default.
      tail: positions behind the committed ones that were written before.
      chip: which TPU the kernel is built for.
      interpret: True, or the TPU interpreter's parameters, to run it without one.

    Returns:
      As the reference, to rounding. Weights are rounded to the dtype of the values before they are normalised.

    Raises:
      KernelError: arguments that do not agree or are not supported.
    """
    checks.check_chip(chip)
    checks.check_queries(q_BxNxHxD)
    if k_BxKxSxD.ndim != 4 or k_BxKxSxD.shape != v_BxKxSxD.shape or k_BxKxSxD.shape[0] != q_BxNxHxD.shape[0]:
        raise checks.KernelError(
            f"keys and values must both be [B, K, S, D] with the B of the queries, got {q_BxNxHxD.shape=}, "
            f"{k_BxKxSxD.shape=}, {v_BxKxSxD.shape=}"
        )
    _, K, S, D = k_BxKxSxD.shape
    dtypes = k_BxKxSxD.dtype, v_BxKxSxD.dtype
    checks.check_attention(q_BxNxHxD, k_BxKxSxD.shape, dtypes, length_B, words_BxNxW, scale, tail, S, D, K)
    settings = _Settings(scale, chip, interpret)
    return _attention(settings, q_BxNxHxD, k_BxKxSxD, v_BxKxSxD, length_B, words_BxNxW, jnp.asarray(tail, jnp.int32))


@dataclasses.dataclass(frozen=True)
class _Settings:
    scale: float | None
    chip: Chip
    interpret: bool | pltpu.InterpretParams


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(settings: _Settings, q_BxNxHxD, k_BxKxSxD, v_BxKxSxD, length_B, words_BxNxW, tail):
    _, K, S, _ = k_BxKxSxD.shape
    return streaming.attention(
        q_BxNxHxD,
        (k_BxKxSxD, v_BxKxSxD),
        _fetch,
        (),
        length_B,
        words_BxNxW,
        settings.scale,
        tail,
        num_kv_heads=K,
        capacity=S,
        chip=settings.chip,
        name="causal_attention" if words_BxNxW is None else "tree_attention",
        interpret=settings.interpret,
    )


def _forward(settings: _Settings, *arguments):
    return _attention(settings, *arguments), arguments


def _backward(settings: _Settings, arguments, out_cotangent):
    *differentiable, length_B, words_BxNxW, tail = arguments
    _, pull_back = jax.vjp(
        lambda q, k, v: tree_attention_reference(q, k, v, length_B, words_BxNxW, settings.scale, tail), *differentiable
    )
    return (*pull_back(out_cotangent), None, None, None)


_attention.defvjp(_forward, _backward)


def _fetch(prefetch_refs, kv_refs, buffer, semaphore, row, start, end):
    at = pl.ds(start, buffer.shape[2])
    return copies.together([(ref.at[row, :, at, :], buffer.at[i]) for i, ref in enumerate(kv_refs)], semaphore)
