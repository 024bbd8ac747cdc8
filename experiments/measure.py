"""The one place where time, compilations and memory are measured.

All times are wall time in seconds until the result is there (`block_until_ready`). What is compared is run in turns, in
the same process, and ratios are made of runs of the same turn, so that a machine that slows down slows both sides.
"""

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import Beam, Decoder, Law, SamplingParams, Stats, cycle, decode, growth
from spec_jax.cycle import DecodeState, Params, Plan
from spec_jax.kv import KVBuffer
from spec_jax.propose import Context, Proposal
from spec_jax.target import Target
from spec_jax.verify import Match


@dataclasses.dataclass(frozen=True)
class Spread:
    """The median of repeated measurements, and the least and the greatest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(statistics.median(values), min(values), max(values))


def interleaved(runs: Mapping[str, Callable[[], Any]], repeats: int, warmup: int = 2) -> dict[str, list[float]]:
    """Times of every run, in seconds; all take turns, and the first to run changes with each turn."""
    for run in list(runs.values()) * warmup:
        jax.block_until_ready(run())
    names, times = list(runs), {name: [] for name in runs}
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            started = time.perf_counter()
            jax.block_until_ready(runs[name]())
            times[name].append(time.perf_counter() - started)
    return times


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """The spread of the ratios of what was measured in the same turn."""
    return Spread.of([a / b for a, b in zip(numerator, denominator, strict=True)])


# --- Compilations -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Compilations:
    """How many programs XLA was given while a block ran."""

    count: int = 0


@contextlib.contextmanager
def counting_compilations() -> Iterator[Compilations]:
    """Counts compilations of the block, those that a persistent cache answers included."""
    counted = Compilations()

    def listen(event: str, duration: float, **_: Any) -> None:
        counted.count += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield counted
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


# --- Whole calls --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Timed:
    """One call that generated text, by whatever program.

    Attributes:
      tokens: the new tokens of every row: the one token counter for all programs.
      wall_s: the whole call, prefill included, until the tokens are on the host.
      decode_s: the part of it behind prefill, and `decode_tokens` the new tokens that came in it. (Ours prefills the
        prompt without its last token, so all new tokens do; other programs get the first one from prefill.)
      stats: acceptance, where it is known.
    """

    tokens: list[list[int]]
    wall_s: float
    decode_s: float
    decode_tokens: int
    stats: Stats | None = None


def timed_generate(decoder: Decoder, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Timed:
    """`decoder.generate`, taken apart at the end of prefill to time the two parts of the same call."""
    started = time.perf_counter()
    request = decoder.request(list(prompts), params)
    state = decode.prefill(decoder.plan, decoder.params, decoder.start(request))
    jax.block_until_ready(state)
    prefilled = time.perf_counter()
    results = decoder.results(request, decode.run(decoder.plan, decoder.params, state))
    ended = time.perf_counter()
    tokens = [result.tokens for result in results]
    return Timed(tokens, ended - started, ended - prefilled, sum(map(len, tokens)), results.stats)


# --- Inside a cycle -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CycleTimes:
    """Seconds of the stages of one cycle, each a program of its own, and of a plain cycle (t_1).

    A stage's time contains the start of its program, as that of the plain cycle does.

    Attributes:
      propose: the proposer's drafting.
      verify: scoring by the target, and the rule.
      reconcile: cut, commit of tokens and KV, the proposer's `observe`, counters.
      plain: a whole cycle without speculation, in the same turns.
    """

    propose: Spread
    verify: Spread
    reconcile: Spread
    plain: Spread

    @property
    def total(self) -> float:
        return self.propose.median + self.verify.median + self.reconcile.median


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="proposer")
def _propose(plan: Plan, params: Any, proposer: Any, context: Context) -> tuple[Proposal, Any]:
    return plan.proposer.propose(params, proposer, context)


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="state")
def _verify(plan: Plan, params: Params, state: DecodeState, proposal: Proposal):
    *verified, kv = cycle.verify(plan, params, state, proposal)
    return tuple(verified), dataclasses.replace(state, kv=kv)


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="state")
def _reconcile(plan: Plan, params: Any, state: DecodeState, proposal: Proposal, verified) -> DecodeState:
    return cycle.reconcile(plan, Params(None, params), state, proposal, *verified, state.kv)


def cycle_times(
    decoder: Decoder, plain: Decoder, prompts: Sequence[Sequence[int]], params: SamplingParams, cycles: int = 12
) -> CycleTimes:
    """Decodes by the stages of `spec_jax.cycle`, one after the other, and times each of them in every cycle.

    The states are those of real decoding, some cycles behind the prompt, and the buffers are donated as in the loop.

    Args:
      decoder, plain: with and without speculation, on the same target.
      prompts: the rows of the batch.
      params: budget and stops are ignored, so that the rows stay active.
      cycles: timed cycles; two more come first, which compile.
    """
    state, plain_state = (_prefilled(d, prompts, params) for d in (decoder, plain))
    times: dict[str, list[float]] = {"propose": [], "verify": [], "reconcile": [], "plain": []}

    def timed(name: str, run: Callable[..., Any], *args: Any) -> Any:
        started = time.perf_counter()
        result = jax.block_until_ready(run(*args))
        times[name].append(time.perf_counter() - started)
        return result

    # Every stage gets the arrays that it needs and no others: handing over hundreds of them takes time of its own.
    plan, params = decoder.plan, decoder.params
    for _ in range(2 + cycles):
        proposal, proposer = timed("propose", _propose, plan, params.proposer, state.proposer, state.context)
        state = dataclasses.replace(state, proposer=proposer)
        verified, state = timed("verify", _verify, plan, params, state, proposal)
        state = timed("reconcile", _reconcile, plan, params.proposer, state, proposal, verified)
        plain_state = timed("plain", decode.step, plain.plan, plain.params, plain_state)
    return CycleTimes(**{name: Spread.of(values[2:]) for name, values in times.items()})


def _prefilled(decoder: Decoder, prompts: Sequence[Sequence[int]], params: SamplingParams) -> DecodeState:
    params = dataclasses.replace(params, max_new_tokens=decoder.max_len, ignore_eos=True, stop=(), stop_token_ids=())
    request = decoder.request(list(prompts), params)
    return decode.prefill(decoder.plan, decoder.params, decoder.start(request))


# --- Bare model steps ---------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="target", donate_argnames="kv")
def _forward(target: Target, params: Any, tokens_BxN: jax.Array, kv: KVBuffer) -> tuple[jax.Array, KVBuffer]:
    positions_BxN = kv.length_B[:, None] + jnp.arange(tokens_BxN.shape[1])[None, :]
    logits_BxNxV, _, kv = target.forward(params, tokens_BxN, positions_BxN, kv, None)
    return logits_BxNxV, kv


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Seconds of single steps of one row, all in turns, and ratios of the same turn.

    Attributes:
      cycle: a plain cycle (no proposer), as `generate` runs it.
      one, many: the bare model's step, with 1 and with `positions` new positions.
      cycle_to_one, many_to_one: ratios.
    """

    cycle: Spread
    one: Spread
    many: Spread
    cycle_to_one: Spread
    many_to_one: Spread


