"""Prompt lookup: what followed the last n tokens earlier in the text is likely to follow again."""

import dataclasses
import functools
from typing import Literal

import jax.numpy as jnp

from spec_jax.contract import Law
from spec_jax.propose.base import Context, Stateless
from spec_jax.propose.plain import chain_proposal
from spec_jax.tree import Tree


@dataclasses.dataclass(frozen=True)
class PromptLookup(Stateless):
    """Copies the continuation of an earlier occurrence of the text's last n tokens.

    The longest n in max_ngram..min_ngram that occurs earlier wins; among its occurrences `pick` chooses. The
    continuation ends with the text, so a draft may be shorter than `length`, and empty without a match.
    (Saxena, "Prompt Lookup Decoding", 2023, which takes the leftmost occurrence.)

    Attributes:
      length: drafted tokens K at most.
      max_ngram, min_ngram: lengths of the suffix to look for.
      pick: "recent" (the occurrence nearest to the end) or "leftmost".
    """

    length: int = 5
    max_ngram: int = 3
    min_ngram: int = 1
    pick: Literal["recent", "leftmost"] = "recent"

    law = Law.POINT_MASS
    may_abstain = True

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"length must be >= 1, got {self.length}; without a proposer decoding is plain")
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"need 1 <= min_ngram <= max_ngram, got min_ngram={self.min_ngram}, max_ngram={self.max_ngram}"
            )
        if self.pick not in ("recent", "leftmost"):
            raise ValueError(f"pick must be 'recent' or 'leftmost', got {self.pick!r}")

    @functools.cached_property
    def tree(self) -> Tree:
        return Tree.chain(self.length)

    def propose(self, params, state, context: Context):
        tokens_BxS, num_tokens_B = context.tokens_BxS, context.num_tokens_B
        capacity = tokens_BxS.shape[1]
        index_1xS = jnp.arange(capacity)[None, :]
        # agreed[b, j]: how many of the text's last tokens (at most max_ngram) also end at j.
        agrees_BxS, agreed_BxS = jnp.ones_like(tokens_BxS, bool), jnp.zeros_like(tokens_BxS)
        for back in range(self.max_ngram):
            last_Bx1 = jnp.take_along_axis(tokens_BxS, jnp.maximum(num_tokens_B - 1 - back, 0)[:, None], axis=1)
            shifted_BxS = jnp.roll(tokens_BxS, back, axis=1)
            agrees_BxS &= (shifted_BxS == last_Bx1) & (index_1xS >= back)
            agreed_BxS += agrees_BxS.astype(jnp.int32)
        followed_BxS = index_1xS < num_tokens_B[:, None] - 1
        agreed_BxS = jnp.where(followed_BxS, agreed_BxS, 0)
        longest_Bx1 = agreed_BxS.max(1, keepdims=True)
        best_BxS = agreed_BxS == longest_Bx1
        if self.pick == "recent":
            end_B = capacity - 1 - jnp.argmax(best_BxS[:, ::-1], axis=1)
        else:
            end_B = jnp.argmax(best_BxS, axis=1)
        source_BxK = end_B[:, None] + 1 + jnp.arange(self.length)[None, :]
        drafted_BxK = jnp.take_along_axis(tokens_BxS, source_BxK, axis=1, mode="clip")
        found_B = longest_Bx1[:, 0] >= self.min_ngram
        count_B = jnp.where(found_B, jnp.clip(num_tokens_B - 1 - end_B, 0, self.length), 0)
        return chain_proposal(context, drafted_BxK, count_B, self.tree, self.law), state
