"""The attention contract, against a brute-force loop."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.tree_attention import expand_ancestor_words, tree_attention_reference, visible
from spec_jax.tree import Tree


def random_tree(rng, size):
    return Tree((-1, *(int(rng.integers(0, node)) for node in range(1, size))))


def brute_force(q, k, v, length, tree):
    """One query at a time over the rows it may see, and no others."""
    B, N, H, D = q.shape
    group = H // k.shape[1]
    out = np.zeros((B, N, H, D))
    for b in range(B):
        for n in range(N):
            rows = [*range(length[b]), *(length[b] + m for m in np.flatnonzero(tree.ancestors_NxN[n]))]
            for h in range(H):
                scores = k[b, h // group, rows] @ q[b, n, h] / np.sqrt(D)
                weights = np.exp(scores - scores.max())
                out[b, n, h] = weights @ v[b, h // group, rows] / weights.sum()
    return out


def random_inputs(rng, size, heads=4, kv_heads=2, capacity=24, dim=8, fill=np.nan):
    length = np.array([0, 1, capacity - size], np.int32)
    q = rng.standard_normal((3, size, heads, dim)).astype(np.float32)
    k = np.full((3, kv_heads, capacity, dim), fill, np.float32)
    v = k.copy()
    for b, n in enumerate(length):
        k[b, :, : n + size] = rng.standard_normal((kv_heads, n + size, dim))
        v[b, :, : n + size] = rng.standard_normal((kv_heads, n + size, dim))
    return q, k, v, length


@pytest.mark.smoke
@pytest.mark.parametrize("fill", [np.nan, 1e4])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_reference_equals_brute_force_and_no_stale_row_reaches_it(size, fill):
    rng = np.random.default_rng(size)
    for tree in (Tree.chain(size - 1), random_tree(rng, size)):
        q, k, v, length = random_inputs(rng, size, fill=fill)
        words = jnp.broadcast_to(jnp.asarray(tree.ancestor_words_NxW)[None], (3, *tree.ancestor_words_NxW.shape))
        got = tree_attention_reference(*map(jnp.asarray, (q, k, v, length)), words)
        np.testing.assert_allclose(got, brute_force(q, k, v, length, tree), rtol=2e-5, atol=2e-5)


def test_a_chain_needs_no_words():
    rng = np.random.default_rng(0)
    arrays = tuple(map(jnp.asarray, random_inputs(rng, 5)))
    words = jnp.broadcast_to(jnp.asarray(Tree.chain(4).ancestor_words_NxW)[None], (3, 5, 1))
    np.testing.assert_array_equal(tree_attention_reference(*arrays), tree_attention_reference(*arrays, words))


def test_bfloat16_keeps_float32_sums():
    rng = np.random.default_rng(0)
    q, k, v, length = random_inputs(rng, 3, capacity=24)
    low = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    got = tree_attention_reference(*low, jnp.asarray(length))
    assert got.dtype == jnp.bfloat16
    want = brute_force(*(np.asarray(x, np.float32) for x in low), length, Tree.chain(2))
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=2e-2, atol=2e-2)


def test_zeroed_rows_are_not_masked_rows():
    """q=[1,1], K=[[1,0],[0,1]], V=[1,3] gives 2; two phantom rows of zeros would give 1.462."""
    q = jnp.array([1.0, 1.0]).reshape(1, 1, 1, 2)
    k = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]).reshape(1, 1, 4, 2)
    v = jnp.array([[1.0, 1.0], [3.0, 3.0], [0.0, 0.0], [0.0, 0.0]]).reshape(1, 1, 4, 2)
    out = tree_attention_reference(q, k, v, jnp.array([1], jnp.int32), scale=1.0)
    np.testing.assert_allclose(out.ravel(), [2.0, 2.0], rtol=1e-6)


def test_mask_equals_ancestor_test_on_random_trees():
    rng = np.random.default_rng(1)
    for size in (1, 4, 33, 64, 128) * 20:
        tree = random_tree(rng, size)
        words = jnp.asarray(tree.ancestor_words_NxW)[None]
        np.testing.assert_array_equal(expand_ancestor_words(words)[0, :, :size], tree.ancestors_NxN)
        mask = np.asarray(visible(jnp.array([3], jnp.int32), size, size + 10, words))[0]
        assert mask[:, :3].all() and not mask[:, 3 + size :].any()
        np.testing.assert_array_equal(mask[:, 3 : 3 + size], tree.ancestors_NxN)


@pytest.mark.parametrize("split", [1, 3, 6])
def test_a_tree_scored_in_parts_is_the_tree_scored_at_once(split):
    """The later nodes, with the earlier ones as tail, get what they get in one pass."""
    rng = np.random.default_rng(2)
    for tree in (random_tree(rng, 7), Tree.chain(6)):
        q, k, v, length = map(jnp.asarray, random_inputs(rng, 7))
        words = jnp.broadcast_to(jnp.asarray(tree.ancestor_words_NxW)[None], (3, 7, 1))
        whole = tree_attention_reference(q, k, v, length, words)
        late = tree_attention_reference(q[:, split:], k, v, length, words[:, split:], tail=split)
        np.testing.assert_allclose(late, whole[:, split:], rtol=1e-6, atol=1e-6)
        written = jnp.arange(24)[None, :] < (length + split)[:, None]
        early_k, early_v = (jnp.where(written[:, None, :, None], rows, jnp.nan) for rows in (k, v))
        early = tree_attention_reference(q[:, :split], early_k, early_v, length, words[:, :split])
        np.testing.assert_allclose(early, whole[:, :split], rtol=1e-6, atol=1e-6)
        if tree.is_chain:
            late = tree_attention_reference(q[:, split:], k, v, length, tail=split)
            np.testing.assert_allclose(late, whole[:, split:], rtol=1e-6, atol=1e-6)
