"""What an optimised HLO text tells about memory traffic: copies inside of loops, and transfers to the host."""

import dataclasses
import math
import re
from collections.abc import Iterator

_SPACES = {0: "HBM", 1: "VMEM", 5: "host"}
_HEADER = re.compile(r"^(?:ENTRY )?%?([^\s(]+) \(.*\) -> .*\{$", re.MULTILINE)
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%(\S+) = ", re.MULTILINE)
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\](?:\{[^}]*?\})?")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation|called_computations)="
    r"(?:\{([^}]*)\}|([^\s,{}]+))"
)
_STARTS = ("copy-start", "async-start")
_COPIES = (*_STARTS, "copy", "slice", "dynamic-slice", "transpose", "dynamic-update-slice")
_HOST = ("infeed", "outfeed", "send", "recv")
_HOST_CALL = re.compile(r'custom_call_target="([^"]*(?:allback|MoveToHost|MoveToDevice|HostExecute)[^"]*)"')


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of a result; `space` is the memory it is in: 0 HBM, 1 VMEM, 5 of the host."""

    dtype: str
    sizes: tuple[int, ...]
    space: int

    @property
    def bytes(self) -> int:
        bits = re.search(r"\d+", self.dtype)  # bf16, s4, f8e4m3fn; a token has none.
        return math.prod(self.sizes) * (8 if self.dtype == "pred" else int(bits[0]) if bits else 0) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction.

    Attributes:
      arrays: of its result.
      operands, called: names of the instructions that it reads, and of the computations that it runs.
      text: from the opcode on.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    text: str


Computations = dict[str, dict[str, Instruction]]
"""Instructions by name, by the computation they are in; the last one of a computation is its result."""


@dataclasses.dataclass(frozen=True)
class Copy:
    """A copy inside of a loop.

    Attributes:
      opcode: what copies; `dynamic-update-slice` is part of an array put into its place in another.
      dtype, sizes, bytes: of what is copied in a round.
      into: memory that it is copied to.
    """

    name: str
    opcode: str
    dtype: str
    sizes: tuple[int, ...]
    bytes: int
    into: str


def copies_in_loops(text: str, least_bytes: int) -> tuple[Copy, ...]:
    """Copies of at least that many bytes in the bodies of loops, and in all that these run.

    Beside copies proper that is whatever only moves: slices and transpositions that are materialised, and slices put
    back. A buffer that fits may be staged: copied to VMEM and back in each round. That is two copies.
    """
    computations, entry = parse(text)
    found = []
    for computation, instruction, depth in _run(computations, entry, into_fusions=False):
        for opcode, array, space in _moved(instruction, computations[computation], computations):
            if depth > 0 and array.bytes >= least_bytes:
                into = _SPACES.get(space, f"S({space})")
                found.append(Copy(instruction.name, opcode, array.dtype, array.sizes, array.bytes, into))
    return tuple(found)


def _moved(
    instruction: Instruction, around: dict[str, Instruction], computations: Computations
) -> Iterator[tuple[str, Array, int]]:
    """Opcode, array and target memory of what an instruction copies; a fusion copies if its results are copies."""
    opcode = instruction.opcode
    if opcode == "fusion":
        inside = computations[instruction.called[0]]
        results = [list(inside.values())[-1]]
        if results[0].opcode == "tuple":
            results = [inside[name] for name in results[0].operands]
        # A reduction of several arrays at once is one result, and no copy.
        for result, target in zip(results, instruction.arrays, strict=False):
            while result.opcode in ("bitcast", "reshape"):
                result = inside[result.operands[0]]
            for inner_opcode, array, _ in _moved(result, inside, computations):
                yield inner_opcode, array, target.space
    elif opcode == "dynamic-update-slice":
        yield opcode, around[instruction.operands[1]].arrays[0], instruction.arrays[0].space
    elif opcode in _COPIES and instruction.arrays:
        # The result of an asynchronous start is target, source and context, or operands, target and context.
        target = instruction.arrays[1 if opcode == "async-start" and len(instruction.arrays) > 2 else 0]
        yield opcode, target, target.space


def host_transfers(text: str) -> tuple[str, ...]:
    """Instructions that move data between device and host, or call the host: opcode or target, and name."""
    computations, entry = parse(text)
    found = {}
    for _, instruction, _ in _run(computations, entry, into_fusions=True):
        call = _HOST_CALL.search(instruction.text)
        copies = instruction.opcode in _COPIES and any(array.space == 5 for array in instruction.arrays)
        if instruction.opcode in _HOST or copies or call:
            found[f"{call[1] if call else instruction.opcode} {instruction.name}"] = None
    return tuple(found)


def parse(text: str) -> tuple[Computations, str]:
    """All computations of a module, and the name of the one it begins with.

    Raises:
      ValueError: this is no HLO text.
    """
    heads = list(_HEADER.finditer(text))
    entries = [head[1] for head in heads if head[0].startswith("ENTRY")]
    if len(entries) != 1:
        raise ValueError(f"this is no HLO text: it has {len(entries)} entries")
    ends = [head.start() for head in heads[1:]] + [len(text)]
    computations = {}
    for head, end in zip(heads, ends, strict=True):
        instructions = map(_instruction, _lines(text[head.end() : end]))
        computations[head[1]] = {instruction.name: instruction for instruction in instructions}
    return computations, entries[0]


def _run(computations: Computations, entry: str, into_fusions: bool) -> Iterator[tuple[str, Instruction, int]]:
    """Computation, instruction and number of loops around it, for all that run; the number is 0, or 1 for more."""
    waiting, seen = [(entry, 0)], set()
    while waiting:
        name, depth = waiting.pop()
        if (name, depth) in seen:
            continue
        seen.add((name, depth))
        for instruction in computations[name].values():
            yield name, instruction, depth
            if into_fusions or instruction.opcode != "fusion":
                inner = 1 if instruction.opcode == "while" else depth
                waiting += [(called, inner) for called in instruction.called if called in computations]


def _lines(body: str) -> Iterator[tuple[str, str]]:
    heads = list(_INSTRUCTION.finditer(body))
    ends = [head.start() for head in heads[1:]] + [len(body)]
    for head, end in zip(heads, ends, strict=True):
        yield head[1], body[head.end() : end]


def _instruction(line: tuple[str, str]) -> Instruction:
    name, text = line
    shape, rest = _split_shape(text)
    opcode, _, rest = rest.partition("(")
    called = [part for match in _CALLED.finditer(rest) for part in (match[1] or match[2]).split(",")]
    return Instruction(
        name=name,
        opcode=opcode.strip(),
        arrays=tuple(map(_array, _ARRAY.finditer(shape))),
        operands=tuple(re.findall(r"%([^\s,()]+)", rest.partition(")")[0])),
        called=tuple(part.strip().removeprefix("%") for part in called),
        text=f"{opcode}({rest}",
    )


def _split_shape(text: str) -> tuple[str, str]:
    """The result's type, which is a tuple in parentheses or one word, and what follows."""
    end, level = 0, 0
    while text[end] != " " or level:
        level += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    return text[:end], text[end:].lstrip()


def _array(match: re.Match) -> Array:
    space = re.search(r"S\((\d+)\)", match[0])
    sizes = tuple(int(size) for size in match[2].split(",") if size)
    return Array(match[1], sizes, int(space[1]) if space else 0)
