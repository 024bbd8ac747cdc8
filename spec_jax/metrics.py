"""Counters kept on device, and the arithmetic of acceptance and time.

All counts are of *committed* tokens: what a stop or the budget cut off was never accepted, whatever the rule said.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from spec_jax.pytree import pytree


@pytree
class Counters:
    """Per row, since its prompt.

    Attributes:
      cycles_B: cycles the row took part in, which is the number of target passes it needed.
      drafted_B: valid drafted nodes.
      verified_B: nodes scored, the root and invalid nodes included.
      accepted_B, correction_B, bonus_B: committed tokens by origin; their sum is the number of tokens emitted.
      histogram_BxP: cycles by number of accepted drafted tokens.
    """

    cycles_B: Int[Array, "B"]
    drafted_B: Int[Array, "B"]
    verified_B: Int[Array, "B"]
    accepted_B: Int[Array, "B"]
    correction_B: Int[Array, "B"]
    bonus_B: Int[Array, "B"]
    histogram_BxP: Int[Array, "B P"]

    @classmethod
    def create(cls, batch: int, max_path: int) -> "Counters":
        zeros = [jnp.zeros((batch,), jnp.int32) for _ in range(6)]
        return cls(*zeros, histogram_BxP=jnp.zeros((batch, max_path), jnp.int32))

    def after(
        self,
        active_B: Bool[Array, "B"],
        drafted_B: Int[Array, "B"],
        num_nodes: int,
        accepted_B: Int[Array, "B"],
        emitted_B: Int[Array, "B"],
        at_leaf_B: Bool[Array, "B"],
    ) -> "Counters":
        """The counters after one cycle that accepted `accepted` drafted tokens and emitted `emitted` tokens."""
        active = active_B.astype(jnp.int32)
        kept_B = jnp.minimum(accepted_B, emitted_B)
        extra_B = emitted_B - kept_B
        path_1xP = jnp.arange(self.histogram_BxP.shape[1])[None, :]
        return Counters(
            cycles_B=self.cycles_B + active,
            drafted_B=self.drafted_B + active * drafted_B,
            verified_B=self.verified_B + active * num_nodes,
            accepted_B=self.accepted_B + kept_B,
            correction_B=self.correction_B + jnp.where(at_leaf_B, 0, extra_B),
            bonus_B=self.bonus_B + jnp.where(at_leaf_B, extra_B, 0),
            histogram_BxP=self.histogram_BxP + (active_B[:, None] & (path_1xP == kept_B[:, None])).astype(jnp.int32),
        )


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts of one row or a whole call, and what follows from them.

    Attributes:
      cycles, drafted, verified, accepted, corrections, bonuses: see `Counters`.
      accepted_histogram: cycles by number of accepted drafted tokens, 0 first.
    """

    cycles: int
    drafted: int
    verified: int
    accepted: int
    corrections: int
    bonuses: int
    accepted_histogram: tuple[int, ...]

    @classmethod
    def of(cls, counters: Counters, row: int | slice = slice(None)) -> "Stats":
        """Of one row, or of a slice of rows summed (all of them by default)."""
        rows = slice(row, row + 1) if isinstance(row, int) else row
        totals = [int(np.asarray(getattr(counters, f.name))[rows].sum()) for f in dataclasses.fields(Counters)[:6]]
        histogram = np.asarray(counters.histogram_BxP)[rows].sum(0)
        return cls(*totals, accepted_histogram=tuple(map(int, histogram)))

    @property
    def tokens(self) -> int:
        """Emitted tokens."""
        return self.accepted + self.corrections + self.bonuses

    @property
    def tokens_per_cycle(self) -> float:
        """tau: emitted tokens per cycle (and so per target pass)."""
        return self.tokens / self.cycles if self.cycles else 0.0

    @property
    def survival(self) -> tuple[float, ...]:
        """Share of cycles in which the drafted tokens at depth 1, 2, ... were accepted."""
        at_least = np.cumsum(self.accepted_histogram[::-1])[::-1][1:]
        return tuple(float(n) / self.cycles if self.cycles else 0.0 for n in at_least)

    @property
    def conditional_acceptance(self) -> tuple[float, ...]:
        """Share accepted at depth i of the cycles in which depth i - 1 was accepted."""
        reached = (1.0, *self.survival)
        return tuple(b / a if a else 0.0 for a, b in zip(reached, reached[1:], strict=False))

    def __add__(self, other: "Stats") -> "Stats":
        width = max(len(self.accepted_histogram), len(other.accepted_histogram))
        padded = [s.accepted_histogram + (0,) * (width - len(s.accepted_histogram)) for s in (self, other)]
        sums = {
            f.name: getattr(self, f.name) + getattr(other, f.name)
            for f in dataclasses.fields(self)
            if f.name != "accepted_histogram"
        }
        return Stats(**sums, accepted_histogram=tuple(a + b for a, b in zip(*padded, strict=True)))


def survival(conditional_acceptance: Sequence[float]) -> tuple[float, ...]:
    """Probability that depth 1, 2, ... is accepted, from the acceptance of each depth given the one before."""
    return tuple(map(float, np.cumprod(np.asarray(conditional_acceptance, np.float64))))


def expected_tokens(survival_: Sequence[float]) -> float:
    """E[tokens per cycle] = 1 + sum of the survival: the accepted run and one more token."""
    return 1.0 + float(sum(survival_))


def independent_expected_tokens(acceptance: float, length: int) -> float:
    """(1 - a^(K+1)) / (1 - a), the estimate of a position-independent acceptance (Leviathan et al., 2211.17192)."""
    return expected_tokens(survival([acceptance] * length))


def predicted_speedup(
    tokens_per_cycle: float, t_plain: float, t_propose: float, t_verify: float, t_reconcile: float
) -> float:
    """S = E[Y] t_1 / (t_propose + t_verify + t_reconcile), times in one unit; E[Y] is tokens per cycle."""
    return tokens_per_cycle * t_plain / (t_propose + t_verify + t_reconcile)
