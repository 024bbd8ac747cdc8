"""A smaller model with the target's vocabulary drafts a chain or a tree."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from spec_jax import drafting
from spec_jax.contract import ContractError, Law, check_draft
from spec_jax.growth import Beam, Level
from spec_jax.kv import KVBuffer
from spec_jax.propose.base import Committed, Context, Proposal
from spec_jax.pytree import pytree
from spec_jax.target import Target
from spec_jax.tree import Tree


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
        tree, law = drafting.checked(self.tree, self.law)
        object.__setattr__(self, "tree", tree)
        object.__setattr__(self, "law", law)

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
        extra = max(drafting.num_rows(self.tree) - self.tree.size, 0)
        return DraftState(self.model.init_kv(batch, capacity + extra), jnp.zeros((batch, self.tree.size), jnp.int32))

    def prefill(self, params, state: DraftState, context, tokens_BxC, start, taps) -> DraftState:
        kv = state.kv.with_length(jnp.full_like(state.kv.length_B, start))
        return dataclasses.replace(state, kv=self._feed(params, kv, tokens_BxC)[1])

    def propose(self, params, state: DraftState, context: Context) -> tuple[Proposal, DraftState]:
        root_B = context.root_position_B
        start_B = jnp.maximum(root_B - 1, 0)
        logits_Bx2xV, kv = self._feed(params, state.kv.with_length(start_B), self._tokens(context, start_B, 2))
        logits_BxV = jnp.take_along_axis(logits_Bx2xV, (root_B - start_B)[:, None, None], axis=1)[:, 0]
        kv = kv.with_length(root_B + 1)

        def expand(kv, level: Level):
            return self._feed(params, kv.with_tail(level.tail), level.tokens_BxM, level.words_BxMxW, level.depth)

        proposal, row_BxN, kv = drafting.draft(self.tree, self.law, logits_BxV, expand, kv, context)
        if self.model.max_positions is not None:
            fits_Bx1 = (root_B + self.tree.max_depth <= self.model.max_positions)[:, None]
            valid_BxN = proposal.valid_BxN & (fits_Bx1 | (jnp.arange(self.tree.size)[None, :] == 0))
            proposal = dataclasses.replace(proposal, valid_BxN=valid_BxN)
        return proposal, DraftState(kv, row_BxN)

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
            kv = state.kv.with_length(root_B + 1)
            kv = kv.commit(jnp.maximum(committed.count_B - 2, 0), row_BxP, max(drafting.num_rows(self.tree), 1))
        return dataclasses.replace(state, kv=kv)

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
