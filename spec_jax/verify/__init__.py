"""Verification rules: which drafted tokens may be committed. A file each; `TABLE` says which law each may judge."""

from spec_jax.verify.base import Acceptance, CoinRule, Rule, Verdict
from spec_jax.verify.block import Block
from spec_jax.verify.match import Match
from spec_jax.verify.recursive import Recursive
from spec_jax.verify.rejection import Rejection
from spec_jax.verify.traversal import Traversal
from spec_jax.verify.typical import Typical

RULES = {rule.name: rule for rule in (Match, Rejection, Block, Recursive, Traversal, Typical)}

TABLE = {(law, name) for name, rule in RULES.items() for law in rule.laws}
"""The legal pairs (law of proposal, rule); every other pair is refused when a decoder is built."""

__all__ = [
    "RULES",
    "TABLE",
    "Acceptance",
    "Block",
    "CoinRule",
    "Match",
    "Recursive",
    "Rejection",
    "Rule",
    "Traversal",
    "Typical",
    "Verdict",
]
