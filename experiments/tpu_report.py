"""What the TPU compiler tells about our kernels and JAX's own, on a machine without a TPU.

    pip install -e '.[tpu]'
    python -m experiments.tpu_report --chip v6e --case tree_attention --json out.json
    python -m experiments.tpu_report --chip all --case tree_attention,paged_tree_attention --nodes 16,32,64 \
        --picture out.png
    python -m experiments.tpu_report --chip v6e --case cycle,generate,generate_70b_chain

Compiles each case for each chip and reads the machine schedule that the compiler writes: bundles by loop, estimated
issue cycles, spills, use of units, VMEM; beside them what the kernel must move through HBM and the time that this takes
at the chip's peak; and from the HLO the bytes of donated buffers that are aliased, large copies inside of loops and
transfers to the host. A case is compared with its peers (`--nopeers` leaves them out).

Everything is estimated by a compiler and not measured: waiting for memory is not in the cycles, so the larger of the
two times is the better guess. About ten seconds for a kernel and chip on two cores. A case that does not compile is
reported, and the others go on.
"""

import dataclasses
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import tqdm
from absl import flags
from matplotlib.figure import Figure

from experiments import cli, report, tpu_cases, tpu_compiler, tpu_hlo, tpu_programs, tpu_schedule
from experiments.records import Ledger
from experiments.tpu_cases import Shape
from kernels_pallas.chips import CHIPS, Chip, chip_named

CASES = tpu_cases.CASES | tpu_programs.CASES
_DELAY_SLOTS = {"7x": 6}  # Behind a branch; the others have 4.
_UNITS = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VSTORE", "SALU")
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of a kernel, the loops inside of it apart; "" is what is in none.

    Attributes:
      executions: rounds in a whole call.
      given: whether they were stated by the case rather than read from the schedule.
      bundles: of its body, branches included.
      cycles: estimated issue cycles in a whole call; parts that are skipped count as often as they are known to run.
      spills: vector registers filled and spilled in a round.
      use: share of each unit's slots.
    """

    name: str
    executions: float
    given: bool
    bundles: int
    cycles: float
    spills: int
    use: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What the schedule of a kernel tells; nothing of it is measured.

    Attributes:
      cycles: estimated issue cycles of a call.
      around_cycles: of what the program runs beside the kernel (layouts of arguments and results); None where the
        schedules do not tell.
      hbm_bytes, flops: that the kernel needs at least, on all its cores.
      cores: that share its work; the schedule is that of one.
      clock_hz, hbm_s, mxu_s: of the chip, and what its cores need for these at their peak.
    """

    kernel: str
    bundles: int
    cycles: float
    around_cycles: float | None
    spills: int
    vmem_bytes: int
    loops: tuple[Loop, ...]
    hbm_bytes: int
    flops: float
    cores: int
    clock_hz: float
    hbm_s: float
    mxu_s: float

    @property
    def hot(self) -> Loop:
        """The loop with most cycles."""
        return max(self.loops, key=lambda loop: loop.cycles)

    @property
    def roofline_s(self) -> float:
        return max(self.hbm_s, self.mxu_s)


@dataclasses.dataclass(frozen=True)
class Result:
    """A case compiled for a chip; `error` says why nothing else is known.

    Attributes:
      compile_s: seconds to lower and compile it here.
      argument_bytes, temp_bytes, alias_bytes: see `tpu_compiler.Compiled`.
      kv_bytes: see `tpu_cases.Program`.
      copies: large ones inside of loops.
      host_transfers: see `tpu_hlo.host_transfers`.
      estimate: where the case has a kernel.
    """

    chip: str
    case: str
    nodes: int
    error: str | None = None
    compile_s: float = 0.0
    argument_bytes: int = 0
    temp_bytes: int = 0
    alias_bytes: int = 0
    kv_bytes: int = 0
    copies: tuple[tpu_hlo.Copy, ...] = ()
    host_transfers: tuple[str, ...] = ()
    estimate: Estimate | None = None


