"""What a proposer is, and what it hands to the verifier."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax.contract import Law
from spec_jax.growth import keep_best
from spec_jax.pytree import pytree
from spec_jax.sampling import SamplingRows
from spec_jax.tree import DynamicTree, Topology, Tree


@pytree
class Proposal:
    """Drafted tokens laid out as a tree.

    Attributes:
      tokens_BxN: node 0 is the root (the last committed token), the others are drafted.
      valid_BxN: which nodes were drafted. The root is valid, and a valid node's parent is valid. Invalid nodes are
        scored like the others and never accepted. For a sampled law, whether a node is valid must not depend on its
        own token or on anything drawn after it, and an invalid sibling drawn without replacement keeps its token.
      draft_probs_BxNxV: row n is the law from which the children of node n were drawn (float32); None for a point
        mass. Rows of leaves are ignored.
      tree, law: static.
      parents_BxN: of a `DynamicTree`, -1 for the root and an earlier node for every other, invalid ones included;
        None for a static tree.
    """

    tokens_BxN: Int[Array, "B N"]
    valid_BxN: Bool[Array, "B N"]
    draft_probs_BxNxV: Float[Array, "B N V"] | None
    tree: Tree | DynamicTree = dataclasses.field(metadata={"static": True})
    law: Law = dataclasses.field(metadata={"static": True})
    parents_BxN: Int[Array, "B N"] | None = None

    @property
    def topology(self) -> Topology:
        """Depths and ancestors of the nodes; the leading axis is 1 where all rows share a static tree."""
        return self.tree.topology if self.parents_BxN is None else Topology.of(self.parents_BxN)

    def pruned(self, values_BxN: Float[Array, "B N"], size: int) -> "Proposal":
        """Cut down to the root and the `size - 1` most valuable nodes.

        Whether a node stays depends on its token, so what is left is no sample of anything: the law becomes a point
        mass and the draft's probabilities are dropped.

        Args:
          values_BxN: of each node (the root's is ignored); no node may be worth more than its parent.
        """
        parents_BxN = jnp.broadcast_to(self.topology.parents_BxN, values_BxN.shape)
        values_BxM = jnp.where(self.valid_BxN, values_BxN, -jnp.inf)[:, 1:]
        kept_BxM, parents_BxN, valid_BxN = keep_best(values_BxM, jnp.maximum(parents_BxN[:, 1:] - 1, -1), size - 1)
        tokens_BxM = jnp.take_along_axis(self.tokens_BxN[:, 1:], kept_BxM, axis=1, mode="clip")
        tokens_BxN = jnp.concatenate([self.tokens_BxN[:, :1], tokens_BxM], axis=1)
        tree = DynamicTree(size, min(self.tree.max_depth, size - 1))
        return Proposal(tokens_BxN, valid_BxN, None, tree, Law.POINT_MASS, parents_BxN)


@pytree
class Context:
    """The committed text a proposer continues.

    Attributes:
      tokens_BxS: prompt and output; entries from `num_tokens` on are undefined.
      num_tokens_B: committed tokens of each row; the last one is the root of this cycle.
      rows: the requests' sampling parameters.
    """

    tokens_BxS: Int[Array, "B S"]
    num_tokens_B: Int[Array, "B"]
    rows: SamplingRows

    @property
    def root_position_B(self) -> Int[Array, "B"]:
        return self.num_tokens_B - 1

    @property
    def root_B(self) -> Int[Array, "B"]:
        return jnp.take_along_axis(self.tokens_BxS, self.root_position_B[:, None], axis=1)[:, 0]


@pytree
class Committed:
    """What one cycle committed.

    Attributes:
      path_BxP: nodes of the scored tree whose KV was committed, root first; entries from `count` on are out of
        range.
      tokens_BxP: the tokens emitted: those of path[1:], then the correction or bonus token.
      count_B: emitted tokens, which is also the number of committed nodes; 0 for a row that took no part.
      taps: hidden states that the proposer asked for, at every scored node.
      drafted: static; whether `propose` ran in this cycle (False: a plain step).
    """

    path_BxP: Int[Array, "B P"]
    tokens_BxP: Int[Array, "B P"]
    count_B: Int[Array, "B"]
    taps: tuple[Float[Array, "B N E"], ...]
    drafted: bool = dataclasses.field(metadata={"static": True})

    def at_path(self, tap_BxNxE: Float[Array, "B N E"]) -> Float[Array, "B P E"]:
        """A tap at the committed nodes; entries from `count` on mean nothing."""
        return jnp.take_along_axis(tap_BxNxE, self.path_BxP[..., None], axis=1, mode="clip")


@runtime_checkable
class Proposer(Protocol):
    """Supplies candidates; the target decides. Frozen and hashable: compiled programs are cached by it.

    Attributes:
      tree: the shape of its proposals, or the bounds of one that it grows from data.
      law: how their tokens are drawn.
      taps: hidden states of the target it wants to observe (see `Target.forward`).
      may_abstain: it may draft nothing in a cycle, often enough that scoring the root alone then is worth a second
        compiled form of the cycle.
      params: a pytree of arrays, an argument of the compiled program.

    State is a pytree of arrays with the batch in front. `rollback` needs no method: a proposer never stores more
    than what `observe` was told is committed, or masks the rest by length.
    """

    tree: Tree | DynamicTree
    law: Law
    taps: tuple[int, ...]
    may_abstain: bool
    params: Any

    def check(self, target: Any, max_len: int) -> None:
        """Raises ContractError where this proposer cannot serve the target."""
        ...

    def init(self, batch: int, capacity: int) -> Any:
        """State of empty rows whose text may grow to `capacity` tokens (scratch included)."""
        ...

    def prefill(
        self,
        params: Any,
        state: Any,
        context: Context,
        tokens_BxC: Int[Array, "B C"],
        start: Int[Array, ""],
        taps: tuple[Float[Array, "B C E"], ...],
    ) -> Any:
        """Takes in tokens `start..start+C` of the prompts with the target's taps at them.

        What lies at a row's last prompt token, its first root, or behind it is padding.
        """
        ...

    def propose(self, params: Any, state: Any, context: Context) -> tuple[Proposal, Any]:
        """Drafts a tree that continues the context."""
        ...

    def observe(self, params: Any, state: Any, context: Context, committed: Committed) -> Any:
        """Brings the state to exactly what is committed; `context` is the one *before* the cycle.

        Called after plain steps too, so that the draft state never goes stale while speculation is off.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Stateless:
    """Base of proposers that keep nothing between cycles: they read the committed text only."""

    taps = ()
    may_abstain = False
    params = None

    def check(self, target, max_len: int) -> None:
        """Any target will do."""

    def init(self, batch: int, capacity: int) -> None:
        return None

    def prefill(self, params, state, context, tokens_BxC, start, taps) -> None:
        return None

    def observe(self, params, state, context, committed) -> None:
        return None
