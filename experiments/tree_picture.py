"""The picture of one cycle: nodes as boxes, the root on the left, what was accepted in green."""

import textwrap

from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch

from experiments.explain import Cycle, Fate, Node, share

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y = 1.65, 0.62, 0.5, 0.16  # Inches: of a box, and between boxes.
_EXTRA = "extra"

# Edge and face, of a palette for all kinds of eyes.
_COLORS = {
    Fate.ROOT: ("#333333", "#e6e6e6"),
    Fate.ACCEPTED: ("#009e73", "#d5f0e6"),
    _EXTRA: ("#0072b2", "#d6e8f5"),
    Fate.REJECTED: ("#d55e00", "#fbe6d8"),
    Fate.CUT: ("#e69f00", "#fdf1d6"),
    Fate.PASSED_OVER: ("#999999", "#f7f7f7"),
    Fate.INVALID: ("#cccccc", "#ffffff"),
}
_NAMES = {_EXTRA: "the target's own token", Fate.CUT: "cut off", Fate.INVALID: "not drafted"}


def draw(cycle: Cycle, heading: str, summary: str) -> Figure:
    """The tree from left to right, a column a depth; the figure grows with the tree."""
    places, rows = _layout(cycle)
    columns = 1 + max(x for x, _ in places.values())
    step_x, step_y = _WIDTH + _GAP_X, _HEIGHT + _GAP_Y
    tree_width = columns * step_x - _GAP_X + 0.3
    width = max(tree_width, 7.5)
    characters = int(width * 13.5)
    above = textwrap.fill(_printable(heading), characters)
    behind = textwrap.shorten(_printable(cycle.behind), int(1.2 * characters), placeholder="…'")
    below = textwrap.fill(_printable(summary), int(1.2 * characters))
    top = 0.45 + 0.18 * (above.count("\n") + 1)
    bottom = 0.55 + 0.16 * (below.count("\n") + 1)
    height = rows * step_y + top + bottom
    figure = Figure(figsize=(width, height), dpi=150)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))  # Inches, from the upper left corner.
    axes.axis("off")
    left = (width - tree_width) / 2 + 0.15

    def corner(key) -> tuple[float, float]:
        x, y = places[key]
        return left + x * step_x, top + y * step_y + _GAP_Y / 2

    for key, parent, kind in _edges(cycle):
        _edge(axes, corner(parent), corner(key), kind)
    for node in cycle.nodes:
        _box(axes, corner(node.number), node.fate, node.token.text, _small_print(node), _reason(node))
    if cycle.extra is not None:
        p = "" if cycle.extra.target_prob is None else f"target {share(cycle.extra.target_prob)}"
        _box(axes, corner(_EXTRA), _EXTRA, cycle.extra.token.text, p, f"{cycle.extra.kind} token")
    axes.text(0.15, 0.13, above, fontsize=8.5, va="top", weight="bold", parse_math=False)
    axes.text(0.15, top - 0.06, behind, fontsize=7.5, va="bottom", parse_math=False)
    axes.text(0.15, height - 0.1, below, fontsize=7.5, va="bottom", parse_math=False)
    present = {node.fate for node in cycle.nodes} - {Fate.ROOT} | ({_EXTRA} if cycle.extra else set())
    handles = [
        Line2D([], [], marker="s", linestyle="", markersize=8, color=edge, markerfacecolor=face, label=_NAMES.get(k, k))
        for k, (edge, face) in _COLORS.items()
        if k in present
    ]
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.1 / width, (bottom - 0.4) / height), ncols=len(handles),
        fontsize=7, frameon=False, borderaxespad=0.0, handletextpad=0.1, columnspacing=1.2,
    )  # fmt: skip
    return figure


def _edges(cycle: Cycle) -> list[tuple]:
    """(node, parent, kind), what was accepted last, so that it lies on top."""
    edges = [(node.number, node.parent, node.fate) for node in cycle.nodes[1:]]
    if cycle.extra is not None:
        edges.append((_EXTRA, cycle.extra.parent, _EXTRA))
    return sorted(edges, key=lambda edge: edge[2] in (Fate.ACCEPTED, _EXTRA))


