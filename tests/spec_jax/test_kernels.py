"""Kernels forced in interpret mode decode what plain JAX decodes, and a choice that cannot be is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spec_jax as sj
from kernels_pallas.chips import CHIPS
from models.config import LlamaConfig
from models.target import LlamaTarget
from spec_jax.attention import attend
from spec_jax.contract import Law
from spec_jax.growth import Beam
from spec_jax.kernels import REFERENCE, Kernels
from spec_jax.kv import KVBuffer
from spec_jax.propose import DraftModel
from spec_jax.tree import Tree

CONFIG = LlamaConfig("llama", 61, 2, 4, 2, 64, 32, 48, max_positions=256)
ODD = dataclasses.replace(CONFIG, num_heads=3, num_kv_heads=3)
INTERPRETED = Kernels.choose("interpret", 64)


def decoded(kernels, tree, config=CONFIG):
    target = LlamaTarget.random(config, 0, kernels=kernels)
    # The target without its last layer: some drafts are accepted, and accepted paths are scattered.
    draft = LlamaTarget.random(dataclasses.replace(config, num_layers=1), 0, kernels=kernels)
    law = Law.POINT_MASS if isinstance(tree, Beam) else Law.IID
    proposer = None if tree is None else DraftModel(draft, tree=tree, law=law)
    decoder = sj.Decoder(target, proposer, max_len=64, prefill_chunk=16)
    params = [sj.SamplingParams(temperature=0.8, seed=i, max_new_tokens=9) for i in range(2)]
    return decoder.generate([[1, 2, 3, 4, 5] * 5, [7]], params)


@pytest.mark.parametrize("tree", [None, 3, Tree.branching((3, 2, 1)), Beam(8, 3, 3)], ids=str)
def test_interpreted_kernels_decode_the_same_tokens(tree):
    got, want = (decoded(kernels, tree) for kernels in (INTERPRETED, REFERENCE))
    assert [r.tokens for r in got] == [r.tokens for r in want]
    assert got.stats == want.stats
    assert tree is None or 0 < got.stats.accepted < got.stats.drafted


@pytest.mark.parametrize("kernels", [INTERPRETED, REFERENCE], ids=["kernels", "reference"])
def test_a_branch_that_is_no_number_shows_to_those_who_see_it_only(kernels):
    """Values of node 1 overflowed, its keys did not: it is NaN, and so is its child 2; root and sibling 3 are not."""
    kv = KVBuffer.create(1, 1, 2, 128, 64, kernels=kernels).with_length(jnp.asarray([5]))
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 4, 2, 64))
    kv = dataclasses.replace(kv, keys=(jnp.zeros_like(kv.keys[0]),), values=(jnp.ones_like(kv.values[0]),))
    words = jnp.asarray(Tree((-1, 0, 1, 0)).ancestor_words_NxW)[None]
    out = attend(q, kv.write(0, k, v.at[0, 1, :, 7].set(jnp.inf)), 0, words)
    assert np.isnan(np.asarray(out[0, 1:3])).all()
    fine = attend(q, kv.write(0, k, v), 0, words)
    np.testing.assert_array_equal(out[0, [0, 3]], fine[0, [0, 3]])


def test_gradients_through_a_buffer_are_those_of_plain_jax():
    def loss(x, kernels):
        q, k, v = x
        kv = KVBuffer.create(1, 2, 2, 128, 64, kernels=kernels).write(0, k, v)
        return jnp.sum(jnp.sin(attend(q, kv, 0, None)))

    x = jax.random.normal(jax.random.key(0), (3, 2, 6, 2, 64))
    got, want = (jax.grad(loss)(x, kernels) for kernels in (INTERPRETED, REFERENCE))
    assert np.abs(np.asarray(want)).sum((1, 2, 3, 4)).all()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_an_odd_number_of_narrow_heads():
    got, want = (decoded(kernels, Tree.branching((2, 1)), ODD) for kernels in (INTERPRETED, REFERENCE))
    assert [r.tokens for r in got] == [r.tokens for r in want]


def test_a_buffer_for_kernels_is_rounded_up():
    assert KVBuffer.create(1, 1, 1, 70, 64, kernels=INTERPRETED).capacity == 128
    assert KVBuffer.create(1, 1, 1, 70, 64).capacity == 70


@pytest.mark.parametrize(
    ("heads", "head_dim", "rows"), [(4, 64, (2, 128)), (3, 64, (3, 128)), (2, 128, (2, 128)), (1, 256, (1, 256))]
)
def test_narrow_heads_share_rows_where_kernels_read_them(heads, head_dim, rows):
    buffer = KVBuffer.create(1, 1, heads, 128, head_dim, kernels=INTERPRETED)
    assert (buffer.keys[0].shape[1], buffer.keys[0].shape[3]) == rows
    assert KVBuffer.create(1, 1, heads, 128, head_dim).keys[0].shape == (1, heads, 128, head_dim)


def test_choices():
    assert Kernels.choose() == REFERENCE  # These tests run on CPU.
    assert Kernels.choose("reference", chip=CHIPS["v6e"]) == REFERENCE
    assert Kernels.choose("auto", 64, CHIPS["v6e"]).chip.name == "v6e"
    assert Kernels.choose("auto", 96, CHIPS["v6e"]) == REFERENCE
    assert not Kernels.choose("kernel", 128, CHIPS["7x"]).interpret


def test_a_tpu_that_kernels_were_not_made_for_runs_plain_jax(monkeypatch):
    class V3:
        device_kind = "TPU v3"

    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "devices", lambda: [V3()])
    assert Kernels.choose("auto") == REFERENCE
    with pytest.raises(ValueError, match="not made for 'TPU v3'"):
        Kernels.choose("kernel")
    V3.device_kind = "TPU v6 lite"
    assert Kernels.choose("auto").chip.name == "v6e"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("flash",), "'flash' is not known; expected one of auto, reference, kernel, interpret"),
        (("kernel",), "needs a TPU, and this is cpu; use 'interpret'"),
        (("interpret", 96), "head_dim 64, 128, 256, the model has 96; use 'reference'"),
    ],
)
def test_choices_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        Kernels.choose(*arguments)


def test_commit_by_kernel_moves_the_same_rows():
    rows = jnp.arange(2 * 1 * 128 * 64, dtype=jnp.float32).reshape(2, 1, 128, 64)
    length, count = jnp.array([3, 9], jnp.int32), jnp.array([2, 3], jnp.int32)
    path = jnp.array([[0, 4, 9], [0, 2, 7]], jnp.int32)
    kept = [
        KVBuffer((rows,), (rows,), length, jnp.int32(0), kernels).commit(count, path)
        for kernels in (INTERPRETED, REFERENCE)
    ]
    for b, end in enumerate((5, 12)):
        for got, want in zip(*((kv.keys[0], kv.values[0]) for kv in kept), strict=True):
            assert jnp.array_equal(got[b, :, :end], want[b, :, :end])
