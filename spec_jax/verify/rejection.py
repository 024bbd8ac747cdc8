"""Token-by-token speculative sampling."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from spec_jax.verify.base import CoinRule, chain_length, chain_ratios, leading_run, positive_part, rows_at


@dataclasses.dataclass(frozen=True)
class Rejection(CoinRule):
    """Accept token x with probability min(1, p(x)/q(x)); at the first rejection draw from (p - q)+.

    Exact when the tokens were drawn from the recorded q; for a point mass q is all weight on the drafted token, so
    x is accepted with probability p(x). Expected accepted tokens: the sum over depths of the product of
    1 - TV(p, q). (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318.)
    """

    name: ClassVar[str] = "rejection"

    def coins(self, proposal, p_BxNxV, q_BxNxV):
        return jnp.minimum(chain_ratios(proposal, p_BxNxV, q_BxNxV), 1.0)

    def select(self, proposal, passed_BxN):
        return leading_run(passed_BxN)

    def residual(self, proposal, p_BxNxV, q_BxNxV, node_B):
        rejected_B = node_B < chain_length(proposal)
        return positive_part(rows_at(p_BxNxV, node_B), rows_at(q_BxNxV, node_B), rejected_B)
