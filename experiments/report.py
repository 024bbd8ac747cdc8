"""From records to rows, and from rows to tables."""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from experiments.measure import Spread, paired_ratio
from experiments.records import Call, Cycle, Shape, Speed, Variant
from spec_jax import Stats, metrics

_MIB = 2.0**20


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of one variant, over all prompts.

    Attributes:
      variant: which.
      prompts, tokens: how many prompts and new tokens a repeat had.
      by_repeat, decode_by_repeat: tokens per second of each repeat, all prompts together, by whole calls and by what
        is behind prefill.
      speedup, decode_speedup: the same as ratios to our plain decoding of the same dtype, in the same turns.
      by_category: (tokens per cycle, speedup) of each category; tokens per cycle is None where it is not known.
      stats: acceptance counts of all calls.
      cycle: where the time of a cycle goes; None for the peer.
      loop_cycle_s: seconds of a cycle inside `generate`, prefill left out; None with several prompts per call.
      compilations: programs compiled during timed calls.
      compared: whether the output promises to be that of plain decoding, and was compared with it.
      differences, ties: outputs that differ all the same, and how many of them part at a near tie; `details`
        says where.
    """

    variant: Variant
    prompts: int
    tokens: float
    by_repeat: tuple[float, ...]
    decode_by_repeat: tuple[float, ...]
    speedup: Spread
    decode_speedup: Spread
    by_category: dict[str, tuple[float | None, float]]
    stats: Stats | None
    cycle: Cycle | None
    loop_cycle_s: float | None
    compilations: int
    compared: bool
    differences: int
    ties: int
    details: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.variant.label} {self.variant.dtype}"

    @property
    def tokens_per_s(self) -> Spread:
        return Spread.of(self.by_repeat)

    @property
    def decode_tokens_per_s(self) -> Spread:
        return Spread.of(self.decode_by_repeat)

    @property
    def shape(self) -> Shape | None:
        """The tree of the proposer; None where it is not known. A cycle recorded without one was that of a chain."""
        if self.cycle is None:
            return None
        if self.cycle.shape is not None or self.stats is None:
            return self.cycle.shape
        depth = len(self.stats.accepted_histogram) - 1
        return Shape(depth + 1, depth, (1,) * depth)

    def ratio_to(self, other: "Row") -> Spread:
        """Tokens per second of whole calls against another variant, of the same repeats."""
        return paired_ratio(self.by_repeat, other.by_repeat)

    @property
    def predicted(self) -> float | None:
        """S = E[Y] t_1 / (t_propose + t_verify + t_reconcile), with the measured tokens per cycle.

        Where a proposer abstained, the root alone was verified, at the price of a plain cycle; how often tells the
        number of nodes verified, since every other cycle verified the whole tree that was timed.
        """
        if self.cycle is None or self.stats is None:
            return None
        propose, verify, reconcile, plain = (
            getattr(self.cycle.times, name).median for name in ("propose", "verify", "reconcile", "plain")
        )
        full = (self.stats.verified / max(self.stats.cycles, 1) - 1) / max(self.shape.nodes - 1, 1)
        verify = full * verify + (1 - full) * (plain - reconcile)
        return metrics.predicted_speedup(self.stats.tokens_per_cycle, plain, propose, verify, reconcile)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"predicted": self.predicted}


def rows(calls: Sequence[Call], cycles: Sequence[Cycle]) -> list[Row]:
    """A row for each variant, in the order in which they first occur."""
    by_variant: dict[Variant, list[Call]] = {}
    for call in calls:
        by_variant.setdefault(call.variant, []).append(call)
    of_cycles = {cycle.variant: cycle for cycle in cycles}
    return [_row(variant, mine, of_cycles.get(variant)) for variant, mine in by_variant.items()]


def _row(variant: Variant, calls: Sequence[Call], cycle: Cycle | None) -> Row:
    repeats = [[c for c in calls if c.repeat == repeat] for repeat in sorted({c.repeat for c in calls})]
    stats = None if calls[0].stats is None else _total(calls)
    by_category = {}
    for category in dict.fromkeys(map(_category, calls)):
        mine = [c for c in calls if _category(c) == category]
        tokens_per_cycle = None if stats is None else _total(mine).tokens_per_cycle
        by_category[category] = tokens_per_cycle, _rate(mine) / _rate(mine, of=_baseline)
    return Row(
        variant=variant,
        prompts=sum(len(c.prompts) for c in repeats[0]),
        tokens=sum(c.speed.tokens for c in calls) / len(repeats),
        by_repeat=tuple(map(_rate, repeats)),
        decode_by_repeat=tuple(_decode_rate(r) for r in repeats),
        speedup=Spread.of([_rate(r) / _rate(r, of=_baseline) for r in repeats]),
        decode_speedup=Spread.of([_decode_rate(r) / _decode_rate(r, of=_baseline) for r in repeats]),
        by_category=by_category,
        stats=stats,
        cycle=cycle,
        loop_cycle_s=_loop_cycle(calls, stats),
        compilations=sum(c.compilations for c in calls),
        compared=calls[0].compared,
        differences=sum(len(c.differences) for c in calls),
        ties=sum(c.ties for c in calls),
        details=tuple(dict.fromkeys(text for c in calls for text in c.differences)),
    )


_own, _baseline = operator.attrgetter("speed"), operator.attrgetter("baseline")


def _rate(calls: Iterable[Call], of=_own) -> float:
    speeds: list[Speed] = list(map(of, calls))
    return sum(s.tokens for s in speeds) / sum(s.wall_s for s in speeds)


def _decode_rate(calls: Iterable[Call], of=_own) -> float:
    speeds: list[Speed] = list(map(of, calls))
    return sum(s.decode_tokens for s in speeds) / sum(s.decode_s for s in speeds)


def _loop_cycle(calls: Sequence[Call], stats: Stats | None) -> float | None:
    # Rows of a batch end at different times, so their cycles do not count the passes of the loop.
    if stats is None or any(len(c.prompts) > 1 for c in calls):
        return None
    return sum(c.speed.decode_s for c in calls) / max(stats.cycles, 1)


def _total(calls: Iterable[Call]) -> Stats:
    return functools.reduce(operator.add, (c.stats for c in calls))


def _category(call: Call) -> str:
    return ", ".join(dict.fromkeys(call.categories))


# --- Tables -------------------------------------------------------------------------------------------------------


def markdown(rows: Sequence[Row], heading: str) -> str:
    """All tables. A result that is slower than plain decoding is printed like any other."""
    parts = [
        heading,
        "**Speed.** Tokens per second of whole calls, and of decoding with prefill left out: medians of the repeats. "
        "Ratios to our plain decoding of the same dtype, run in the same turns: median (least-greatest). Predicted: "
        "E[Y] t1 / (propose + verify + reconcile), with the times from below, for decoding. Output: whether it is that "
        "of plain decoding. Compiled: programs compiled in timed calls.",
        _speed(rows),
    ]
    known = [row for row in rows if row.stats is not None]
    parts += [
        "**Acceptance**, per cycle and row. Correction: the token after a rejection; bonus: the token after the "
        "last drafted one. Survival: share of cycles in which a drafted token at depth 1, 2, ... was accepted; "
        "conditional: of those in which the one above was.",
        _acceptance(known),
    ]
    if shaped := [row for row in known if row.shape is not None and not row.variant.is_plain]:
        parts += [
            "**By tree.** Tree: how many nodes it has at depth 1, 2, ... (a chain has one each, a grown tree what the "
            "scores say); its nodes, root included, and its depth. Per cycle: nodes scored (the root alone where the "
            "proposer abstained), drafted and accepted, and tokens (tau). ÷ plain: speed of whole calls, by wall time.",
            _by_tree(shaped),
        ]
    timed = [row for row in rows if row.cycle is not None]
    parts += [
        "**Time of a cycle**, ms: stages of a full proposal as programs of their own, their sum, the cycle inside the "
        "loop of `generate`, and a plain cycle (t1). **Memory**, MiB: KV buffers, and scratch of the compiled loop.",
        _time(timed),
    ]
    if len(rows[0].by_category) > 1:
        parts += [
            "**By category**: tokens per cycle, and the ratio to plain decoding of whole calls.",
            _by_category(rows),
        ]
    if details := [f"- {row.name}: {text}" for row in rows for text in row.details]:
        parts += ["**Outputs that differ** from our plain decoding of the same dtype:", "\n".join(details)]
    return "\n\n".join(parts)


def table(header: Sequence[str], lines: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table that also reads well as text; all but the first `left` columns are set to the right."""
    lines = [list(header), *map(list, lines)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def join(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    def padded(line: Sequence[str]) -> str:
        return join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))

    rule = join("-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths))
    return "\n".join([padded(lines[0]), rule, *map(padded, lines[1:])])


def spread(value: Spread, digits: int = 2) -> str:
    """Median (least-greatest)."""
    if value.low == value.high:
        return f"{value.median:.{digits}f}"
    return f"{value.median:.{digits}f} ({value.low:.{digits}f}-{value.high:.{digits}f})"


def _speed(rows: Sequence[Row]) -> str:
    header = (
        "variant", "dtype", "tokens/s", "decode tokens/s", "÷ plain", "decode ÷ plain", "predicted", "output",
        "compiled",
    )  # fmt: skip
    lines = []
    for row in rows:
        compared = not row.variant.is_baseline
        lines.append(
            (
                row.variant.label,
                row.variant.dtype,
                f"{row.tokens_per_s.median:.1f}",
                f"{row.decode_tokens_per_s.median:.1f}",
                spread(row.speedup) if compared else "1",
                spread(row.decode_speedup) if compared else "1",
                f"{row.predicted:.2f}" if compared and row.predicted is not None else "",
                _verdict(row),
                str(row.compilations) if row.stats is not None else "",
            )
        )
    return table(header, lines, left=2)


def _verdict(row: Row) -> str:
    if row.variant.is_baseline:
        return "plain"
    if not row.compared:
        return "sampled"
    if not row.differences:
        return "same"
    return f"{row.ties} ties" if row.ties == row.differences else f"{row.differences - row.ties} DIFFER"


def _acceptance(rows: Sequence[Row]) -> str:
    header = (
        "variant",
        "dtype",
        "tokens/cycle",
        "drafted",
        "verified",
        "accepted",
        "correction",
        "bonus",
        "cycles/token",
        "survival",
        "conditional",
    )
    lines = []
    for row in rows:
        s, cycles = row.stats, max(row.stats.cycles, 1)
        per_cycle = (s.tokens, s.drafted, s.verified, s.accepted, s.corrections, s.bonuses)
        lines.append(
            (
                row.variant.label,
                row.variant.dtype,
                *(f"{count / cycles:.2f}" for count in per_cycle),
                f"{s.cycles / max(s.tokens, 1):.2f}",
                _shares(s.survival),
                _shares(s.conditional_acceptance),
            )
        )
    return table(header, lines, left=2)


def _by_tree(rows: Sequence[Row]) -> str:
    header = (
        "variant", "dtype", "tree", "nodes", "depth", "scored", "drafted", "accepted", "accepted/drafted", "tau",
        "÷ plain",
    )  # fmt: skip
    lines = []
    for row in rows:
        s, cycles = row.stats, max(row.stats.cycles, 1)
        lines.append(
            (
                row.variant.label,
                row.variant.dtype,
                str(row.shape),
                str(row.shape.nodes),
                str(row.shape.depth),
                *(f"{count / cycles:.2f}" for count in (s.verified, s.drafted, s.accepted)),
                f"{s.accepted / s.drafted:.2f}" if s.drafted else "",
                f"{s.tokens_per_cycle:.2f}",
                spread(row.speedup),
            )
        )
    return table(header, lines, left=3)


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}".removeprefix("0") for value in values)


