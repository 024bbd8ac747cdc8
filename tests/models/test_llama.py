import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.checkpoint import filled_params, flat_params
from models.errors import ModelError
from models.llama import RMSNorm
from models.target import LlamaTarget
from spec_jax.tree import Tree
from tests.models.common import TINY, VARIANTS, commit, forward, noisy_target, some_tokens

variants = pytest.mark.parametrize("name", VARIANTS)


def in_pieces(target, tokens_BxN, sizes, capacity=24):
    """Logits of a chain fed in pieces of the given sizes."""
    kv, logits, start = target.init_kv(tokens_BxN.shape[0], capacity), [], 0
    for size in sizes:
        piece, _, kv = forward(target, tokens_BxN[:, start : start + size], kv)
        kv = commit(kv, jnp.full((tokens_BxN.shape[0],), size, jnp.int32))
        logits.append(piece)
        start += size
    return np.concatenate(logits, axis=1)


@variants
def test_one_pass_equals_token_by_token_equals_chunks(name):
    target, tokens_BxN = noisy_target(VARIANTS[name]), some_tokens((2, 12))
    whole = in_pieces(target, tokens_BxN, [12])
    assert whole.dtype == np.float32 and whole.std() > 0.1
    np.testing.assert_allclose(in_pieces(target, tokens_BxN, [1] * 12), whole, atol=2e-5)
    np.testing.assert_allclose(in_pieces(target, tokens_BxN, [5, 5, 2]), whole, atol=2e-5)


@pytest.mark.smoke
@variants
def test_a_tree_scores_each_path_as_a_chain(name):
    target = noisy_target(VARIANTS[name])
    tree = Tree((-1, 0, 0, 1, 1, 2, 4))
    prompt_BxN, nodes_BxN = some_tokens((2, 6)), some_tokens((2, tree.size), seed=1)
    _, _, prefix = forward(target, prompt_BxN, target.init_kv(2, 24))
    prefix = commit(prefix, jnp.array([6, 3], jnp.int32))  # Ragged: row 1 keeps three of its six tokens.
    words_BxNxW = jnp.asarray(np.broadcast_to(tree.ancestor_words_NxW, (2, *tree.ancestor_words_NxW.shape)))
    logits_BxNxV, _, scored = forward(target, nodes_BxN, prefix, words_BxNxW, tree.depth_N)
    for leaf in sorted(set(range(tree.size)) - set(tree.parents)):
        path = np.flatnonzero(tree.ancestors_NxN[leaf]).tolist()
        chain_BxNxV, _, _ = forward(target, nodes_BxN[:, path], prefix)
        np.testing.assert_allclose(logits_BxNxV[:, path], chain_BxNxV, atol=2e-5)
        # What a commit of the path leaves behind continues as the chain would.
        path_BxP = jnp.asarray(np.broadcast_to(path, (2, len(path))), jnp.int32)
        kept = commit(scored, jnp.full((2,), len(path), jnp.int32), path_BxP)
        after_BxNxV, _, _ = forward(target, some_tokens((2, 1), seed=2), kept)
        chain_BxN = np.concatenate([nodes_BxN[:, path], some_tokens((2, 1), seed=2)], axis=1)
        expected_BxNxV, _, _ = forward(target, chain_BxN, prefix)
        np.testing.assert_allclose(after_BxNxV[:, 0], expected_BxNxV[:, -1], atol=2e-5)


