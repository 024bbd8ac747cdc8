import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import shapes
from spec_jax.growth import Beam
from spec_jax.tree import Tree

SMALL = [(size, depth) for size in range(1, 8) for depth in (1, 2, 3, None)]


def retrieve_indices(tree):
    """Medusa's: one row a leaf, the last leaf first, -1 behind the end."""
    leaves = [node for node in reversed(range(tree.size)) if not tree.children[node]]
    path_LxP = np.asarray(tree.topology.path(jnp.asarray(leaves, jnp.int32), tree.max_depth + 1))
    return np.where(path_LxP == tree.size, -1, path_LxP)


def tree_indices(paths):
    """Medusa's: where each node's token stands in the root's token and the 10 best of every head."""
    ordered = sorted(paths, key=lambda path: (len(path), path))
    return np.asarray([0, *(path[-1] + 10 * (len(path) - 1) + 1 for path in ordered)])


@pytest.mark.smoke
def test_medusa_tree_has_the_published_buffers():
    tree = shapes.published("medusa_mc_sim_7b_63")
    assert tree.size == 64 and tree.max_children == 10
    assert np.bincount(tree.depth_N).tolist() == [1, 10, 28, 23, 2]
    assert tree.depth_N[-6:].tolist() == [3, 3, 3, 3, 4, 4]
    retrieve = retrieve_indices(tree)
    assert retrieve.shape == (42, 5)
    assert retrieve[:3].tolist() == [[0, 1, 11, 39, 63], [0, 1, 11, 39, 62], [0, 3, 28, 61, -1]]
    assert retrieve[-1].tolist() == [0, 1, 19, -1, -1]
    indices = tree_indices(shapes.PUBLISHED["medusa_mc_sim_7b_63"])
    assert indices[:15].tolist() == list(range(15))
    assert indices[-6:].tolist() == [21, 21, 22, 21, 31, 32]
    np.testing.assert_array_equal(indices[1:], tree.rank_N[1:] + 10 * (tree.depth_N[1:] - 1) + 1)


def test_eagle_tree_has_the_published_buffers():
    tree = shapes.published("eagle_mc_sim_7b_63")
    assert tree.size == 26 and tree.max_depth == 5
    assert np.bincount(tree.depth_N).tolist() == [1, 4, 8, 8, 3, 2]
    # By hand from the list.
    assert tree.parents == (-1, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4, 5, 5, 5, 6, 6, 7, 7, 8, 13, 13, 13, 21, 21)
    retrieve = retrieve_indices(tree)
    assert retrieve.shape == (15, 6)
    assert retrieve[0].tolist() == [0, 1, 5, 13, 21, 25]
    assert retrieve[-1].tolist() == [0, 2, 9, -1, -1, -1]


@pytest.mark.parametrize(("name", "count"), [("medusa_mc_sim_7b_63", 63), ("eagle_mc_sim_7b_63", 25)])
def test_published_lists_skip_no_rank(name, count):
    paths = set(shapes.PUBLISHED[name])
    assert len(paths) == len(shapes.PUBLISHED[name]) == count
    assert all((*path[:-1], rank) in paths for path in paths for rank in range(path[-1]))


def test_unknown_published_name():
    with pytest.raises(ValueError, match="mc_sim_7b_63'; choose one of medusa_mc_sim_7b_63, eagle_mc_sim_7b_63"):
        shapes.published("mc_sim_7b_63")


def forests(nodes, levels, width, above=(), rank=0):
    """Every ordered forest of that many nodes below `above`, as sets of paths of ranks."""
    if not nodes:
        yield ()
    elif levels and width > rank:
        for first in range(1, nodes + 1):
            path = (*above, rank)
            below = forests(first - 1, levels - 1, width, path)
            for child, rest in itertools.product(below, forests(nodes - first, levels, width, above, rank + 1)):
                yield (path, *child, *rest)


def worth(paths, accuracy):
    return 1.0 + sum(np.prod([accuracy[depth][rank] for depth, rank in enumerate(path)]) for path in paths)


def random_table(seed, rows, width, descending):
    table = np.random.default_rng(seed).dirichlet(np.full(width + 1, 0.7), rows)[:, :width]
    return -np.sort(-table, axis=1) if descending else table


