"""Medusa: heads on the target's last hidden state, each of which guesses one more token ahead."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spec_jax import drafting
from spec_jax.contract import ContractError
from spec_jax.growth import Level
from spec_jax.propose.base import Committed, Context, Proposal
from spec_jax.propose.heads import Head, HeadProposer, at_last_committed, at_last_position, unless_alone
from spec_jax.target import Target


@runtime_checkable
class MedusaHeads(Head, Protocol):
    """K heads, each a law of one token from the target's hidden state alone; `taps` names that state.

    Attributes:
      num_heads: K. From the hidden state at position t, head k guesses the token at t + 2 + k; the target's own output
        layer gives that at t + 1.
    """

    num_heads: int

    def logits(self, params: Any, hidden_BxE: Float[Array, "B E"]) -> Float[Array, "B K U"]:
        """What every head makes of a hidden state."""
        ...


@dataclasses.dataclass(frozen=True)
class Medusa(HeadProposer):
    """Drafts with Medusa heads (Cai et al., arXiv 2401.10774).

    The heads do not see the tokens drafted before: all nodes of a depth share one law. A tree is at most as deep as
    there are heads; `shapes.published` has the paper's.
    """

    head: MedusaHeads

    def __post_init__(self):
        super().__post_init__()
        if self.tree.max_depth > self.head.num_heads:
            raise ValueError(
                f"the tree is {self.tree.max_depth} tokens deep and there are {self.head.num_heads} Medusa heads, one "
                "a depth; use a shallower tree"
            )

    def check(self, target: Target, max_len: int) -> None:
        super().check(target, max_len)
        if len(self.head.taps) != 1:
            raise ContractError(f"Medusa heads read one hidden state, and these ask for taps {self.head.taps}")

    def init(self, batch: int, capacity: int) -> Float[Array, "B E"]:
        """The target's hidden state at the last position with KV, the one before the root."""
        return jnp.zeros((batch, self.head.width), jnp.float32)

    def prefill(self, params, state, context: Context, tokens_BxC, start, taps):
        return at_last_position(state, taps[0], context, start)

    def propose(self, params, state, context: Context) -> tuple[Proposal, Any]:
        logits_BxKxV = self.head.logits(params, state)

        def expand(carry, level: Level):
            return jax.lax.dynamic_slice_in_dim(logits_BxKxV, level.depth, 1, axis=1), carry

        vocabulary = self.head.vocabulary(params)
        proposal, _, _ = drafting.draft(self.tree, self.law, logits_BxKxV[:, 0], expand, None, context, vocabulary)
        return unless_alone(proposal, context), state

    def observe(self, params, state, context: Context, committed: Committed):
        return at_last_committed(state, committed.at_path(committed.taps[0]), committed)