def step_times(
    target: Target, in_buffer: int = 200, positions: int = 8, max_len: int = 512, repeats: int = 30
) -> StepTimes:
    """Times a plain cycle and bare jitted model steps, with `in_buffer` tokens in a buffer of the same size."""
    plain = Decoder(target, max_len=max_len)
    prompt = [token % target.vocab_size for token in range(1, in_buffer + 2)]
    held = {"cycle": _prefilled(plain, [prompt], SamplingParams(temperature=0.0))}
    for name in ("one", "many"):
        held[name] = target.init_kv(1, plain.capacity).with_length(jnp.full((1,), in_buffer, jnp.int32))

    def run_cycle():
        held["cycle"] = decode.step(plain.plan, plain.params, held["cycle"])
        return held["cycle"]

    def step(name: str, tokens_BxN: jax.Array):
        logits_BxNxV, held[name] = _forward(target, target.params, tokens_BxN, held[name])
        return logits_BxNxV, held[name]

    tokens_1xN = jnp.asarray([prompt[:positions]], jnp.int32)
    times = interleaved(
        {
            "cycle": run_cycle,
            "one": functools.partial(step, "one", tokens_1xN[:, :1]),
            "many": functools.partial(step, "many", tokens_1xN),
        },
        repeats,
    )
    return StepTimes(
        **{name: Spread.of(values) for name, values in times.items()},
        cycle_to_one=paired_ratio(times["cycle"], times["one"]),
        many_to_one=paired_ratio(times["many"], times["one"]),
    )