def evaluate(chip: Chip, case: str, shape: Shape, dump: Path) -> Result:
    """Compiles a case and reads what the compiler says; a failure is a result too.

    Args:
      dump: the folder that `tpu_compiler.prepare` was given. It is emptied.
    """
    try:
        program = CASES[case](chip, shape)
        device = tpu_compiler.devices(program.topology or chip.topology)[0]
        compiled = tpu_compiler.compile(program.function, program.arguments, device, program.donate)
        copies = tpu_hlo.copies_in_loops(compiled.text, program.least_copy)
        return Result(
            chip=chip.name,
            case=case,
            nodes=shape.nodes,
            compile_s=compiled.seconds,
            argument_bytes=compiled.argument_bytes,
            temp_bytes=compiled.temp_bytes,
            alias_bytes=compiled.alias_bytes,
            kv_bytes=program.kv_bytes,
            copies=tuple(c for c in copies if not program.kv_sizes or set(program.kv_sizes) & set(c.sizes)),
            host_transfers=tpu_hlo.host_transfers(compiled.text),
            estimate=program.kernel and _estimate(chip, program.kernel, dump),
        )
    except Exception as error:  # The compiler raises what it likes; one case must not stop the others.
        message = " ".join(str(error).split())
        return Result(chip.name, case, shape.nodes, error=f"{type(error).__name__}: {message[:400]}")
    finally:
        for path in dump.iterdir():
            path.unlink()


def _estimate(chip: Chip, kernel: tpu_cases.Kernel, dump: Path) -> Estimate:
    slots = _DELAY_SLOTS.get(chip.name, 4)
    schedule = tpu_schedule.read(dump, kernel.name, slots)
    around = (tpu_schedule.read(dump, name, slots) for name in tpu_schedule.names(dump) if name != schedule.kernel)
    try:
        around_cycles = sum(other.cycles({}) for other in around)
    except tpu_schedule.ScheduleError:
        around_cycles = None
    loops = _loops(schedule, kernel)
    return Estimate(
        kernel=schedule.kernel,
        bundles=schedule.bundles,
        cycles=schedule.cycles(kernel.executions),
        around_cycles=around_cycles,
        spills=schedule.spills,
        vmem_bytes=schedule.vmem_bytes,
        loops=loops,
        hbm_bytes=kernel.hbm_bytes,
        flops=kernel.flops,
        cores=kernel.cores,
        clock_hz=chip.clock_hz,
        hbm_s=kernel.hbm_bytes / (kernel.cores * chip.hbm_bytes_per_s),
        mxu_s=kernel.flops / (kernel.cores * chip.flops_per_s),
    )


def _loops(schedule: tpu_schedule.Schedule, kernel: tpu_cases.Kernel) -> tuple[Loop, ...]:
    times = schedule.executions(kernel.executions)
    loops = []
    for name in dict.fromkeys(region.loop for region in schedule.regions):
        own = [region for region in schedule.regions if region.loop == name]
        loops.append(
            Loop(
                name=name,
                executions=times[name],
                given=name in kernel.executions,
                bundles=sum(region.bundles for region in own),
                cycles=sum(region.bundles * times[region.name] for region in own),
                spills=sum(region.spills for region in own),
                use=schedule.use(own),
            )
        )
    return tuple(loops)


# --- Tables -------------------------------------------------------------------------------------------------------

_HEADING = """All figures are **estimated** by the TPU compiler and **not measured**: issue cycles leave out all \
waiting for memory. Cycles become times by a clock that is inferred from the chip's peaks."""


def markdown(results: Sequence[Result], shape: Shape) -> str:
    """All tables."""
    parts = [_HEADING]
    done = [result for result in results if result.error is None]
    if kernels := [result for result in done if result.estimate is not None]:
        parts += [
            f"**Kernels**, {shape}.",
            "Estimated issue cycles of a call, in thousands, and of what surrounds the kernel in its program; spills: "
            "vector registers filled and spilled, in all the kernel and in its hottest loop; all this for one of the "
            "cores that share the work. HBM: bytes that must be moved, the time for them or for the products at the "
            "peak, whichever is longer.",
            _kernel_table(kernels),
        ]
        if ratios := _ratios(kernels):
            parts += ["**Ratios** of estimated issue cycles: the case ÷ its peer.", ratios]
        parts += [
            "**Loops**, inner ones apart. Rounds in a call: read from the schedule, or given by the case (*). Cycles "
            "in thousands; use: share of the slots of a unit, in percent.",
            _loop_table(kernels),
        ]
    if done:
        parts += [
            f"**Programs**, {shape.rows} rows, context {shape.context}.",
            "Memory of a device for arguments, temporaries and aliased outputs, MiB; copies of large arrays inside of "
            "loops (of whole programs those of KV); transfers between host and device; bytes of KV, MiB, all of which "
            "must be aliased.",
            _program_table(done),
        ]
        parts += [
            f"- {result.case} on {result.chip}: in a loop, {copy.opcode} {copy.name} of "
            f"{copy.dtype}[{','.join(map(str, copy.sizes))}] into {copy.into}"
            for result in done
            for copy in result.copies
        ]
    if failed := [f"- {r.case} on {r.chip}, {r.nodes} nodes: {r.error}" for r in results if r.error is not None]:
        parts += ["**Failed**:", "\n".join(failed)]
    return "\n\n".join(parts)


