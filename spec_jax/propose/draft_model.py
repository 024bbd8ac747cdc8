"""A smaller model with the target's vocabulary drafts a chain or a tree."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spec_jax import growth, sampling
from spec_jax.contract import ContractError, Law, check_draft
from spec_jax.growth import Beam
from spec_jax.kv import KVBuffer
from spec_jax.propose.base import Committed, Context, Proposal
from spec_jax.pytree import pytree
from spec_jax.sampling import Purpose, SamplingRows
from spec_jax.target import Target
from spec_jax.tree import Tree, pack_words


@pytree
class DraftState:
    """The draft's KV, and which of its scratch rows holds each node of the last tree (out of range: none)."""

    kv: KVBuffer
    row_BxN: Int[Array, "B N"]


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """Drafts with another model on its own KV buffer, one pass a level for all rows.

    `law` says how the children of a node are chosen from the draft's law q, which is taken under the request's own
    sampling parameters and recorded (Leviathan et al., arXiv 2211.17192):

    * `iid`: independent draws from q (SpecInfer, 2305.09781);
    * `without_replacement`: one draw after the other from what is left of q (RSD, 2402.14160; Sequoia, 2402.12374);
    * `top_and_sample`: one draw from q without its k - 1 most likely tokens, then those (Hu et al., 2502.18779);
    * `point_mass`: the k most likely tokens. A tree grown from the scores (`Beam`) is always of this law.

    Where q has fewer tokens than a node has children, as in a greedy row, the draft's next most likely ones follow.

    The buffer always holds the text without its last two tokens, so the first pass of a cycle feeds two: after full
    acceptance the row of the last drafted token does not exist yet, and a fixed lag needs no special case. The rows of
    a tree are scratch; those of the accepted path are moved next to the text.
    Where the draft's positions end before the target's, its rows propose nothing.

    Attributes:
      model: any `Target` with the vocabulary and tokenizer of the target.
      tree: a static tree, a `Beam` to grow one, or the length of a chain.
      law: how children are chosen.
    """

    model: Target
    tree: Tree | Beam | int = 4
    law: Law = Law.IID

    taps = ()
    may_abstain = False

    def __post_init__(self):
        if isinstance(self.tree, int):
            object.__setattr__(self, "tree", Tree.chain(self.tree))
        if not isinstance(self.tree, Tree | Beam):
            raise ValueError(f"tree must be a Tree, a Beam or the length of a chain, got {self.tree!r}")
        if self.law not in list(Law):
            raise ValueError(f"law must be one of {', '.join(Law)}, got {self.law!r}")
        object.__setattr__(self, "law", Law(self.law))
        if self.tree.size < 2:
            raise ValueError("the tree has no node to draft; without a proposer decoding is plain")
        if isinstance(self.tree, Beam) and self.law != Law.POINT_MASS:
            raise ValueError(
                f"a tree grown by the draft's scores is no sample: its law is 'point_mass', got {str(self.law)!r}; use "
                "a static tree to draw from the draft"
            )

    @property
    def params(self) -> Any:
        return self.model.params

    def check(self, target: Target, max_len: int) -> None:
        check_draft(target, self.model)
        limit = self.model.max_positions
        if limit is not None and limit < self.tree.max_depth + 2:
            raise ContractError(
                f"the draft model has {limit} positions, too few to draft {self.tree.max_depth} tokens even once"
            )

    def init(self, batch: int, capacity: int) -> DraftState:
        # Behind the text a beam may need more rows than the tree it ends with has nodes.
        extra = max(self.tree.num_expanded - self.tree.size, 0) if isinstance(self.tree, Beam) else 0
        return DraftState(self.model.init_kv(batch, capacity + extra), jnp.zeros((batch, self.tree.size), jnp.int32))

    def prefill(self, params, state: DraftState, tokens_BxC, start, taps) -> DraftState:
        kv = state.kv.with_length(jnp.full_like(state.kv.length_B, start))
        return dataclasses.replace(state, kv=self._feed(params, kv, tokens_BxC)[1])

    def propose(self, params, state: DraftState, context: Context) -> tuple[Proposal, DraftState]:
        root_B = context.root_position_B
        start_B = jnp.maximum(root_B - 1, 0)
        logits_Bx2xV, kv = self._feed(params, state.kv.with_length(start_B), self._tokens(context, start_B, 2))
        logits_BxV = jnp.take_along_axis(logits_Bx2xV, (root_B - start_B)[:, None, None], axis=1)[:, 0]
        kv = kv.with_length(root_B + 1)
        draft = self._grow if isinstance(self.tree, Beam) else self._draw
        proposal, state = draft(params, logits_BxV, kv, context)
        if self.model.max_positions is not None:
            fits_Bx1 = (root_B + self.tree.max_depth <= self.model.max_positions)[:, None]
            valid_BxN = proposal.valid_BxN & (fits_Bx1 | (jnp.arange(self.tree.size)[None, :] == 0))
            proposal = dataclasses.replace(proposal, valid_BxN=valid_BxN)
        return proposal, state

    def observe(self, params, state: DraftState, context: Context, committed: Committed) -> DraftState:
        root_B = context.root_position_B
        if not committed.drafted:
            start_B = jnp.maximum(root_B - 1, 0)
            kv = self._feed(params, state.kv.with_length(start_B), self._tokens(context, start_B, 1))[1]
        elif self.tree.is_chain:
            return state  # the rows lie where the text wants them
        else:
            # The text without its last two tokens ends one node before the last committed one, which may be a leaf.
            row_BxP = jnp.take_along_axis(state.row_BxN, committed.path_BxP[:, 1:], axis=1, mode="clip")
            # Ranks of rows ascend with depth, as `commit` wants them: levels are written one behind the other.
            num_rows = max(self.tree.size, getattr(self.tree, "num_expanded", 0))
            kv = state.kv.with_length(root_B + 1)
            kv = kv.commit(jnp.maximum(committed.count_B - 2, 0), row_BxP, num_rows)
        return dataclasses.replace(state, kv=kv)

    def _draw(self, params, logits_BxV, kv: KVBuffer, context: Context) -> tuple[Proposal, DraftState]:
        """A static tree, level by level."""
        tree, (B, V) = self.tree, logits_BxV.shape
        levels, row_N = _levels(tree)
        tokens_BxN = jnp.zeros((B, tree.size), jnp.int32).at[:, 0].set(context.root_B)
        ok_BxN = jnp.ones((B, tree.size), bool)
        probs_BxNxV = None if self.law == Law.POINT_MASS else jnp.zeros((B, tree.size, V), jnp.float32)

        def choose(drafted, logits_BxMxV, level: _Level):
            tokens_BxN, ok_BxN, probs_BxNxV = drafted
            child_1xN = jnp.asarray(level.child_MxK).reshape(1, -1)
            lanes = sampling.root_lanes(context.root_position_B, child_1xN)
            u_BxMxK = sampling.uniforms(context.rows.seed_Bx2, Purpose.DRAFT, *lanes)
            u_BxMxK = u_BxMxK.reshape(B, *level.child_MxK.shape)
            token_BxMxK, q_BxMxV = draw_children(self.law, logits_BxMxV, level.counts, u_BxMxK, context.rows)
            # Nodes with fewer children than others of the level write the rest out of range.
            tokens_BxN = tokens_BxN.at[:, level.child_MxK].set(token_BxMxK, mode="drop")
            if q_BxMxV is not None:
                # A draft whose logits are not numbers has drawn from no law: its tokens are not proposed.
                sound_BxM = jnp.isfinite(q_BxMxV.sum(-1))
                probs_BxNxV = probs_BxNxV.at[:, level.node_M].set(jnp.where(sound_BxM[..., None], q_BxMxV, 0.0))
                ok_BxMxK = jnp.broadcast_to(sound_BxM[..., None], token_BxMxK.shape)
                ok_BxN = ok_BxN.at[:, level.child_MxK].set(ok_BxMxK, mode="drop")
            return tokens_BxN, ok_BxN, probs_BxNxV

        def step(carry, level: _Level):
            drafted, kv = carry
            words_BxMxW = None
            if not tree.is_chain:
                words_BxMxW = jnp.broadcast_to(level.words_MxW[None], (B, *level.words_MxW.shape))
            logits_BxMxV, kv = self._feed(
                params, kv.with_tail(level.tail), drafted[0][:, level.node_M], words_BxMxW, level.depth
            )
            return (choose(drafted, logits_BxMxV, level), kv), None

        drafted = choose((tokens_BxN, ok_BxN, probs_BxNxV), logits_BxV[:, None, :], levels[0])
        carry = (drafted, kv)
        # Levels of one shape run in a loop, so a long chain is not a long program.
        for _, run in itertools.groupby(levels[1:], key=lambda level: level.counts):
            carry, _ = jax.lax.scan(step, carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *run))
        (tokens_BxN, ok_BxN, probs_BxNxV), kv = carry
        valid_BxN = jnp.all(jnp.where(tree.ancestors_NxN[None], ok_BxN[:, None, :], True), axis=-1)
        proposal = Proposal(tokens_BxN, valid_BxN, probs_BxNxV, tree, self.law)
        return proposal, DraftState(kv, jnp.broadcast_to(jnp.asarray(row_N)[None], (B, tree.size)))

    def _grow(self, params, logits_BxV, kv: KVBuffer, context: Context) -> tuple[Proposal, DraftState]:
        """A tree grown from the draft's scores."""

        def expand(kv, tokens_BxK, depth, words_BxKxW):
            return self._feed(params, kv.with_tail((depth - 1) * self.tree.width), tokens_BxK, words_BxKxW, depth)

        grown, kv = growth.grow(self.tree, logits_BxV, expand, kv)
        tokens_BxN = grown.tokens_BxN.at[:, 0].set(context.root_B)
        proposal = Proposal(tokens_BxN, grown.valid_BxN, None, self.tree, self.law, grown.parents_BxN)
        return proposal, DraftState(kv, grown.row_BxN)

    def _feed(self, params, kv: KVBuffer, tokens_BxN, words_BxNxW=None, depth=None):
        """Scores new positions: consecutive ones behind the text, or nodes that are all `depth` below the root."""
        if depth is None:
            positions_BxN = kv.length_B[:, None] + jnp.arange(tokens_BxN.shape[1])[None, :]
        else:
            positions_BxN = jnp.broadcast_to(kv.length_B[:, None] + depth - 1, tokens_BxN.shape)
        logits_BxNxV, _, kv = self.model.forward(params, tokens_BxN, positions_BxN, kv, words_BxNxW)
        return logits_BxNxV, kv

    @staticmethod
    def _tokens(context: Context, start_B, count: int):
        index_BxN = start_B[:, None] + jnp.arange(count)[None, :]
        return jnp.take_along_axis(context.tokens_BxS, index_BxN, axis=1, mode="clip")


