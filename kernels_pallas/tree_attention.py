"""Attention of a few new positions over a contiguous, partly filled KV buffer.

One contract serves prefill, verification of a chain or tree, and drafting. Row `b` of the buffer holds
`length[b]` committed positions, followed by the N positions being processed now. New position `n` sees

* every committed position `s < length[b]`, and
* of the N new ones those named by its ancestor bits (itself included), or, without bits, new positions `0..n`.

No value stored anywhere else can reach the output: uncommitted rows may hold NaN.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

# Finite, so that the difference of two masked scores is 0 and not NaN.
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


def expand_ancestor_words(words_BxNxW: UInt32[Array, "B N W"]) -> Bool[Array, "B N N"]:
    """Ancestor bits as booleans: `[b, n, m]` is true where new position m is n itself or an ancestor of n."""
    num_nodes = words_BxNxW.shape[1]
    node_N = jnp.arange(num_nodes)
    word_BxNxN = words_BxNxW[:, :, node_N // 32]
    shift_1x1xN = (node_N % 32).astype(jnp.uint32)[None, None, :]
    return (word_BxNxN >> shift_1x1xN) & jnp.uint32(1) == jnp.uint32(1)


def visible(
    length_B: Int[Array, "B"],
    num_nodes: int,
    capacity: int,
    words_BxNxW: UInt32[Array, "B N W"] | None,
) -> Bool[Array, "B N S"]:
    """The one mask rule: which of `capacity` buffer rows each of `num_nodes` new positions sees."""
    tail_BxS = jnp.arange(capacity)[None, :] - length_B[:, None]
    node_BxS = jnp.clip(tail_BxS, 0, num_nodes - 1)
    if words_BxNxW is None:
        new_BxNxS = node_BxS[:, None, :] <= jnp.arange(num_nodes)[None, :, None]
    else:
        new_BxNxS = jnp.take_along_axis(expand_ancestor_words(words_BxNxW), node_BxS[:, None, :], axis=2)
    in_tail_BxS = (tail_BxS >= 0) & (tail_BxS < num_nodes)
    return (tail_BxS < 0)[:, None, :] | (in_tail_BxS[:, None, :] & new_BxNxS)


def tree_attention_reference(
    q_BxNxHxD: Float[Array, "B N H D"],
    k_BxKxSxD: Float[Array, "B K S D"],
    v_BxKxSxD: Float[Array, "B K S D"],
    length_B: Int[Array, "B"],
    words_BxNxW: UInt32[Array, "B N W"] | None = None,
    scale: float | None = None,
) -> Float[Array, "B N H D"]:
    """Plain-JAX reference of the contract above, with grouped queries (H a multiple of K).

    Args:
      q_BxNxHxD: queries of the N new positions.
      k_BxKxSxD, v_BxKxSxD: the buffer, the N new rows already written at `length..length+N`.
      length_B: committed positions of each row.
      words_BxNxW: ancestor bits (bit m of node n: n sees m), or None for a chain.
      scale: factor on the scores; 1/sqrt(D) by default.

    Returns:
      Attention output in the dtype of the queries; scores, softmax and sums are float32.
    """
    B, N, H, D = q_BxNxHxD.shape
    K, S = k_BxKxSxD.shape[1:3]
    G = H // K
    scale = 1.0 / math.sqrt(D) if scale is None else scale
    q_BxKxMxD = q_BxNxHxD.reshape(B, N, K, G, D).transpose(0, 2, 3, 1, 4).reshape(B, K, G * N, D)
    # A weight of zero does not hide a NaN: rows that nobody sees must not be multiplied at all. (The scores are masked
    # anyway; keys are treated alike because XLA:CPU then reads the buffer in place instead of copying it every time.)
    written_Bx1xSx1 = (jnp.arange(S)[None, :] < length_B[:, None] + N)[:, None, :, None]
    k_BxKxSxD, v_BxKxSxD = (
        jnp.where(written_Bx1xSx1, rows, jnp.zeros((), rows.dtype)) for rows in (k_BxKxSxD, v_BxKxSxD)
    )
    scores_BxKxMxS = jnp.einsum("bkmd,bksd->bkms", q_BxKxMxD, k_BxKxSxD, preferred_element_type=jnp.float32)
    scores_BxKxGxNxS = scores_BxKxMxS.reshape(B, K, G, N, S) * scale
    visible_BxNxS = visible(length_B, N, S, words_BxNxW)
    scores_BxKxGxNxS = jnp.where(visible_BxNxS[:, None, None], scores_BxKxGxNxS, MASKED)
    weights_BxKxGxNxS = jax.nn.softmax(scores_BxKxGxNxS, axis=-1)
    out_BxKxMxD = jnp.einsum(
        "bkms,bksd->bkmd",
        weights_BxKxGxNxS.reshape(B, K, G * N, S).astype(v_BxKxSxD.dtype),
        v_BxKxSxD,
        preferred_element_type=jnp.float32,
    )
    out_BxNxHxD = out_BxKxMxD.reshape(B, K, G, N, D).transpose(0, 3, 1, 2, 4).reshape(B, N, H, D)
    return out_BxNxHxD.astype(q_BxNxHxD.dtype)
