"""Block verification: the drafted block is judged jointly."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from spec_jax.verify.base import CoinRule, chain_length, chain_ratios, positive_part, rows_at


@dataclasses.dataclass(frozen=True)
class Block(CoinRule):
    """Never fewer accepted tokens than token-by-token rejection, in expectation, and as exact.

    With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i)/q(x_i)), node i's coin passes with probability
    h_i = S_i / (S_i + 1 - w_i), S_i = sum_x (w_i p(x|x_<=i) - q(x|x_<=i))+, and h = w at the last drafted token. The
    *deepest* node whose coin passes is kept, whatever coins failed above it, and the next token is drawn from
    (w_i p - q)+ there. (Sun et al., ICLR 2025, arXiv 2403.10444.)
    """

    name: ClassVar[str] = "block"

    def coins(self, proposal, p_BxNxV, q_BxNxV):
        w_BxN = _weights(proposal, p_BxNxV, q_BxNxV)
        surplus_BxN = jnp.maximum(w_BxN[..., None] * p_BxNxV - q_BxNxV, 0.0).sum(-1)
        missing_BxN = surplus_BxN + 1.0 - w_BxN
        # 0/0: p equals q and everything so far was accepted for sure.
        inner_BxN = jnp.where(missing_BxN > 0.0, surplus_BxN / jnp.where(missing_BxN > 0.0, missing_BxN, 1.0), 1.0)
        node_1xN = jnp.arange(w_BxN.shape[1])[None, :]
        last_Bx1 = chain_length(proposal)[:, None]
        coin_BxN = jnp.where(node_1xN == last_Bx1, w_BxN, jnp.minimum(inner_BxN, 1.0))
        return jnp.where(node_1xN <= last_Bx1, coin_BxN, 0.0)

    def select(self, proposal, passed_BxN):
        node_1xN = jnp.arange(passed_BxN.shape[1])[None, :]
        return jnp.where(passed_BxN, node_1xN, 0).max(1).astype(jnp.int32)

    def residual(self, proposal, p_BxNxV, q_BxNxV, node_B):
        w_B = jnp.take_along_axis(_weights(proposal, p_BxNxV, q_BxNxV), node_B[:, None], axis=1)[:, 0]
        rejected_B = node_B < chain_length(proposal)
        scaled_BxV = jnp.where(rejected_B, w_B, 1.0)[:, None] * rows_at(p_BxNxV, node_B)
        return positive_part(scaled_BxV, rows_at(q_BxNxV, node_B), rejected_B)


def _weights(proposal, p_BxNxV, q_BxNxV):
    """w of every node; the root's is 1."""
    ratio_NxB = chain_ratios(proposal, p_BxNxV, q_BxNxV).T.at[0].set(1.0)

    def step(w_B, ratio_B):
        w_B = jnp.minimum(w_B * ratio_B, 1.0)
        return w_B, w_B

    _, w_NxB = jax.lax.scan(step, jnp.ones_like(ratio_NxB[0]), ratio_NxB)
    return w_NxB.T
