"""A draft's tree, level by level: children chosen from the draft's laws, on a static tree or a growing one.

What a draft is (a model of its own, a head on the target's hidden states) is behind one function, `Expand`: the logits
behind the nodes of a level.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spec_jax import growth, sampling
from spec_jax.contract import Law
from spec_jax.growth import Beam, Expand, Level
from spec_jax.propose.base import Context, Proposal
from spec_jax.pytree import pytree
from spec_jax.sampling import Purpose, SamplingRows
from spec_jax.tree import Tree, pack_words


@pytree
class Vocabulary:
    """The target's tokens that a draft knows.

    Attributes:
      ids_U: their ids, ascending; entry u is what the draft's token u means.
      size: static; V, the target's.
    """

    ids_U: Int[Array, "U"]
    size: int = dataclasses.field(metadata={"static": True})

    def spread(self, values_BxMxU: Float[Array, "B M U"]) -> Float[Array, "B M V"]:
        """Probabilities of the draft's tokens over the target's; the others have none."""
        wide_BxMxV = jnp.zeros((*values_BxMxU.shape[:2], self.size), values_BxMxU.dtype)
        return wide_BxMxV.at[:, :, self.ids_U].set(values_BxMxU)


def checked(tree: Tree | Beam | int, law: Law | str) -> tuple[Tree | Beam, Law]:
    """A tree to draft, given as one or as the length of a chain, and the law of its tokens.

    Raises:
      ValueError: there is no such tree or law, or the tree is grown and the law not a point mass.
    """
    if isinstance(tree, int):
        tree = Tree.chain(tree)
    if not isinstance(tree, Tree | Beam):
        raise ValueError(f"tree must be a Tree, a Beam or the length of a chain, got {tree!r}")
    if law not in list(Law):
        raise ValueError(f"law must be one of {', '.join(Law)}, got {law!r}")
    if tree.size < 2:
        raise ValueError("the tree has no node to draft; without a proposer decoding is plain")
    if isinstance(tree, Beam) and law != Law.POINT_MASS:
        raise ValueError(
            f"a tree grown by the draft's scores is no sample: its law is 'point_mass', got {str(law)!r}; use "
            "a static tree to draw from the draft"
        )
    return tree, Law(law)


def num_rows(tree: Tree | Beam) -> int:
    """Scratch rows that a draft fills: nodes it is asked about, the root left out."""
    return tree.num_expanded if isinstance(tree, Beam) else sum(map(bool, tree.children[1:]))


def draft(
    tree: Tree | Beam,
    law: Law,
    logits_BxV: Float[Array, "B V"],
    expand: Expand,
    carry: Any,
    context: Context,
    vocabulary: Vocabulary | None = None,
) -> tuple[Proposal, Int[Array, "B N"], Any]:
    """Drafts a tree that continues the context.

    Args:
      tree, law: static, as of `checked`.
      logits_BxV: the draft's behind the root.
      expand: its logits behind the nodes of a level; one law for all of them, [B, 1, V], will do.
      carry: handed through the calls of `expand`, such as the draft's KV.
      vocabulary: of the logits; None where it is the target's.

    Returns:
      The proposal; the scratch row of each of its nodes (out of range: none); the carry.
    """
    if vocabulary is not None:
        inner = expand

        def expand(carry, level: Level):
            return inner(carry, dataclasses.replace(level, tokens_BxM=vocabulary.ids_U[level.tokens_BxM]))

    B = len(logits_BxV)
    if isinstance(tree, Beam):
        grown, carry = growth.grow(tree, logits_BxV, expand, carry)
        tokens_BxN, row_BxN = grown.tokens_BxN, grown.row_BxN
        valid_BxN, probs_BxNxV, parents_BxN = grown.valid_BxN, None, grown.parents_BxN
    else:
        tokens_BxN, valid_BxN, probs_BxNxV, row_N, carry = _draw(tree, law, logits_BxV, expand, carry, context)
        row_BxN, parents_BxN = jnp.broadcast_to(jnp.asarray(row_N)[None], (B, tree.size)), None
    if vocabulary is not None:
        tokens_BxN = vocabulary.ids_U[tokens_BxN]
        probs_BxNxV = None if probs_BxNxV is None else vocabulary.spread(probs_BxNxV)
    tokens_BxN = tokens_BxN.at[:, 0].set(context.root_B)
    return Proposal(tokens_BxN, valid_BxN, probs_BxNxV, tree, law, parents_BxN), row_BxN, carry


def _draw(tree: Tree, law: Law, logits_BxV, expand: Expand, carry, context: Context):
    """A static tree; tokens are the draft's own, and the root's is 0."""
    B, V = logits_BxV.shape
    levels, row_N = _levels(tree)
    tokens_BxN = jnp.zeros((B, tree.size), jnp.int32)
    ok_BxN = jnp.ones((B, tree.size), bool)
    probs_BxNxV = None if law == Law.POINT_MASS else jnp.zeros((B, tree.size, V), jnp.float32)

    def choose(drafted, logits_BxMxV, level: _Level):
        tokens_BxN, ok_BxN, probs_BxNxV = drafted
        child_1xN = jnp.asarray(level.child_MxK).reshape(1, -1)
        lanes = sampling.root_lanes(context.root_position_B, child_1xN)
        u_BxMxK = sampling.uniforms(context.rows.seed_Bx2, Purpose.DRAFT, *lanes)
        u_BxMxK = u_BxMxK.reshape(B, *level.child_MxK.shape)
        token_BxMxK, q_BxMxV = draw_children(law, logits_BxMxV, level.counts, u_BxMxK, context.rows)
        # Nodes with fewer children than others of the level write the rest out of range.
        tokens_BxN = tokens_BxN.at[:, level.child_MxK].set(token_BxMxK, mode="drop")
        if q_BxMxV is not None:
            # A draft whose logits are not numbers has drawn from no law: its tokens are not proposed.
            sound_BxM = jnp.isfinite(q_BxMxV.sum(-1))
            probs_BxNxV = probs_BxNxV.at[:, level.node_M].set(jnp.where(sound_BxM[..., None], q_BxMxV, 0.0))
            ok_BxMxK = jnp.broadcast_to(sound_BxM[..., None], token_BxMxK.shape)
            ok_BxN = ok_BxN.at[:, level.child_MxK].set(ok_BxMxK, mode="drop")
        return tokens_BxN, ok_BxN, probs_BxNxV

    def step(state, level: _Level):
        drafted, carry = state
        words_BxMxW = None
        if not tree.is_chain:
            words_BxMxW = jnp.broadcast_to(level.words_MxW[None], (B, *level.words_MxW.shape))
        parent_BxM = jnp.broadcast_to(level.parent_M[None], (B, len(level.parent_M)))
        asked = Level(drafted[0][:, level.node_M], parent_BxM, words_BxMxW, level.depth, level.tail)
        logits_BxMxV, carry = expand(carry, asked)
        return (choose(drafted, logits_BxMxV, level), carry), None

    drafted = choose((tokens_BxN, ok_BxN, probs_BxNxV), logits_BxV[:, None, :], levels[0])
    state = (drafted, carry)
    # Levels of one shape run in a loop, so a long chain is not a long program.
    for _, run in itertools.groupby(levels[1:], key=lambda level: level.counts):
        state, _ = jax.lax.scan(step, state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *run))
    (tokens_BxN, ok_BxN, probs_BxNxV), carry = state
    valid_BxN = jnp.all(jnp.where(tree.ancestors_NxN[None], ok_BxN[:, None, :], True), axis=-1)
    return tokens_BxN, valid_BxN, probs_BxNxV, row_N, carry


@pytree
class _Level:
    """The nodes of one depth that have children.

    Attributes:
      node_M: their numbers in the tree.
      child_MxK: the numbers of their children; the size of the tree where a node has fewer.
      parent_M, words_MxW, depth, tail: as of `Level`.
      counts: static; how many children each has.
    """

    node_M: np.ndarray
    child_MxK: np.ndarray
    parent_M: np.ndarray
    words_MxW: np.ndarray
    depth: np.ndarray
    tail: np.ndarray
    counts: tuple[int, ...] = dataclasses.field(metadata={"static": True})


@functools.cache
def _levels(tree: Tree) -> tuple[list[_Level], np.ndarray]:
    """The levels of a tree, root first, and the scratch row of every node (`num_rows` for root and leaves)."""
    by_depth = [
        [n for n in range(tree.size) if tree.depth_N[n] == depth and tree.children[n]]
        for depth in range(tree.max_depth)
    ]
    fed = np.asarray([n for nodes in by_depth[1:] for n in nodes], np.int32)
    row_N = np.full(tree.size, len(fed), np.int32)
    row_N[fed] = np.arange(len(fed))
    levels = []
    for depth, nodes in enumerate(by_depth):
        counts = tuple(len(tree.children[n]) for n in nodes)
        child_MxK = np.full((len(nodes), max(counts)), tree.size, np.int32)
        for place, n in enumerate(nodes):
            child_MxK[place, : counts[place]] = tree.children[n]
        words_MxW = pack_words(tree.ancestors_NxN[nodes][:, fed])
        tail = np.int32(sum(map(len, by_depth[1:depth])))
        parent_M = row_N[tree.parents_N[nodes]]  # the root's own parent is never asked for
        levels.append(
            _Level(np.asarray(nodes, np.int32), child_MxK, parent_M, words_MxW, np.int32(depth), tail, counts)
        )
    return levels, row_N


def draw_children(
    law: Law,
    logits_BxMxV: Float[Array, "B #M V"],
    counts: tuple[int, ...],
    u_BxMxK: Float[Array, "B M K"],
    rows: SamplingRows,
) -> tuple[Int[Array, "B M K"], Float[Array, "B M V"] | None]:
    """Children of M nodes, and the law they were drawn from as `Proposal` records it (None for a point mass).

    Args:
      logits_BxMxV: of each node, or [B, 1, V] of all.
      counts: how many children each node has; only so many of its K tokens mean anything.
      u_BxMxK: a uniform for each.
    """
    K, V = max(counts), logits_BxMxV.shape[-1]
    token_1x1xV = jnp.arange(V)[None, None, :]
    if law == Law.POINT_MASS:
        return jnp.broadcast_to(jax.lax.top_k(logits_BxMxV, K)[1], u_BxMxK.shape), None
    q_BxMxV = sampling.law(logits_BxMxV, rows)
    shape = (*u_BxMxK.shape[:2], V)
    logits_BxMxV, q_BxMxV = (jnp.broadcast_to(array, shape) for array in (logits_BxMxV, q_BxMxV))
    if law == Law.IID:
        return jnp.stack([sampling.inverse_cdf(q_BxMxV, u_BxMxK[..., k]) for k in range(K)], axis=-1), q_BxMxV

    def draw(weights_BxMxV, left_BxMxV, u_BxM):
        """A draw from the weights; where none are left, the most likely token that is."""
        some_BxM = weights_BxMxV.sum(-1) > 0.0
        best_BxM = jnp.argmax(left_BxMxV, axis=-1).astype(jnp.int32)
        return jnp.where(some_BxM, sampling.inverse_cdf(weights_BxMxV, u_BxM), best_BxM)

    if law == Law.TOP_AND_SAMPLE:
        # The k - 1 most likely tokens of each node.
        left_BxMxV, tops = logits_BxMxV, []
        for k in range(K - 1):
            top_BxM = jnp.argmax(left_BxMxV, axis=-1).astype(jnp.int32)
            taken_1xMx1 = np.asarray([k < count - 1 for count in counts])[None, :, None]
            left_BxMxV = jnp.where(taken_1xMx1 & (token_1x1xV == top_BxM[..., None]), -jnp.inf, left_BxMxV)
            tops.append(top_BxM)
        q_BxMxV = jnp.where(left_BxMxV > -jnp.inf, q_BxMxV, 0.0)
        total_BxMx1 = q_BxMxV.sum(-1, keepdims=True)
        q_BxMxV = q_BxMxV / jnp.where(total_BxMx1 == 0.0, 1.0, total_BxMx1)
        return jnp.stack([draw(q_BxMxV, left_BxMxV, u_BxMxK[..., 0]), *tops], axis=-1), q_BxMxV

    weights_BxMxV, left_BxMxV, tokens = q_BxMxV, logits_BxMxV, []
    for k in range(K):
        tokens.append(draw(weights_BxMxV, left_BxMxV, u_BxMxK[..., k]))
        drawn_BxMxV = token_1x1xV == tokens[-1][..., None]
        weights_BxMxV = jnp.where(drawn_BxMxV, 0.0, weights_BxMxV)
        left_BxMxV = jnp.where(drawn_BxMxV, -jnp.inf, left_BxMxV)
    return jnp.stack(tokens, axis=-1), q_BxMxV
