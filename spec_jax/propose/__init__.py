"""Proposers: who supplies candidates, a file each."""

from spec_jax.propose.base import Committed, Context, Proposal, Proposer, Stateless
from spec_jax.propose.draft_model import DraftModel
from spec_jax.propose.eagle import Eagle, EagleHead
from spec_jax.propose.medusa import Medusa, MedusaHeads
from spec_jax.propose.plain import Plain
from spec_jax.propose.prompt_lookup import PromptLookup
from spec_jax.propose.synthetic import Synthetic

__all__ = [
    "Committed",
    "Context",
    "DraftModel",
    "Eagle",
    "EagleHead",
    "Medusa",
    "MedusaHeads",
    "Plain",
    "PromptLookup",
    "Proposal",
    "Proposer",
    "Stateless",
    "Synthetic",
]
