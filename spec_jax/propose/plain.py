"""No speculation: the root alone is scored."""

import dataclasses

import jax.numpy as jnp

from spec_jax.contract import Law
from spec_jax.propose.base import Context, Proposal, Stateless
from spec_jax.tree import Tree


@dataclasses.dataclass(frozen=True)
class Plain(Stateless):
    """Plain autoregressive decoding, as a proposer that never drafts anything."""

    tree = Tree.chain(0)
    law = Law.POINT_MASS

    def propose(self, params, state, context: Context):
        return root_only(context), state


def root_only(context: Context) -> Proposal:
    """The proposal of a plain step."""
    root_Bx1 = context.root_B[:, None]
    return Proposal(root_Bx1, jnp.ones_like(root_Bx1, bool), None, Plain.tree, Plain.law)


def chain_proposal(context: Context, drafted_BxK, count_B, tree: Tree, law: Law, probs_BxNxV=None) -> Proposal:
    """A chain behind the root, of which the first `count` tokens of each row are valid."""
    tokens_BxN = jnp.concatenate([context.root_B[:, None], drafted_BxK.astype(jnp.int32)], axis=1)
    valid_BxN = jnp.arange(tree.size)[None, :] <= count_B[:, None]
    return Proposal(tokens_BxN, valid_BxN, probs_BxNxV, tree, law)