def _time(rows: Sequence[Row]) -> str:
    header = ("variant", "dtype", "propose", "verify", "reconcile", "sum", "in the loop", "t1", "KV", "scratch")
    lines = []
    for row in rows:
        times, memory = row.cycle.times, row.cycle.memory
        stages = (times.propose.median, times.verify.median, times.reconcile.median, times.total)
        lines.append(
            (
                row.variant.label,
                row.variant.dtype,
                *(f"{1e3 * seconds:.1f}" for seconds in stages),
                "" if row.loop_cycle_s is None else f"{1e3 * row.loop_cycle_s:.1f}",
                f"{1e3 * times.plain.median:.1f}",
                f"{memory.kv / _MIB:.1f}",
                f"{memory.workspace / _MIB:.1f}",
            )
        )
    return table(header, lines, left=2)


def _by_category(rows: Sequence[Row]) -> str:
    categories = list(rows[0].by_category)
    lines = [
        (row.variant.label, row.variant.dtype, *(_pair(*row.by_category[category]) for category in categories))
        for row in rows
        if not row.variant.is_baseline
    ]
    return table(("variant", "dtype", *categories), lines, left=2)


def _pair(tokens_per_cycle: float | None, speedup: float) -> str:
    return f"{speedup:.2f}x" if tokens_per_cycle is None else f"{tokens_per_cycle:.2f}, {speedup:.2f}x"
