"""The report; what needs the compiler runs in processes of its own, since libtpu takes its settings once."""

import dataclasses
import importlib.util
import json
import subprocess
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

from experiments import cli, tpu_cases, tpu_compiler, tpu_hlo, tpu_report
from experiments.tpu_cases import Shape
from experiments.tpu_report import Estimate, Loop, Result
from kernels_pallas.chips import CHIPS
from tests.experiments.test_programs import ROOT, run_program

needs_compiler = [
    pytest.mark.tpu_compiler,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install -e '.[tpu]'"),
]


def result(case, cycles, **changes):
    use = dict.fromkeys(tpu_report._UNITS, 0.25)
    loops = (Loop("", 1, False, 20, 20, 1, use), Loop("1.1", 64, True, 30, cycles - 20, 7, use))
    estimate = Estimate(case, 50, cycles, None, 8, 2**21, loops, 10**8, 1e9, 1, 1e9, 60e-6, 50e-6)
    return dataclasses.replace(Result("v6e", case, 32, compile_s=1.5, estimate=estimate), **changes)


@pytest.fixture
def results():
    copy = tpu_hlo.Copy("copy.20", "copy", "bf16", (8, 2048), 2**15, "VMEM")
    return [
        result("tree_attention", 80_000, alias_bytes=2**25),
        result("ragged_paged_attention", 160_000, copies=(copy,), host_transfers=("send x",)),
        Result("v6e", "commit", 32, compile_s=2.0, alias_bytes=2**24),
        Result("v5e", "flash_attention", 32, error="JaxRuntimeError: out of VMEM"),
    ]


def test_tables(results):
    text = tpu_report.markdown(results, Shape())
    assert "estimated" in text and "not measured" in text

    def row(*cells):
        return any([cell.strip() for cell in line.split("|")[1:-1]][: len(cells)] == list(cells) for line in lines)

    lines = text.splitlines()
    assert row("tree_attention", "v6e", "32", "1.5", "1", "2.0", "50", "80.0", "?", "8", "7", "80.0", "100.0", "60.0")
    assert row("tree_attention", "v6e", "32", "0.50")
    assert row("tree_attention", "v6e", "1.1", "32", "30", "64*", "80.0", "7", "25")
    assert row("commit", "v6e", "32", "2.0", "0.0", "0.0", "16.0", "0", "0")
    assert row("ragged_paged_attention", "v6e", "32", "1.5", "0.0", "0.0", "0.0", "1 (0.0 MiB)", "1")
    assert "- ragged_paged_attention on v6e: in a loop, copy copy.20 of bf16[8,2048] into VMEM" in lines
    assert "- flash_attention on v5e, 32 nodes: JaxRuntimeError: out of VMEM" in lines


def test_tables_of_nothing():
    assert "not measured" in tpu_report.markdown([], Shape())


def test_the_picture(results, tmp_path):
    tpu_report.picture(results, Shape()).savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("nodes", [8, 64])
@pytest.mark.parametrize("chip", CHIPS)
def test_cases_state_what_they_move(chip, nodes):
    shape = Shape(nodes=nodes)
    names = (*tpu_cases.PEERS, *tpu_cases.JAX_OWN, "commit", "paged_commit")
    programs = {name: tpu_cases.CASES[name](CHIPS[chip], shape) for name in names}
    kv = 2 * 8 * 8 * 2048 * 128 * 2
    for name in (*tpu_cases.PEERS, "ragged_paged_attention"):
        assert kv < programs[name].kernel.hbm_bytes < 1.2 * kv
        assert programs[name].kernel.flops == programs["tree_attention"].kernel.flops
    assert {peer for peers in tpu_cases.PEERS.values() for peer in peers} <= set(programs)
    assert programs["commit"].kernel.hbm_bytes == programs["paged_commit"].kernel.hbm_bytes < 0.1 * kv


@pytest.fixture(scope="module")
def defined_flags(define_flags):
    define_flags(tpu_report)


@pytest.fixture
def reports(monkeypatch, capsys, defined_flags, tmp_path):
    """Runs the program in this process without a compiler; gives exit code, standard output and standard error."""
    monkeypatch.setattr(tpu_compiler, "prepare", lambda dump: None)

    @flagsaver.flagsaver
    def run(*arguments):
        flags.FLAGS.unparse_flags()
        flags.FLAGS(["tpu_report", *arguments])
        code = cli.guarded(tpu_report.main)
        return code, *capsys.readouterr()

    return run