def _kernel_table(results: Iterable[Result]) -> str:
    header = (
        "case", "chip", "nodes", "compile s", "cores", "VMEM MiB", "bundles", "cycles", "around", "spills",
        "in hot loop", "us", "HBM MB", "roofline us",
    )  # fmt: skip
    lines = []
    for result in results:
        e = result.estimate
        lines.append(
            (
                result.case,
                result.chip,
                str(result.nodes),
                f"{result.compile_s:.1f}",
                str(e.cores),
                f"{e.vmem_bytes / _MIB:.1f}",
                str(e.bundles),
                f"{e.cycles / 1e3:.1f}",
                "?" if e.around_cycles is None else f"{e.around_cycles / 1e3:.1f}",
                str(e.spills),
                str(e.hot.spills),
                f"{1e6 * e.cycles / e.clock_hz:.1f}",
                f"{e.hbm_bytes / 1e6:.1f}",
                f"{1e6 * e.roofline_s:.1f}",
            )
        )
    return report.table(header, lines, left=2)


def _ratios(results: Sequence[Result]) -> str:
    cycles = {(r.case, r.chip, r.nodes): r.estimate.cycles for r in results}
    compiled = {r.case for r in results}
    wanted = dict.fromkeys(peer for r in results for peer in tpu_cases.PEERS.get(r.case, ()))
    peers = [peer for peer in wanted if peer in compiled]
    lines = []
    for (case, chip, nodes), own in cycles.items():
        found = [cycles.get((peer, chip, nodes)) if peer in tpu_cases.PEERS.get(case, ()) else None for peer in peers]
        if any(found):
            lines.append((case, chip, str(nodes), *(f"{own / peer:.2f}" if peer else "" for peer in found)))
    return report.table(("case", "chip", "nodes", *(f"÷ {peer}" for peer in peers)), lines, left=2) if lines else ""


def _loop_table(results: Iterable[Result]) -> str:
    lines = []
    for result in results:
        for loop in result.estimate.loops:
            lines.append(
                (
                    result.case,
                    result.chip,
                    loop.name or "-",
                    str(result.nodes),
                    str(loop.bundles),
                    f"{loop.executions:g}{'*' if loop.given else ''}",
                    f"{loop.cycles / 1e3:.1f}",
                    str(loop.spills),
                    *(f"{100 * loop.use[unit]:.0f}" for unit in _UNITS),
                )
            )
    header = ("case", "chip", "loop", "nodes", "bundles", "rounds", "cycles", "spills", *_UNITS)
    return report.table(header, lines, left=3)


def _program_table(results: Iterable[Result]) -> str:
    header = (
        "case", "chip", "nodes", "compile s", "arguments", "temporaries", "aliased", "copies in loops",
        "host transfers", "KV",
    )  # fmt: skip
    lines = [
        (
            result.case,
            result.chip,
            str(result.nodes),
            f"{result.compile_s:.1f}",
            *(f"{b / _MIB:.1f}" for b in (result.argument_bytes, result.temp_bytes, result.alias_bytes)),
            f"{len(result.copies)}"
            + (f" ({sum(c.bytes for c in result.copies) / _MIB:.1f} MiB)" * bool(result.copies)),
            str(len(result.host_transfers)),
            f"{result.kv_bytes / _MIB:.1f}" if result.kv_bytes else "",
        )
        for result in results
    ]
    return report.table(header, lines, left=2)


