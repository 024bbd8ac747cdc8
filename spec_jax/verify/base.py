"""What a rule is, and the driver that the rules with acceptance coins share."""

import abc
import dataclasses
from typing import ClassVar, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax import sampling
from spec_jax.contract import Law, Shapes
from spec_jax.propose.base import Proposal
from spec_jax.pytree import pytree
from spec_jax.sampling import Purpose, SamplingRows


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
    def at(cls, proposal: Proposal, node_B: Int[Array, "B"], next_token_B: Int[Array, "B"]) -> "Acceptance":
        """The acceptance of everything from the root to `node`."""
        path_BxP = proposal.topology.path(node_B, proposal.tree.max_depth + 1)
        num_accepted_B = (path_BxP < proposal.tree.size).sum(1).astype(jnp.int32) - 1
        return cls(path_BxP, num_accepted_B, next_token_B)


@runtime_checkable
class Rule(Protocol):
    """Decides which drafted tokens are committed.

    Attributes:
      name: the rule's name on command lines and in reports.
      exact: the output has the law of plain decoding.
      laws: laws of proposal under which that holds (for a relaxed rule: that it can judge at all).
      shapes: the trees it is defined on.
    """

    name: ClassVar[str]
    exact: ClassVar[bool]
    laws: ClassVar[frozenset[Law]]
    shapes: ClassVar[Shapes]

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


@pytree
class Verdict:
    """What a rule with coins makes of a proposal before any coin is tossed.

    Attributes:
      coins_BxN: probability that each node's coin passes; 0 for an invalid node, ignored for the root.
      weights_BxNxV: non-negative weights, not all zero, from which the token behind each node is drawn if that
        node is the last accepted one.
    """

    coins_BxN: Float[Array, "B N"]
    weights_BxNxV: Float[Array, "B N V"]


@dataclasses.dataclass(frozen=True)
class CoinRule(abc.ABC):
    """A rule made of one independent coin per node.

    It says with what probability each coin passes and how the next token is drawn (`judge`), and which node is kept
    given the coins that passed (`select`). Both are functions of the target's law p and the proposal alone, so
    `spec_jax.testing` can enumerate the exact law of a cycle from them; the noise is added here, once for all rules.
    """

    exact: ClassVar[bool] = True
    laws: ClassVar[frozenset[Law]] = frozenset(Law)

    @abc.abstractmethod
    def judge(self, proposal: Proposal, p_BxNxV: Float[Array, "B N V"]) -> Verdict:
        """Coins and next-token weights of every node."""

    @abc.abstractmethod
    def select(self, proposal: Proposal, passed_BxN: Bool[Array, "B N"]) -> Int[Array, "B"]:
        """The last accepted node, given which coins passed; the root where nothing is accepted."""

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
        verdict = self.judge(proposal, sampling.law(logits_BxNxV, rows))
        # Strictly below: a coin of probability 0 never passes, even for a uniform of exactly 0.
        passed_BxN = self.toss(proposal, rows, root_position_B) < verdict.coins_BxN
        node_B = self.select(proposal, passed_BxN)
        weights_Bx1xV = jnp.take_along_axis(verdict.weights_BxNxV, node_B[:, None, None], axis=1)
        u_Bx1 = sampling.uniforms(rows.seed_Bx2, Purpose.RESIDUAL, root_position_B[:, None])
        return Acceptance.at(proposal, node_B, sampling.inverse_cdf(weights_Bx1xV, u_Bx1)[:, 0])

    def toss(self, proposal: Proposal, rows: SamplingRows, root_position_B: Int[Array, "B"]) -> Float[Array, "B N"]:
        """The uniform of every node; its coin passes where this is below the coin's probability."""
        node_1xN = jnp.arange(proposal.tree.size)[None, :]
        return sampling.uniforms(rows.seed_Bx2, Purpose.ACCEPT, *sampling.root_lanes(root_position_B, node_1xN))


def deepest(proposal: Proposal, passed_BxN: Bool[Array, "B N"]) -> Int[Array, "B"]:
    """The deepest node that passed together with all its ancestors (the root counts as passed); the first such."""
    topology = proposal.topology
    passed_BxN = passed_BxN.at[:, 0].set(True)
    reached_BxN = jnp.all(jnp.where(topology.ancestors_BxNxN, passed_BxN[:, None, :], True), axis=-1)
    # What lies deeper than the tree was declared to be has no place on the path.
    reached_BxN &= topology.depth_BxN <= proposal.tree.max_depth
    return jnp.argmax(jnp.where(reached_BxN, topology.depth_BxN, -1), axis=-1).astype(jnp.int32)
