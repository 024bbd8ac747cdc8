"""Trees grown from scores, against a plain-Python beam."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import growth
from spec_jax.growth import Beam
from spec_jax.tree import Tree


def grown(beam, tables_BxVxV):
    """The trees of drafts that only see their last token: row t of a table holds the logits behind token t."""
    tables_BxVxV = jnp.asarray(tables_BxVxV, jnp.float32)

    def expand(calls, level):
        assert level.words_BxMxW.shape[-1] == -(-beam.num_expanded // 32)
        return jnp.take_along_axis(tables_BxVxV, level.tokens_BxM[..., None], axis=1), calls + 1

    made, calls = jax.jit(lambda: growth.grow(beam, tables_BxVxV[:, 0], expand, jnp.int32(0)))()
    return jax.device_get((made.tokens_BxN, made.parents_BxN, made.valid_BxN, made.row_BxN, calls))


def log_softmax(table):
    return np.minimum(np.asarray(jax.nn.log_softmax(jnp.asarray(table, jnp.float32), axis=-1)), 0.0)


def plain_beam(beam, table):
    """Paths of tokens with their values: a beam of `width`, and the best `size - 1` of all that it looked at."""
    log_p = log_softmax(table)

    def children(path, value):
        last = path[-1] if path else 0
        order = np.argsort(-log_p[last], kind="stable")[: beam.width]
        return [((*path, int(token)), np.float32(value + log_p[last][token])) for token in order]

    level = pool = children((), np.float32(0.0))
    for _ in range(beam.max_depth - 1):
        before = sum(sorted((np.exp(v) for _, v in pool), reverse=True)[: beam.size - 1])
        level = [child for node in level for child in children(*node)]
        pool = pool + level
        level = sorted(level, key=lambda node: -node[1])[: beam.width]
        gain = sum(sorted((np.exp(v) for _, v in pool), reverse=True)[: beam.size - 1]) - before
        if beam.threshold is not None and gain <= beam.threshold:
            break
    return dict(sorted(pool, key=lambda node: -node[1])[: beam.size - 1])


def paths_of(tokens, parents, valid):
    paths = [()]
    for node in range(1, len(tokens)):
        paths.append((*paths[parents[node]], int(tokens[node])) if valid[node] else None)
    return paths


@pytest.mark.parametrize(
    "beam", [Beam(8, 3, 3), Beam(20, 4, 4), Beam(30, 2, 3), Beam.opt_tree(9, 5, 0.3), Beam(2, 1, 1), Beam(40, 5, 2)]
)
def test_the_best_of_a_beam(beam):
    rng = np.random.default_rng(0)
    tables = 2.0 * rng.standard_normal((5, 7, 7))
    tokens, parents, valid, rows, _ = grown(beam, tables)
    for row in range(5):
        Tree(tuple(parents[row].tolist()))  # a tree, invalid nodes and all
        wanted = plain_beam(beam, tables[row])
        paths = paths_of(tokens[row], parents[row], valid[row])
        assert {path for path in paths[1:] if path} == wanted.keys() and valid[row].sum() == len(wanted) + 1
        depths = [len(path) for path in paths if path is not None]
        assert depths == sorted(depths), "level order"
        # Every inner node was expanded and has a scratch row of its own.
        inner = {parents[row][n] for n in range(1, beam.size) if valid[row][n]} - {0}
        held = [rows[row][n] for n in inner]
        assert all(0 <= r < beam.num_expanded for r in held) and len(set(held)) == len(held)


def test_equal_scores_never_orphan_a_child():
    """A sure child is worth as much as its parent, and whole levels tie."""
    sure = np.full((4, 4), -1e9)
    sure[np.arange(4), (np.arange(4) + 1) % 4] = 0.0
    tables = np.stack([sure, np.zeros((4, 4))])
    for size in range(2, 16):
        tokens, parents, valid, _, _ = grown(Beam(size, min(5, size - 1), 3), tables)
        for row in range(2):
            for node in range(1, size):
                assert 0 <= parents[row, node] < node
                assert not valid[row, node] or valid[row, parents[row, node]]
    # The sure chain is kept down to the last level.
    assert (1, 2, 3, 0, 1) in paths_of(tokens[0], parents[0], valid[0])


def test_more_places_than_candidates():
    """A vocabulary of two tokens, a beam of five: nothing is made up."""
    tables = np.random.default_rng(1).standard_normal((3, 2, 2))
    tokens, parents, valid, _, _ = grown(Beam(40, 3, 5), tables)
    for row in range(3):
        paths = [path for path in paths_of(tokens[row], parents[row], valid[row])[1:] if path is not None]
        assert len(paths) == len(set(paths)) == 2 + 4 + 8
        assert (parents[row][~valid[row]] == 0).all()


def test_growing_stops_when_no_row_gains():
    flat = np.zeros((2, 32, 32))
    *_, calls = grown(Beam(9, 6, 8, threshold=0.9), flat)
    assert calls == 1
    *_, calls = grown(Beam(9, 6, 8), flat)
    assert calls == 5


def test_words_are_the_ancestors_among_the_scratch_rows():
    beam, seen = Beam(40, 4, 3), {}
    tables = 2.0 * np.random.default_rng(2).standard_normal((1, 5, 5))

    def expand(carry, level):
        jax.debug.callback(lambda level: seen.update({int(level.depth): jax.device_get(level)}), level)
        return jnp.take_along_axis(jnp.asarray(tables, jnp.float32), level.tokens_BxM[..., None], axis=1), carry

    growth.grow(beam, jnp.asarray(tables[:, 0], jnp.float32), expand, ())
    jax.effects_barrier()
    table, rows = log_softmax(tables[0]), {}
    for depth in (1, 2, 3):
        level = seen[depth]
        assert level.tail == (depth - 1) * 3
        for slot in range(3):
            row = (depth - 1) * 3 + slot
            above = [r for r in range(9) if level.words_BxMxW[0, slot, 0] >> r & 1]
            assert above[-1] == row and len(above) == depth
            assert level.parent_BxM[0, slot] == (above[-2] if depth > 1 else 9), "the row of its parent; 9 is the root"
            rows[row] = (*(rows[above[-2]] if depth > 1 else ()), int(level.tokens_BxM[0, slot]))
    best = sorted(((table[0][a] + table[a][b], (a, b)) for a in range(5) for b in range(5)), reverse=True)
    assert rows[3] in [path for _, path in best[:3]]
