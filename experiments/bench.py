"""Measures proposers and rules against plain decoding, on a set of prompts.

    python -m experiments.bench
    python -m experiments.bench --prompts FILE.jsonl --limit 20 --dtype float32 --dtype bfloat16 \
        --proposer prompt_lookup:length=5 --proposer prompt_lookup:length=8 --peer hf
    python -m experiments.bench --suite DIR --per_category 10 --rule match --rule rejection

Every proposer runs with every rule in every dtype, and plain decoding of the same dtype takes turns with them; a
first call of each, which compiles, is not counted. `--peer hf` adds plain and prompt-lookup generation by
`transformers` on the same weights and prompts. Prints tables and writes into --out: `bench.jsonl` (a line for each
call), `bench.md` and `bench.png`. It may be stopped at any time: the same command goes on where it was.

The built-in prompts take about three minutes on two cores; 20 prompts of 96 tokens about 1.5 minutes for each variant
and repeat.
"""

import dataclasses
import functools
import hashlib
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import tqdm
from absl import flags

import models
import spec_jax as sj
from experiments import cli, exactness, machine, measure, plots, prompts, registry, report
from experiments.measure import Timed
from experiments.peer import Peer
from experiments.records import OURS, Call, Cycle, Ledger, Shape, Speed, Variant, call_key, cycle_key
from experiments.registry import Spec
from spec_jax.target import Target

