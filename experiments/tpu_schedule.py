"""Reads the schedule that the TPU compiler writes for one kernel: loops, bundles, spills and the use of units.

A *bundle* is one issue slot of a TensorCore. *Estimated issue cycles* are the sum over all bundles of how often each is
issued. That is no measurement: waiting for memory and for other cores is not in it.

The dump is text for people and has no promised form. What is relied on, as seen in libtpu 0.0.42:

- `*-final_bundles.txt`: a line for each bundle, numbered from 0, with `LB` at the head of a loop. `sbr.rel` branches to
  the bundle whose comment starts the region that it names, after its delay slots. A counter compared with a constant is
  marked `loop exit test`.
- `*-final_hlo-static-per-bundle-utilization.txt`: slots by unit, then the used ones, a row for each bundle.
  `VLOAD` and `VSTORE` include the fills and spills of registers beside them.
- `*-pre-finalize-registers-and-allocations.txt`: what lies in VMEM.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

_FILL, _SPILL = "VLOAD:FILL", "VSTORE:SPILL"
_SMALL = 64  # Branches over fewer bundles, loops apart, are not regions: what they skip counts as issued.

_FILE = re.compile(
    r"\d+-(.+)-\d+-(final_bundles|final_hlo-static-per-bundle-utilization|pre-finalize-registers-and-allocations)\.txt"
)
_BUNDLE = re.compile(r"^ *(?:0x)?([0-9a-f]+) +(LB|PB|PF|CT)?: ", re.MULTILINE)
_BRANCH = re.compile(r"sbr\.rel(?: \(!?%(\w+)\))? target = \$region(\d+)")
_START = re.compile(r"Start(?:/End empty)? region (\d+)")
_EMPTY = re.compile(r"[ >]*\{ *\}")


class ScheduleError(ValueError):
    """A schedule has another form than expected, or says too little to estimate from."""


@dataclasses.dataclass(frozen=True)
class Region:
    """A part of a kernel that is issued as often in all its bundles.

    Attributes:
      name: "" for the kernel itself; `2.1` is the first loop inside of the second loop, `2b1` the first large part of
        the second loop that a branch may skip (branches within branches count on).
      parent: name of the region around it; None for the kernel.
      bundles: without those of the regions inside.
      used: slots used in these bundles, by unit.
      trips: rounds of a loop for each time that it is entered, where that is a constant.
    """

    name: str
    parent: str | None
    bundles: int
    used: Mapping[str, int]
    trips: int | None = None

    @property
    def loop(self) -> str:
        """Name of the innermost loop it belongs to, itself if it is one."""
        return self.name.partition("b")[0]

    @property
    def is_loop(self) -> bool:
        return self.name == self.loop != ""

    @property
    def spills(self) -> int:
        """Vector registers filled from and spilled to VMEM."""
        return self.used[_FILL] + self.used[_SPILL]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The schedule of a kernel.

    Attributes:
      kernel: its name in the dump.
      slots: that each unit has in a bundle.
      regions: outer before inner ones, in the order of the program; the first is the kernel itself.
      vmem_bytes: allocated in VMEM, operands apart that the surrounding program keeps there.
    """

    kernel: str
    slots: Mapping[str, int]
    regions: tuple[Region, ...]
    vmem_bytes: int

    @property
    def bundles(self) -> int:
        return sum(region.bundles for region in self.regions)

    @property
    def spills(self) -> int:
        return sum(region.spills for region in self.regions)

    def executions(self, given: Mapping[str, float]) -> dict[str, float]:
        """How often each region is issued in a call of the kernel.

        Args:
          given: the number, for regions where it depends on data. A loop that is not among them must have constant
            trips; the part that a branch may skip is issued as often as what is around it. Names of parts that are no
            region here are no error: on another chip they may be small, or predicated.

        Raises:
          ScheduleError: a loop's number is not known, or there is no loop of a given name.
        """
        if unknown := {name for name in given if "b" not in name} - {region.name for region in self.regions}:
            raise ScheduleError(f"{self.kernel} has no loop {', '.join(sorted(unknown))}; it has {self.describe()}")
        times = {None: 1.0}
        for region in self.regions:
            if region.is_loop and region.trips is None and region.name not in given:
                raise ScheduleError(
                    f"rounds of loop {region.name} of {self.kernel} are data and must be given; it has "
                    f"{self.describe()}"
                )
            trips = region.trips if region.is_loop else 1
            times[region.name] = given[region.name] if region.name in given else times[region.parent] * trips
        del times[None]
        return times

    def cycles(self, given: Mapping[str, float]) -> float:
        """Estimated issue cycles of a call; arguments and errors as of `executions`."""
        times = self.executions(given)
        return sum(region.bundles * times[region.name] for region in self.regions)

    def use(self, regions: Iterable[Region]) -> dict[str, float]:
        """Share of each unit's slots that regions use."""
        regions = list(regions)
        bundles = max(sum(region.bundles for region in regions), 1)
        return {
            unit: sum(region.used[unit] for region in regions) / (slots * bundles) for unit, slots in self.slots.items()
        }

    def describe(self) -> str:
        """All regions in a line, for errors."""
        parts = (
            f"{region.name or 'the kernel'} ({region.bundles} bundles"
            + (f", {region.trips} rounds)" if region.trips is not None else ")")
            for region in self.regions
        )
        return ", ".join(parts)


