"""A smaller model with the target's vocabulary drafts a chain."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax import sampling
from spec_jax.contract import ContractError, Law, check_draft
from spec_jax.kv import KVBuffer
from spec_jax.propose.base import Committed, Context
from spec_jax.propose.plain import chain_proposal
from spec_jax.sampling import Purpose
from spec_jax.target import Target
from spec_jax.tree import Tree


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """Drafts `length` tokens one after the other with another model on its own KV buffer.

    Sampled tokens come from the draft's law under the request's own sampling parameters, and that law q is
    recorded; with `greedy` they are its argmax, a point mass. (Leviathan et al., arXiv 2211.17192.)

    The buffer always holds the text without its last two tokens, so the first pass of a cycle feeds two: after full
    acceptance the row of the last drafted token does not exist yet, and a fixed lag needs no special case.
    Where the draft's positions end before the target's, its rows propose nothing.

    Attributes:
      model: any `Target` with the vocabulary and tokenizer of the target.
      length: drafted tokens K.
      greedy: draft the argmax instead of sampling.
    """

    model: Target
    length: int = 4
    greedy: bool = False

    taps = ()
    may_abstain = False

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"length must be >= 1, got {self.length}; without a proposer decoding is plain")

    @functools.cached_property
    def tree(self) -> Tree:
        return Tree.chain(self.length)

    @property
    def law(self) -> Law:
        return Law.POINT_MASS if self.greedy else Law.IID

    @property
    def params(self) -> Any:
        return self.model.params

    def check(self, target: Target, max_len: int) -> None:
        check_draft(target, self.model)
        limit = self.model.max_positions
        if limit is not None and limit < self.length + 2:
            raise ContractError(
                f"the draft model has {limit} positions, too few to draft {self.length} tokens even once"
            )

    def init(self, batch: int, capacity: int) -> KVBuffer:
        return self.model.init_kv(batch, capacity)

    def prefill(self, params, kv: KVBuffer, tokens_BxC, start, taps) -> KVBuffer:
        return self._feed(params, kv.with_length(jnp.full_like(kv.length_B, start)), tokens_BxC)[1]

    def propose(self, params, kv: KVBuffer, context: Context):
        root_B = context.root_position_B
        start_B = jnp.maximum(root_B - 1, 0)
        logits_Bx2xV, kv = self._feed(params, kv.with_length(start_B), self._tokens(context, start_B, 2))
        logits_BxV = jnp.take_along_axis(logits_Bx2xV, (root_B - start_B)[:, None, None], axis=1)[:, 0]

        def draw(logits_BxV, lane):
            lanes = sampling.root_lanes(root_B, lane[None, None])
            u_Bx1 = sampling.uniforms(context.rows.seed_Bx2, Purpose.DRAFT, *lanes)
            q_Bx1xV = sampling.law(logits_BxV[:, None, :], context.rows)
            return sampling.inverse_cdf(q_Bx1xV, u_Bx1)[:, 0], q_Bx1xV[:, 0]

        def choose(logits_BxV, lane):
            if self.greedy:
                return jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32), None
            return draw(logits_BxV, lane)

        def step(carry, lane):
            logits_BxV, kv = carry
            token_B, q_BxV = choose(logits_BxV, lane)
            logits_Bx1xV, kv = self._feed(params, kv, token_B[:, None])
            kv = kv.with_length(kv.length_B + 1)
            return (logits_Bx1xV[:, 0], kv), (token_B, q_BxV)

        carry = (logits_BxV, kv.with_length(root_B + 1))
        (logits_BxV, kv), (token_KxB, q_KxBxV) = jax.lax.scan(step, carry, jnp.arange(self.length - 1))
        token_B, q_BxV = choose(logits_BxV, jnp.int32(self.length - 1))
        drafted_BxK = jnp.concatenate([token_KxB, token_B[None]]).T
        probs_BxNxV, count_B = None, jnp.full_like(root_B, self.length)
        if not self.greedy:
            # One row a node: the last node has no child and so no law.
            laws_NxBxV = jnp.concatenate([q_KxBxV, q_BxV[None], jnp.zeros_like(q_BxV)[None]])
            probs_BxNxV = laws_NxBxV.transpose(1, 0, 2)
            # A draft whose logits are not numbers has drawn from no law: its tokens are not proposed.
            sound_BxNx1 = jnp.isfinite(probs_BxNxV.sum(-1, keepdims=True))
            probs_BxNxV = jnp.where(sound_BxNx1, probs_BxNxV, 0.0)
            count_B = jnp.cumprod(sound_BxNx1[:, : self.length, 0].astype(jnp.int32), axis=1).sum(1).astype(jnp.int32)
        if self.model.max_positions is not None:
            fits_B = root_B + self.length <= self.model.max_positions
            count_B = jnp.where(fits_B, count_B, 0)
        return chain_proposal(context, drafted_BxK, count_B, self.tree, self.law, probs_BxNxV), kv

    def observe(self, params, kv: KVBuffer, context: Context, committed: Committed) -> KVBuffer:
        if committed.drafted:
            return kv  # propose has fed everything but the last two tokens of whatever was accepted
        start_B = jnp.maximum(context.root_position_B - 1, 0)
        return self._feed(params, kv.with_length(start_B), self._tokens(context, start_B, 1))[1]

    def _feed(self, params, kv: KVBuffer, tokens_BxN):
        positions_BxN = kv.length_B[:, None] + jnp.arange(tokens_BxN.shape[1])[None, :]
        logits_BxNxV, _, kv = self.model.forward(params, tokens_BxN, positions_BxN, kv, None)
        return logits_BxNxV, kv

    @staticmethod
    def _tokens(context: Context, start_B, count: int):
        index_BxN = start_B[:, None] + jnp.arange(count)[None, :]
        return jnp.take_along_axis(context.tokens_BxS, index_BxN, axis=1, mode="clip")
