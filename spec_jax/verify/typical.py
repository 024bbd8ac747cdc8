"""Typical acceptance: a relaxed rule."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from spec_jax.contract import Shapes
from spec_jax.verify.base import CoinRule, Verdict, deepest


@dataclasses.dataclass(frozen=True)
class Typical(CoinRule):
    """Accept a drafted token that the target finds typical: p(x) > min(epsilon, delta * exp(-H(p))).

    **Relaxed**: the output does not have the target's law; results say so. Greedy rows stay greedy, because a
    one-hot p has entropy 0 and only the argmax exceeds the threshold. Of a tree the deepest path of typical tokens is
    kept (of equally deep ones the first), and the token behind it is drawn from p. (Medusa; Cai et al., arXiv
    2401.10774, section 2.3.1.)

    Attributes:
      epsilon: hard threshold in [0, 1).
      delta: factor on exp(-entropy in nats); the paper takes sqrt(epsilon).
    """

    name: ClassVar[str] = "typical"
    exact: ClassVar[bool] = False
    shapes: ClassVar[Shapes] = Shapes.ANY

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self):
        if not (0.0 <= self.epsilon < 1.0 and 0.0 <= self.delta < 1.0):
            raise ValueError(f"epsilon and delta must be in [0, 1), got {self.epsilon} and {self.delta}")

    def judge(self, proposal, p_BxNxV):
        log_p_BxNxV = jnp.log(jnp.where(p_BxNxV > 0.0, p_BxNxV, 1.0))
        entropy_BxN = -(p_BxNxV * log_p_BxNxV).sum(-1)
        threshold_BxN = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy_BxN))
        excess_BxNxV = p_BxNxV - threshold_BxN[..., None]
        typical_BxN = proposal.topology.under_parent(excess_BxNxV, proposal.tokens_BxN) > 0.0
        return Verdict((typical_BxN & proposal.valid_BxN).astype(p_BxNxV.dtype), p_BxNxV)

    def select(self, proposal, passed_BxN):
        return deepest(proposal, passed_BxN)