@pytree
class _Level:
    """The nodes of one depth that have children.

    Attributes:
      node_M: their numbers in the tree.
      child_MxK: the numbers of their children; the size of the tree where a node has fewer.
      words_MxW: their ancestors among the draft's scratch rows, as bits.
      tail: scratch rows written before this level; the level's own follow.
      depth: of these nodes.
      counts: static; how many children each has.
    """

    node_M: np.ndarray
    child_MxK: np.ndarray
    words_MxW: np.ndarray
    tail: np.ndarray
    depth: np.ndarray
    counts: tuple[int, ...] = dataclasses.field(metadata={"static": True})


@functools.cache
def _levels(tree: Tree) -> tuple[list[_Level], np.ndarray]:
    """The levels of a tree, root first, and the scratch row of every node (the tree's size for root and leaves)."""
    by_depth = [
        [n for n in range(tree.size) if tree.depth_N[n] == depth and tree.children[n]]
        for depth in range(tree.max_depth)
    ]
    fed = np.asarray([n for nodes in by_depth[1:] for n in nodes], np.int32)
    row_N = np.full(tree.size, tree.size, np.int32)
    row_N[fed] = np.arange(len(fed))
    levels = []
    for depth, nodes in enumerate(by_depth):
        counts = tuple(len(tree.children[n]) for n in nodes)
        child_MxK = np.full((len(nodes), max(counts)), tree.size, np.int32)
        for place, n in enumerate(nodes):
            child_MxK[place, : counts[place]] = tree.children[n]
        words_MxW = pack_words(tree.ancestors_NxN[nodes][:, fed])
        tail, level_depth = np.int32(sum(map(len, by_depth[1:depth]))), np.int32(depth)
        levels.append(_Level(np.asarray(nodes, np.int32), child_MxK, words_MxW, tail, level_depth, counts))
    return levels, row_N


def draw_children(
    law: Law,
    logits_BxMxV: Float[Array, "B M V"],
    counts: tuple[int, ...],
    u_BxMxK: Float[Array, "B M K"],
    rows: SamplingRows,
) -> tuple[Int[Array, "B M K"], Float[Array, "B M V"] | None]:
    """Children of M nodes, and the law they were drawn from as `Proposal` records it (None for a point mass).

    Args:
      counts: how many children each node has; only so many of its K tokens mean anything.
      u_BxMxK: a uniform for each.
    """
    K, V = max(counts), logits_BxMxV.shape[-1]
    token_1x1xV = jnp.arange(V)[None, None, :]
    if law == Law.POINT_MASS:
        return jax.lax.top_k(logits_BxMxV, K)[1], None
    q_BxMxV = sampling.law(logits_BxMxV, rows)
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
