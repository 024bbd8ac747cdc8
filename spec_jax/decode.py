"""The drivers of `cycle`: `Decoder.generate`, all cycles in one loop on device, and `Decoder.stream`."""

import codecs
import dataclasses
import functools
import operator
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import contract, cycle, stop
from spec_jax.contract import Contract, ContractError
from spec_jax.cycle import DecodeState, Params, Plan
from spec_jax.metrics import Counters, Stats
from spec_jax.propose import Plain, Proposer
from spec_jax.sampling import SamplingParams, SamplingRows
from spec_jax.stop import StopRows
from spec_jax.target import Target
from spec_jax.verify import Match, Rule

# A text or a sequence of token ids; `Decoder.request` checks it, with errors for people.
Prompt = Any


@dataclasses.dataclass(frozen=True)
class Result:
    """What one request got.

    Attributes:
      text: the generated text, cut before a stop string; None for a target without a tokenizer.
      tokens: the generated tokens, a stop or end-of-text token (and the token that completed a stop string) included.
      finish_reason: "stop", "length" (the budget or `max_len`), or "error" (the target's logits were not numbers).
      prompt_tokens: the prompt.
      seed: the seed the tokens were drawn with; giving it again gives the same tokens.
      contract: what the output promises, and by which rule.
      stats: acceptance counts of this row.
    """

    text: str | None
    tokens: list[int]
    finish_reason: str
    prompt_tokens: list[int]
    seed: int
    contract: Contract
    stats: Stats


class Results(list[Result]):
    """The results of one call, in the order of the prompts; `stats` counts all rows together."""

    def __init__(self, results: Sequence[Result], stats: Stats):
        super().__init__(results)
        self.stats = stats


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="state")
def prefill(plan: Plan, params: Params, state: DecodeState) -> DecodeState:
    """`cycle.prefill`, compiled; the state is donated."""
    return cycle.prefill(plan, params, state)


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="state")
def run(plan: Plan, params: Params, state: DecodeState) -> DecodeState:
    """Cycles until every row has ended, in one program; the state is donated."""
    return jax.lax.while_loop(
        lambda state: jnp.any(state.active_B), functools.partial(cycle.cycle, plan, params), state
    )


@functools.partial(jax.jit, static_argnames=("plan", "speculate"), donate_argnames="state")
def step(plan: Plan, params: Params, state: DecodeState, speculate: bool = True) -> DecodeState:
    """One cycle, compiled; the state is donated."""
    return cycle.cycle(plan, params, state, speculate)


