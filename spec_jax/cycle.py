"""One cycle: propose, score, verify, cut, commit, as one pure function of the decoding state.

`generate`, `stream` and every other driver call `cycle` and have no copy of its rules.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spec_jax import contract
from spec_jax import stop as stop_lib
from spec_jax.kv import KVBuffer
from spec_jax.metrics import Counters
from spec_jax.propose.base import Committed, Context, Proposal, Proposer
from spec_jax.propose.plain import root_only
from spec_jax.pytree import pytree
from spec_jax.sampling import SamplingRows
from spec_jax.stop import StopRows
from spec_jax.target import Target
from spec_jax.verify.base import Acceptance, Rule


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static choices of a decoder: who is the target, who proposes, which rule commits."""

    target: Target
    proposer: Proposer
    rule: Rule
    prefill_chunk: int


@pytree
class Params:
    """The arrays of the models of a plan."""

    target: Any
    proposer: Any


@pytree
class DecodeState:
    """Everything one cycle reads and writes.

    After every cycle `kv.length` is `num_tokens - 1`: the last committed token has no KV yet and is the next root.

    Attributes:
      tokens_BxS: prompt and output; undefined from `num_tokens` on.
      num_tokens_B: committed tokens, the prompt included.
      budget_B: tokens each row may still emit.
      status_B: RUNNING or the reason a row ended (see `stop`).
      rows, stop: the requests' sampling parameters and stop conditions.
      kv: the target's KV.
      proposer: the proposer's state.
      counters: what has been counted since the prompt.
    """

    tokens_BxS: Int[Array, "B S"]
    num_tokens_B: Int[Array, "B"]
    budget_B: Int[Array, "B"]
    status_B: Int[Array, "B"]
    rows: SamplingRows
    stop: StopRows
    kv: KVBuffer
    proposer: Any
    counters: Counters

    @property
    def active_B(self) -> Bool[Array, "B"]:
        return self.status_B == stop_lib.RUNNING

    @property
    def context(self) -> Context:
        return Context(self.tokens_BxS, self.num_tokens_B, self.rows)


def prefill(plan: Plan, params: Params, state: DecodeState) -> DecodeState:
    """Runs the prompts without their last token through target and proposer, in chunks of a fixed size.

    The last prompt token is the root of the first cycle, so prefill needs no logits. Rows shorter than a chunk's
    end are padded; what padding writes lies behind the committed length.
    """
    chunk = plan.prefill_chunk
    length_B = state.num_tokens_B - 1

    def body(carry):
        start, kv, proposer = carry
        tokens_BxC = jax.lax.dynamic_slice_in_dim(state.tokens_BxS, start, chunk, axis=1)
        positions_BxC = jnp.broadcast_to(start + jnp.arange(chunk)[None, :], tokens_BxC.shape)
        kv = kv.with_length(jnp.full_like(length_B, start))
        _, taps, kv = plan.target.forward(params.target, tokens_BxC, positions_BxC, kv, None, taps=plan.proposer.taps)
        proposer = plan.proposer.prefill(params.proposer, proposer, state.context, tokens_BxC, start, taps)
        return start + chunk, kv, proposer

    _, kv, proposer = jax.lax.while_loop(
        lambda carry: carry[0] < length_B.max(), body, (jnp.int32(0), state.kv, state.proposer)
    )
    return dataclasses.replace(state, kv=kv.with_length(length_B), proposer=proposer)


def propose(plan: Plan, params: Params, state: DecodeState, speculate: bool = True) -> tuple[Proposal, Any]:
    """The proposal of this cycle and the proposer's next state."""
    if not speculate:
        return root_only(state.context), state.proposer
    proposal, proposer = plan.proposer.propose(params.proposer, state.proposer, state.context)
    contract.check_proposal(proposal, plan.proposer)
    return proposal, proposer


def score(
    plan: Plan, params: Params, state: DecodeState, proposal: Proposal
) -> tuple[Float[Array, "B N V"], tuple, KVBuffer]:
    """The target's logits at every node of the proposal, in one pass; the KV of the nodes is scratch."""
    topology, shape = proposal.topology, proposal.tokens_BxN.shape
    positions_BxN = state.context.root_position_B[:, None] + topology.depth_BxN
    words_BxNxW = None
    if not proposal.tree.is_chain:
        words_BxNxW = topology.words_BxNxW
        words_BxNxW = jnp.broadcast_to(words_BxNxW, (*shape, words_BxNxW.shape[-1]))
    return plan.target.forward(
        params.target, proposal.tokens_BxN, positions_BxN, state.kv, words_BxNxW, taps=plan.proposer.taps
    )


def verify(
    plan: Plan, params: Params, state: DecodeState, proposal: Proposal
) -> tuple[Acceptance, Bool[Array, "B N"], tuple, KVBuffer]:
    """What the rule makes of the target's scores: acceptance, nodes whose logits are not numbers, taps, written KV."""
    logits_BxNxV, taps, kv = score(plan, params, state, proposal)
    acceptance = plan.rule.verify(proposal, logits_BxNxV, state.rows, state.context.root_position_B)
    # The maximum over V carries a NaN out of it; a row of -inf holds no law, and one with +inf none either.
    return acceptance, ~jnp.isfinite(logits_BxNxV.max(-1)), taps, kv


