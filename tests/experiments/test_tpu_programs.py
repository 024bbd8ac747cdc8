"""Whole programs for TPUs: what they are made of here, what the compiler makes of them in processes of their own."""

import math

import jax
import pytest

from experiments import tpu_programs
from experiments.tpu_cases import Shape
from experiments.tpu_programs import CONFIGS, SETUPS, program
from kernels_pallas.chips import CHIPS
from models.checkpoint import param_shapes
from tests.experiments.test_tpu_report import needs_compiler, run_script


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3.2-1b", 1.24), ("llama-3.1-8b", 8.03), ("llama-3.3-70b", 70.55), ("small-135m", 0.18)],
)
def test_models_have_as_many_parameters_as_the_public_ones(name, billions):
    count = sum(map(math.prod, param_shapes(CONFIGS[name]).values()))
    assert round(count / 1e9, 2) == billions


@pytest.mark.parametrize("proposer", tpu_programs.PROPOSERS)
def test_programs_are_made_of_shapes_alone(proposer):
    made = program(CHIPS["v6e"], "8b", proposer, "generate", Shape(rows=4, context=500))
    assert all(type(leaf) is jax.ShapeDtypeStruct for leaf in jax.tree.leaves(made.arguments))
    state = made.arguments[1]
    assert state.tokens_BxS.shape == (4, 564) and made.donate == (1,) and made.topology is None
    (capacity,) = made.kv_sizes
    assert capacity == 640 and state.kv.keys[0].shape == (4, 8, 640, 128)
    target_kv, draft_kv = 32 * 2 * 4 * 8 * 640 * 128 * 2, 16 * 2 * 4 * 4 * 640 * 128 * 2
    assert made.kv_bytes == target_kv + (draft_kv if proposer != "plain" else 0)
    sizes = {"plain": 1, "chain": 5, "tree": 32}
    assert made.function.args[0].proposer.tree.size == sizes[proposer]


def test_the_usual_program_is_of_the_largest_model_that_fits():
    layers = {"v5e": 16, "v6e": 32}
    for name, count in layers.items():
        made = tpu_programs.CASES["cycle"](CHIPS[name], Shape())
        assert len(made.arguments[1].kv.keys) == count
        assert made.function.func is tpu_programs.STAGES["cycle"]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"proposer": "beam"}, ValueError, "proposer 'beam' is not known"),
        ({"setup": "7b"}, KeyError, "7b"),
        ({"setup": "70b"}, ValueError, "llama-3.3-70b is compiled for v6e, v5p, 7x; v5e cannot hold it"),
        ({"stage": "verify"}, KeyError, "verify"),
        ({"attention": "fast"}, ValueError, "attention 'fast' is not known"),
    ],
)
def test_unknown_choices(changes, error, message):
    with pytest.raises(error, match=message):
        program(**{"chip": CHIPS["v5e"], "setup": "1b", "proposer": "tree", "stage": "cycle"} | changes)


class TestLive:
    """Two layers of each model: what matters repeats in every layer."""

    pytestmark = needs_compiler

    @pytest.mark.parametrize(
        ("chip", "setup"), [("v5e", "1b"), ("v6e", "8b"), ("v6e", "70b"), ("v5p", "8b"), ("7x", "8b")]
    )
    def test_kv_stays_in_place_and_nothing_asks_the_host(self, chip, setup):
        done = run_script(COMPILE, chip, setup)
        for proposer, found in done.items():
            assert found["copies"] == [] and found["host"] == [], proposer
            assert found["alias"] >= found["kv"] > 0, proposer
            assert found["gathered"] == [], proposer
        assert (SETUPS[setup].topology.get(chip) is not None) == (done["tree"]["devices"] > 1)


COMPILE = """
import json, math, re, sys
from experiments import tpu_compiler, tpu_hlo, tpu_programs
from kernels_pallas.chips import CHIPS
import jax

chip, setup = CHIPS[sys.argv[1]], sys.argv[2]
tpu_compiler.prepare()
found = {}
for proposer, stage in (("plain", "generate"), ("chain", "generate"), ("tree", "generate"), ("tree", "prefill")):
    made = tpu_programs.program(chip, setup, proposer, stage, num_layers=2)
    device = tpu_compiler.devices(made.topology or chip.topology)[0]
    compiled = tpu_compiler.compile(made.function, made.arguments, device, made.donate)
    weights = {leaf.size for leaf in jax.tree.leaves(made.arguments[0]) if leaf.size > 2**22}
    gathered = re.findall(r"= (\\w+\\[([\\d,]+)\\]\\S*) all-gather", compiled.text)
    copies = tpu_hlo.copies_in_loops(compiled.text, 2**20)
    found[proposer if stage == "generate" else stage] = {
        "copies": [copy.name for copy in copies if set(copy.sizes) & set(made.kv_sizes)],
        "host": tpu_hlo.host_transfers(compiled.text),
        "alias": compiled.alias_bytes,
        "kv": made.kv_bytes,
        "gathered": [text for text, sizes in gathered if math.prod(map(int, sizes.split(","))) in weights],
        "devices": 1 if made.topology is None else len(tpu_compiler.devices(made.topology)),
    }
print(json.dumps(found))
"""
