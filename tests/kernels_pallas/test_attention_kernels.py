"""The attention kernels against the reference: one suite over both kernels, both interpreters and every input kind."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import copies, paged_attention
from kernels_pallas.checks import KernelError
from kernels_pallas.chips import CHIPS, chip_named, chip_of
from kernels_pallas.tree_attention import tree_attention_reference
from kernels_pallas.tree_attention_tpu import tree_attention
from tests.kernels_pallas.common import PAGE, case, interpreter, paged

V6E = CHIPS["v6e"]

CASES = {
    "one node": dict(nodes=1, lengths=(0, 127), capacity=128),
    "tree, ragged": dict(nodes=7, lengths=(0, 1, 640 - 7), capacity=640),
    "tail over a block's end": dict(nodes=33, lengths=(511, 509, 500, 512), capacity=640, dim=128),
    "two levels": dict(nodes=12, lengths=(30, 3, 200), capacity=256, tail=21),
    "128 nodes": dict(nodes=128, lengths=(500, 0), capacity=640, heads=8),
    "wide head, many queries": dict(nodes=9, lengths=(20, 5), capacity=128, dim=256, heads=8, kv_heads=1),
    "bfloat16 tree": dict(nodes=16, lengths=(130, 40, 239), capacity=256, dtype=jnp.bfloat16, dim=128),
    "bfloat16 odd": dict(nodes=5, lengths=(0, 129, 61), capacity=256, dtype=jnp.bfloat16, heads=9, kv_heads=3),
    "chain": dict(nodes=6, lengths=(0, 133), capacity=256, tree=False),
    "chain behind a tail": dict(nodes=6, lengths=(11, 133), capacity=256, tree=False, tail=5),
    "prefill in query blocks": dict(nodes=140, lengths=(0, 100), capacity=256, tree=False, dtype=jnp.bfloat16),
    "huge scratch": dict(nodes=7, lengths=(0, 100), capacity=256, fill=1e4),
}


def run(kernel, c, interpret, scale=None):
    if kernel == "contiguous":
        return tree_attention(c.q, c.k, c.v, c.length, c.words, scale, c.tail, chip=V6E, interpret=interpret)
    pages, table = paged(c.k, c.v, np.asarray(c.length) + c.tail + c.q.shape[1])
    return paged_attention.paged_tree_attention(
        c.q, pages, table, c.length, c.words, scale, c.tail, chip=V6E, interpret=interpret
    )


def assert_agree(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape
    # Half a unit in the last place of the output, and one for weights that were rounded before they were summed.
    tolerance = 2e-6 if want.dtype == jnp.float32 else 2**-7
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kernel", ["contiguous", "paged"])
def test_kernel_equals_reference(kernel, name):
    c = case(0, **CASES[name])
    want = tree_attention_reference(c.q, c.k, c.v, c.length, c.words, None, c.tail)
    with interpreter("plain") as interpret:
        assert_agree(run(kernel, c, interpret), want)


@pytest.mark.parametrize("name", ["tree, ragged", "tail over a block's end", "bfloat16 odd", "prefill in query blocks"])
@pytest.mark.parametrize("kernel", ["contiguous", "paged"])
def test_tpu_interpreter_finds_no_race(kernel, name):
    c = case(1, **CASES[name])
    want = tree_attention_reference(c.q, c.k, c.v, c.length, c.words, None, c.tail)
    with interpreter("races") as interpret:
        assert_agree(run(kernel, c, interpret), want)


@pytest.mark.smoke
@pytest.mark.parametrize("kernel", ["contiguous", "paged"])
def test_scale(kernel):
    c = case(2, nodes=4, lengths=(9,), capacity=128)
    with interpreter("plain") as interpret:
        got = run(kernel, c, interpret, scale=0.5)
    assert_agree(got, tree_attention_reference(c.q, c.k, c.v, c.length, c.words, 0.5))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kernel", ["reference", "contiguous", "paged"])
def test_a_branch_of_nan_does_not_reach_its_siblings(kernel, dtype):
    """Values of node 1 are no numbers: nodes 0 and 2 do not see it and do not notice."""
    c = case(8, nodes=3, lengths=(9, 127), capacity=256, dtype=dtype)
    c.words = jnp.asarray([[[1], [3], [5]]] * 2, jnp.uint32)
    spoiled = dataclasses.replace(c, v=c.v.at[0, :, 10].set(jnp.nan).at[1, :, 128, ::2].set(jnp.inf))

    def outputs(c):
        if kernel == "reference":
            return tree_attention_reference(c.q, c.k, c.v, c.length, c.words)
        return run(kernel, c, True)

    got, want = (np.asarray(outputs(x), np.float32)[:, [0, 2]] for x in (spoiled, c))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kernel", ["contiguous", "paged"])
def test_bits_beyond_the_tail_show_nothing(kernel):
    c = case(9, nodes=4, lengths=(9, 125), capacity=256, fill=1e4)
    loud = dataclasses.replace(c, words=c.words | jnp.uint32(2**32 - 2**4))
    want = tree_attention_reference(c.q, c.k, c.v, c.length, c.words)
    assert_agree(tree_attention_reference(loud.q, loud.k, loud.v, loud.length, loud.words), want)
    assert_agree(run(kernel, loud, True), want)


def test_gradients_are_the_references():
    c = case(7, nodes=5, lengths=(9, 0), capacity=128)

    def loss(attend, q, k, v):
        return jnp.sum(jnp.sin(attend(q, k, v, c.length, c.words)))

    def kernel(*arguments):
        return tree_attention(*arguments, chip=V6E, interpret=True)

    got, want = (
        jax.grad(loss, argnums=(1, 2, 3))(attend, c.q, c.k, c.v) for attend in (kernel, tree_attention_reference)
    )
    for ours, theirs in zip(got, want, strict=True):
        assert np.isfinite(np.asarray(ours)).all() and np.asarray(ours).any()
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_rows_may_share_the_pages_of_a_prefix():
    c = case(3, nodes=3, lengths=(PAGE + 4, PAGE + 9), capacity=128)
    k, v = (x.at[1, :, :PAGE].set(x[0, :, :PAGE]) for x in (c.k, c.v))
    pages, table = paged(k, v, np.asarray(c.length) + 3)
    shared = table.at[1, 0].set(table[0, 0])
    want = tree_attention_reference(c.q, k, v, c.length, c.words)
    with interpreter("plain") as interpret:
        got = paged_attention.paged_tree_attention(c.q, pages, shared, c.length, c.words, chip=V6E, interpret=interpret)
    assert_agree(got, want)
    with pytest.raises(KernelError, match="shared"):
        paged_attention.check_table(shared, np.array([4, 9]), 3, len(pages), PAGE)


def test_the_prefix_needs_no_room_for_nodes_that_do_not_fit():
    """A finished row near the end of its buffer: what does not fit was dropped, and its mates do not notice."""
    c = case(4, nodes=8, lengths=(120, 40), capacity=128)
    late = c.length.at[0].set(124)
    want = tree_attention_reference(c.q, c.k, c.v, late, c.words)
    with interpreter("plain") as interpret:
        got = tree_attention(c.q, c.k, c.v, late, c.words, chip=V6E, interpret=interpret)
    assert_agree(got, want)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_every_chip_takes_the_same_mask(chip):
    c = case(5, nodes=9, lengths=(100, 3), capacity=256)
    got = tree_attention(c.q, c.k, c.v, c.length, c.words, chip=chip, interpret=True)
    assert_agree(got, tree_attention_reference(c.q, c.k, c.v, c.length, c.words))


def _refused(change):
    c = case(6, nodes=4, lengths=(9, 2), capacity=128)
    arguments = dict(q=c.q, k=c.k, v=c.v, length=c.length, words=c.words, scale=None, tail=0, chip=V6E) | change(c)
    *positional, chip = arguments.values()
    tree_attention(*positional, chip=chip, interpret=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: dict(v=c.v[:, :1]), r"keys and values must both.*v_BxKxSxD.shape=\(2, 1, 128, 64\)"),
        (lambda c: dict(q=c.q[..., :32]), r"disagree about head_dim.*32"),
        (lambda c: {name: getattr(c, name)[..., :32] for name in "qkv"}, r"head_dim 32 .*\(64, 128, 256\)"),
        (lambda c: dict(q=c.q.astype(jnp.bfloat16)), "must all be float32 or all bfloat16, got bfloat16"),
        (lambda c: {name: getattr(c, name).astype(jnp.float16) for name in "qkv"}, "float16"),
        (lambda c: dict(q=c.q[:, :, :3]), "3 query heads are no multiple of 2"),
        (lambda c: dict(length=c.length[:1]), r"int32 \[2\]"),
        (lambda c: dict(words=c.words[:, :2]), r"uint32 \[2, 4, W\]"),
        (lambda c: dict(k=c.k[:, :, :100], v=c.v[:, :, :100]), "100 positions, expected a multiple of 128"),
        (lambda c: dict(scale=-1.0), "must be a positive number.* got -1.0"),
        (lambda c: dict(tail=1.5), "the tail must be one whole number, got 1.5"),
        (lambda c: dict(q=c.q[:, :0], words=c.words[:, :0]), r"every array needs a value, got queries \[2, 0, 4, 64\]"),
        (lambda c: dict(q=c.q[0]), r"queries must be \[B, N, H, D\]"),
        (lambda c: dict(chip="v6e"), "chip_named"),
    ],
)
def test_refusals(untyped, change, message):
    with pytest.raises(KernelError, match=message):
        _refused(change)


def test_more_than_128_nodes_are_refused():
    q = jnp.zeros((1, 129, 2, 64))
    k = jnp.zeros((1, 2, 256, 64))
    with pytest.raises(KernelError, match="at most 128 nodes, got 129"):
        tree_attention(q, k, k, jnp.zeros(1, jnp.int32), jnp.zeros((1, 129, 5), jnp.uint32), chip=V6E)


def test_words_need_a_bit_for_every_node():
    q, k = jnp.zeros((1, 40, 2, 64)), jnp.zeros((1, 2, 256, 64))
    with pytest.raises(KernelError, match=r"40 nodes need a bit each, and ancestor words \(1, 40, 1\) have 32"):
        tree_attention(q, k, k, jnp.zeros(1, jnp.int32), jnp.zeros((1, 40, 1), jnp.uint32), chip=V6E)


def test_what_vmem_cannot_hold_is_refused():
    q, k = jnp.zeros((1, 128, 64, 256)), jnp.zeros((1, 64, 256, 256))
    words = jnp.zeros((1, 128, 4), jnp.uint32)
    with pytest.raises(KernelError, match="64 key heads need .* MiB for a block of 128 keys, and a v5p has 32 MiB"):
        tree_attention(q, k, k, jnp.zeros(1, jnp.int32), words, chip=CHIPS["v5p"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pages, table: (pages, table.at[0, 0].set(99)), "page 99 of row 0, place 0, is out of range.* 7 pages"),
        (lambda pages, table: (pages, table.at[1, 0].set(-1)), "page -1 of row 1"),
        (lambda pages, table: (pages, table.at[1, 0].set(table[0, 0])), "about to be written and is shared"),
        (lambda pages, table: (pages[:, :1], table), r"pages must be \[P, 2, K, T, D\]"),
        (lambda pages, table: (pages[:, :, :, :24], table), "pages of 24 positions"),
        (lambda pages, table: (pages, table.astype(jnp.uint32)), r"int32 \[B, I\]"),
        (lambda pages, table: (pages, table[:, :0]), "do not fit"),
    ],
)
def test_bad_pages_are_refused(untyped, change, message):
    c = case(6, nodes=4, lengths=(9, 2), capacity=64)
    pages, table = change(*paged(c.k, c.v, np.asarray(c.length) + 4))
    with pytest.raises(KernelError, match=message):
        paged_attention.paged_tree_attention(c.q, pages, table, c.length, c.words, chip=V6E, interpret=True)


def test_a_compiled_program_checks_no_values():
    c = case(6, nodes=4, lengths=(9, 2), capacity=128)
    pages, table = paged(c.k, c.v, np.asarray(c.length) + 4)

    @jax.jit
    def attend(table):
        return paged_attention.paged_tree_attention(c.q, pages, table, c.length, c.words, chip=V6E, interpret=True)

    assert_agree(attend(table), tree_attention_reference(c.q, c.k, c.v, c.length, c.words))


def test_chips_by_name_and_by_device():
    assert [chip_of(kind).name for kind in ("TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x")] == list(CHIPS)
    with pytest.raises(ValueError, match="chip 'v9' is not known; expected one of v5e, v5p, v6e, 7x"):
        chip_named("v9")
    with pytest.raises(ValueError, match="'NVIDIA H200'"):
        chip_of("NVIDIA H200")


def test_the_race_detector_sees_a_buffer_touched_too_early(monkeypatch):
    def impatient(pairs, semaphore):
        pairs = list(pairs)
        start, wait = together(pairs, semaphore)

        def peek_and_wait():
            for _, target in pairs:
                target[0, 0, 0] = jnp.float32(0)  # Written while the copy is on its way.
            wait()

        return start, peek_and_wait

    together = copies.together
    monkeypatch.setattr(copies, "together", impatient)
    c = case(8, nodes=2, lengths=(9,), capacity=128)
    with pytest.raises(AssertionError, match="has a race"), interpreter("races") as interpret:
        run("contiguous", c, interpret)