def _layout(cycle: Cycle) -> tuple[dict, int]:
    """Column and row of every box; a leaf has a row of its own, a parent lies amid its children."""
    below: dict = {node.number: [child.number for child in cycle.children(node.number)] for node in cycle.nodes}
    depth: dict = {node.number: node.depth for node in cycle.nodes}
    if cycle.extra is not None:
        below[cycle.extra.parent].append(_EXTRA)
        below[_EXTRA], depth[_EXTRA] = [], depth[cycle.extra.parent] + 1
    places: dict = {}
    rows = 0

    def place(key) -> float:
        nonlocal rows
        if below[key]:
            ys = [place(child) for child in below[key]]
            y = (ys[0] + ys[-1]) / 2
        else:
            y, rows = float(rows), rows + 1
        places[key] = depth[key], y
        return y

    place(0)
    return places, rows


def _edge(axes: Axes, start: tuple[float, float], end: tuple[float, float], kind) -> None:
    (x0, y0), (x1, y1), bend = start, end, _GAP_X / 2
    x0, y0, y1 = x0 + _WIDTH, y0 + _HEIGHT / 2, y1 + _HEIGHT / 2
    taken = kind in (Fate.ACCEPTED, _EXTRA)
    axes.plot(
        [x0, x0 + bend, x0 + bend, x1], [y0, y0, y1, y1], color=_COLORS[kind][0] if taken else "#bbbbbb",
        linewidth=2.4 if taken else 1.0, linestyle=":" if kind == Fate.INVALID else "-", solid_joinstyle="round",
        zorder=2 if taken else 1,
    )  # fmt: skip


def _box(axes: Axes, corner: tuple[float, float], kind, text: str, numbers: str, reason: str) -> None:
    (x, y), (edge, face) = corner, _COLORS[kind]
    strong = kind in (Fate.ACCEPTED, Fate.ROOT, _EXTRA)
    axes.add_patch(
        FancyBboxPatch(
            (x, y), _WIDTH, _HEIGHT, boxstyle="round,pad=0,rounding_size=0.07", facecolor=face, edgecolor=edge,
            linewidth=1.8 if strong else 1.0, linestyle="--" if kind == Fate.INVALID else "-", zorder=3,
        )
    )  # fmt: skip
    middle = x + _WIDTH / 2
    color = "#888888" if kind == Fate.INVALID else "#000000"
    style = {"ha": "center", "va": "center", "zorder": 4, "parse_math": False}
    text = _printable(text)
    text = text if len(text) <= 20 else text[:18] + "…" + text[-1]
    axes.text(middle, y + (0.15 if numbers else 0.2), text, fontsize=8.5, family="monospace", color=color, **style)
    axes.text(middle, y + 0.33, numbers, fontsize=6, color="#444444", **style)
    reason_y, reason_color = y + (0.49 if numbers else 0.42), edge if strong else "#444444"
    size = 6 * min(1.0, 33 / max(len(reason), 1))  # A long reason is set smaller: it must stay in its box.
    axes.text(middle, reason_y, reason, fontsize=size, style="italic", color=reason_color, **style)


def _small_print(node: Node) -> str:
    values = {"draft": node.draft_prob, "target": node.target_prob, "coin": node.coin}
    return "  ".join(f"{name} {share(value)}" for name, value in values.items() if value is not None)


def _reason(node: Node) -> str:
    reason = _printable(node.reason)
    return reason if len(reason) <= 44 else reason[:43] + "…"


def _printable(text: str) -> str:
    """The text with what the font cannot draw as escapes."""
    known = font_manager.get_font(font_manager.findfont("monospace")).get_charmap()
    return "".join(c if ord(c) in known else c.encode("unicode_escape").decode() for c in text)