def picture(results: Sequence[Result], shape: Shape) -> Figure:
    """Estimated time of issue by kernel and chip, beside the time that HBM needs for the bytes."""
    shown = [result for result in results if result.estimate is not None]
    figure = Figure(figsize=(10, 1.8 + 0.4 * len(shown)), layout="constrained", dpi=110)
    axes = figure.subplots()
    for y, result in enumerate(shown):
        e = result.estimate
        issue, floor = 1e6 * e.cycles / e.clock_hz, 1e6 * e.roofline_s
        axes.barh(y, issue, color="#d55e00" if result.case in tpu_cases.JAX_OWN else "#0072b2", height=0.6)
        axes.plot([floor] * 2, [y - 0.4, y + 0.4], color="black", label="HBM or MXU at the peak" if y == 0 else None)
        text = f"{e.cycles / 1e3:.0f}k cycles"
        axes.annotate(text, (max(issue, floor), y), xytext=(6, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(shown)), [f"{r.case}, {r.chip}, {r.nodes} nodes" for r in shown])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel("microseconds of issue, estimated from the compiler's schedule and not measured")
    axes.set_title(str(shape))
    if shown:
        figure.legend(loc="outside lower center")
    return figure


# --- The program --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compile; the flags of the same names say more."""

    chips: tuple[Chip, ...]
    cases: tuple[str, ...]
    nodes: tuple[int, ...]
    json: Path | None
    picture: Path | None


def define_flags() -> None:
    flags.DEFINE_multi_string("chip", ["v6e"], f"chips to compile for, of {', '.join(CHIPS)}; or all")
    flags.DEFINE_multi_string("case", ["tree_attention"], f"what to compile, of {', '.join(CASES)}")
    flags.DEFINE_multi_string("nodes", ["32"], "new positions of a row, or nodes of a program's tree")
    flags.DEFINE_bool("peers", True, "compile what each case is compared with, too")
    flags.DEFINE_string("json", None, "write a line of JSON for each case and chip to this file")
    flags.DEFINE_string("picture", None, "draw estimated times into this file: .png, .pdf or .svg")


def config_from_flags() -> Config:
    """Raises ValueError for values that cannot be used."""
    values = flags.FLAGS
    # Given several times, or with commas, or both.
    chips, cases, nodes = (",".join(given).split(",") for given in (values.chip, values.case, values.nodes))
    if unknown := [case for case in cases if case not in CASES]:
        raise ValueError(f"case {unknown[0]!r} is not known; expected some of {', '.join(CASES)}")
    if bad := [text for text in nodes if not text.isdecimal() or int(text) == 0]:
        raise ValueError(f"--nodes must be positive numbers, got {bad[0]!r}")
    peers = [peer for case in cases for peer in tpu_cases.PEERS.get(case, ()) if values.peers]
    picture_file = cli.output_file("picture")
    if picture_file is not None and picture_file.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--picture {picture_file} must end in .png, .pdf or .svg")
    return Config(
        chips=tuple(CHIPS.values()) if "all" in chips else tuple(map(chip_named, chips)),
        cases=tuple(dict.fromkeys([*cases, *peers])),
        nodes=tuple(map(int, nodes)),
        json=cli.output_file("json"),
        picture=picture_file,
    )


def run(config: Config) -> int:
    """Compiles, prints and writes; 1 where a case failed, 130 where it was interrupted.

    Raises:
      TpuCompilerError: there is no TPU compiler.
    """
    work = [(c, case, n) for c in config.chips for n in config.nodes for case in config.cases]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        # Only kernels have their schedules read; those of a whole program would be many thousands of files.
        tpu_compiler.prepare(Path(folder) if any(case in tpu_cases.CASES for case in config.cases) else None)
        ledger = Ledger(config.json, resume=False) if config.json is not None else None
        interrupted = False
        try:
            with tqdm.tqdm(total=len(work), unit="case") as bar:
                for chip, case, nodes in work:
                    bar.set_description(f"{case}, {chip.name}"[:40])
                    results.append(evaluate(chip, case, Shape(nodes=nodes), Path(folder)))
                    if ledger is not None:
                        ledger.note("tpu", {"measured": False} | dataclasses.asdict(results[-1]))
                    bar.update()
        except KeyboardInterrupt:
            interrupted = True
            cli.note("\nstopped; what was compiled is below")
    print(markdown(results, Shape()))
    if config.picture is not None:
        picture(results, Shape()).savefig(config.picture)
    return 130 if interrupted else int(any(result.error is not None for result in results))


def main() -> int:
    return run(config_from_flags())


if __name__ == "__main__":
    define_flags()
    cli.run(main)
