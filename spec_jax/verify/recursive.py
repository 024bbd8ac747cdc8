"""Recursive rejection: siblings are tested one after the other, from the root down."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from spec_jax.contract import Shapes
from spec_jax.verify.base import CoinRule, deepest
from spec_jax.verify.siblings import judge_siblings


@dataclasses.dataclass(frozen=True)
class Recursive(CoinRule):
    """Accept a child x with probability min(1, p(x)/q(x)); after a rejection go on with norm((p - q)+) and its next
    sibling, and draw from what is left when none remains.

    q is the law the sibling was really drawn from: the recorded one for independent draws (SpecInfer; Miao et al.,
    arXiv 2305.09781), renormalised without its elder siblings for draws without replacement (Sequoia, Chen et al.,
    2402.12374; RSD, Jeon et al., 2402.14160), and all weight on the token for one that was chosen. With
    `Law.TOP_AND_SAMPLE` this is the optimal transport of the greedy draft (Hu et al., 2502.18779).
    """

    name: ClassVar[str] = "recursive"
    shapes: ClassVar[Shapes] = Shapes.STATIC

    def judge(self, proposal, p_BxNxV):
        return judge_siblings(proposal, p_BxNxV, bottom_up=False)

    def select(self, proposal, passed_BxN):
        # Of siblings whose coins passed only the first was tested.
        parents_N, node_N = proposal.tree.parents_N, jnp.arange(proposal.tree.size)
        elder_NxN = (parents_N[:, None] == parents_N[None, :]) & (node_N[None, :] < node_N[:, None])
        beaten_BxN = jnp.any(elder_NxN[None] & passed_BxN[:, None, :], axis=-1)
        return deepest(proposal, passed_BxN & ~beaten_BxN)
