"""A proposer with a chosen acceptance, to time and test the system without a trained head."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from spec_jax import sampling
from spec_jax.contract import ContractError, Law
from spec_jax.propose.base import Context, Stateless
from spec_jax.propose.plain import chain_proposal
from spec_jax.sampling import Purpose
from spec_jax.tree import Tree


@dataclasses.dataclass(frozen=True, init=False)
class Synthetic(Stateless):
    """Drafts a known continuation and spoils each token with a chosen probability.

    Verification stays real: the drafted tokens are those of an earlier plain run (greedy, or sampled with the same
    seed under rule `match`), so an unspoiled one is accepted and a spoiled one is not, and the output is right
    whatever the chosen acceptance.

    Args:
      references: the whole token sequence (prompt and output) of every row, in the order of the batch.
      acceptance: probability that the token at depth 1, 2, ... is right, given that those before it are. 0 and 1 force
        the outcome.
      seed: of the spoiling.
    """

    tree: Tree
    params: Any = dataclasses.field(compare=False, repr=False)

    law = Law.POINT_MASS

    def __init__(self, references: Sequence[Sequence[int]], acceptance: Sequence[float], seed: int = 0):
        if not len(acceptance) or not all(0.0 <= a <= 1.0 for a in acceptance):
            raise ValueError(f"acceptance must be one probability in [0, 1] per depth, got {list(acceptance)}")
        if not len(references) or not all(len(r) for r in references):
            raise ValueError("give one reference sequence per row, none of them empty")
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed must be in [0, 2**32), got {seed}")
        length_B = np.asarray([len(r) for r in references], np.int32)
        padded_BxT = np.zeros((len(references), length_B.max()), np.int32)
        for row, reference in zip(padded_BxT, references, strict=True):
            row[: len(reference)] = reference
        params = {
            "references_BxT": jnp.asarray(padded_BxT),
            "length_B": jnp.asarray(length_B),
            "acceptance_K": jnp.asarray(acceptance, jnp.float32),
            "seed": jnp.uint32(seed),
        }
        object.__setattr__(self, "tree", Tree.chain(len(acceptance)))
        object.__setattr__(self, "params", params)

    def init(self, batch: int, capacity: int) -> None:
        rows = len(self.params["length_B"])
        if batch != rows:
            raise ContractError(
                f"Synthetic was given references for {rows} rows, and the batch has {batch}: "
                "give one reference per prompt, in the same order"
            )

    def propose(self, params, state, context: Context):
        depth_1xK = jnp.arange(self.tree.max_depth)[None, :]
        index_BxK = context.num_tokens_B[:, None] + depth_1xK
        right_BxK = jnp.take_along_axis(params["references_BxT"], index_BxK, axis=1, mode="clip")
        # Spoiling is not sampling: rows differ by their place, so that it does not depend on the requests' seeds.
        row_B = jnp.arange(len(context.num_tokens_B), dtype=jnp.uint32)
        seed_Bx2 = jnp.stack([jnp.full_like(row_B, params["seed"]), row_B], axis=1)
        u_BxK = sampling.uniforms(seed_Bx2, Purpose.DRAFT, *sampling.root_lanes(context.root_position_B, depth_1xK))
        spoiled_BxK = u_BxK >= params["acceptance_K"][None, :]
        # Any other token of the vocabulary.
        wrong_BxK = jnp.where(right_BxK == 0, 1, right_BxK - 1)
        drafted_BxK = jnp.where(spoiled_BxK, wrong_BxK, right_BxK)
        count_B = jnp.clip(params["length_B"] - context.num_tokens_B, 0, self.tree.max_depth)
        return chain_proposal(context, drafted_BxK, count_B, self.tree, self.law), state