PLAIN, MATCH = registry.parse_proposer("plain"), registry.parse_rule("match")


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure.

    Attributes:
      proposers, rules, dtypes: every combination runs; plain decoding is added in each dtype.
      batch: prompts per call.
      repeats: how often every call is timed.
      params: of every prompt; with a seed, so that repeats do the same work.
      peer: compare with `transformers`, plain and with lookup of `peer_lookup_tokens` tokens.
    """

    target: str = "smollm2-135m"
    proposers: tuple[Spec, ...] = (registry.parse_proposer("prompt_lookup"),)
    rules: tuple[Spec, ...] = (MATCH,)
    dtypes: tuple[str, ...] = ("float32",)
    batch: int = 1
    repeats: int = 3
    max_len: int = 1024
    params: sj.SamplingParams = sj.SamplingParams(temperature=0.0, seed=0, max_new_tokens=96)
    peer: bool = False
    peer_lookup_tokens: int = 10

    def __post_init__(self):
        if min(self.batch, self.repeats) < 1:
            raise ValueError("batch and repeats must be at least 1")
        for name in ("proposers", "rules", "dtypes"):
            given = getattr(self, name)
            if len(set(given)) < len(given):
                raise ValueError(f"something is given twice in {', '.join(map(str, given))}")
        if self.peer and (self.batch > 1 or self.params.temperature > 0 or "float32" not in self.dtypes):
            raise ValueError(
                "the peer decodes single prompts, greedily, in float32: drop --batch and --temperature, "
                "or add --dtype float32"
            )


@dataclasses.dataclass(frozen=True)
class Group:
    """The prompts of one call."""

    prompts: tuple[prompts.Prompt, ...]
    tokens: tuple[list[int], ...]

    @functools.cached_property
    def digest(self) -> str:
        return _digest(self.tokens)


class Runner(Protocol):
    """Something to time."""

    variant: Variant

    def run(self, group: Group, params: sj.SamplingParams, plain: Callable[[], list[list[int]]]) -> Timed:
        """One call. `plain` gives the plain output, for a proposer that drafts from it."""
        ...


class Ours:
    """A decoder of ours."""

    def __init__(self, target: Target, proposer: Spec, rule: Spec, dtype: str, max_len: int, load):
        label = proposer.label if rule == MATCH else f"{proposer.label} {rule.label}"
        self.variant = Variant(OURS, str(proposer), str(rule), dtype, label)
        self._proposer, self._load, self._max_len = proposer, functools.partial(load, dtype=dtype), max_len
        self._make = functools.partial(sj.Decoder, target, rule=rule.build(), max_len=max_len)
        self._fixed = None if proposer.needs_references else self._make(proposer.build(self._load))

    def decoder(self, group: Group, plain: Callable[[], list[list[int]]]) -> sj.Decoder:
        if self._fixed is not None:
            return self._fixed
        texts = [prompt + new for prompt, new in zip(group.tokens, plain(), strict=True)]
        # Of one length for all groups: data, and no reason to compile.
        padded = [tokens + [0] * (self._max_len - len(tokens)) for tokens in texts]
        return self._make(self._proposer.build(self._load, padded))

    def run(self, group: Group, params: sj.SamplingParams, plain: Callable[[], list[list[int]]]) -> Timed:
        return measure.timed_generate(self.decoder(group, plain), group.tokens, params)


class Theirs:
    """`transformers`."""

    def __init__(self, peer: Peer, lookup_tokens: int | None):
        proposer = "plain" if lookup_tokens is None else f"prompt_lookup:num_tokens={lookup_tokens}"
        self.variant = Variant(peer.name, proposer, str(MATCH), "float32", f"transformers {proposer}")
        self._peer, self._lookup_tokens = peer, lookup_tokens

    def run(self, group: Group, params: sj.SamplingParams, plain: Callable[[], list[list[int]]]) -> Timed:
        return self._peer.generate(group.tokens[0], params.max_new_tokens, params.ignore_eos, self._lookup_tokens)


class Bench:
    """One run of a configuration on prompts.

    Args:
      config: what to measure.
      chosen: the prompts.
      out: folder of the records and reports.
      load: gives the target of a name and dtype.
      resume: take what `out` already holds; measure everything afresh otherwise.

    Raises:
      ValueError: something cannot be measured; nothing has been timed then.
    """

    def __init__(
        self,
        config: Config,
        chosen: Sequence[prompts.Prompt],
        out: Path,
        load: Callable[..., Target] = models.load,
        resume: bool = True,
    ):
        self.config, self.out = config, out
        load = functools.lru_cache(maxsize=None)(load)
        targets = {dtype: load(config.target, dtype=dtype) for dtype in config.dtypes}
        target = targets[config.dtypes[0]]
        self.machine = machine.Machine.here()
        self.settings = {
            "target": config.target,
            "weights": getattr(target, "fingerprint", None),
            "max_len": config.max_len,
            "params": dataclasses.asdict(config.params),
            "machine": dataclasses.asdict(self.machine) | {"commit": None},
        }
        self.groups = _groups(target, chosen, config)
        self.plain = {
            dtype: Ours(target, PLAIN, MATCH, dtype, config.max_len, load) for dtype, target in targets.items()
        }
        self.runners: list[Runner] = list(self.plain.values())
        for dtype, target in targets.items():
            for proposer in config.proposers:
                for rule in config.rules:
                    if proposer != PLAIN:
                        self.runners.append(Ours(target, proposer, rule, dtype, config.max_len, load))
        if config.peer:
            peer = Peer(targets["float32"])
            self.runners += [Theirs(peer, None), Theirs(peer, config.peer_lookup_tokens)]
        self.ledger = Ledger(out / "bench.jsonl", resume)
        self._expected: dict[tuple[str, str], list[list[int]]] = {}

    def run(self) -> list[report.Row]:
        """Measures what the records do not hold yet; returns the results of this configuration."""
        id = _digest(self.settings)
        cells = [(repeat, group) for repeat in range(self.config.repeats) for group in self.groups]

        def key(runner: Runner, repeat: int, group: Group) -> tuple:
            return call_key(id, runner.variant, group.digest, repeat)

        missing = [
            (repeat, group, runners)
            for repeat, group in cells
            if (runners := [r for r in self.runners if key(r, repeat, group) not in self.ledger])
        ]
        uncounted = [
            runner
            for runner in self.runners
            if isinstance(runner, Ours) and cycle_key(id, runner.variant) not in self.ledger
        ]
        total = sum(len(runners) for _, _, runners in missing) + len(uncounted)
        if done := len(cells) * len(self.runners) - sum(len(runners) for _, _, runners in missing):
            cli.note(f"{done} of {len(cells) * len(self.runners)} calls are in {self.out / 'bench.jsonl'} already")
        with tqdm.tqdm(total=total, unit="call", desc="warm-up", disable=not total) as bar:
            if missing:
                self._warm_up()
            for repeat, group, runners in missing:
                bar.set_description(f"repeat {repeat + 1}, {group.prompts[0].id}"[:30])
                self.ledger.append(self._cell(id, repeat, group, runners))
                bar.update(len(runners))
            for runner in uncounted:
                bar.set_description("stages of a cycle")
                self.ledger.append([self._cycle(id, runner)])
                bar.update()
        rows = report.rows(
            [self.ledger[key(runner, repeat, group)] for runner in self.runners for repeat, group in cells],
            [self.ledger[cycle_key(id, runner.variant)] for runner in self.runners if isinstance(runner, Ours)],
        )
        self.ledger.note("summary", self._facts(id) | {"rows": [row.as_json() for row in rows]})
        return rows

    def _warm_up(self) -> None:
        """Compiles everything. Budgets and lengths are data, so a few tokens of the first group do."""
        params = dataclasses.replace(self.config.params, max_new_tokens=min(8, self.config.params.max_new_tokens))
        for runner in self.runners:
            runner.run(self.groups[0], params, lambda: [[] for _ in self.groups[0].tokens])

    def _cell(self, id: str, repeat: int, group: Group, runners: Sequence[Runner]) -> list[Call]:
        """Times the runners on one group, side by side with plain decoding of their dtypes."""
        turns = list(runners)
        for runner in runners:
            if (plain := self.plain[runner.variant.dtype]) not in turns:
                turns.append(plain)
        first = repeat % len(turns)
        timed, compilations = {}, {}
        for runner in turns[first:] + turns[:first]:
            dtype = runner.variant.dtype
            expected = functools.partial(self._plain_tokens, dtype, group)
            if isinstance(runner, Ours):
                runner.decoder(group, expected)  # An untimed plain run, if it drafts from one.
            with measure.counting_compilations() as counted:
                timed[runner] = runner.run(group, self.config.params, expected)
            compilations[runner] = counted.count
            if runner is self.plain[dtype]:
                self._expected[dtype, group.digest] = timed[runner].tokens
        calls = []
        for runner in runners:
            baseline = timed[self.plain[runner.variant.dtype]]
            differences = self._differences(runner, group, baseline.tokens, timed[runner].tokens)
            calls.append(
                Call(
                    settings=id,
                    variant=runner.variant,
                    prompts=[prompt.id for prompt in group.prompts],
                    categories=[prompt.category for prompt in group.prompts],
                    digest=group.digest,
                    repeat=repeat,
                    tokens=timed[runner].tokens,
                    speed=Speed.of(timed[runner]),
                    baseline=Speed.of(baseline),
                    stats=timed[runner].stats,
                    compilations=compilations[runner],
                    compared=self._promises_plain(runner),
                    differences=[f"{group.prompts[row].id} {difference}" for row, difference in differences],
                    ties=sum(difference.near_tie for _, difference in differences),
                )
            )
        return calls

    def _plain_tokens(self, dtype: str, group: Group) -> list[list[int]]:
        if (dtype, group.digest) not in self._expected:
            timed = self.plain[dtype].run(group, self.config.params, list)
            self._expected[dtype, group.digest] = timed.tokens
        return self._expected[dtype, group.digest]

    def _promises_plain(self, runner: Runner) -> bool:
        """Greedily every rule gives the tokens of plain decoding, and `match` always does."""
        return self.config.params.temperature == 0.0 or runner.variant.rule == str(MATCH)

    def _differences(self, runner: Runner, group: Group, expected, got) -> list[tuple[int, exactness.Difference]]:
        if not self._promises_plain(runner):
            return []
        dtype, rows = runner.variant.dtype, enumerate(zip(group.tokens, expected, got, strict=True))
        greedy_plain = self.plain[dtype].decoder(group, list) if self.config.params.temperature == 0.0 else None
        compared = [(row, exactness.compare(*texts, dtype, greedy_plain)) for row, texts in rows]
        return [(row, difference) for row, difference in compared if difference is not None]

    def _cycle(self, id: str, runner: Ours) -> Cycle:
        group, dtype = self.groups[0], runner.variant.dtype
        decoder = runner.decoder(group, functools.partial(self._plain_tokens, dtype, group))
        plain = self.plain[dtype].decoder(group, list)
        times = measure.cycle_times(decoder, plain, group.tokens, self.config.params)
        shape = Shape.of(decoder.plan.proposer.tree)
        return Cycle(id, runner.variant, times, measure.memory(decoder, len(group.tokens)), shape)

    def _facts(self, id: str) -> dict[str, Any]:
        config = self.config
        return {
            "command": shlex.join(sys.orig_argv),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings_id": id,
            "settings": self.settings,
            "commit": self.machine.commit,
            "prompts": [prompt.id for group in self.groups for prompt in group.prompts],
            "proposers": [str(proposer) for proposer in config.proposers],
            "rules": [str(rule) for rule in config.rules],
            "dtypes": config.dtypes,
            "batch": config.batch,
            "repeats": config.repeats,
        }

    def heading(self) -> str:
        """What the figures are of, for reports."""
        config, params = self.config, self.config.params
        law = "greedy" if params.temperature == 0.0 else f"temperature {params.temperature:g}"
        stops = "end-of-text ignored" if params.ignore_eos else "stopped at end-of-text"
        peers = dict.fromkeys(runner.variant.program for runner in self.runners if not runner.variant.is_ours)
        return (
            f"{config.target}, {sum(len(group.tokens) for group in self.groups)} prompts, {config.batch} per call, "
            f"at most {params.max_new_tokens} new tokens, {law}, {stops}; {config.repeats} repeats in turns. "
            f"{', '.join([str(self.machine), *peers])}."
        )


def _groups(target: Target, chosen: Sequence[prompts.Prompt], config: Config) -> list[Group]:
    encoded = prompts.encode(target, chosen, config.max_len - config.params.max_new_tokens)
    size = config.batch
    if size > len(chosen):
        raise ValueError(f"--batch {size} is more than the {len(chosen)} prompts there are")
    if rest := len(chosen) % size:
        cli.note(f"the last {rest} prompts do not fill a batch of {size} and are left out")
    starts = range(0, len(chosen) - size + 1, size)
    return [Group(tuple(chosen[i : i + size]), tuple(encoded[i : i + size])) for i in starts]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=list).encode()).hexdigest()[:16]


def define_flags() -> None:
    cli.define_target(max_len=1024)
    cli.define_prompts(max_new_tokens=96)
    flags.DEFINE_multi_string("proposer", ["prompt_lookup"], f"may be given several times. {registry.describe()}")
    flags.DEFINE_multi_string("rule", ["match"], "which rule commits; may be given several times")
    flags.DEFINE_multi_enum("dtype", ["float32"], ["float32", "bfloat16"], "may be given twice")
    flags.DEFINE_integer("batch", 1, "prompts per call")
    flags.DEFINE_integer("repeats", 3, "how often every call is timed")
    flags.DEFINE_float("temperature", 0.0, "0 is greedy")
    flags.DEFINE_integer("seed", 0, "of every prompt")
    flags.DEFINE_bool("ignore_eos", False, "do not stop at the model's end-of-text tokens, on both sides")
    flags.DEFINE_enum("peer", None, ["hf"], "compare with transformers; needs the extra [peer]")
    flags.DEFINE_integer("peer_lookup_tokens", 10, "prompt_lookup_num_tokens of transformers")
    flags.DEFINE_string("out", "results/bench", "folder of the records, tables and pictures")


def config_from_flags() -> Config:
    values = flags.FLAGS
    return Config(
        target=values.target,
        proposers=tuple(map(registry.parse_proposer, values.proposer)),
        rules=tuple(map(registry.parse_rule, values.rule)),
        dtypes=tuple(values.dtype),
        batch=values.batch,
        repeats=values.repeats,
        max_len=values.max_len,
        params=sj.SamplingParams(
            temperature=values.temperature,
            seed=values.seed,
            max_new_tokens=values.max_new_tokens,
            ignore_eos=values.ignore_eos,
        ),
        peer=values.peer is not None,
        peer_lookup_tokens=values.peer_lookup_tokens,
    )


def run(bench: Bench) -> tuple[list[report.Row], int]:
    """Measures, prints and saves.

    Returns:
      The results (none if it was stopped), and an exit code: 1 if an output differs from plain decoding other than at
      a near tie, 130 if it was stopped.
    """
    if warning := machine.busy():
        cli.note(f"warning: {warning}")
    try:
        rows = bench.run()
    except KeyboardInterrupt:
        cli.note(f"\nstopped; what was measured is in {bench.ledger.path}: the same command goes on from there")
        return [], 130
    text = report.markdown(rows, bench.heading())
    print(text)
    (bench.out / "bench.md").write_text(text + "\n", encoding="utf-8")
    plots.overview(rows).savefig(bench.out / "bench.png")
    cli.note(f"written to {bench.out}: bench.jsonl, bench.md, bench.png")
    return rows, int(any(row.differences > row.ties for row in rows))


def main() -> int:
    values = flags.FLAGS
    chosen = prompts.read(values.prompts, values.suite, values.limit, values.per_category)
    _, code = run(Bench(config_from_flags(), chosen, Path(values.out)))
    return code


if __name__ == "__main__":
    define_flags()
    cli.run(main)
