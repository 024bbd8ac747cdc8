"""Inputs and interpreters shared by the kernel tests."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as tpu_interpreter
from jax.experimental.pallas import tpu as pltpu

from spec_jax.tree import Tree

PAGE = 32


@contextlib.contextmanager
def interpreter(name):
    """How a kernel runs without a TPU: `plain` as HLO, `races` with memories, copies and a check for races."""
    if name == "plain":
        yield True
        return
    yield pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
    assert not tpu_interpreter.races.races_found, "the kernel has a race"


def random_tree(rng, size):
    return Tree((-1, *(int(rng.integers(0, node)) for node in range(1, size))))


@dataclasses.dataclass
class Case:
    """Arguments of attention; rows that nobody wrote hold `fill`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    length: jax.Array
    words: jax.Array | None
    tail: int


def case(
    seed, nodes, lengths, capacity, *, heads=4, kv_heads=2, dim=64, dtype=jnp.float32, tree=True, tail=0, fill=np.nan
):
    """A case with a random tree for each row, of which the last `nodes` are new and `tail` were scored before."""
    rng = np.random.default_rng(seed)
    B, size = len(lengths), nodes + tail
    q = rng.standard_normal((B, nodes, heads, dim))
    k, v = (np.full((B, kv_heads, capacity, dim), fill) for _ in range(2))
    for b, length in enumerate(lengths):
        for rows in (k, v):
            rows[b, :, : length + size] = rng.standard_normal((kv_heads, length + size, dim))
    words = None
    if tree:
        words = jnp.stack([jnp.asarray(random_tree(rng, size).ancestor_words_NxW)[tail:] for _ in lengths])
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    return Case(q, k, v, jnp.asarray(lengths, jnp.int32), words, tail)


def paged(k, v, used_B, seed=0, spare=3, page=PAGE):
    """The rows of k and v in shuffled pages of a pool, NaN where unused; returns pages and table."""
    rng = np.random.default_rng(seed)
    B, K, S, D = k.shape
    places = S // page
    pages = np.full((B * places + spare, 2, K, page, D), np.nan)
    table = rng.permutation(len(pages))[: B * places].reshape(B, places).astype(np.int32)
    for b in range(B):
        for i in range(places):
            if i * page < used_B[b]:
                at = slice(i * page, (i + 1) * page)
                pages[table[b, i]] = np.stack([np.asarray(x[b, :, at], np.float32) for x in (k, v)])
            else:
                table[b, i] = -(10**6)  # Never looked at.
    return jnp.asarray(pages, k.dtype), jnp.asarray(table)
