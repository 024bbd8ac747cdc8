"""Trees from parents alone, static and as data, against plain-Python walks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import ContractError, Decoder, KVBuffer, testing
from spec_jax.propose import DraftModel, PromptLookup
from spec_jax.tree import DynamicTree, Topology, Tree


@pytest.mark.smoke
def test_chain():
    tree = Tree.chain(3)
    assert tree.is_chain and tree.size == 4 and tree.max_depth == 3
    np.testing.assert_array_equal(tree.depth_N, [0, 1, 2, 3])
    np.testing.assert_array_equal(tree.ancestor_words_NxW[:, 0], [1, 3, 7, 15])
    np.testing.assert_array_equal(
        tree.topology.path(jnp.arange(4), 4), [[0, 4, 4, 4], [0, 1, 4, 4], [0, 1, 2, 4], [0, 1, 2, 3]]
    )
    assert Tree.chain(0).parents == (-1,)


def test_scattered_tree():
    tree = Tree((-1, 0, 0, 1, 1, 2))  # root; a, b; aa, ab, ba
    assert not tree.is_chain
    np.testing.assert_array_equal(tree.depth_N, [0, 1, 1, 2, 2, 2])
    np.testing.assert_array_equal(tree.topology.path(jnp.array([5]), 3), [[0, 2, 5]])
    assert tree.children == ((1, 2), (3, 4), (5,), (), (), ()) and tree.max_children == 2
    np.testing.assert_array_equal(tree.rank_N, [0, 0, 1, 0, 1, 0])
    np.testing.assert_array_equal(tree.post_order, [3, 4, 1, 5, 2, 0])
    assert Tree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0]]) == tree


def test_words_beyond_32_nodes():
    tree = Tree((-1, *([0] * 99)))
    assert tree.ancestor_words_NxW.shape == (100, 4)
    assert tree.ancestor_words_NxW[70].tolist() == [1, 0, 1 << 6, 0]


def test_branching():
    assert Tree.branching((2, 2)) == Tree((-1, 0, 0, 1, 1, 2, 2))
    assert Tree.branching(()) == Tree.chain(0) and Tree.branching((1, 1)) == Tree.chain(2)
    with pytest.raises(ValueError, match="at least one child"):
        Tree.branching((2, 0))
    with pytest.raises(ValueError, match="between 1 and 128"):
        Tree.branching((8, 8, 8))


def test_trees_as_data_say_what_static_trees_say():
    """100 random trees: depths, ancestors, words and paths by walking up from every node."""
    rng = np.random.default_rng(0)
    for size in (1, 2, 33, 128):
        parents = np.stack([np.asarray([-1, *(rng.integers(0, n) for n in range(1, size))]) for _ in range(25)])
        topology = jax.jit(Topology.of)(jnp.asarray(parents, jnp.int32))
        words, P = np.asarray(topology.words_BxNxW), int(topology.depth_BxN.max()) + 1
        for row, ancestors in enumerate(np.asarray(topology.ancestors_BxNxN)):
            tree = Tree(tuple(parents[row].tolist()))
            np.testing.assert_array_equal(tree.ancestors_NxN, ancestors)
            np.testing.assert_array_equal(tree.depth_N, topology.depth_BxN[row])
            np.testing.assert_array_equal(tree.ancestor_words_NxW, words[row])
        nodes = rng.integers(0, size, 25)
        for path, node, row in zip(np.asarray(topology.path(jnp.asarray(nodes), P)), nodes, parents, strict=True):
            walked = [int(node)]
            while row[walked[0]] >= 0:
                walked.insert(0, int(row[walked[0]]))
            assert path.tolist() == walked + [size] * (P - len(walked))


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((), "root"),
        ((0, 0), "root"),
        ((-1, 1), "cycle"),
        ((-1, 2, 1), "earlier node"),
        ((-1, 0, -1), "second root"),
        ((-1, 0, 7), "orphan"),
        ((-1, 0, -2), "orphan"),
        ((-1, *range(128)), "between 1 and 128"),
    ],
)
def test_what_is_not_a_tree_is_refused(parents, message):
    with pytest.raises(ValueError, match=message):
        Tree(parents)


def test_paths_without_their_prefix_are_refused():
    with pytest.raises(ValueError, match=r"prefixes \[\(1,\)\]"):
        Tree.from_paths([[0], [1, 0]])
    with pytest.raises(ValueError, match="implicit"):
        Tree.from_paths([[], [0]])
    for paths in ([[0], [5]], [[-1]]):
        with pytest.raises(ValueError, match="must not be skipped"):
            Tree.from_paths(paths)
    assert Tree([-1, 0]) == Tree.chain(1) and Tree([-1, 0]).is_chain


@pytest.mark.parametrize(("size", "depth"), [(0, 0), (129, 3), (4, 0), (4, 4)])
def test_bounds_that_no_tree_has_are_refused(size, depth):
    with pytest.raises(ValueError, match=r"between 1 and"):
        DynamicTree(size, depth)


def test_trees_that_do_not_fit_are_refused():
    target = testing.HistLM(vocab_size=3)
    with pytest.raises(ContractError, match="4 children and the vocabulary has 3 tokens"):
        Decoder(target, DraftModel(target, Tree.branching((4,))), max_len=16)
    with pytest.raises(ContractError, match="5 tokens deep and a text has at most max_len=5"):
        Decoder(target, PromptLookup(5), max_len=5)
    kv = KVBuffer.create(1, 1, 1, 4, 2)
    with pytest.raises(ValueError, match="5 new positions cannot fit a buffer of 4"):
        kv.write(0, jnp.zeros((1, 5, 1, 2)), jnp.zeros((1, 5, 1, 2)))
