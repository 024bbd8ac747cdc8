"""What a rule is, and the driver that the rules with acceptance coins share."""

import abc
import dataclasses
from typing import ClassVar, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax import sampling
from spec_jax.contract import Law
from spec_jax.propose.base import Proposal
from spec_jax.pytree import pytree
from spec_jax.sampling import Purpose, SamplingRows
from spec_jax.tree import Tree


@pytree
class Acceptance:
    """What a rule decided.

    Attributes:
      path_BxP: nodes from the root (node 0) to the last accepted one, one per depth; entries behind
        `num_accepted` are out of range.
      num_accepted_B: accepted drafted tokens, the root not counted.
      next_token_B: the correction token (something was rejected) or bonus token (a leaf was reached).
    """

    path_BxP: Int[Array, "B P"]
    num_accepted_B: Int[Array, "B"]
    next_token_B: Int[Array, "B"]

    @classmethod
    def at(cls, tree: Tree, node_B: Int[Array, "B"], next_token_B: Int[Array, "B"]) -> "Acceptance":
        """The acceptance of everything from the root to `node`."""
        return cls(jnp.asarray(tree.path_NxP)[node_B], jnp.asarray(tree.depth_N)[node_B], next_token_B)


@runtime_checkable
class Rule(Protocol):
    """Decides which drafted tokens are committed.

    Attributes:
      name: the rule's name on command lines and in reports.
      exact: the output has the law of plain decoding.
      laws: laws of proposal under which that holds (for a relaxed rule: that it can judge at all).
      chain_only: the rule is defined on chains.
    """

    name: ClassVar[str]
    exact: ClassVar[bool]
    laws: ClassVar[frozenset[Law]]
    chain_only: ClassVar[bool]

    def describe(self) -> str:
        """Name and parameters, for reports."""
        ...

    def verify(
        self,
        proposal: Proposal,
        logits_BxNxV: Float[Array, "B N V"],
        rows: SamplingRows,
        root_position_B: Int[Array, "B"],
    ) -> Acceptance:
        """Judges a proposal by the target's logits at its nodes. Probabilities are float32."""
        ...


@dataclasses.dataclass(frozen=True)
class CoinRule(abc.ABC):
    """A rule made of one coin a drafted node and one draw from a residual law.

    A rule says how likely each coin passes, which node the passed coins select, and from which weights the next
    token is drawn when a node was selected. The three parts are functions of the target's law p and the draft's
    law q alone, so `spec_jax.testing` can enumerate the exact law of a cycle from them; the noise is added here,
    once for all rules.
    """

    laws: ClassVar[frozenset[Law]] = frozenset({Law.IID, Law.POINT_MASS})
    exact: ClassVar[bool] = True
    chain_only: ClassVar[bool] = True

    @abc.abstractmethod
    def coins(self, proposal: Proposal, p_BxNxV, q_BxNxV) -> Float[Array, "B N"]:
        """Probability in [0, 1] that each node's coin passes; 0 for an invalid node. The root's is ignored."""

    @abc.abstractmethod
    def select(self, proposal: Proposal, passed_BxN: Bool[Array, "B N"]) -> Int[Array, "B"]:
        """The last accepted node, given which coins passed; the root where nothing is accepted."""

    @abc.abstractmethod
    def residual(self, proposal: Proposal, p_BxNxV, q_BxNxV, node_B: Int[Array, "B"]) -> Float[Array, "B V"]:
        """Non-negative weights, not all zero, from which the token behind the selected node is drawn."""

    def describe(self) -> str:
        values = ", ".join(f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self))
        return f"{self.name}({values})" if values else self.name

    def verify(
        self,
        proposal: Proposal,
        logits_BxNxV: Float[Array, "B N V"],
        rows: SamplingRows,
        root_position_B: Int[Array, "B"],
    ) -> Acceptance:
        p_BxNxV = sampling.law(logits_BxNxV, rows)
        q_BxNxV = draft_law(proposal, p_BxNxV.shape[-1])
        node_1xN = jnp.arange(proposal.tree.size)[None, :]
        u_BxN = sampling.uniforms(rows.seed_Bx2, Purpose.ACCEPT, *sampling.root_lanes(root_position_B, node_1xN))
        # Strictly below: a coin of probability 0 never passes, even for a uniform of exactly 0.
        node_B = self.select(proposal, u_BxN < self.coins(proposal, p_BxNxV, q_BxNxV))
        weights_BxV = self.residual(proposal, p_BxNxV, q_BxNxV, node_B)
        u_Bx1 = sampling.uniforms(rows.seed_Bx2, Purpose.RESIDUAL, root_position_B[:, None])
        next_token_B = sampling.inverse_cdf(weights_BxV[:, None, :], u_Bx1)[:, 0]
        return Acceptance.at(proposal.tree, node_B, next_token_B)