def names(folder: Path) -> tuple[str, ...]:
    """The kernels and fusions whose schedules a dump has, in the order of compilation."""
    found = (_FILE.fullmatch(path.name) for path in sorted(folder.iterdir()))
    of_bundles = (match[1] for match in found if match and match[2] == "final_bundles")
    return tuple(dict.fromkeys(name for name in of_bundles if not name.startswith(("TLP", "<"))))


def read(folder: Path, kernel: str, delay_slots: int = 4) -> Schedule:
    """The schedule of the kernel of that name, or else of the one whose name begins so; see `parse`.

    Raises:
      ScheduleError: the dump has none, or several; or they cannot be read.
    """
    found = names(folder)
    matching = [kernel] if kernel in found else [name for name in found if name.startswith(kernel)]
    if len(matching) != 1:
        raise ScheduleError(
            f"expected the schedule of one kernel {kernel!r}, found {', '.join(matching) or 'none'} among "
            f"{', '.join(found) or 'none at all'}"
        )
    paths = ((path, _FILE.fullmatch(path.name)) for path in folder.iterdir())
    files = {match[2]: path.read_text("utf-8") for path, match in paths if match and match[1] == matching[0]}
    return parse(
        matching[0],
        files["final_bundles"],
        files["final_hlo-static-per-bundle-utilization"],
        files["pre-finalize-registers-and-allocations"],
        delay_slots,
    )


