"""Prompt lookup: what followed the last n tokens earlier in the text is likely to follow again."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import jax.numpy as jnp

from spec_jax.contract import Law
from spec_jax.propose.base import Context, Proposal, Stateless
from spec_jax.tree import Tree, check_size


@dataclasses.dataclass(frozen=True)
class PromptLookup(Stateless):
    """Copies the continuation of an earlier occurrence of the text's last n tokens.

    The longest n in max_ngram..min_ngram that occurs earlier wins; among its occurrences `pick` chooses. The
    continuation ends with the text, so a draft may be shorter than `length`, and empty without a match.
    (Saxena, "Prompt Lookup Decoding", 2023, which takes the leftmost occurrence.)

    With `branches`, further occurrences draft beside the first one, in the same order (longest suffix, then `pick`),
    each of which begins with a token that no earlier branch begins with.

    Attributes:
      length: drafted tokens K at most.
      max_ngram, min_ngram: lengths of the suffix to look for.
      pick: "recent" (the occurrence nearest to the end) or "leftmost".
      branches: most tokens of each further branch; empty for a chain.
    """

    length: int = 5
    max_ngram: int = 3
    min_ngram: int = 1
    pick: Literal["recent", "leftmost"] = "recent"
    branches: Sequence[int] = ()

    law = Law.POINT_MASS
    may_abstain = True

    def __post_init__(self):
        object.__setattr__(self, "branches", tuple(self.branches))
        if self.length < 1:
            raise ValueError(f"length must be >= 1, got {self.length}; without a proposer decoding is plain")
        if any(length < 1 for length in self.branches):
            raise ValueError(f"a branch must have a length >= 1, got branches={self.branches}")
        check_size(1 + self.length + sum(self.branches))
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"need 1 <= min_ngram <= max_ngram, got min_ngram={self.min_ngram}, max_ngram={self.max_ngram}"
            )
        if self.pick not in ("recent", "leftmost"):
            raise ValueError(f"pick must be 'recent' or 'leftmost', got {self.pick!r}")

    @functools.cached_property
    def tree(self) -> Tree:
        parents = [-1]
        for length in (self.length, *self.branches):
            parents += [0, *range(len(parents), len(parents) + length - 1)]
        return Tree(tuple(parents))

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
        agreed_BxS = jnp.where(followed_BxS & (agreed_BxS >= self.min_ngram), agreed_BxS, 0)
        # Occurrences that may still be picked, the best one greatest; 0 for none.
        place_1xS = index_1xS if self.pick == "recent" else capacity - 1 - index_1xS
        rank_BxS = jnp.where(agreed_BxS > 0, agreed_BxS * capacity + place_1xS, 0)
        next_BxS = jnp.roll(tokens_BxS, -1, axis=1)
        drafted, valid = [], []
        for length in (self.length, *self.branches):
            end_Bx1 = jnp.argmax(rank_BxS, axis=1, keepdims=True)
            found_Bx1 = jnp.take_along_axis(rank_BxS, end_Bx1, axis=1) > 0
            source_BxK = end_Bx1 + 1 + jnp.arange(length)[None, :]
            drafted.append(jnp.take_along_axis(tokens_BxS, source_BxK, axis=1, mode="clip"))
            valid.append(found_Bx1 & (source_BxK < num_tokens_B[:, None]))
            rank_BxS = jnp.where(next_BxS == jnp.take_along_axis(next_BxS, end_Bx1, axis=1), 0, rank_BxS)
        root_Bx1 = context.root_B[:, None]
        tokens_BxN = jnp.concatenate([root_Bx1, *drafted], axis=1)
        valid_BxN = jnp.concatenate([jnp.ones_like(root_Bx1, bool), *valid], axis=1)
        return Proposal(tokens_BxN, valid_BxN, None, self.tree, self.law), state
