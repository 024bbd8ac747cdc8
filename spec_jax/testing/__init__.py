"""Public toys with a known law, and the harness that judges a proposer, a tree or a rule.

Targets: `MarkovLM` (exact law), `ScriptLM` (a wrong position shows as a wrong token), `HistLM` (a hole or a stale row
shows), `TinyTransformer` (a real one, random). Heads for a `HistLM`: `HistEagle`, `HistMedusa`. `Poisoned` fills every
uncommitted row with a value that must not reach the output. Judges: `cycle_law` (the joint law of a cycle by
enumeration), `total_variation`, `chi_square_p`, `assert_same_tokens`, `assert_invariants`.

Whoever adds a proposer runs `assert_same_tokens`; whoever adds a rule made of coins runs `cycle_law` over
`all_drafts` against `plain_law`, and both run the chi-square test on the compiled decoder.
"""

from spec_jax.testing.judges import assert_invariants, assert_same_tokens
from spec_jax.testing.laws import (
    Draft,
    all_drafts,
    chi_square_p,
    cycle_law,
    optimal_acceptance,
    plain_law,
    proposal_of,
    random_laws,
    total_variation,
)
from spec_jax.testing.toys import HistEagle, HistLM, HistMedusa, MarkovLM, Poisoned, ScriptLM, TinyTransformer

__all__ = [
    "Draft",
    "HistEagle",
    "HistLM",
    "HistMedusa",
    "MarkovLM",
    "Poisoned",
    "ScriptLM",
    "TinyTransformer",
    "all_drafts",
    "assert_invariants",
    "assert_same_tokens",
    "chi_square_p",
    "cycle_law",
    "optimal_acceptance",
    "plain_law",
    "proposal_of",
    "random_laws",
    "total_variation",
]