# --- Bookkeeping of trees -----------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("beam", "law"), donate_argnames="kv")
def _bookkeeping(
    beam: Beam,
    law: Law,
    values_BxC: jax.Array,
    parents_BxC: jax.Array,
    tokens_BxC: jax.Array,
    drawn_BxN: jax.Array,
    kv: KVBuffer,
) -> tuple[jax.Array, KVBuffer]:
    """All that a cycle does for a tree beside drafting and scoring it: build, mask, walk and commit."""
    kept_BxM, parents_BxN, valid_BxN = growth.keep_best(values_BxC, parents_BxC, beam.size - 1)
    tokens_BxN = jnp.pad(jnp.take_along_axis(tokens_BxC, kept_BxM, axis=1), ((0, 0), (1, 0)))
    proposal = Proposal(tokens_BxN, valid_BxN, None, beam, law, parents_BxN)
    mask_BxNxS = kv.visible(beam.size, proposal.topology.words_BxNxW)
    made = Match().walk(proposal, drawn_BxN)
    length_B = kv.length_B
    return mask_BxNxS, kv.commit(made.num_accepted_B + 1, made.path_BxP).with_length(length_B)


BOOKKEPT = Beam(32, 6, 8)


@dataclasses.dataclass(frozen=True)
class BookkeepingTimes:
    """Seconds of the bookkeeping of a grown tree and of a plain step of the model, in turns, and their ratio."""

    bookkeeping: Spread
    step: Spread
    ratio: Spread


def bookkeeping_times(
    target: Target,
    batch: int = 8,
    beam: Beam = BOOKKEPT,
    in_buffer: int = 200,
    max_len: int = 512,
    repeats: int = 30,
) -> BookkeepingTimes:
    """Times what a tree costs beside its drafting and scoring, for random values and draws that accept a part."""
    rng, C = np.random.default_rng(0), beam.num_candidates
    # Candidates as a beam makes them: every level hangs from `width` nodes of the one before.
    parents_C, values_C = np.full(C, -1, np.int32), -rng.random(C).astype(np.float32)
    for first in range(beam.width, C, beam.width**2):
        above = np.arange(max(first - beam.width**2, 0), first)
        parents_C[first : first + beam.width**2] = np.repeat(rng.choice(above, beam.width, replace=False), beam.width)
    for candidate in range(beam.width, C):
        values_C[candidate] += values_C[parents_C[candidate]]

    def rows(array):
        return jnp.broadcast_to(jnp.asarray(array)[None], (batch, *array.shape))

    tree = rows(values_C), rows(parents_C), rows(rng.integers(0, 3, C, dtype=np.int32))
    drawn_BxN = jnp.asarray(rng.integers(0, 3, (batch, beam.size), dtype=np.int32))
    empty = target.init_kv(batch, max_len + beam.size).with_length(jnp.full((batch,), in_buffer, jnp.int32))
    held = {"bookkeeping": empty, "step": jax.tree.map(jnp.copy, empty)}
    tokens_Bx1 = jnp.ones((batch, 1), jnp.int32)

    def keep_books():
        mask, held["bookkeeping"] = _bookkeeping(beam, Law.POINT_MASS, *tree, drawn_BxN, held["bookkeeping"])
        return mask, held["bookkeeping"]

    def step():
        logits, held["step"] = _forward(target, target.params, tokens_Bx1, held["step"])
        return logits, held["step"]

    times = interleaved({"bookkeeping": keep_books, "step": step}, repeats)
    return BookkeepingTimes(
        **{name: Spread.of(values) for name, values in times.items()},
        ratio=paired_ratio(times["bookkeeping"], times["step"]),
    )


# --- Memory -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that decoding holds beside the parameters.

    Attributes:
      kv: the KV buffers of target and proposer (all of the proposer's state), which never grow.
      workspace: scratch of the compiled loop, as the compiler plans it.
    """

    kv: int
    workspace: int


def memory(decoder: Decoder, batch: int) -> Memory:
    """Memory of `generate` for a batch; compiles nothing where `generate` has run with it."""
    prompts = [[0]] * batch
    state = decoder.start(decoder.request(prompts, SamplingParams(max_new_tokens=1)))
    buffers = jax.tree.leaves((state.kv, state.proposer))
    compiled = decode.run.lower(decoder.plan, decoder.params, state).compile()
    return Memory(sum(b.nbytes for b in buffers), compiled.memory_analysis().temp_size_in_bytes)