def test_a_case_that_fails_is_reported_and_the_others_go_on(reports, monkeypatch, tmp_path):
    def devices(topology):
        raise RuntimeError("out of\n VMEM")

    monkeypatch.setattr(tpu_compiler, "devices", devices)
    code, out, _ = reports("--case=tree_attention,commit", "--nopeers", "--chip=all", f"--json={tmp_path / 'a.json'}")
    assert code == 1 and out.count("RuntimeError: out of VMEM") == 2 * len(CHIPS)
    rows = [json.loads(line) for line in (tmp_path / "a.json").read_text().splitlines()]
    assert [row["case"] for row in rows] == ["tree_attention", "commit"] * len(CHIPS)
    assert all(row["kind"] == "tpu" and row["measured"] is False and "VMEM" in row["error"] for row in rows)


def test_an_interruption_leaves_what_was_compiled(reports, monkeypatch, results):
    waiting = iter(results[:2])

    def evaluate(*arguments):
        for found in waiting:
            return found
        raise KeyboardInterrupt

    monkeypatch.setattr(tpu_report, "evaluate", evaluate)
    code, out, err = reports("--case=tree_attention")
    assert code == 130 and "stopped" in err and "| ragged_paged_attention" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case=nope"], "case 'nope' is not known; expected some of tree_attention"),
        (["--chip=v9"], "chip 'v9' is not known"),
        (["--nodes=8,x"], "--nodes must be positive numbers, got 'x'"),
        (["--json=/no/such/folder/x"], "the folder of --json"),
        (["--picture=a.doc"], "must end in .png"),
    ],
)
def test_bad_values_end_in_one_line(reports, arguments, message):
    code, out, err = reports(*arguments)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


def test_without_the_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(tpu_compiler, "is_installed", lambda: False)
    with pytest.raises(tpu_compiler.TpuCompilerError, match=r"pip install -e '.\[tpu\]'"):
        tpu_compiler.prepare()


