"""What proposers with a trained head have in common: a head reads the target's hidden states."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spec_jax import drafting
from spec_jax.contract import Law, check_head
from spec_jax.drafting import Vocabulary
from spec_jax.growth import Beam
from spec_jax.propose.base import Committed, Context, Proposal
from spec_jax.target import Target
from spec_jax.tree import Tree


@runtime_checkable
class Head(Protocol):
    """A trained head. Hashable by identity.

    Attributes:
      taps: hidden states of the target that it reads (see `Target.forward`).
      width: E, of the hidden state that it keeps for a row.
      vocab_size: of the target.
      target_fingerprint: of the target that it was trained for, or None where it is not known.
      params: a pytree of arrays.
    """

    taps: tuple[int, ...]
    width: int
    vocab_size: int
    target_fingerprint: str | None
    params: Any

    def vocabulary(self, params: Any) -> Vocabulary | None:
        """Which of the target's tokens its logits are of; None for all."""
        ...


@dataclasses.dataclass(frozen=True)
class HeadProposer:
    """Base of proposers that draft with a head.

    Attributes:
      head: the head.
      tree: a static tree, a `Beam` to grow one, or the length of a chain.
      law: how the children of a static tree are chosen, as for `DraftModel`; a grown tree is a point mass.
    """

    head: Head
    tree: Tree | Beam | int = 4
    law: Law = Law.POINT_MASS

    may_abstain = False

    def __post_init__(self):
        tree, law = drafting.checked(self.tree, self.law)
        object.__setattr__(self, "tree", tree)
        object.__setattr__(self, "law", law)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.head.taps

    @property
    def params(self) -> Any:
        return self.head.params

    def check(self, target: Target, max_len: int) -> None:
        check_head(target, self.head)


def at_last_position(
    state_BxE: Float[Array, "B E"], values_BxCxE: Float[Array, "B C E"], context: Context, start: Int[Array, ""]
) -> Float[Array, "B E"]:
    """The state, or the value at the position before the root for rows that have it in a prefill chunk."""
    offset_B = context.root_position_B - 1 - start
    found_BxE = jnp.take_along_axis(values_BxCxE, jnp.maximum(offset_B, 0)[:, None, None], axis=1, mode="clip")[:, 0]
    inside_B = (offset_B >= 0) & (offset_B < values_BxCxE.shape[1])
    return jnp.where(inside_B[:, None], found_BxE.astype(state_BxE.dtype), state_BxE)


def at_last_committed(
    state_BxE: Float[Array, "B E"], values_BxPxE: Float[Array, "B P E"], committed: Committed
) -> Float[Array, "B E"]:
    """The value at the last committed node; rows that committed nothing keep their state."""
    index_Bx1x1 = jnp.maximum(committed.count_B - 1, 0)[:, None, None]
    last_BxE = jnp.take_along_axis(values_BxPxE, index_Bx1x1, axis=1)[:, 0]
    return jnp.where((committed.count_B > 0)[:, None], last_BxE.astype(state_BxE.dtype), state_BxE)


def unless_alone(proposal: Proposal, context: Context) -> Proposal:
    """Without drafted tokens for rows whose root is the first token: no hidden state has been seen yet."""
    is_root_1xN = jnp.arange(proposal.tokens_BxN.shape[1])[None, :] == 0
    seen_Bx1 = (context.root_position_B > 0)[:, None]
    return dataclasses.replace(proposal, valid_BxN=proposal.valid_BxN & (seen_Bx1 | is_root_1xN))
