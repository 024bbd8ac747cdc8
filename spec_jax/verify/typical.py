"""Typical acceptance: a relaxed rule."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from spec_jax.contract import Law
from spec_jax.verify.base import CoinRule, leading_run, rows_at


@dataclasses.dataclass(frozen=True)
class Typical(CoinRule):
    """Accept a drafted token that the target finds typical: p(x) > min(epsilon, delta * exp(-H(p))).

    **Relaxed**: the output does not have the target's law; results say so. Greedy rows stay greedy, because a
    one-hot p has entropy 0 and only the argmax exceeds the threshold. The token behind the accepted run is drawn
    from p. (Medusa; Cai et al., arXiv 2401.10774, section 2.3.1.)

    Attributes:
      epsilon: hard threshold in [0, 1).
      delta: factor on exp(-entropy in nats); the paper takes sqrt(epsilon).
    """

    name: ClassVar[str] = "typical"
    exact: ClassVar[bool] = False
    laws: ClassVar[frozenset[Law]] = frozenset(Law)

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self):
        if not (0.0 <= self.epsilon < 1.0 and 0.0 <= self.delta < 1.0):
            raise ValueError(f"epsilon and delta must be in [0, 1), got {self.epsilon} and {self.delta}")

    def coins(self, proposal, p_BxNxV, q_BxNxV):
        log_p_BxNxV = jnp.log(jnp.where(p_BxNxV > 0.0, p_BxNxV, 1.0))
        entropy_BxN = -(p_BxNxV * log_p_BxNxV).sum(-1)
        threshold_BxN = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy_BxN))
        child_BxNx1 = jnp.roll(proposal.tokens_BxN, -1, axis=1)[..., None]
        passes_BxN = jnp.take_along_axis(p_BxNxV, child_BxNx1, axis=-1)[..., 0] > threshold_BxN
        return (jnp.roll(passes_BxN, 1, axis=1) & proposal.valid_BxN).astype(jnp.float32)

    def select(self, proposal, passed_BxN):
        return leading_run(passed_BxN)

    def residual(self, proposal, p_BxNxV, q_BxNxV, node_B):
        return rows_at(p_BxNxV, node_B)