def test_brute_force_counts_all_trees():
    assert [len(set(forests(n, n, n))) for n in range(1, 7)] == [1, 2, 5, 14, 42, 132]  # Catalan


@pytest.mark.parametrize("seed", range(6))
def test_sequoia_is_the_best_of_all_trees(seed):
    width = 1 + seed % 3
    (acceptance,) = random_table(seed, 1, width, descending=seed < 3)
    for size, max_depth in SMALL:
        levels = max_depth or size - 1
        all_trees = list(forests(size - 1, levels, width))
        if not all_trees:
            with pytest.raises(ValueError, match=f"{width} children a node and depth {levels} make at most"):
                shapes.sequoia(acceptance, size, max_depth)
            continue
        tree = shapes.sequoia(acceptance, size, max_depth)
        assert tree.size == size and tree.max_depth <= levels and tree.max_children <= width
        assert (np.diff(tree.depth_N) >= 0).all()
        best = max(worth(paths, [acceptance] * size) for paths in all_trees)
        assert shapes.expected_tokens(tree, acceptance) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_search_is_the_best_of_all_trees(seed):
    depth, width = 1 + seed % 4, 3
    accuracy = random_table(10 + seed, depth, width, descending=seed % 2 == 0)
    for size in range(1, 8):
        all_trees = list(forests(size - 1, depth, width))
        if not all_trees:
            with pytest.raises(ValueError, match="make at most 4 nodes"):
                shapes.search(accuracy, size)
            continue
        best = max(all_trees, key=lambda paths: worth(paths, accuracy))
        assert shapes.search(accuracy, size) == Tree.from_paths(best)


def test_search_is_medusas_greedy_where_accuracy_falls_with_rank():
    accuracy = random_table(3, 5, 10, descending=True)
    frontier, paths = {(0,)}, []
    for _ in range(63):
        path = max(frontier, key=lambda path: worth([path], accuracy))
        frontier.remove(path)
        paths.append(path)
        frontier |= {(*path[:-1], rank) for rank in [path[-1] + 1] if rank < 10}
        frontier |= {(*path, 0)} if len(path) < 5 else set()
    assert shapes.search(accuracy, 64) == Tree.from_paths(paths)


def test_known_trees():
    assert shapes.sequoia([1.0], 5) == shapes.sequoia([0.9, 0.1], 5) == Tree.chain(4)
    assert shapes.sequoia([0.2, 0.2, 0.2], 4) == Tree.branching([3])
    assert shapes.sequoia([0.9, 0.1], 5, max_depth=3) == Tree((-1, 0, 0, 1, 3))
    assert shapes.sequoia([0.0, 0.0], 7, max_depth=2) == Tree.branching([2, 2])
    assert shapes.sequoia([0.5], 1) == shapes.search([[0.5]], 1) == Tree.chain(0)
    assert shapes.sequoia([0.5, 0.3, 0.1], 128).size == 128
    # A worse elder sibling is the price of a good younger one, which greed would not pay.
    assert shapes.search([[0.1, 0.8], [0.2, 0.1]], 3) == Tree.branching([2])


def test_expected_tokens():
    assert shapes.expected_tokens(Tree.chain(0), [0.3]) == 1.0
    assert shapes.expected_tokens(Tree.chain(3), [0.5]) == pytest.approx(1.875)
    assert shapes.expected_tokens(Tree((-1, 0, 0, 1, 2, 2)), np.asarray([0.6, 0.3])) == pytest.approx(2.53)
    with pytest.raises(ValueError, match="nodes of 3 children.*got 2"):
        shapes.expected_tokens(Tree.branching([3]), [0.5, 0.2])


@pytest.mark.parametrize("acceptance", [[], [0.5, -0.1], [1.1], [0.7, 0.4], [float("nan")]])
def test_what_is_no_acceptance_is_refused(acceptance):
    calls = [
        lambda: shapes.sequoia(acceptance, 2),
        lambda: shapes.search([acceptance], 2),
        lambda: shapes.expected_tokens(Tree.chain(1), acceptance),
        lambda: shapes.plan(acceptance, [2], [1], 1.0, float),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"must be probabilities in \[0, 1\]|must hold one probability"):
            call()