def reconcile(
    plan: Plan,
    params: Params,
    state: DecodeState,
    proposal: Proposal,
    acceptance: Acceptance,
    bad_BxN: Bool[Array, "B N"],
    taps: tuple,
    kv: KVBuffer,
    speculate: bool = True,
) -> DecodeState:
    """Cuts the accepted run, commits what is left of it everywhere, and counts it.

    Rows that are finished commit nothing. A row whose run needs the token behind a node of `bad_BxN` (where the
    target's logits are not numbers) commits what came before and ends with an error; its mates do not notice.
    """
    tree, path_BxP = proposal.tree, acceptance.path_BxP
    B, P = path_BxP.shape
    step_1xP = jnp.arange(P)[None, :]
    on_path_BxP = jnp.take_along_axis(proposal.tokens_BxN, path_BxP, axis=1, mode="clip")
    run_BxP = jnp.where(
        step_1xP < acceptance.num_accepted_B[:, None],
        jnp.roll(on_path_BxP, -1, axis=1),
        acceptance.next_token_B[:, None],
    )
    # The token in place i of the run was drawn behind node i of the path.
    bad_BxP = jnp.take_along_axis(bad_BxN, path_BxP, axis=1, mode="clip")
    bad_BxP &= step_1xP <= acceptance.num_accepted_B[:, None]
    failed_B = jnp.any(bad_BxP, axis=1)
    count_B = jnp.where(failed_B, jnp.argmax(bad_BxP, axis=1), acceptance.num_accepted_B + 1)
    count_B = jnp.where(state.active_B, count_B, 0)
    emitted_B, reason_B, stop = stop_lib.cut(state.stop, run_BxP, count_B, state.budget_B)
    reason_B = jnp.where(failed_B & (reason_B == stop_lib.RUNNING), stop_lib.ERROR, reason_B)

    # Out-of-range indices are dropped; a negative one would wrap.
    S = state.tokens_BxS.shape[1]
    index_BxP = jnp.where(step_1xP < emitted_B[:, None], state.num_tokens_B[:, None] + step_1xP, S)
    tokens_BxS = state.tokens_BxS.at[jnp.arange(B)[:, None], index_BxP].set(run_BxP, mode="drop")
    kept_BxP = jnp.where(step_1xP < emitted_B[:, None], path_BxP, tree.size)
    committed = Committed(kept_BxP, run_BxP, emitted_B, taps, drafted=speculate)
    proposer = plan.proposer.observe(params.proposer, state.proposer, state.context, committed)

    accepted_B = acceptance.num_accepted_B
    last_node_Bx1 = jnp.take_along_axis(path_BxP, accepted_B[:, None], axis=1)
    at_leaf_B = ~jnp.any(proposal.valid_BxN & (proposal.topology.parents_BxN == last_node_Bx1), axis=1)
    return DecodeState(
        tokens_BxS=tokens_BxS,
        num_tokens_B=state.num_tokens_B + emitted_B,
        budget_B=state.budget_B - emitted_B,
        status_B=jnp.where(state.active_B, reason_B, state.status_B),
        rows=state.rows,
        stop=stop,
        kv=kv.commit(emitted_B, None if tree.is_chain else kept_BxP, tree.size),
        proposer=proposer,
        counters=state.counters.after(
            state.active_B,
            proposal.valid_BxN[:, 1:].sum(1).astype(jnp.int32),
            tree.size,
            accepted_B,
            emitted_B,
            at_leaf_B,
        ),
    )


def cycle(plan: Plan, params: Params, state: DecodeState, speculate: bool = True) -> DecodeState:
    """One propose / score / verify / cut / commit step of all rows.

    Where no row has drafted anything, the root alone is scored, at the price of a plain step: the same outcome, since
    invalid nodes are never accepted.

    Args:
      speculate: static; False takes a plain step, after which the proposer is still up to date.
    """
    proposal, proposer = propose(plan, params, state, speculate)
    state = dataclasses.replace(state, proposer=proposer)

    def judge(proposal: Proposal, state: DecodeState) -> DecodeState:
        return reconcile(plan, params, state, proposal, *verify(plan, params, state, proposal), speculate)

    if not (speculate and plan.proposer.may_abstain):
        return judge(proposal, state)
    anything = jnp.any(proposal.valid_BxN[:, 1:] & state.active_B[:, None])
    root = root_only(state.context)
    state = _when(anything, functools.partial(judge, proposal), state)
    return _when(~anything, functools.partial(judge, root), state)


def _when(condition: Bool[Array, ""], step: Callable[[DecodeState], DecodeState], state: DecodeState) -> DecodeState:
    """`step(state)` where the condition holds, else the state as it is.

    A loop of at most one turn: XLA works on a loop's buffers in place, but copies the KV for a conditional.
    """
    _, state = jax.lax.while_loop(lambda carry: carry[0], lambda carry: (False, step(carry[1])), (condition, state))
    return state
