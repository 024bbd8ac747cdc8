"""Every kernel compiles for every chip, by the real TPU compiler: shapes, alignment, memory, in place."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from experiments import tpu_compiler
from kernels_pallas.chips import CHIPS
from kernels_pallas.commit import commit, paged_commit
from kernels_pallas.paged_attention import paged_tree_attention
from kernels_pallas.tree_attention_tpu import tree_attention
from kernels_pallas.write import write

pytestmark = [
    pytest.mark.tpu_compiler,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install -e '.[tpu]'"),
]

B, MAX_SECONDS = 8, 20
FULL, NARROW, WIDE, ODD = (32, 8, 128), (32, 8, 64), (16, 4, 256), (9, 3, 64)  # Heads, KV heads, head_dim.
ATTENTION = [
    # nodes (negative: a chain), heads, capacity, dtype
    (1, FULL, 2176, "bfloat16"),
    (32, FULL, 2176, "bfloat16"),
    (-64, FULL, 2176, "bfloat16"),
    (-256, FULL, 2176, "bfloat16"),
    (128, FULL, 2176, "float32"),
    (128, NARROW, 2176, "bfloat16"),
    (16, WIDE, 2176, "bfloat16"),
    (7, WIDE, 2176, "float32"),
    (5, ODD, 128, "bfloat16"),
    (61, (32, 32, 128), 4096, "bfloat16"),
]


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    tpu_compiler.prepare()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def compiled(chip, function, *arguments, donate=()):
    found = tpu_compiler.compile(function, arguments, tpu_compiler.devices(CHIPS[chip].topology)[0], donate)
    assert found.seconds < MAX_SECONDS
    return found


def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def queries(nodes, heads, dtype):
    """Queries, lengths and words of the contract, and what comes between the first two."""
    num_heads, _, dim = heads
    words = () if nodes < 0 else (array("uint32", B, nodes, -(-nodes // 32)),)
    return array(dtype, B, abs(nodes), num_heads, dim), array("int32", B), words


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("nodes", "heads", "capacity", "dtype"), ATTENTION)
def test_attention(chip, nodes, heads, capacity, dtype):
    q, length, words = queries(nodes, heads, dtype)
    kv = array(dtype, B, heads[1], capacity, heads[2])
    found = compiled(chip, functools.partial(tree_attention, chip=CHIPS[chip]), q, kv, kv, length, *words)
    assert found.text.count("tpu_custom_call") >= 1


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("nodes", "heads", "page", "dtype"),
    [(32, FULL, 32, "bfloat16"), (-64, NARROW, 16, "bfloat16"), (16, WIDE, 128, "bfloat16"), (61, FULL, 64, "float32")],
)
def test_paged_attention(chip, nodes, heads, page, dtype):
    q, length, words = queries(nodes, heads, dtype)
    pages = array(dtype, 512, 2, heads[1], page, heads[2])
    table = array("int32", B, 2048 // page)
    compiled(chip, functools.partial(paged_tree_attention, chip=CHIPS[chip]), q, pages, table, length, *words)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("heads", "new"), [(FULL, 1), (FULL, 64), (WIDE, 33), (FULL, 150)])
def test_write_is_in_place(chip, heads, new, dtype):
    _, K, D = heads
    kv, rows = array(dtype, B, K, 2176, D), array(dtype, B, new, K, D)
    found = compiled(
        chip, functools.partial(write, chip=CHIPS[chip]), kv, kv, array("int32", B), rows, rows, donate=(0, 1)
    )
    size = jnp.dtype(dtype).itemsize * B * K * 2176 * D
    assert found.alias_bytes >= 2 * size and found.temp_bytes < size // 2


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("heads", "num_rows"), [(FULL, 32), ((32, 4, 128), 128), (WIDE, 7)])
def test_commit_is_in_place(chip, heads, num_rows, dtype):
    _, K, D = heads
    vector, path = array("int32", B), array("int32", B, 9)
    kv, pages = array(dtype, B, K, 2176, D), array(dtype, 512, 2, K, 32, D)
    settings = dict(num_rows=num_rows, chip=CHIPS[chip])
    found = compiled(chip, functools.partial(commit, **settings), kv, kv, vector, vector, path, donate=(0, 1))
    paged = compiled(
        chip,
        functools.partial(paged_commit, **settings),
        pages,
        array("int32", B, 64),
        vector,
        vector,
        path,
        donate=(0,),
    )
    size = jnp.dtype(dtype).itemsize * D * K
    assert found.alias_bytes >= 2 * B * 2176 * size and found.temp_bytes < B * 2176 * size // 8
    assert paged.alias_bytes >= 2 * 512 * 32 * size and paged.temp_bytes < 512 * 32 * size // 8
