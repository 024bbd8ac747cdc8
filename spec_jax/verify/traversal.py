"""Traversal verification: leaves first, so that a whole path is judged jointly."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from spec_jax.contract import Shapes
from spec_jax.verify.base import CoinRule
from spec_jax.verify.siblings import judge_siblings


@dataclasses.dataclass(frozen=True)
class Traversal(CoinRule):
    """The first node in post-order whose coin passes is kept, with everything above it.

    Never fewer accepted tokens than recursive rejection, in expectation, and as exact. A leaf's coin is the joint
    ratio of its path, cut to 1 at every step; an inner node gets its turn when everything below it was rejected.
    See `judge_siblings` for the coins. (Weng et al., NeurIPS 2025, arXiv 2505.12398; the rule here is built from its
    description and held to the exact law by enumeration.)
    """

    name: ClassVar[str] = "traversal"
    shapes: ClassVar[Shapes] = Shapes.STATIC

    def judge(self, proposal, p_BxNxV):
        return judge_siblings(proposal, p_BxNxV, bottom_up=True)

    def select(self, proposal, passed_BxN):
        order = proposal.tree.post_order
        passed_BxN = passed_BxN.at[:, 0].set(True)
        return jnp.asarray(order)[jnp.argmax(passed_BxN[:, order], axis=1)]
