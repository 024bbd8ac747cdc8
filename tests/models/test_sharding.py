"""Tensor parallelism on eight CPU devices: the tokens of one device, and no weight moves.

The number of devices is fixed when JAX starts, so the checks run in a process of their own (this file as a program).
"""

import dataclasses
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import spec_jax as sj
from models import ModelError
from models.config import LlamaConfig
from models.target import LlamaTarget
from spec_jax import decode
from spec_jax.contract import Law
from spec_jax.growth import Beam
from spec_jax.kernels import Kernels
from spec_jax.propose import DraftModel
from spec_jax.tree import Tree

DEVICES = 8
CONFIG = LlamaConfig("llama", 96, 2, 16, 8, 64, 64, 128, max_positions=256)
TREE = Tree.branching((4, 3, 1, 1))  # 32 nodes beside the root: 41
PROMPTS = [[1, 2, 3, 4, 5] * 6, [7], [9, 9, 8]]
PARAMS = [sj.SamplingParams(temperature=t, seed=i, max_new_tokens=12) for i, t in enumerate((0.8, 0.0, 1.2))]


def mesh():
    return Mesh(np.asarray(jax.devices()[:DEVICES]), ("model",))


def decoder(target, draft=None, tree=None):
    law = Law.POINT_MASS if isinstance(tree, Beam) else Law.IID
    proposer = None if tree is None else DraftModel(draft, tree=tree, law=law)
    return sj.Decoder(target, proposer, max_len=64, prefill_chunk=16)


def check_tokens():
    one = small = LlamaTarget.random(CONFIG, 0)  # Its own draft: much is accepted.
    many = one.sharded(mesh())
    for tree in (None, 4, TREE, Beam(32, 4, 6)):
        want = decoder(one, small, tree).generate(PROMPTS, PARAMS)
        for draft in [small.sharded(mesh())] + [small.replicated(mesh())] * (tree is TREE):
            got = decoder(many, draft, tree).generate(PROMPTS, PARAMS)
            assert [r.tokens for r in got] == [r.tokens for r in want], tree
            assert got.stats == want.stats
            assert tree is None or got.stats.accepted > 0


def check_kernels():
    """Eight devices run the kernel on a pair of heads each."""
    config = dataclasses.replace(CONFIG, num_heads=16, num_kv_heads=16)
    kernels = Kernels.choose("interpret", CONFIG.head_dim)
    want = decoder(LlamaTarget.random(config, 0), LlamaTarget.random(config, 0), 2).generate(PROMPTS[:1], PARAMS[:1])
    target = LlamaTarget.random(config, 0, kernels=kernels).sharded(mesh())
    (got,) = decoder(target, target, Tree.branching((2, 1))).generate(PROMPTS[:1], PARAMS[:1])
    assert got.tokens == want[0].tokens


def check_placement():
    """Each device has its share of every matrix and of the KV, and no program gathers one."""
    target = LlamaTarget.random(CONFIG, 0).sharded(mesh())
    for path, leaf in jax.tree_util.tree_leaves_with_path(target.params):
        share = leaf.addressable_shards[0].data.size
        assert share * (DEVICES if leaf.ndim > 1 else 1) == leaf.size, path
    decoding = decoder(target, target, TREE)
    state = decoding.start(decoding.request(PROMPTS, PARAMS))
    for rows in (*state.kv.keys, *state.kv.values):
        assert rows.addressable_shards[0].data.shape[1] * DEVICES == rows.shape[1]
    compiled = decode.run.lower(decoding.plan, decoding.params, state).compile()
    gathered = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather\(", compiled.as_text())
    # What is gathered are logits, for sampling.
    weights = {tuple(leaf.shape) for leaf in jax.tree.leaves(target.params) if leaf.ndim > 1}
    weights |= {shape[::-1] for shape in weights} | {rows.shape}
    sizes = [tuple(map(int, shape.split(","))) for shape in gathered]
    assert not weights & set(sizes), sizes
    held = sum(x.nbytes for x in (*state.kv.keys, *state.kv.values)) // DEVICES
    assert compiled.memory_analysis().alias_size_in_bytes >= held


def check_refusals():
    uneven = dataclasses.replace(CONFIG, num_kv_heads=4, vocab_size=97)
    with pytest.raises(ModelError, match="num_kv_heads=4, vocab_size=97 cannot be divided over 8 devices"):
        LlamaTarget.random(uneven, 0).sharded(mesh())
    kernels = Kernels.choose("interpret", 64)
    with pytest.raises(ModelError, match="rows of 2 key/value heads=4 cannot be divided over 8"):
        LlamaTarget.random(CONFIG, 0, kernels=kernels).sharded(mesh())


CHECKS = {check.__name__: check for check in (check_tokens, check_kernels, check_placement, check_refusals)}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_on_eight_devices(name):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-m", "tests.models.test_sharding", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_axis_must_be_there():
    with pytest.raises(ModelError, match="the mesh has axes 'data' and no 'model'"):
        LlamaTarget.random(CONFIG, 0).sharded(Mesh(np.asarray(jax.devices()[:1]), ("data",)))


if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