def draft_law(proposal: Proposal, vocab_size: int) -> Float[Array, "B N V"]:
    """q at every node of a chain: the recorded law, or for a point mass all weight on the drafted token."""
    if proposal.law == Law.IID:
        return proposal.draft_probs_BxNxV
    child_BxN = jnp.roll(proposal.tokens_BxN, -1, axis=1)
    return (child_BxN[..., None] == jnp.arange(vocab_size)[None, None, :]).astype(jnp.float32)


def chain_ratios(proposal: Proposal, p_BxNxV, q_BxNxV) -> Float[Array, "B N"]:
    """p(x)/q(x) of each drafted token of a chain under its parent's laws; 0 for the root and invalid nodes."""
    token_BxNx1 = jnp.roll(proposal.tokens_BxN, -1, axis=1)[..., None]
    p_BxN = jnp.take_along_axis(p_BxNxV, token_BxNx1, axis=-1)[..., 0]
    q_BxN = jnp.take_along_axis(q_BxNxV, token_BxNx1, axis=-1)[..., 0]
    # q(x) = 0 means that x cannot have been drawn; should rounding have done it, it counts as a sure ratio.
    drawn_BxN = q_BxN > 0.0
    sure_BxN = jnp.where(p_BxN > 0.0, jnp.inf, 0.0)
    ratio_BxN = jnp.where(drawn_BxN, p_BxN / jnp.where(drawn_BxN, q_BxN, 1.0), sure_BxN)
    ratio_BxN = jnp.roll(ratio_BxN, 1, axis=1)
    drafted_1xN = jnp.arange(ratio_BxN.shape[1])[None, :] > 0
    return jnp.where(proposal.valid_BxN & drafted_1xN, ratio_BxN, 0.0)


def positive_part(p_BxV, q_BxV, rejected_B) -> Float[Array, "B V"]:
    """The residual (p - q)+ where a token was rejected, p elsewhere or where rounding leaves nothing."""
    residual_BxV = jnp.where(rejected_B[:, None], jnp.maximum(p_BxV - q_BxV, 0.0), p_BxV)
    empty_Bx1 = residual_BxV.sum(-1, keepdims=True) <= 0.0
    return jnp.where(empty_Bx1, p_BxV, residual_BxV)


def leading_run(passed_BxN: Bool[Array, "B N"]) -> Int[Array, "B"]:
    """The last node of a chain before the first coin that failed."""
    return jnp.cumprod(passed_BxN[:, 1:].astype(jnp.int32), axis=1).sum(1).astype(jnp.int32)


def rows_at(values_BxNxV: Float[Array, "B N V"], node_B: Int[Array, "B"]) -> Float[Array, "B V"]:
    return jnp.take_along_axis(values_BxNxV, node_B[:, None, None], axis=1)[:, 0]


def chain_length(proposal: Proposal) -> Int[Array, "B"]:
    """Valid drafted tokens of each row of a chain."""
    return proposal.valid_BxN[:, 1:].sum(1).astype(jnp.int32)
