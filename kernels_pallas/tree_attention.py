"""Attention of a few new positions over a contiguous, partly filled KV buffer.

One contract serves prefill, verification of a chain or tree, and drafting level by level. Row `b` of the buffer holds
`length[b]` committed positions, then the *tail*: `tail` positions that were scored before and are not committed,
followed by the N positions being processed now. New position `n` sees

* every committed position `s < length[b]`, and
* of the tail the positions named by its ancestor bits (bit 0 is the first position behind the committed ones), or,
  without bits, all up to itself.

No value stored anywhere else can reach the output, whatever it is: rows nobody wrote may hold NaN, and so may a branch
that a position does not see. For that, values behind the committed ones that are no finite numbers count as zero;
whoever writes them makes their keys NaN, so that those who do see them notice (`spec_jax.kv.KVBuffer.write`).
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

# Finite, so that the difference of two masked scores is 0 and not NaN.
MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)


def expand_ancestor_words(words_BxNxW: UInt32[Array, "B N W"]) -> Bool[Array, "B N M"]:
    """Ancestor bits as booleans, M = 32 W: `[b, n, m]` is true where bit m of new position n is set."""
    bit_M = jnp.arange(32 * words_BxNxW.shape[2])
    shift_1x1xM = (bit_M % 32).astype(jnp.uint32)[None, None, :]
    return (words_BxNxW[:, :, bit_M // 32] >> shift_1x1xM) & jnp.uint32(1) == jnp.uint32(1)


def visible(
    length_B: Int[Array, "B"],
    num_new: int,
    capacity: int,
    words_BxNxW: UInt32[Array, "B N W"] | None,
    tail: Int[Array, ""] | int = 0,
) -> Bool[Array, "B N S"]:
    """The one mask rule: which of `capacity` buffer rows each of `num_new` new positions sees."""
    tail_BxS = jnp.arange(capacity)[None, :] - length_B[:, None]
    if words_BxNxW is None:
        seen_BxNxS = tail_BxS[:, None, :] <= tail + jnp.arange(num_new)[None, :, None]
    else:
        bits_BxNxM = expand_ancestor_words(words_BxNxW)
        bit_BxS = jnp.clip(tail_BxS, 0, bits_BxNxM.shape[2] - 1)
        seen_BxNxS = jnp.take_along_axis(bits_BxNxM, bit_BxS[:, None, :], axis=2)
        seen_BxNxS &= (tail_BxS < bits_BxNxM.shape[2])[:, None, :]
    in_tail_BxS = (tail_BxS >= 0) & (tail_BxS < tail + num_new)
    return (tail_BxS < 0)[:, None, :] | (in_tail_BxS[:, None, :] & seen_BxNxS)


def tree_attention_reference(
    q_BxNxHxD: Float[Array, "B N H D"],
    k_BxKxSxD: Float[Array, "B K S D"],
    v_BxKxSxD: Float[Array, "B K S D"],
    length_B: Int[Array, "B"],
    words_BxNxW: UInt32[Array, "B N W"] | None = None,
    scale: float | None = None,
    tail: Int[Array, ""] | int = 0,
) -> Float[Array, "B N H D"]:
    """Plain-JAX reference of the contract above, with grouped queries (H a multiple of K).

    Args:
      q_BxNxHxD: queries of the N new positions.
      k_BxKxSxD, v_BxKxSxD: the buffer, the N new rows already written at `length + tail` and on.
      length_B: committed positions of each row.
      words_BxNxW: ancestor bits over the tail (bit m of node n: n sees m), or None for a chain.
      scale: factor on the scores; 1/sqrt(D) by default.
      tail: positions behind the committed ones that were written before.

    Returns:
      Attention output in the dtype of the queries; scores, softmax and sums are float32.
    """
    B, N, H, D = q_BxNxHxD.shape
    K, S = k_BxKxSxD.shape[1:3]
    G = H // K
    scale = 1.0 / math.sqrt(D) if scale is None else scale
    q_BxKxMxD = q_BxNxHxD.reshape(B, N, K, G, D).transpose(0, 2, 3, 1, 4).reshape(B, K, G * N, D)
    # A weight of zero does not hide a NaN. (The scores are masked anyway; keys are treated alike because XLA:CPU then
    # reads the buffer in place instead of copying it every time.)
    written_Bx1xSx1 = (jnp.arange(S)[None, :] < length_B[:, None] + tail + N)[:, None, :, None]
    k_BxKxSxD = jnp.where(written_Bx1xSx1, k_BxKxSxD, jnp.zeros((), k_BxKxSxD.dtype))
    v_BxKxSxD = jnp.where(jnp.isfinite(v_BxKxSxD), v_BxKxSxD, jnp.zeros((), v_BxKxSxD.dtype))
    scores_BxKxMxS = jnp.einsum("bkmd,bksd->bkms", q_BxKxMxD, k_BxKxSxD, preferred_element_type=jnp.float32)
    scores_BxKxGxNxS = scores_BxKxMxS.reshape(B, K, G, N, S) * scale
    visible_BxNxS = visible(length_B, N, S, words_BxNxW, tail)
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