def parse(kernel: str, bundles: str, utilization: str, allocations: str, delay_slots: int = 4) -> Schedule:
    """The schedule in the three files of a kernel.

    Args:
      delay_slots: bundles behind a branch that are issued before it is taken. Where there are more than 4 (7x has 6),
        an empty one stands for all that remain, so that counts are a lower bound.

    Raises:
      ScheduleError: they have another form than expected.
    """
    parts = _bundles(bundles)
    slots, rows = _utilization(utilization)
    if len(rows) != len(parts):
        raise ScheduleError(f"{kernel}: {len(parts)} bundles, but the use of {len(rows)}")
    starts = {int(region): at for at, (_, text) in reversed(list(enumerate(parts))) for region in _START.findall(text)}

    def behind(branch: int) -> int:  # The first bundle behind the delay slots.
        for at in range(branch + 1, min(branch + delay_slots, len(parts) - 1) + 1):
            if delay_slots > 4 and _EMPTY.match(parts[at][1]):
                return at + 1
        return min(branch + delay_slots + 1, len(parts))

    loops, skips = {}, []
    for at, (_, text) in enumerate(parts):
        for predicate, region in _BRANCH.findall(text):
            target = starts.get(int(region), len(parts) - 1)  # The last bundle says something else in its comment.
            if target <= at:
                loops[target] = (behind(at), predicate)
            elif target > behind(at):
                skips.append((behind(at), target))
    heads = {at for at, (label, _) in enumerate(parts) if label == "LB"}
    if heads != loops.keys():
        raise ScheduleError(f"{kernel}: loops at bundles {sorted(heads)}, but branches back to {sorted(loops)}")
    in_loops = [0] * len(parts)
    for start, (end, _) in loops.items():
        in_loops[start:end] = [depth + 1 for depth in in_loops[start:end]]

    def is_large(start: int, end: int) -> bool:
        return in_loops[start:end].count(in_loops[start - 1]) >= _SMALL

    spans = [(start, end, True) for start, (end, _) in loops.items()]
    spans += [(*skip, False) for skip in skips if is_large(*skip)]
    spans.sort(key=lambda span: (span[0], -span[1], span[2]))

    regions, owner = [("", None, 0, len(parts))], [0] * len(parts)
    counts: dict[str, int] = {}
    open_regions = [0]
    for start, end, is_loop in spans:
        while start >= regions[open_regions[-1]][3]:
            open_regions.pop()
        parent, _, _, parent_end = regions[open_regions[-1]]
        if end > parent_end:
            if is_loop:
                raise ScheduleError(f"{kernel}: the loop at bundle {start} ends outside of region {parent!r}")
            continue  # A branch out of a loop or into another branch: what it skips counts as issued.
        around = parent.partition("b")[0]
        mark = (around and around + ".") if is_loop else around + "b"
        counts[mark] = counts.get(mark, 0) + 1
        open_regions.append(len(regions))
        owner[start:end] = [len(regions)] * (end - start)
        regions.append((f"{mark}{counts[mark]}", parent, start, end))

    def region(number: int, name: str, parent: str | None, start: int, end: int) -> Region:
        own = [row for row, of in zip(rows, owner, strict=True) if of == number]
        is_loop = start in loops and end == loops[start][0]
        return Region(
            name=name,
            parent=parent,
            bundles=len(own),
            used={unit: sum(column) for unit, column in zip(slots, zip(*own, strict=True), strict=True)}
            if own
            else dict.fromkeys(slots, 0),
            trips=_trips(parts, start, end, loops[start][1]) if is_loop else None,
        )

    return Schedule(
        kernel=kernel,
        slots=slots,
        regions=tuple(region(number, *span) for number, span in enumerate(regions)),
        vmem_bytes=_vmem_bytes(allocations),
    )


def _bundles(text: str) -> list[tuple[str, str]]:
    """Label and text of each bundle."""
    heads = list(_BUNDLE.finditer(text))
    if [int(head[1], 16) for head in heads] != list(range(len(heads))) or not heads:
        raise ScheduleError("the bundles are not numbered from 0 on")
    ends = [head.start() for head in heads[1:]] + [len(text)]
    return [(head[2] or "", text[head.end() : end]) for head, end in zip(heads, ends, strict=True)]


def _utilization(text: str) -> tuple[dict[str, int], list[list[int]]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("==")]
    units, rows = lines[0].split(", "), [list(map(int, line.split())) for line in lines[1:]]
    if not {_FILL, _SPILL} <= set(units) or any(len(row) != len(units) for row in rows):
        raise ScheduleError(f"the use of units has another form than expected: {lines[0]!r}")
    return dict(zip(units, rows[0], strict=True)), rows[1:]


def _vmem_bytes(text: str) -> int:
    sizes = re.findall(r"(#\w+) \[shape = [^\n]*?space=vmem, size = (0x[0-9a-f]+)", text)
    return sum(int(size, 16) for size in dict(sizes).values())


def _trips(parts: list[tuple[str, str]], start: int, end: int, predicate: str) -> int | None:
    """Rounds of the loop if its counter starts at, grows by, and is compared with constants."""
    body = "".join(text for _, text in parts[start:end])
    guard = r"(?:\([^)]*\), )?"  # An instruction may be predicated.
    test = re.search(rf"%{predicate} = scmp\.ge\.s32\.totalorder {guard}%(\w+), (\d+) /\* loop exit test", body)
    if not test:
        return None
    counter, bound = test[1], int(test[2])
    step = re.search(rf"%{counter} = sadd\.s32 {guard}(?:(\d+), %|%\w+, (\d+))", body)
    same = "|".join([counter, *re.findall(rf"%(\w+) = smov {guard}%{counter}\b", body)])
    phi = re.search(rf"= sphi %(\w+), %(?:{same})\b", parts[start][1])
    before = "".join(text for _, text in parts[:start])
    first = phi and re.search(rf"%{phi[1]} = smov {guard}(\d+)", before)
    if not step or not first:
        return None
    return -(-(bound - int(first[1])) // int(step[1] or step[2]))
