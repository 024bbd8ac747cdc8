"""EAGLE: a small layer that continues the target's own hidden states."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from spec_jax import drafting
from spec_jax.growth import Level
from spec_jax.kv import KVBuffer
from spec_jax.propose.base import Committed, Context, Proposal
from spec_jax.propose.heads import Head, HeadProposer, at_last_committed, at_last_position, unless_alone
from spec_jax.pytree import pytree


@runtime_checkable
class EagleHead(Head, Protocol):
    """A draft layer over pairs of a hidden state and the token behind it.

    Slot t holds the target's features at position t and the token at t + 1; from it and the slots before comes the law
    of the token at t + 2. Behind the text the head's own output takes the place of the features.
    """

    def init_kv(self, batch: int, capacity: int) -> KVBuffer:
        """An empty buffer of `capacity` slots a row."""
        ...

    def features(self, params: Any, taps: tuple[Float[Array, "B N F"], ...]) -> Float[Array, "B N E"]:
        """What the layer reads of the target's hidden states."""
        ...

    def forward(
        self,
        params: Any,
        features_BxNxE: Float[Array, "B N E"],
        tokens_BxN: Int[Array, "B N"],
        positions_BxN: Int[Array, "B N"],
        kv: KVBuffer,
        words_BxNxW: UInt32[Array, "B N W"] | None,
    ) -> tuple[Float[Array, "B N E"], KVBuffer]:
        """The head's hidden states at N new slots; what `logits` reads and the next slot's features may be."""
        ...

    def logits(self, params: Any, hidden_BxNxE: Float[Array, "B N E"]) -> Float[Array, "B N U"]:
        """The law behind each slot."""
        ...


@pytree
class EagleState:
    """The head's KV, and its output at the last slot whose features are the target's: that of the root.

    Attributes:
      kv: a row's text of n tokens fills n - 1 slots.
      hidden_BxE: float32.
    """

    kv: KVBuffer
    hidden_BxE: Float[Array, "B E"]


@dataclasses.dataclass(frozen=True)
class Eagle(HeadProposer):
    """Drafts with an EAGLE-1 or EAGLE-3 head (Li et al., arXiv 2401.15077, 2503.01840), one pass a level.

    With a `Beam` the tree is EAGLE-2's (2406.16858); EAGLE-1 draws the children of a static tree without replacement.

    What is drafted leaves no trace: after every cycle the head runs over the committed tokens again, with the target's
    features.
    """

    head: EagleHead

    def init(self, batch: int, capacity: int) -> EagleState:
        # Behind the text a tree may need more rows than it has nodes.
        extra = max(drafting.num_rows(self.tree) - self.tree.size, 0)
        kv = self.head.init_kv(batch, capacity + extra)
        return EagleState(kv, jnp.zeros((batch, self.head.width), jnp.float32))

    def prefill(self, params, state: EagleState, context: Context, tokens_BxC, start, taps) -> EagleState:
        index_1xC = start + 1 + jnp.arange(tokens_BxC.shape[1])[None, :]
        next_BxC = jnp.take_along_axis(
            context.tokens_BxS, jnp.broadcast_to(index_1xC, tokens_BxC.shape), 1, mode="clip"
        )
        kv = state.kv.with_length(jnp.full_like(state.kv.length_B, start))
        hidden_BxCxE, kv = self._extend(params, kv, taps, next_BxC)
        return EagleState(kv, at_last_position(state.hidden_BxE, hidden_BxCxE, context, start))

    def propose(self, params, state: EagleState, context: Context) -> tuple[Proposal, EagleState]:
        B, E = state.hidden_BxE.shape
        kv = state.kv.with_length(context.root_position_B)
        # The root's stands behind the scratch rows.
        hidden_BxRxE = jnp.zeros((B, drafting.num_rows(self.tree) + 1, E), jnp.float32)
        hidden_BxRxE = hidden_BxRxE.at[:, -1].set(state.hidden_BxE)

        def expand(carry, level: Level):
            kv, hidden_BxRxE = carry
            features_BxMxE = jnp.take_along_axis(hidden_BxRxE, level.parent_BxM[..., None], axis=1)
            positions_BxM = jnp.broadcast_to(kv.length_B[:, None] + level.depth - 1, level.tokens_BxM.shape)
            hidden_BxMxE, kv = self.head.forward(
                params, features_BxMxE, level.tokens_BxM, positions_BxM, kv.with_tail(level.tail), level.words_BxMxW
            )
            hidden_BxMxE = hidden_BxMxE.astype(jnp.float32)
            hidden_BxRxE = lax.dynamic_update_slice_in_dim(hidden_BxRxE, hidden_BxMxE, level.tail, axis=1)
            return self.head.logits(params, hidden_BxMxE), (kv, hidden_BxRxE)

        logits_BxV = self.head.logits(params, state.hidden_BxE[:, None])[:, 0]
        vocabulary = self.head.vocabulary(params)
        proposal, _, (kv, _) = drafting.draft(
            self.tree, self.law, logits_BxV, expand, (kv, hidden_BxRxE), context, vocabulary
        )
        return unless_alone(proposal, context), dataclasses.replace(state, kv=kv)

    def observe(self, params, state: EagleState, context: Context, committed: Committed) -> EagleState:
        taps = tuple(committed.at_path(tap_BxNxF) for tap_BxNxF in committed.taps)
        kv = state.kv.with_length(context.root_position_B)
        hidden_BxPxE, kv = self._extend(params, kv, taps, committed.tokens_BxP)
        return EagleState(kv, at_last_committed(state.hidden_BxE, hidden_BxPxE, committed))

    def _extend(self, params, kv: KVBuffer, taps, next_BxN):
        """Runs the head over consecutive slots with the target's features."""
        positions_BxN = kv.length_B[:, None] + jnp.arange(next_BxN.shape[1])[None, :]
        return self.head.forward(params, self.head.features(params, taps), next_BxN, positions_BxN, kv, None)
