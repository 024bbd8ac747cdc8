"""Trees grown on device from a draft's scores: beam expansion and rerank, with static shapes.

The value of a node is the product of the draft's probabilities on its path, an estimate of the chance that it is
accepted. A tree grown by value is no sample of the draft: its law is a point mass, whatever drew its tokens.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from spec_jax.pytree import pytree
from spec_jax.tree import MAX_NODES, DynamicTree, pack_words


@dataclasses.dataclass(frozen=True)
class Beam(DynamicTree):
    """Grow `max_depth` levels by a beam of `width` nodes, then keep the `size - 1` candidates of greatest value.

    Every level expands the `width` most valuable nodes of the one before into `width` children each; all children
    compete for the `size - 1` places, so the kept ones hang together (a child is never worth more than its parent).

    Attributes:
      width: nodes expanded at each level, and children considered of each.
      threshold: stop growing a row when another level adds no more than this to the expected number of accepted
        tokens; None grows every level.
    """

    width: int = 10
    threshold: float | None = None

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.width <= MAX_NODES:
            raise ValueError(f"width must be between 1 and {MAX_NODES}, got {self.width}")
        if self.threshold is not None and not self.threshold >= 0.0:
            raise ValueError(f"threshold must be >= 0 or None, got {self.threshold}")

    @classmethod
    def eagle2(cls, size: int = 60, max_depth: int = 6, width: int = 10) -> "Beam":
        """EAGLE-2's and EAGLE-3's tree (Li et al., arXiv 2406.16858); sizes count the root."""
        return cls(size, max_depth, width)

    @classmethod
    def opt_tree(cls, size: int = 50, max_depth: int = 10, threshold: float = 0.5) -> "Beam":
        """OPT-Tree (Wang et al., arXiv 2406.17276): as wide as the tree has nodes, as deep as it pays."""
        return cls(size, max_depth, size - 1, threshold)

    @property
    def num_candidates(self) -> int:
        return self.width + (self.max_depth - 1) * self.width**2

    @property
    def num_expanded(self) -> int:
        """Nodes the draft scores beside the root: its scratch."""
        return (self.max_depth - 1) * self.width


@pytree
class Level:
    """Nodes of one depth, whose children a draft is asked for.

    Attributes:
      tokens_BxM: their tokens.
      parent_BxM: the scratch rows of their parents; the number of rows where that is the root.
      words_BxMxW: their ancestors among the scratch rows, themselves included, as bits; None in a chain.
      depth: of these nodes; the root's is 0.
      tail: scratch rows of the levels before; the M rows of these nodes follow.
    """

    tokens_BxM: Int[Array, "B M"]
    parent_BxM: Int[Array, "B M"]
    words_BxMxW: UInt32[Array, "B M W"] | None
    depth: Int[Array, ""]
    tail: Int[Array, ""]


Expand = Callable[[Any, Level], tuple[Array, Any]]
"""Scores a level: `(carry, level) -> (logits_BxMxV, carry)`; the carry is the draft's own, such as its KV."""


@pytree
class Grown:
    """A grown tree, root included.

    Attributes:
      tokens_BxN: the root's is 0, to be filled in.
      parents_BxN, valid_BxN: as in `Proposal`; level order, invalid nodes hang from the root.
      row_BxN: which of the draft's scratch rows holds each node, counted from the root's successor; out of range for a
        node that was not expanded.
    """

    tokens_BxN: Int[Array, "B N"]
    parents_BxN: Int[Array, "B N"]
    valid_BxN: Bool[Array, "B N"]
    row_BxN: Int[Array, "B N"]


