import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.kv import KVBuffer


def filled(batch=2, capacity=8, length=(2, 5)):
    """A buffer whose row s of batch row b holds 100 b + s."""
    value = 100.0 * np.arange(batch)[:, None] + np.arange(capacity)[None]
    rows = jnp.asarray(np.broadcast_to(value[:, None, :, None], (batch, 1, capacity, 2)), jnp.float32)
    return KVBuffer((rows, rows), (rows, rows), jnp.asarray(length, jnp.int32), jnp.int32(0))


def new_rows(batch, count):
    return jnp.broadcast_to(-1.0 - jnp.arange(count, dtype=jnp.float32)[None, :, None, None], (batch, count, 1, 2))


@pytest.mark.smoke
def test_write_is_scratch_behind_each_rows_own_length():
    kv = filled().write(1, new_rows(2, 2), new_rows(2, 2))
    np.testing.assert_array_equal(kv.keys[1][0, 0, :, 0], [0, 1, -1, -2, 4, 5, 6, 7])
    np.testing.assert_array_equal(kv.keys[1][1, 0, :, 0], [100, 101, 102, 103, 104, -1, -2, 107])
    np.testing.assert_array_equal(kv.keys[0], filled().keys[0])
    np.testing.assert_array_equal(kv.length_B, [2, 5])


def test_a_write_past_the_buffer_is_dropped_and_lands_nowhere_else():
    """dynamic_update_slice would clamp and destroy committed rows; an index of -1 would wrap."""
    kv = filled(length=(6, 8)).write(0, new_rows(2, 3), new_rows(2, 3))
    np.testing.assert_array_equal(kv.keys[0][0, 0, :, 0], [0, 1, 2, 3, 4, 5, -1, -2])
    np.testing.assert_array_equal(kv.keys[0][1, 0, :, 0], 100 + np.arange(8))


def test_commit_of_a_chain_moves_nothing():
    kv = filled().commit(jnp.array([3, 0], jnp.int32))
    np.testing.assert_array_equal(kv.length_B, [5, 5])
    np.testing.assert_array_equal(kv.keys[0], filled().keys[0])


def test_commit_compacts_scattered_paths_of_each_row():
    """Nodes [root; a, b; aa, ab, ba]: row 0 accepts b, ba (2, 5), row 1 accepts a (1) and no more."""
    kv = filled(capacity=12, length=(2, 4))
    path = jnp.array([[0, 2, 5], [0, 1, 6]], jnp.int32)
    kv = kv.commit(jnp.array([3, 2], jnp.int32), path)
    np.testing.assert_array_equal(kv.length_B, [5, 6])
    np.testing.assert_array_equal(kv.values[1][0, 0, :5, 0], [0, 1, 2, 4, 7])
    np.testing.assert_array_equal(kv.values[1][1, 0, :, 0], 100 + np.arange(12))


def test_commit_of_nothing_leaves_the_last_slot_alone():
    kv = filled(length=(7, 5)).commit(jnp.array([0, 0], jnp.int32), jnp.array([[0, 3, 6], [0, 6, 6]], jnp.int32))
    np.testing.assert_array_equal(kv.keys[0], filled().keys[0])
    np.testing.assert_array_equal(kv.length_B, [7, 5])


def test_later_levels_are_written_behind_the_earlier_ones():
    kv = filled().with_tail(2).write(0, new_rows(2, 1), new_rows(2, 1))
    for row, place in enumerate((4, 7)):
        assert np.flatnonzero(np.asarray(kv.keys[0])[row, 0, :, 0] == -1).tolist() == [place]
    assert int(kv.commit(jnp.array([1, 1], jnp.int32)).tail) == 0
