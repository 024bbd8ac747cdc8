"""What a measurement leaves behind: a line of JSON for each timed call, in a file that survives being cut off."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from experiments.measure import CycleTimes, Memory, Spread, Timed
from spec_jax import Stats
from spec_jax.tree import DynamicTree, Tree

OURS = "spec_jax"


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is compared: a program with its proposer, rule and dtype, each as its whole specification."""

    program: str
    proposer: str
    rule: str
    dtype: str
    label: str = dataclasses.field(compare=False)

    @property
    def is_ours(self) -> bool:
        return self.program == OURS

    @property
    def is_plain(self) -> bool:
        return self.proposer == "plain"

    @property
    def is_baseline(self) -> bool:
        """Our own plain decoding: what every ratio of the same dtype refers to."""
        return self.is_plain and self.is_ours

    @property
    def key(self) -> str:
        return " ".join((self.program, self.proposer, self.rule, self.dtype))


@dataclasses.dataclass(frozen=True)
class Speed:
    """How long a call took, and for how many tokens (see `measure.Timed`)."""

    tokens: int
    wall_s: float
    decode_tokens: int
    decode_s: float

    @classmethod
    def of(cls, timed: Timed) -> Self:
        return cls(sum(map(len, timed.tokens)), timed.wall_s, timed.decode_tokens, timed.decode_s)


@dataclasses.dataclass(frozen=True)
class Call:
    """One timed call.

    Attributes:
      settings: identity of everything that is the same for all calls of a run, machine and code included.
      prompts, categories, digest: which prompts the call had (a row each), and a hash of their tokens.
      tokens: new tokens of each row.
      baseline: our plain decoding of the same prompts and dtype, timed in the same turn; the call itself if it is that.
      stats: acceptance counts; None where the program does not tell.
      compilations: programs compiled during the call.
      compared: whether the output promises to be that of plain decoding, and was compared with it.
      differences: a text for each row that differs all the same.
      ties: how many of them part at a near tie.
    """

    settings: str
    variant: Variant
    prompts: list[str]
    categories: list[str]
    digest: str
    repeat: int
    tokens: list[list[int]]
    speed: Speed
    baseline: Speed
    stats: Stats | None
    compilations: int
    compared: bool
    differences: list[str]
    ties: int

    @property
    def key(self) -> tuple:
        return call_key(self.settings, self.variant, self.digest, self.repeat)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        stats = row["stats"]
        if stats is not None:
            stats = Stats(**stats | {"accepted_histogram": tuple(stats["accepted_histogram"])})
        return cls(
            **row
            | {
                "variant": Variant(**row["variant"]),
                "speed": Speed(**row["speed"]),
                "baseline": Speed(**row["baseline"]),
                "stats": stats,
            }
        )


def call_key(settings: str, variant: Variant, digest: str, repeat: int) -> tuple:
    return ("call", settings, variant.key, digest, repeat)


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a proposer's tree looks like.

    Attributes:
      nodes: with the root: scored in a cycle in which the proposer does not abstain.
      depth: of the deepest node.
      levels: nodes at depth 1, 2, ...; None where the tree is grown from data.
    """

    nodes: int
    depth: int
    levels: tuple[int, ...] | None

    @classmethod
    def of(cls, tree: Tree | DynamicTree) -> Self:
        levels = np.bincount(tree.depth_N)[1:] if isinstance(tree, Tree) else None
        return cls(tree.size, tree.max_depth, None if levels is None else tuple(levels.tolist()))

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        return cls(row["nodes"], row["depth"], None if row["levels"] is None else tuple(row["levels"]))

    def __str__(self) -> str:
        if self.levels is None:
            return "grown"
        if self.nodes == self.depth + 1:
            return "chain" if self.depth else "root"
        return " ".join(map(str, self.levels))


@dataclasses.dataclass(frozen=True)
class Cycle:
    """Where the time of a variant's cycle goes, and what its buffers take.

    Attributes:
      shape: of the tree that was timed; None in records from before trees, when all proposals were chains.
    """

    settings: str
    variant: Variant
    times: CycleTimes
    memory: Memory
    shape: Shape | None = None

    @property
    def key(self) -> tuple:
        return cycle_key(self.settings, self.variant)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        return cls(
            settings=row["settings"],
            variant=Variant(**row["variant"]),
            times=CycleTimes(**{name: Spread(**spread) for name, spread in row["times"].items()}),
            memory=Memory(**row["memory"]),
            shape=None if row.get("shape") is None else Shape.from_json(row["shape"]),
        )


def cycle_key(settings: str, variant: Variant) -> tuple:
    return ("cycle", settings, variant.key)


_KINDS = {"call": Call, "cycle": Cycle}


class Ledger:
    """The records of a JSON-lines file; what is appended is on disk at once.

    Args:
      path: made with its folder where it does not exist. A last line that is not whole (the program was killed while
        it wrote) is dropped.
      resume: keep what the file holds; a new file otherwise.

    Attributes:
      path: the file.

    Raises:
      ValueError: the file is not one of ours.
    """

    def __init__(self, path: Path, resume: bool = True):
        self.path = path
        self._records: dict[tuple, Call | Cycle] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if not resume:
            path.unlink(missing_ok=True)
        text = path.read_bytes() if path.is_file() else b""
        whole = text[: text.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                row = json.loads(line)
                kind = row.pop("kind")
                if kind in _KINDS:
                    record = _KINDS[kind].from_json(row)
                    self._records[record.key] = record
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(
                    f"line {number} of {path} is not a record of this program; move the file away, or choose another "
                    "--out"
                ) from None
        if len(whole) < len(text):
            with path.open("r+b") as file:
                file.truncate(len(whole))

    def __getitem__(self, key: tuple) -> Call | Cycle:
        return self._records[key]

    def __contains__(self, key: tuple) -> bool:
        return key in self._records

    def append(self, records: Iterable[Call | Cycle]) -> None:
        """Adds records; all or, if the program dies, a beginning of them gets into the file."""
        names = {cls: kind for kind, cls in _KINDS.items()}
        records = list(records)
        self._write([{"kind": names[type(record)]} | dataclasses.asdict(record) for record in records])
        self._records.update({record.key: record for record in records})

    def note(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Adds a line that is for readers and not read back."""
        self._write([{"kind": kind} | dict(facts)])

    def _write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