def test_what_is_no_tree_is_refused():
    for size in (0, 129):
        with pytest.raises(ValueError, match=f"between 1 and 128 nodes with its root, got {size}"):
            shapes.sequoia([0.5], size)
        with pytest.raises(ValueError, match="between 1 and 128"):
            shapes.search([[0.5]], size)
    with pytest.raises(ValueError, match="max_depth must be >= 1"):
        shapes.sequoia([0.5], 1, max_depth=0)
    with pytest.raises(ValueError, match="2 children a node and depth 2 make at most 7 nodes .* got size 8"):
        shapes.sequoia([0.5, 0.2], 8, max_depth=2)
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        shapes.search(np.full(3, 0.1), 2)


@pytest.mark.parametrize("t_draft", [0.0, 0.1, 0.4, 3.0])
def test_plan_is_the_cheapest_of_all_trees(t_draft):
    acceptance, sizes, depths = [0.6, 0.2], [1, 3, 5, 7], [4, 1, 2, 3]
    asked = []

    def t_target(size):
        asked.append(size)
        return 1.0 + 0.05 * size

    tree, seconds = shapes.plan(acceptance, sizes, depths, t_draft, t_target)
    assert asked == sizes
    cost = {
        paths: (max(map(len, paths), default=0) * t_draft + 1.0 + 0.05 * size) / worth(paths, [acceptance] * 4)
        for size in sizes
        for paths in forests(size - 1, 4, 2)
    }
    assert seconds == pytest.approx(min(cost.values()), rel=1e-12)
    own = tree.max_depth * t_draft + 1.0 + 0.05 * tree.size
    assert seconds == pytest.approx(own / shapes.expected_tokens(tree, acceptance), rel=1e-12)
    if t_draft == 3.0:
        assert tree == Tree.chain(0)


def test_plan_refuses():
    good = {"acceptance": [0.5, 0.2], "sizes": [4], "depths": [2], "t_draft": 0.1, "t_target": lambda size: 1.0}
    shapes.plan(**good)
    for change, message in [
        ({"sizes": []}, "at least one size"),
        ({"depths": []}, "at least one size"),
        ({"depths": [2, 0]}, "depth >= 1"),
        ({"sizes": [4, 129]}, "between 1 and 128"),
        ({"depths": [1]}, r"2 children a node and depths \[1\] hold no tree of the sizes \[4\]"),
        ({"t_draft": -1.0}, "t_draft=-1.0"),
        ({"t_target": lambda size: 0.0}, r"t_target\(4\)=0.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            shapes.plan(**good | change)


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("4", Tree.chain(4)),
        ("0", Tree.chain(0)),
        ("3x2x1", Tree.branching([3, 2, 1])),
        ("medusa_mc_sim_7b_63", shapes.published("medusa_mc_sim_7b_63")),
        ("eagle_mc_sim_7b_63", shapes.published("eagle_mc_sim_7b_63")),
        ("beam:60x6x10", Beam.eagle2()),
        ("beam:8x3x2", Beam(8, 3, 2)),
        ("opt:50x10", Beam.opt_tree()),
        ("paths:0/1/0.0/0.1", Tree((-1, 0, 0, 1, 1))),
        ("paths:0.0.0/0.0/0", Tree.chain(3)),
    ],
)
def test_parse(text, tree):
    assert shapes.parse(text) == tree


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "names no tree; the forms are") for text in ["", "four", "-1", "3x", "x3", "3X2", "4.5", ":4", "2 x"]),
        *((text, "SIZExDEPTHxWIDTH") for text in ["beam:8x3", "beam:", "opt:8", "opt:8x3x2", "tree:4", "opt:beam:8x3"]),
        *((text, "paths:0/1/0.0") for text in ["paths:", "paths:0//1", "paths:0..1", "paths:a", "paths:-1"]),
        ("paths:0/1.0", r"without a parent.*\(1,\)"),
        ("paths:0/0.1", r"must not be skipped.*\(0, 0\)"),
        ("128", "between 1 and 128"),
        ("3x0", "at least one child"),
        ("10x10x10", "between 1 and 128"),
        ("beam:8x8x2", "depth between 1 and 7"),
        ("beam:8x3x0", "width must be between 1 and 128"),
        ("opt:200x3", "between 1 and 128"),
    ],
)
def test_parse_refuses(text, message):
    with pytest.raises(ValueError, match=message):
        shapes.parse(text)