class Decoder:
    """A target with a proposer and a rule.

    Args:
      target: the model whose law the output has.
      proposer: who supplies candidates; None decodes plainly, by the same cycle.
      rule: which rule commits; `Match` by default.
      max_len: most tokens of a text, prompt included. Buffers are this long plus scratch.
      prefill_chunk: prompt tokens processed in one pass.

    Raises:
      ContractError: proposer, rule and target do not belong together.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None = None,
        rule: Rule | None = None,
        max_len: int = 2048,
        prefill_chunk: int = 64,
    ):
        proposer = Plain() if proposer is None else proposer
        rule = Match() if rule is None else rule
        if max_len < 2:
            raise ContractError(f"max_len must hold a prompt token and a new one, got {max_len}")
        if prefill_chunk < 1:
            raise ContractError(f"prefill_chunk must be >= 1, got {prefill_chunk}")
        if target.max_positions is not None and max_len > target.max_positions:
            raise ContractError(
                f"max_len is {max_len} and the target has {target.max_positions} positions; choose max_len <= "
                f"{target.max_positions}"
            )
        for part, protocol in ((proposer, Proposer), (rule, Rule)):
            if isinstance(part, type) or not isinstance(part, protocol):
                raise ContractError(f"{part!r} is not a {protocol.__name__} object (a class must be called first)")
        contract.check_pair(proposer, rule)
        contract.check_tree(proposer.tree, target.vocab_size, max_len)
        proposer.check(target, max_len)
        self.max_len = max_len
        self.plan = Plan(target, proposer, rule, prefill_chunk)
        self.params = Params(target.params, proposer.params)
        # Room for the nodes of a tree, or a padded prefill chunk, behind the longest text: nothing ever clamps.
        self.capacity = max_len + max(proposer.tree.size, prefill_chunk)

    @property
    def target(self) -> Target:
        return self.plan.target

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Results:
        """Decodes all prompts together, each by its own parameters, with no host round trip between cycles.

        Args:
          prompts: texts or token ids, of any lengths.
          params: one for all prompts, or one for each; the defaults of `SamplingParams` if None.

        Raises:
          ContractError, ValueError: a request that cannot be honoured; nothing has run then.
        """
        if isinstance(prompts, str | bytes) or any(isinstance(p, int | np.integer) for p in prompts):
            raise ContractError("prompts must be a list of prompts, got a single one; use [prompt]")
        request = self.request(list(prompts), params)
        if not request.prompts:
            return Results([], Stats.of(Counters.create(1, self.plan.proposer.tree.max_depth + 1)))
        state = self.start(request)
        if any(request.budgets):
            state = prefill(self.plan, self.params, state)
            state = run(self.plan, self.params, state)
        return self.results(request, state)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Yields the text of one prompt as it is committed, by the same cycle as `generate`.

        The pieces joined are the text `generate` returns. Bytes of an unfinished character, and text that may turn
        out to be a stop string, are held back until they are decided.

        Raises:
          ContractError, ValueError: as `generate`, at the call and not at the first piece.
        """
        if self.target.tokenizer is None:
            raise ContractError("streaming text needs a target with a tokenizer; use generate")
        return self._stream(self.request([prompt], params))

    def _stream(self, request: "Request") -> Iterator[str]:
        decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        (stops,) = (p.stop for p in request.params)
        state = self.start(request)
        status, done, data, shown = (stop.RUNNING if request.budgets[0] else stop.LENGTH), 0, b"", 0
        if status == stop.RUNNING:
            state = prefill(self.plan, self.params, state)
        while status == stop.RUNNING:
            state = step(self.plan, self.params, state)
            tokens, num_tokens, status = jax.device_get((state.tokens_BxS[0], state.num_tokens_B[0], state.status_B[0]))
            new = tokens[len(request.prompts[0]) + done : num_tokens]
            done += len(new)
            data += b"".join(map(self.target.tokenizer.token_bytes, new.tolist()))
            ready = (
                len(data) - stop.held_back(data, stops) if status == stop.RUNNING else len(stop.cut_text(data, stops))
            )
            piece = decode(data[shown:ready])
            shown = max(shown, ready)
            if piece:
                yield piece
        if status == stop.ERROR:
            raise FloatingPointError("the target's logits are not numbers")
        if rest := decode(b"", True):
            yield rest

    def start(self, request: "Request") -> DecodeState:
        """The state before prefill: prompts in place, nothing computed yet."""
        batch, capacity = len(request.prompts), self.capacity
        tokens_BxS = np.zeros((batch, capacity), np.int32)
        for row, prompt in zip(tokens_BxS, request.prompts, strict=True):
            row[: len(prompt)] = prompt
        budget_B = np.asarray(request.budgets, np.int32)
        return DecodeState(
            tokens_BxS=jnp.asarray(tokens_BxS),
            num_tokens_B=jnp.asarray(np.asarray([len(p) for p in request.prompts], np.int32)),
            budget_B=jnp.asarray(budget_B),
            status_B=jnp.asarray(np.where(budget_B > 0, stop.RUNNING, stop.LENGTH), jnp.int32),
            rows=SamplingRows.create(request.params, request.seeds),
            stop=jax.tree.map(jnp.copy, request.stop),  # the state is donated, a request may be started again
            proposer=self.plan.proposer.init(batch, capacity),
            kv=self.target.init_kv(batch, capacity),
            counters=Counters.create(batch, self.plan.proposer.tree.max_depth + 1),
        )

    def request(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> "Request":
        """Checks a call's prompts and parameters; raises as `generate` does."""
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ContractError(f"got {len(prompts)} prompts and {len(params)} SamplingParams; give one, or one each")
        tokens = [self._tokens(prompt, f"prompt {i}") for i, prompt in enumerate(prompts)]
        return Request(
            prompts=tokens,
            params=list(params),
            seeds=[secrets.randbits(64) if p.seed is None else p.seed for p in params],
            stop=StopRows.create(params, self.target),
            budgets=[
                min(p.max_new_tokens, self.max_len - len(prompt)) for p, prompt in zip(params, tokens, strict=True)
            ],
        )

    def _tokens(self, prompt: Prompt, name: str) -> list[int]:
        if isinstance(prompt, str):
            if self.target.tokenizer is None:
                raise ContractError(f"{name} is text, and the target has no tokenizer; give token ids")
            prompt = self.target.tokenizer.encode(prompt)
        try:
            tokens = [operator.index(token) for token in prompt]
        except TypeError:
            raise ContractError(f"{name} must be text or whole numbers, got {prompt!r}") from None
        contract.check_prompt(tokens, self.target.vocab_size, self.max_len, name)
        return tokens

    def results(self, request: "Request", state: DecodeState) -> Results:
        """What each row of a state has got so far."""
        tokens_BxS, num_tokens_B, status_B, counters = jax.device_get(
            (state.tokens_BxS, state.num_tokens_B, state.status_B, state.counters)
        )
        results = []
        for row, (prompt, params) in enumerate(zip(request.prompts, request.params, strict=True)):
            tokens = tokens_BxS[row, len(prompt) : num_tokens_B[row]].tolist()
            results.append(
                Result(
                    text=self._text(tokens, params.stop),
                    tokens=tokens,
                    finish_reason=stop.REASONS[int(status_B[row])],
                    prompt_tokens=prompt,
                    seed=request.seeds[row],
                    contract=Contract.of(self.plan.rule, params.temperature),
                    stats=Stats.of(counters, row),
                )
            )
        return Results(results, Stats.of(counters))

    def _text(self, tokens: list[int], stops: tuple[str, ...]) -> str | None:
        if self.target.tokenizer is None:
            return None
        data = b"".join(map(self.target.tokenizer.token_bytes, tokens))
        return stop.cut_text(data, stops).decode("utf-8", errors="replace")


@dataclasses.dataclass(frozen=True)
class Request:
    """Checked requests of one call."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    seeds: Sequence[int]
    stop: StopRows
    budgets: list[int]
