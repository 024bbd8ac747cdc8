"""Pictures of results, drawn without a display."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.report import Row

_STAGES = {"propose": "#e69f00", "verify": "#0072b2", "reconcile": "#009e73"}  # A palette for all kinds of eyes.
_PLAIN = "#999999"


def _color(row: Row) -> str:
    ours, theirs = ("#bbbbbb", "#e8c9a0") if row.variant.is_plain else ("#0072b2", "#d55e00")
    return ours if row.variant.is_ours else theirs


def overview(rows: Sequence[Row]) -> Figure:
    """Speed, acceptance by position, where a cycle's time goes, and prediction against measurement."""
    figure = Figure(figsize=(13, 5.0 + 0.9 * len(rows)), layout="constrained", dpi=110)
    (speed, acceptance), (time, prediction) = figure.subplots(2, 2)
    _speed(speed, rows)
    _acceptance(acceptance, [row for row in rows if row.stats is not None and not row.variant.is_plain])
    _time(time, [row for row in rows if row.cycle is not None])
    _prediction(prediction, [row for row in rows if row.predicted is not None and not row.variant.is_plain])
    return figure


def _speed(axes: Axes, rows: Sequence[Row]) -> None:
    for y, row in enumerate(rows):
        rate, ratio = row.tokens_per_s, row.speedup.median
        error = [[rate.median - rate.low], [rate.high - rate.median]]
        axes.barh(y, rate.median, xerr=error, color=_color(row), capsize=3, height=0.6)
        text = f"{rate.median:.1f}" if row.variant.is_baseline else f"{rate.median:.1f}  ({ratio:.2f}x plain)"
        axes.annotate(text, (rate.high, y), xytext=(6, 0), textcoords="offset points", va="center")
    _names(axes, rows)
    axes.set_xlim(0, 1.35 * max(row.tokens_per_s.high for row in rows))
    axes.set_xlabel("tokens per second")
    axes.set_title("Speed of whole calls (median and range of repeats)")


def _acceptance(axes: Axes, rows: Sequence[Row]) -> None:
    for row in rows:
        survival = (1.0, *row.stats.survival)
        label = f"{row.name}: {row.stats.tokens_per_cycle:.2f} tokens per cycle"
        axes.plot(range(len(survival)), survival, marker="o", label=label)
    axes.set_xlabel("depth of the drafted token (0: the one that every cycle gives)")
    axes.set_ylabel("share of cycles that accept it")
    axes.set_ylim(0, 1.04)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.set_title("Acceptance by depth")
    if rows:
        axes.legend(fontsize="small")


def _time(axes: Axes, rows: Sequence[Row]) -> None:
    for y, row in enumerate(rows):
        left = 0.0
        for stage, color in _STAGES.items():
            width = 1e3 * getattr(row.cycle.times, stage).median
            axes.barh(y, width, left=left, color=color, label=stage if y == 0 else None, height=0.6)
            left += width
        plain = 1e3 * row.cycle.times.plain.median
        axes.plot([plain] * 2, [y - 0.4, y + 0.4], color="black", label="a plain cycle (t1)" if y == 0 else None)
    _names(axes, rows)
    # The legend has a strip of its own above the bars.
    axes.set_ylim(len(rows) - 0.4, -0.6 - 0.22 * max(len(rows), 3))
    axes.set_xlabel("milliseconds")
    axes.set_title("Where the time of a cycle goes")
    axes.legend(ncols=2, loc="upper left", fontsize="small")


def _prediction(axes: Axes, rows: Sequence[Row]) -> None:
    for row in rows:
        measured = row.decode_speedup
        error = [[measured.median - measured.low], [measured.high - measured.median]]
        axes.errorbar(row.predicted, measured.median, yerr=error, marker="o", capsize=3, linestyle="", label=row.name)
    if rows:
        values = [v for row in rows for v in (row.predicted, row.decode_speedup.low, row.decode_speedup.high)]
        low, high = 0.9 * min(*values, 1.0), 1.1 * max(*values, 1.0)
        axes.plot([low, high], [low, high], color="black", linewidth=0.8, label="measured = predicted")
        axes.axhline(1.0, color=_PLAIN, linestyle="--", linewidth=0.8, label="plain decoding")
        axes.set(xlim=(low, high), ylim=(low, high))
        axes.legend(fontsize="small")
    axes.set_xlabel("predicted from acceptance and the times of a cycle")
    axes.set_ylabel("measured, prefill left out")
    axes.grid(alpha=0.3)
    axes.set_title("Speed as a multiple of plain decoding")


def _names(axes: Axes, rows: Sequence[Row]) -> None:
    axes.set_yticks(range(len(rows)), [row.name.replace(" ", "\n").replace(":", ":\n") for row in rows])
    axes.invert_yaxis()
