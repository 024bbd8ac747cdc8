"""Sample-and-match: the target samples at every node, and drafted tokens that agree with it are kept."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax import sampling
from spec_jax.contract import Law
from spec_jax.propose.base import Proposal
from spec_jax.sampling import Purpose, SamplingRows
from spec_jax.verify.base import Acceptance


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
    chain_only: ClassVar[bool] = False

    def describe(self) -> str:
        return self.name

    def verify(
        self,
        proposal: Proposal,
        logits_BxNxV: Float[Array, "B N V"],
        rows: SamplingRows,
        root_position_B: Int[Array, "B"],
    ) -> Acceptance:
        tree = proposal.tree
        position_BxN = root_position_B[:, None] + jnp.asarray(tree.depth_N)[None, :] + 1
        u_BxN = sampling.uniforms(rows.seed_Bx2, Purpose.MATCH, position_BxN)
        drawn_BxN = sampling.sample(logits_BxNxV, rows, u_BxN)
        parent_N = jnp.maximum(jnp.asarray(tree.parents), 0)
        agrees_BxN = (proposal.tokens_BxN == drawn_BxN[:, parent_N]) & proposal.valid_BxN
        agrees_BxN = agrees_BxN.at[:, 0].set(True)
        ancestor_1xNxN = jnp.asarray(tree.ancestors_NxN)[None]
        accepted_BxN = jnp.all(jnp.where(ancestor_1xNxN, agrees_BxN[:, None, :], True), axis=-1)
        node_B = jnp.argmax(jnp.where(accepted_BxN, jnp.asarray(tree.depth_N)[None, :], -1), axis=-1)
        next_token_B = jnp.take_along_axis(drawn_BxN, node_B[:, None], axis=1)[:, 0]
        return Acceptance.at(tree, node_B, next_token_B)
