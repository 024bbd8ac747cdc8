"""The commit kernels against the reference: accepted rows move, rejected ones are scratch, nothing else changes."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import paged_attention
from kernels_pallas.checks import KernelError
from kernels_pallas.chips import CHIPS
from kernels_pallas.commit import commit, commit_reference, paged_commit
from tests.kernels_pallas.common import case, interpreter, paged

V6E = CHIPS["v6e"]
NODES = 37


def drawn(seed, lengths, dtype, capacity=256, dim=64):
    """Ascending paths of different lengths: one moves, one is in place already, one is empty, one is whole."""
    rng = np.random.default_rng(seed)
    c = case(seed, nodes=NODES, lengths=lengths, capacity=capacity, dim=dim, dtype=dtype)
    path = np.full((len(lengths), 9), 10**6, np.int32)
    count = np.zeros(len(lengths), np.int32)
    for b in range(len(lengths)):
        count[b] = (4, 3, 0, 9)[b % 4]
        chosen = np.sort(rng.choice(np.arange(1, NODES), count[b], replace=False))
        chosen[:1] = 0
        path[b, : count[b]] = np.arange(count[b]) if b % 4 == 1 else chosen
    return c, jnp.asarray(count), jnp.asarray(path)


def assert_committed(got, before, c, count, path):
    want = commit_reference(before, c.length, count, path)
    for b, length in enumerate(np.asarray(c.length + count)):
        np.testing.assert_array_equal(*(np.asarray(x[b, :, :length], np.float32) for x in (got, want)))
        # The nodes that were rejected are not rows of anybody else, and the rest of the buffer is as it was.
        tail = length + NODES
        np.testing.assert_array_equal(*(np.asarray(x[b, :, tail:], np.float32) for x in (got, before)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("mode", ["plain", "races"])
def test_commit_equals_reference(mode, dtype):
    c, count, path = drawn(0, (0, 5, 31, 100, 256 - NODES, 64, 1, 17), dtype)
    with interpreter(mode) as interpret:
        keys, values = commit(c.k, c.v, c.length, count, path, num_rows=NODES, chip=V6E, interpret=interpret)
    assert_committed(keys, c.k, c, count, path)
    assert_committed(values, c.v, c, count, path)


@pytest.mark.parametrize("mode", ["plain", "races"])
def test_what_leaves_the_buffer_is_not_moved(mode):
    """Rows at the end of their buffer, and paths and counts that are too large: the rest is as the reference has it."""
    c = case(2, nodes=8, lengths=(120, 120, 120, 60), capacity=128)
    length = jnp.asarray([124, 128, 100, 60], jnp.int32)
    count, path = jnp.asarray([3, 3, 9, 2], jnp.int32), jnp.asarray([[0, 2, 5], [0, 2, 5], [0, 2, 5], [0, 60, 61]])
    with interpreter(mode) as interpret:
        keys, _ = commit(c.k, c.v, length, count, path, num_rows=8, chip=V6E, interpret=interpret)
    want = commit_reference(c.k, length, count, path)
    for row, end in enumerate((127, 128, 103, 61)):
        np.testing.assert_array_equal(keys[row, :, :end], want[row, :, :end])
    np.testing.assert_array_equal(keys[3, :, 68:], c.k[3, :, 68:])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("mode", ["plain", "races"])
def test_paged_commit_equals_reference(mode, dtype):
    c, count, path = drawn(1, (0, 5, 30, 63, 128 - NODES, 64, 1, 17), dtype, capacity=128)
    pages, table = paged(c.k, c.v, np.asarray(c.length) + NODES)
    with interpreter(mode) as interpret:
        got = paged_commit(pages, table, c.length, count, path, num_rows=NODES, chip=V6E, interpret=interpret)
    before, after = paged_attention.contiguous(pages, table), paged_attention.contiguous(got, table)
    for old, new in zip(before, after, strict=True):
        assert_committed(new, old, c, count, path)
    unused = np.setdiff1d(np.arange(len(pages)), np.asarray(table))
    np.testing.assert_array_equal(np.asarray(got[unused], np.float32), np.asarray(pages[unused], np.float32))


def test_nodes_that_are_not_numbers_stay_where_they_are():
    c, count, path = drawn(2, (10,), jnp.bfloat16)
    rejected = np.setdiff1d(np.arange(NODES), np.asarray(path[0, :4]))
    k = c.k.at[0, :, 10 + rejected].set(jnp.nan)
    keys, _ = commit(k, k, c.length, count, path, num_rows=NODES, chip=V6E, interpret=True)
    assert np.isfinite(np.asarray(keys[0, :, :14], np.float32)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_rows=1025), "1 to 1024 rows behind the prefix, got num_rows=1025"),
        (dict(count_B=jnp.zeros(3, jnp.int32)), r"count must be int32 \[1\]"),
        (dict(path_BxP=jnp.zeros((2, 9), jnp.int32)), r"path must be int32 \[1, 9\]"),
        (dict(path_BxP=jnp.zeros((1, 0), jnp.int32)), r"every array needs a value, .* path \[1, 0\]"),
        (
            {name: jnp.zeros((1, 64, 2048, 128)) for name in ("keys_BxKxSxD", "values_BxKxSxD")}
            | dict(num_rows=1024, chip=CHIPS["v5p"]),
            "windows of 1040 positions of 64 heads of 128, float32, need .* MiB, and a v5p has 32 MiB",
        ),
        (dict(values_BxKxSxD=jnp.zeros((1, 2, 256, 64), jnp.bfloat16)), "both be float32 or both bfloat16"),
        (dict(values_BxKxSxD=jnp.zeros((1, 2, 128, 64))), r"values.shape=\(1, 2, 128, 64\)"),
        (dict(chip=None), "Chip"),
    ],
)
def test_refusals(untyped, change, message):
    c, count, path = drawn(3, (10,), jnp.float32)
    arguments = dict(keys_BxKxSxD=c.k, values_BxKxSxD=c.v, length_B=c.length, count_B=count, path_BxP=path)
    with pytest.raises(KernelError, match=message):
        commit(**(arguments | dict(num_rows=NODES, chip=V6E, interpret=True) | change))


def test_a_row_that_commits_nothing_needs_no_room():
    c, count, path = drawn(5, (3, 60), jnp.float32, capacity=128)
    pages, table = paged(c.k, c.v, np.asarray(c.length) + NODES)
    count, table = jnp.asarray([3, 0], jnp.int32), table[:, :2]
    path = jnp.asarray([[0, 2, 5], [0, 0, 0]], jnp.int32)
    got = paged_commit(pages, table, c.length, count, path, num_rows=8, chip=V6E, interpret=True)
    keys, before = (paged_attention.contiguous(x, table)[0] for x in (got, pages))
    want = commit_reference(before, c.length, count, path)
    np.testing.assert_array_equal(keys[0, :, :6], want[0, :, :6])
    np.testing.assert_array_equal(keys[1], before[1])


def test_a_shared_page_is_not_written():
    c, count, path = drawn(4, (10, 12), jnp.float32, capacity=64)
    pages, table = paged(c.k, c.v, np.asarray(c.length) + NODES)
    with pytest.raises(KernelError, match="shared"):
        paged_commit(pages, table.at[1].set(table[0]), c.length, count, path, num_rows=NODES, chip=V6E, interpret=True)