def grow(
    beam: Beam,
    logits_BxV: Float[Array, "B V"],
    expand: Expand,
    carry: Any,
) -> tuple[Grown, Any]:
    """Grows one tree per row.

    Args:
      beam: the static bounds.
      logits_BxV: the draft's logits behind the root.
      expand: scores a level of `width` nodes; they come to stand in rows `(depth - 1) * width` and on of the scratch.
      carry: handed through the calls.
    """
    (B, V), width, levels = logits_BxV.shape, beam.width, beam.max_depth
    batch_Bx1 = jnp.arange(B)[:, None]
    slot_1xK = jnp.arange(width)[None, :]
    C, R = beam.num_candidates, max(beam.num_expanded, 1)

    def children(logits_BxMxV):
        """Tokens and log-probabilities of the best `width` children; -inf where there are not so many tokens."""
        # No probability exceeds 1, whatever rounding says: a child must not be worth more than its parent.
        log_p_BxMxV = jnp.minimum(jax.nn.log_softmax(logits_BxMxV.astype(jnp.float32), axis=-1), 0.0)
        log_p_BxMxK, token_BxMxK = jax.lax.top_k(log_p_BxMxV, min(width, V))
        missing = [(0, 0), (0, 0), (0, max(width - V, 0))]
        return jnp.pad(token_BxMxK, missing), jnp.pad(log_p_BxMxK, missing, constant_values=-jnp.inf)

    token_Bx1xK, score_Bx1xK = children(logits_BxV[:, None, :])
    pool = (
        jnp.zeros((B, C), jnp.int32).at[:, :width].set(token_Bx1xK[:, 0]),
        jnp.full((B, C), -jnp.inf, jnp.float32).at[:, :width].set(score_Bx1xK[:, 0]),
        jnp.full((B, C), -1, jnp.int32),
        jnp.full((B, C), R, jnp.int32),
    )
    candidate_BxK = jnp.broadcast_to(slot_1xK, (B, width))
    seen_BxKxR = jnp.zeros((B, width, R), bool)

    def worth(score_BxC):
        return jnp.exp(jax.lax.top_k(score_BxC, min(beam.size - 1, C))[0]).sum(1)

    def level(state):
        depth, growing_B, pool, candidate_BxK, above_row_BxK, seen_BxKxR, carry = state
        token_BxC, score_BxC, parent_BxC, row_BxC = pool
        first = (depth - 1) * width
        row_BxC = row_BxC.at[batch_Bx1, candidate_BxK].set(first + jnp.broadcast_to(slot_1xK, (B, width)))
        seen_BxKxR |= jnp.arange(R)[None, None, :] == first + slot_1xK[..., None]
        tokens_BxK = jnp.take_along_axis(token_BxC, candidate_BxK, axis=1)
        logits_BxKxV, carry = expand(carry, Level(tokens_BxK, above_row_BxK, pack_words(seen_BxKxR), depth, first))
        # A draft may give one law for all nodes of a level.
        token_BxKxK, log_p_BxKxK = (jnp.broadcast_to(x, (B, width, width)) for x in children(logits_BxKxV))
        above_BxK = jnp.take_along_axis(score_BxC, candidate_BxK, axis=1)
        new_BxKK = (above_BxK[..., None] + log_p_BxKxK).reshape(B, -1)
        new_BxKK = jnp.where(growing_B[:, None], new_BxKK, -jnp.inf)
        start = width + (depth - 1) * width**2
        worth_B = worth(score_BxC)
        pool = tuple(
            jax.lax.dynamic_update_slice_in_dim(old_BxC, new, start, axis=1)
            for old_BxC, new in (
                (token_BxC, token_BxKxK.reshape(B, -1)),
                (score_BxC, new_BxKK),
                (parent_BxC, jnp.repeat(candidate_BxK, width, axis=1)),
            )
        )
        if beam.threshold is not None:
            growing_B = growing_B & (worth(pool[1]) - worth_B > beam.threshold)
        _, best_BxK = jax.lax.top_k(new_BxKK, width)
        place_BxK = best_BxK // width
        seen_BxKxR = jnp.take_along_axis(seen_BxKxR, place_BxK[..., None], axis=1)
        return depth + 1, growing_B, (*pool, row_BxC), start + best_BxK, first + place_BxK, seen_BxKxR, carry

    root_BxK = jnp.full((B, width), R, jnp.int32)
    state = (jnp.int32(1), jnp.ones((B,), bool), pool, candidate_BxK, root_BxK, seen_BxKxR, carry)
    if levels > 1:
        state = jax.lax.while_loop(lambda state: (state[0] < levels) & jnp.any(state[1]), level, state)
    token_BxC, score_BxC, parent_BxC, row_BxC = state[2]
    kept_BxM, parents_BxN, valid_BxN = keep_best(score_BxC, parent_BxC, beam.size - 1)

    def rooted(values_BxC, root: int):
        kept = jnp.take_along_axis(values_BxC, kept_BxM, axis=1, mode="clip")
        return jnp.pad(kept, ((0, 0), (1, 0)), constant_values=root)

    return Grown(rooted(token_BxC, 0), parents_BxN, valid_BxN, rooted(row_BxC, R)), state[-1]


def keep_best(
    values_BxC: Float[Array, "B C"], parents_BxC: Int[Array, "B C"], num_kept: int
) -> tuple[Int[Array, "B M"], Int[Array, "B N"], Bool[Array, "B N"]]:
    """The `num_kept` most valuable candidates as a tree below a root; N = M + 1.

    Of equal values the earlier candidate wins, so a parent, which comes first and is worth no less, is never left out
    below its child.

    Args:
      values_BxC: -inf for a candidate that does not exist. No candidate is worth more than its parent.
      parents_BxC: the parent of each, an earlier candidate, or -1 for the root.

    Returns:
      Which candidates were kept, in their old order; the tree's parents; which of its nodes exist (the others hang
      from the root, so that the parents are always a tree).
    """
    missing = max(num_kept - values_BxC.shape[1], 0)  # top_k refuses more places than there are candidates
    values_BxC = jnp.pad(values_BxC, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    parents_BxC = jnp.pad(parents_BxC, ((0, 0), (0, missing)), constant_values=-1)
    values_BxC = jnp.where(values_BxC == 0.0, 0.0, values_BxC)  # top_k takes -0.0 for less than 0.0
    B, C = values_BxC.shape
    best_BxM, index_BxM = jax.lax.top_k(values_BxC, num_kept)
    # top_k returns real-looking places for candidates that do not exist: they go to the end.
    kept_BxM = jnp.sort(jnp.where(best_BxM > -jnp.inf, index_BxM, C), axis=1)
    valid_BxM = kept_BxM < C
    kept_BxM = jnp.minimum(kept_BxM, C - 1)
    is_kept_BxC = jnp.zeros((B, C + 1), bool).at[jnp.arange(B)[:, None], jnp.where(valid_BxM, kept_BxM, C)].set(True)
    node_BxC = jnp.cumsum(is_kept_BxC[:, :C].astype(jnp.int32), axis=1)
    parent_BxM = jnp.take_along_axis(parents_BxC, kept_BxM, axis=1)
    node_BxM = jnp.take_along_axis(node_BxC, jnp.maximum(parent_BxM, 0), axis=1)
    node_BxM = jnp.where(valid_BxM & (parent_BxM >= 0), node_BxM, 0)
    parents_BxN = jnp.pad(node_BxM, ((0, 0), (1, 0)), constant_values=-1)
    return kept_BxM, parents_BxN, jnp.pad(valid_BxM, ((0, 0), (1, 0)), constant_values=True)
