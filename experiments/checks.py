"""Measures on this machine what decoding should reach at least, and prints it beside what is asked.

    python -m experiments.checks --prompts FILE.jsonl --limit 20
    python -m experiments.checks --prompts FILE.jsonl --limit 20 --peer hf

Plain and prompt-lookup decoding in float32 and bfloat16, greedy, one prompt per call, in turns; single steps of the
model; the bookkeeping of a tree; and compilations. The bounds belong to SmolLM2-135M on two CPU cores that do nothing
else, and to prompts like GSM8K's, of which lookup can copy: 20 of them take about ten minutes, and about twenty with
`--peer hf` (extra [peer]).
The records, tables and picture of `experiments.bench` are written as well.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import flags

import models
import spec_jax as sj
from experiments import bench, cli, measure, prompts, registry, report
from experiments.bench import Bench, Config
from experiments.measure import Spread
from experiments.records import Variant
from experiments.report import Row
from spec_jax.target import Target

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Check:
    """One figure: what it is, what was measured, and the bound that is asked for."""

    what: str
    measured: Spread
    asked: str
    met: bool

    @classmethod
    def at_least(cls, what: str, measured: Spread, bound: float) -> "Check":
        return cls(what, measured, f"≥ {bound:g}", measured.median >= bound)

    @classmethod
    def at_most(cls, what: str, measured: Spread, bound: float) -> "Check":
        return cls(what, measured, f"≤ {bound:g}", measured.median <= bound)


def of_speed(rows: Sequence[Row]) -> list[Check]:
    """Checks on whole calls, prefill included."""

    def find(wanted: Callable[[Variant], bool]) -> Row | None:
        return next((row for row in rows if wanted(row.variant)), None)

    ours = {dtype: find(lambda v, d=dtype: v.is_baseline and v.dtype == d) for dtype in DTYPES}
    lookup = {dtype: find(lambda v, d=dtype: v.is_ours and not v.is_plain and v.dtype == d) for dtype in DTYPES}
    theirs = find(lambda v: v.is_plain and not v.is_ours)
    checks = []
    if theirs is not None:
        checks.append(Check.at_least("our plain ÷ transformers plain, float32", ours["float32"].ratio_to(theirs), 1.6))
    for dtype, bound in zip(DTYPES, (1.15, 1.5), strict=True):
        checks.append(Check.at_least(f"prompt lookup ÷ our plain, {dtype}", lookup[dtype].speedup, bound))
    if theirs is not None:
        best = max(lookup.values(), key=lambda row: row.tokens_per_s.median)
        name = f"prompt lookup ({best.variant.dtype}) ÷ transformers plain"
        checks.append(Check.at_least(name, best.ratio_to(theirs), 2.5))
    count = float(sum(row.compilations for row in rows))
    checks.append(Check.at_most("compilations in timed calls", Spread.of([count]), 0))
    return checks


def of_steps(target: Target, dtype: str, many_bound: float) -> list[Check]:
    """Checks on single steps of the model."""
    steps = measure.step_times(target)
    milliseconds = ", ".join(f"{1e3 * s.median:.1f}" for s in (steps.cycle, steps.one, steps.many))
    cli.note(f"{dtype}: a plain cycle, a bare step and a step of 8 positions take {milliseconds} ms")
    return [
        Check.at_most(f"cycle with K=0 ÷ bare model step, {dtype}", steps.cycle_to_one, 1.05),
        Check.at_most(f"scoring 8 positions ÷ 1, 200 in the buffer, {dtype}", steps.many_to_one, many_bound),
    ]


def of_trees(target: Target) -> list[Check]:
    """Checks on what a tree costs beside its drafting and scoring."""
    times = measure.bookkeeping_times(target)
    milliseconds = ", ".join(f"{1e3 * s.median:.1f}" for s in (times.bookkeeping, times.step))
    cli.note(f"8 rows: the bookkeeping of a tree of 32 nodes and a plain step take {milliseconds} ms")
    return [Check.at_most("bookkeeping of a tree ÷ plain step, 32 nodes, 8 rows", times.ratio, 0.05)]


def table(checks: Sequence[Check]) -> str:
    lines = [(c.what, report.spread(c.measured), c.asked, "met" if c.met else "MISSED") for c in checks]
    return report.table(("figure", "measured: median (range)", "asked", ""), lines)


def define_flags() -> None:
    cli.define_target(max_len=1024)
    cli.define_prompts(max_new_tokens=96)
    flags.DEFINE_string("proposer", "prompt_lookup", f"what is compared with plain decoding. {registry.describe()}")
    flags.DEFINE_integer("repeats", 3, "how often every call is timed", lower_bound=1)
    flags.DEFINE_enum("peer", None, ["hf"], "compare with transformers too; needs the extra [peer]")
    flags.DEFINE_string("out", "results/checks", "folder of the records, tables and pictures")


def main() -> int:
    values = flags.FLAGS
    config = Config(
        target=values.target,
        proposers=(registry.parse_proposer(values.proposer),),
        dtypes=DTYPES,
        repeats=values.repeats,
        max_len=values.max_len,
        params=sj.SamplingParams(temperature=0.0, seed=0, max_new_tokens=values.max_new_tokens),
        peer=values.peer is not None,
    )
    load = functools.lru_cache(maxsize=None)(models.load)
    chosen = prompts.read(values.prompts, values.suite, values.limit, values.per_category)
    measured = Bench(config, chosen, Path(values.out), load, resume=False)
    steps = [
        check
        for dtype, bound in zip(DTYPES, (2.0, 1.15), strict=True)
        for check in of_steps(load(values.target, dtype=dtype), dtype, bound)
    ]
    steps += of_trees(load(values.target, dtype="float32"))
    rows, code = bench.run(measured)
    if rows:
        print()
        print(table(of_speed(rows) + steps))
    return code


if __name__ == "__main__":
    define_flags()
    cli.run(main)
