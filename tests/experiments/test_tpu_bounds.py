"""What the kernels promise beside JAX's own, by the estimates of the TPU compiler at one common shape."""

import importlib.util
import json

import pytest

from kernels_pallas.chips import CHIPS
from tests.experiments.test_programs import run_program

pytestmark = [
    pytest.mark.tpu_compiler,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install -e '.[tpu]'"),
]
NODES = (16, 32, 64)


@pytest.mark.parametrize("chip", CHIPS)
def test_estimates_beside_ragged_paged_attention(chip, tmp_path):
    cases = ["tree_attention", "causal_attention", "paged_tree_attention", "ragged_paged_attention"]
    if chip == "v6e":
        cases.append("flash_attention")
    options = (f"--chip={chip}", f"--case={','.join(cases)}", f"--nodes={','.join(map(str, NODES))}", "--nopeers")
    done = run_program("tpu_report", *options, f"--json={tmp_path / 'report.json'}")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "report.json").read_text().splitlines()]
    found = {(row["case"], row["nodes"]): row for row in rows}

    def cycles(case, nodes):
        return found[case, nodes]["estimate"]["cycles"]

    for nodes in NODES:
        jax_own, ours = cycles("ragged_paged_attention", nodes), cycles("tree_attention", nodes)
        assert ours <= 0.80 * jax_own and cycles("paged_tree_attention", nodes) <= 0.90 * jax_own
        assert ours <= 1.05 * cycles("causal_attention", nodes)
        if nodes <= 32:
            for case in ("tree_attention", "paged_tree_attention"):
                loops = found[case, nodes]["estimate"]["loops"]
                assert max(loops, key=lambda loop: loop["cycles"])["spills"] < 100
    if chip == "v6e":
        assert cycles("tree_attention", 32) < cycles("flash_attention", 32)
