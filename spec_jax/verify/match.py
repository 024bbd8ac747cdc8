"""Sample-and-match: the target samples at every node, and drafted tokens that agree with it are kept."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax import sampling
from spec_jax.contract import Law, Shapes
from spec_jax.propose.base import Proposal
from spec_jax.sampling import Purpose, SamplingRows
from spec_jax.verify.base import Acceptance, deepest


@dataclasses.dataclass(frozen=True)
class Match:
    """Exact for every proposal that was made without looking at the verifier's noise.

    The token of each position is drawn from p with noise keyed by that position alone, exactly as plain decoding
    draws it; a drafted token is accepted where it equals that draw, and the first draw that no child equals is
    itself the token emitted. So the tokens are those of plain decoding with the same seed, one for one. Siblings
    that hold the same token meet the same draw, so duplicates do no harm.

    (SpecInfer's and EAGLE-2's target-only verification; Miao et al., arXiv 2305.09781; Li et al., 2406.16858.)
    """

    name: ClassVar[str] = "match"
    exact: ClassVar[bool] = True
    laws: ClassVar[frozenset[Law]] = frozenset(Law)
    shapes: ClassVar[Shapes] = Shapes.ANY

    def describe(self) -> str:
        return self.name

    def verify(
        self,
        proposal: Proposal,
        logits_BxNxV: Float[Array, "B N V"],
        rows: SamplingRows,
        root_position_B: Int[Array, "B"],
    ) -> Acceptance:
        return self.walk(proposal, self.draw(proposal, logits_BxNxV, rows, root_position_B))

    def draw(
        self,
        proposal: Proposal,
        logits_BxNxV: Float[Array, "B N V"],
        rows: SamplingRows,
        root_position_B: Int[Array, "B"],
    ) -> Int[Array, "B N"]:
        """The token that the target draws behind every node."""
        position_BxN = root_position_B[:, None] + proposal.topology.depth_BxN + 1
        return sampling.sample(logits_BxNxV, rows, sampling.uniforms(rows.seed_Bx2, Purpose.MATCH, position_BxN))

    def agrees(self, proposal: Proposal, drawn_BxN: Int[Array, "B N"]) -> Bool[Array, "B N"]:
        """Which nodes are valid and hold the target's draw behind their parent; the root's is meaningless."""
        parent_BxN = jnp.broadcast_to(jnp.maximum(proposal.topology.parents_BxN, 0), drawn_BxN.shape)
        drawn_there_BxN = jnp.take_along_axis(drawn_BxN, parent_BxN, axis=1)
        return (proposal.tokens_BxN == drawn_there_BxN) & proposal.valid_BxN

    def walk(self, proposal: Proposal, drawn_BxN: Int[Array, "B N"]) -> Acceptance:
        """The acceptance, given the target's draw behind every node."""
        node_B = deepest(proposal, self.agrees(proposal, drawn_BxN))
        return Acceptance.at(proposal, node_B, jnp.take_along_axis(drawn_BxN, node_B[:, None], axis=1)[:, 0])