def test_taps_are_the_residual_stream_and_the_final_norm():
    target, tokens_BxN = noisy_target(TINY), some_tokens((2, 5))
    weights = flat_params(target.config, target.params)
    logits_BxNxV, taps, _ = forward(target, tokens_BxN, target.init_kv(2, 8), taps=(3, 0, 1, 2))
    final, embedded, after_first, after_second = taps
    np.testing.assert_array_equal(embedded, np.asarray(weights["embedding.weight"])[tokens_BxN])
    np.testing.assert_allclose(logits_BxNxV, np.einsum("bne,ve->bnv", final, weights["head.weight"]), atol=1e-5)
    normed = after_second / np.sqrt(np.mean(np.square(after_second), axis=-1, keepdims=True) + TINY.norm_eps)
    np.testing.assert_allclose(final, normed * np.asarray(weights["norm.weight"])[None, None, :], atol=1e-5)
    # A model cut after the first block has that block's output as its last stream.
    config = dataclasses.replace(TINY, num_layers=1)
    short = LlamaTarget(config, filled_params(config, weights.get))
    _, (stream,), _ = forward(short, tokens_BxN, short.init_kv(2, 8), taps=(1,))
    np.testing.assert_allclose(after_first, stream, atol=1e-6)


def test_taps_outside_the_model_are_refused():
    target = noisy_target(TINY)
    for tap in (-1, 4):
        with pytest.raises(ModelError, match=r"taps 0\.\.3"):
            forward(target, some_tokens((1, 2)), target.init_kv(1, 4), taps=(tap,))


def test_a_tied_head_has_no_second_array():
    assert "head.weight" not in flat_params(VARIANTS["smollm2"], noisy_target(VARIANTS["smollm2"]).params)


def test_bfloat16_follows_float32():
    config = dataclasses.replace(TINY, dtype="bfloat16")
    low = noisy_target(config)
    high = LlamaTarget(TINY, filled_params(TINY, flat_params(config, low.params).get))
    tokens_BxN = some_tokens((1, 8))
    low_BxNxV, (tap_BxNxE,), kv = forward(low, tokens_BxN, low.init_kv(1, 8), taps=(2,))
    high_BxNxV, _, _ = forward(high, tokens_BxN, high.init_kv(1, 8))
    assert tap_BxNxE.dtype == kv.keys[0].dtype == jnp.bfloat16 and low_BxNxV.dtype == jnp.float32
    np.testing.assert_allclose(low_BxNxV, high_BxNxV, atol=0.05 * float(jnp.abs(high_BxNxV).max()))
    single = in_pieces(low, tokens_BxN, [1] * 8)
    np.testing.assert_allclose(single, low_BxNxV, atol=0.05 * float(jnp.abs(high_BxNxV).max()))


@pytest.mark.parametrize("platform, as_bits", [("cpu", True), ("tpu", False)])
def test_a_bfloat16_row_is_looked_up_as_bits_on_cpu_only(platform, as_bits):
    target = noisy_target(dataclasses.replace(TINY, dtype="bfloat16"))
    traced = jax.jit(target.forward).trace(
        target.params, *[jnp.zeros((1, 1), jnp.int32)] * 2, target.init_kv(1, 8), None
    )
    assert ("bitcast_convert" in traced.lower(lowering_platforms=(platform,)).as_text()) == as_bits


def test_the_norm_is_computed_in_float32():
    config = dataclasses.replace(TINY, dtype="bfloat16")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 24)) * 300, jnp.bfloat16)
    normed = RMSNorm(24, config, nnx.Rngs(0))(x)
    x64 = np.asarray(x, np.float64)
    expected = x64 / np.sqrt(np.mean(np.square(x64), axis=-1, keepdims=True))
    np.testing.assert_allclose(np.asarray(normed, np.float64), expected, rtol=2**-8)


def test_the_rotation_depends_on_differences_of_positions_only():
    target, tokens_BxN = noisy_target(VARIANTS["partial"]), some_tokens((1, 6))
    kv = target.init_kv(1, 8)
    near, _, _ = forward(target, tokens_BxN, kv)
    far, _, _ = forward(target, tokens_BxN, kv, depth_N=np.arange(6) + 30)
    np.testing.assert_allclose(near, far, atol=2e-5)
    apart, _, _ = forward(target, tokens_BxN, kv, depth_N=np.arange(6) * 2)
    assert np.abs(near - apart).max() > 1e-3