class TestLive:
    pytestmark = needs_compiler

    def test_figures_of_jax_own_kernel_are_those_known(self, tmp_path):
        arguments = ("--case=ragged_paged_attention,commit", "--nodes=8", f"--json={tmp_path / 'a.json'}")
        done = run_program("tpu_report", *arguments, f"--picture={tmp_path / 'a.png'}")
        assert done.returncode == 0, done.stderr
        assert "estimated" in done.stdout and "not measured" in done.stdout
        ragged, commit = map(json.loads, (tmp_path / "a.json").read_text().splitlines())
        # Known from an independent reading of the same schedule: 101 thousand cycles, 1527 bundles a row and block.
        assert ragged["estimate"]["cycles"] == pytest.approx(101e3, rel=0.05)
        loops = {loop["name"]: loop for loop in ragged["estimate"]["loops"]}
        assert loops["1.1.1"]["bundles"] == pytest.approx(1527, rel=0.05)
        assert (loops["1"]["executions"], loops["1"]["given"]) == (10, False)  # A grid of 8, and the pipeline's 2.
        assert loops["1.1.1"]["spills"] == pytest.approx(474, rel=0.2)
        assert ragged["estimate"]["vmem_bytes"] > 2**20
        assert commit["alias_bytes"] == 2 * 2 * 8 * 8 * 2048 * 128 and commit["host_transfers"] == []
        assert (tmp_path / "a.png").stat().st_size > 10_000

    @pytest.mark.parametrize("chip", ["v5e", "v5p", "7x"])
    def test_loops_are_found_on_every_chip(self, chip, tmp_path):
        done = run_script(SCHEDULE, chip, tmp_path)
        # An outer loop of 5 rounds around one of 7; then a grid of 3 rounds and the pipeline's 2, if it is one.
        assert done["loops"] == {"1": 5, "1.1": 7}
        assert done["cycles"] > 5 * 7 * done["inner"] > 0

    def test_copies_staging_aliases_and_callbacks(self):
        done = run_script(PROGRAMS)
        size = 2 * 8 * 8 * 2048 * 128
        assert done["scatter"] == {"copies": [], "alias": 4 * size, "host": 0}
        assert {"dynamic-slice", "dynamic-update-slice"} <= set(done["layers"]["copies"])
        assert done["staged"]["copies"] == ["copy", "copy"] and done["staged"]["alias"] == 2 * size
        assert done["callback"]["host"] > 0

    def test_schedules_must_be_asked_for_before_the_compiler_is_loaded(self, tmp_path):
        script = "from experiments import tpu_compiler as c; from pathlib import Path; c.devices('v6e:2x2'); "
        late = subprocess.run(
            [sys.executable, "-c", script + f"c.prepare(Path({str(tmp_path)!r}))"],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert "libtpu was loaded before it was told to write schedules" in late.stderr


def run_script(script, *arguments):
    """What a script prints as its last line, read as JSON; the script runs in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


SCHEDULE = """
import json, sys
from pathlib import Path
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from experiments import tpu_compiler, tpu_report, tpu_schedule
from kernels_pallas.chips import CHIPS

chip, dump = CHIPS[sys.argv[1]], Path(sys.argv[2])
tpu_compiler.prepare(dump)

def kernel(x_ref, o_ref):
    def inner(j, x):
        return jnp.tanh(x + o_ref[j % 8, 0])

    def outer(i, _):
        o_ref[...] = jax.lax.fori_loop(2, 9, inner, x_ref[...] * i.astype(jnp.float32))

    jax.lax.fori_loop(0, 5, outer, None)

x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
call = pl.pallas_call(kernel, out_shape=x, name="mine")
tpu_compiler.compile(call, (x,), tpu_compiler.devices(chip.topology)[0])
found = tpu_schedule.read(dump, "mine", tpu_report._DELAY_SLOTS.get(chip.name, 4))
loops = {region.name: region.trips for region in found.regions if region.is_loop}
inner = [region.bundles for region in found.regions if region.name == "1.1"]
print(json.dumps({"loops": loops, "inner": sum(inner), "cycles": found.cycles({})}))
"""

PROGRAMS = """
import json
import jax, jax.numpy as jnp
from jax import lax
from experiments import tpu_compiler, tpu_hlo

tpu_compiler.prepare()
device = tpu_compiler.devices("v6e:2x2")[0]
layer, stack = (jax.ShapeDtypeStruct((*n, 8, 8, 2048, 128), jnp.bfloat16) for n in ((), (4,)))
position = jax.ShapeDtypeStruct((8,), jnp.int32)

def at(position, i):
    return jnp.arange(8)[:, None], slice(None), position[:, None] + i + jnp.arange(8)

def loop(body):
    return lambda kv, *rest: lax.while_loop(lambda c: c[0] < 5, lambda c: body(*c, *rest), (jnp.int32(0), kv))[1]

def scatter(i, kv, position):
    for n in range(4):
        kv = kv.at[(n, *at(position, i))].set(i.astype(kv.dtype), mode="drop")
    return i + 1, kv

def layers(i, kv, position):
    def one(total, kv):
        kv = kv.at[at(position, i)].set(total.astype(kv.dtype), mode="drop")
        return total + kv.sum().astype(jnp.float32), kv
    return i + 1, lax.scan(one, jnp.float32(0), kv)[1]

def staged(i, kvs, position):
    kvs = tuple(kv.at[at(position, i)].set(i.astype(kv.dtype), mode="drop") for kv in kvs)
    total = sum(jnp.einsum("bksd,bktd->bkst", kv[:, :, :128], kv).sum() for kv in kvs)
    return i + 1 + (total > 5).astype(jnp.int32), kvs

def callback(i, x):
    jax.debug.callback(lambda v: None, x.sum())
    return i + 1, x * 2

programs = {
    "scatter": (scatter, (stack, position)),
    "layers": (layers, (stack, position)),
    "staged": (staged, ((layer, layer), position)),
    "callback": (callback, (jax.ShapeDtypeStruct((8, 128), jnp.float32),)),
}
found = {}
for name, (body, arguments) in programs.items():
    compiled = tpu_compiler.compile(loop(body), arguments, device, donate=(0,))
    copies = tpu_hlo.copies_in_loops(compiled.text, 2**20)
    host = tpu_hlo.host_transfers(compiled.text)
    found[name] = {"copies": [copy.opcode for copy in copies], "alias": compiled.alias_bytes, "host": len(host)}
print(json.dumps(found))
"""
