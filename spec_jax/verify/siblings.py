"""The ratio test over siblings, which recursive rejection and traversal verification share.

The children of a node are tested one after the other, in the order they were drawn. What is left of the target's law
after some of them were rejected depends on the tokens alone, never on a coin, so every coin of a tree is known before
the first is tossed.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from spec_jax.contract import Law
from spec_jax.propose.base import Proposal
from spec_jax.tree import Tree
from spec_jax.verify.base import Verdict


def judge_siblings(proposal: Proposal, p_BxNxV: Float[Array, "B N V"], bottom_up: bool) -> Verdict:
    """Coins and residuals of a tree by ratio tests.

    With M the target's law left at a node, q the law its next child x was drawn from and w the node's weight:

    * x gets c = min(1, w M(x) / q(x));
    * behind a rejected x, M becomes norm((w M - q)+).

    Top-down (recursive rejection), w is 1 and c is x's coin. Bottom-up (traversal verification), c is the weight x
    starts from; with S = sum((w M - q)+) a rejection leaves the node the weight w = S / (S + 1 - w), and the weight
    that is left after all children is the node's own coin.

    Args:
      proposal: on a static tree.
      p_BxNxV: the target's law at every node, in the precision to calculate with.
    """
    tree, V = proposal.tree, p_BxNxV.shape[-1]
    q_BxNxV = proposal.draft_probs_BxNxV
    left_BxNxV, weight_BxN, coin_BxN = p_BxNxV, jnp.ones_like(p_BxNxV[..., 0]), jnp.zeros_like(p_BxNxV[..., 0])
    for nodes in _rounds(tree, bottom_up):
        parents, rank = tree.parents_N[nodes], int(tree.rank_N[nodes[0]])
        valid_BxM, token_BxM = proposal.valid_BxN[:, nodes], proposal.tokens_BxN[:, nodes]
        is_token_BxMxV = token_BxM[..., None] == jnp.arange(V, dtype=token_BxM.dtype)[None, None, :]
        one_hot_BxMxV = is_token_BxMxV.astype(p_BxNxV.dtype)
        drawn_BxMxV = slot_law(proposal.law, rank, None if q_BxNxV is None else q_BxNxV[:, parents], one_hot_BxMxV)
        old_BxMxV = left_BxNxV[:, parents]
        weight_BxM = weight_BxN[:, parents]
        scaled_BxMxV = weight_BxM[..., None] * old_BxMxV

        accept_BxM = _ratio(_at(scaled_BxMxV, token_BxM), _at(drawn_BxMxV, token_BxM))
        surplus_BxMxV = jnp.maximum(scaled_BxMxV - drawn_BxMxV, 0.0)
        sum_BxM = surplus_BxMxV.sum(-1)
        # Nothing is left only where rounding says so, or where the child is accepted for sure.
        some_BxMx1 = (valid_BxM & (sum_BxM > 0.0))[..., None]
        new_BxMxV = jnp.where(some_BxMx1, surplus_BxMxV / jnp.where(some_BxMx1, sum_BxM[..., None], 1.0), old_BxMxV)
        left_BxNxV = left_BxNxV.at[:, parents].set(new_BxMxV)
        coin_BxN = coin_BxN.at[:, nodes].set(jnp.where(valid_BxM, accept_BxM, 0.0))
        if bottom_up:
            rest_BxM = sum_BxM + 1.0 - weight_BxM
            # 0/0: so far everything is accepted for sure. Behind a node whose p is not a number nothing is decided: the
            # node keeps the weight it came with, and the row fails only if that node is the last one accepted.
            after_BxM = jnp.where(rest_BxM > 0.0, sum_BxM / jnp.where(rest_BxM > 0.0, rest_BxM, 1.0), weight_BxM)
            after_BxM = jnp.where(rest_BxM == 0.0, 1.0, after_BxM)
            weight_BxN = weight_BxN.at[:, parents].set(jnp.where(valid_BxM, jnp.minimum(after_BxM, 1.0), weight_BxM))
            weight_BxN = weight_BxN.at[:, nodes].set(coin_BxN[:, nodes])
        if proposal.law == Law.WITHOUT_REPLACEMENT:
            q_BxNxV = q_BxNxV.at[:, parents].set(without(q_BxNxV[:, parents], is_token_BxMxV))
    return Verdict(weight_BxN if bottom_up else coin_BxN, left_BxNxV)


def slot_law(law: Law, rank: int, q_BxMxV: Float[Array, "B M V"] | None, one_hot_BxMxV: Float[Array, "B M V"]):
    """The law from which a child of place `rank` was drawn, given its elder siblings.

    Args:
      q_BxMxV: what is left of the recorded law (None for a point mass).
      one_hot_BxMxV: all weight on the child's token, the law of a child that was chosen and not drawn. So is one that
        lies beyond the support of the recorded law.
    """
    if law == Law.POINT_MASS or (law == Law.TOP_AND_SAMPLE and rank > 0):
        return one_hot_BxMxV
    total_BxMx1 = q_BxMxV.sum(-1, keepdims=True)
    drawn_BxMx1 = total_BxMx1 > 0.0
    return jnp.where(drawn_BxMx1, q_BxMxV / jnp.where(drawn_BxMx1, total_BxMx1, 1.0), one_hot_BxMxV)


def without(q_BxMxV, is_token_BxMxV):
    """What is left of a law when a token has been drawn; not normalised."""
    return jnp.where(is_token_BxMxV, 0.0, q_BxMxV)


def _rounds(tree: Tree, by_depth: bool) -> list[np.ndarray]:
    """Nodes that can be tested together: of one place among their siblings, and of one depth if asked for."""
    order = [(int(tree.depth_N[n]) if by_depth else 0, int(tree.rank_N[n])) for n in range(1, tree.size)]
    return [np.asarray([n + 1 for n, key in enumerate(order) if key == wanted]) for wanted in sorted(set(order))]


def _at(values_BxMxV, token_BxM):
    return jnp.take_along_axis(values_BxMxV, token_BxM[..., None], axis=-1)[..., 0]


def _ratio(p_BxM, q_BxM):
    """min(1, p/q). q(x) = 0 means that x cannot have been drawn; should rounding have done it, p decides alone."""
    drawn_BxM = q_BxM > 0.0
    ratio_BxM = jnp.minimum(p_BxM / jnp.where(drawn_BxM, q_BxM, 1.0), 1.0)
    return jnp.where(drawn_BxM, ratio_BxM, (p_BxM > 0.0).astype(p_BxM.dtype))
