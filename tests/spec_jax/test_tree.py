import numpy as np
import pytest

from spec_jax.tree import Tree


@pytest.mark.smoke
def test_chain():
    tree = Tree.chain(3)
    assert tree.is_chain and tree.size == 4 and tree.max_depth == 3
    np.testing.assert_array_equal(tree.depth_N, [0, 1, 2, 3])
    np.testing.assert_array_equal(tree.ancestor_words_NxW[:, 0], [1, 3, 7, 15])
    np.testing.assert_array_equal(tree.path_NxP, [[0, 4, 4, 4], [0, 1, 4, 4], [0, 1, 2, 4], [0, 1, 2, 3]])
    assert Tree.chain(0).parents == (-1,)


def test_scattered_tree():
    tree = Tree((-1, 0, 0, 1, 1, 2))  # root; a, b; aa, ab, ba
    assert not tree.is_chain
    np.testing.assert_array_equal(tree.depth_N, [0, 1, 1, 2, 2, 2])
    np.testing.assert_array_equal(tree.path_NxP[5], [0, 2, 5])
    assert Tree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0]]) == tree


def test_words_beyond_32_nodes():
    tree = Tree((-1, *([0] * 99)))
    assert tree.ancestor_words_NxW.shape == (100, 4)
    assert tree.ancestor_words_NxW[70].tolist() == [1, 0, 1 << 6, 0]


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((), "root"),
        ((0, 0), "root"),
        ((-1, 1), "cycle"),
        ((-1, 2, 1), "earlier node"),
        ((-1, 0, -1), "second root"),
        ((-1, *range(128)), "at most 128"),
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
