import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_jax import sampling
from spec_jax.sampling import Purpose, SamplingParams, SamplingRows


def law_of(p, **options):
    """`law` on the logits of a probability vector."""
    rows = SamplingRows.create([SamplingParams(**options)], [0])
    with np.errstate(divide="ignore"):
        logits = np.log(np.asarray(p, np.float64)).astype(np.float32)
    return np.asarray(jax.jit(sampling.law)(jnp.asarray(logits)[None, None], rows))[0, 0]


def sorted_law(logits, temperature, top_k, top_p, min_p):
    """The same transform by sorting, in float64."""
    weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    if top_k:
        weights[weights < np.sort(weights)[::-1][min(top_k, len(weights)) - 1]] = 0.0
    weights /= weights.sum()
    order = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    if top_p < 1:
        weights[order[before >= top_p - 1e-6]] = 0.0
    weights[weights < min_p * weights.max()] = 0.0
    return weights / weights.sum()


@pytest.mark.smoke
def test_top_p_keeps_the_smallest_set_and_renormalises():
    np.testing.assert_allclose(law_of((0.5, 0.3, 0.15, 0.05), top_p=0.8), (0.625, 0.375, 0, 0), rtol=1e-6)


def test_each_filter_alone():
    p = (0.4, 0.3, 0.2, 0.1)
    np.testing.assert_allclose(law_of(p), p, rtol=1e-6)
    np.testing.assert_allclose(law_of(p, top_k=2), (4 / 7, 3 / 7, 0, 0), rtol=1e-6)
    np.testing.assert_allclose(law_of(p, top_k=99), p, rtol=1e-6)
    np.testing.assert_allclose(law_of(p, top_p=1e-9), (1, 0, 0, 0))
    np.testing.assert_allclose(law_of(p, min_p=0.5), (4 / 9, 3 / 9, 2 / 9, 0), rtol=1e-6)
    np.testing.assert_allclose(law_of(p, temperature=0.0), (1, 0, 0, 0))
    np.testing.assert_allclose(law_of((0.3, 0.3, 0.3, 0.1), top_k=1), (1 / 3, 1 / 3, 1 / 3, 0), rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.integers(0, 40),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
)
def test_law_equals_sorting(seed, temperature, top_k, top_p, min_p):
    logits = np.random.default_rng(seed).standard_normal(33).astype(np.float32) * 3
    rows = SamplingRows.create([SamplingParams(temperature, top_k, top_p, min_p)], [0])
    got = np.asarray(_law(jnp.asarray(logits)[None, None], rows))[0, 0]
    want = sorted_law(logits, temperature, top_k, top_p, min_p)
    np.testing.assert_array_equal(got > 0, want > 0)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-7)


_law = jax.jit(sampling.law)


@pytest.mark.parametrize("temperatures", [(0, 0.7, 0, 1.3), (0, 0, 0, 0), (1.0, 0.5, 2.0, 1.0)])
def test_greedy_is_a_mask_row_by_row(temperatures):
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((4, 2, 9)), jnp.float32)
    rows = SamplingRows.create([SamplingParams(temperature=t) for t in temperatures], range(4))
    p = np.asarray(sampling.law(logits, rows))
    assert np.isfinite(p).all()
    drawn = np.asarray(sampling.sample(logits, rows, jnp.full((4, 2), 0.999)))
    for row, t in enumerate(temperatures):
        if t == 0:
            np.testing.assert_array_equal(p[row], np.eye(9)[np.asarray(logits[row]).argmax(-1)])
            np.testing.assert_array_equal(drawn[row], np.asarray(logits[row]).argmax(-1))
        else:
            alone = SamplingRows.create([SamplingParams(temperature=t)], [row])
            np.testing.assert_array_equal(p[row], np.asarray(sampling.law(logits[row : row + 1], alone))[0])


@pytest.mark.parametrize("V", [2, 5, 255, 256, 257, 1000])
def test_inverse_cdf(V):
    rng = np.random.default_rng(V)
    weights = rng.gamma(0.3, size=V).astype(np.float32)
    weights[rng.random(V) < 0.5] = 0.0
    weights[0] = 0.0
    weights[V // 2] = 1.0
    u = np.concatenate([[0.0, np.float32(1 - 2**-24)], rng.random(500)]).astype(np.float32)
    rows = jnp.broadcast_to(jnp.asarray(weights)[None, None], (1, len(u), V))
    got = np.asarray(sampling.inverse_cdf(rows, jnp.asarray(u)[None]))[0]
    assert (weights[got] > 0).all()
    upto = np.cumsum(weights.astype(np.float64)) / weights.sum(dtype=np.float64)
    assert (upto[got] >= u - 1e-6).all() and (upto[got] - weights[got] / weights.sum() <= u + 1e-6).all()


def test_no_token_of_weight_zero_is_drawn_at_the_borders_of_blocks():
    """Compiled, with uniforms on the grid of float32 next to where one block of the sum ends and another begins."""
    rng, V = np.random.default_rng(0), 512
    weights = rng.gamma(0.3, size=(64, V)).astype(np.float32) * (rng.random((64, V)) < 0.1)
    weights[:, [3, 300]] = 1.0
    weights[:, 256:300] = 0.0  # the second block begins with tokens that must never be drawn
    border = weights[:, :256].sum(1, dtype=np.float64) / weights.sum(1, dtype=np.float64)
    u = (np.round(border * 2**23)[:, None] + np.arange(-8, 9)) * 2.0**-23
    rows = jnp.asarray(np.broadcast_to(weights[:, None], (64, 17, V)))
    drawn = np.asarray(jax.jit(sampling.inverse_cdf)(rows, jnp.asarray(u, jnp.float32)))
    assert (np.take_along_axis(weights, drawn, axis=1) > 0).all()
    assert {0, 1} == set((drawn // 256).ravel().tolist())


def test_a_uniform_of_zero_takes_the_first_possible_token():
    weights = jnp.array([0.0, 0.0, 0.3, 0.7])[None, None]
    assert int(sampling.inverse_cdf(weights, jnp.zeros((1, 1)))[0, 0]) == 2


def test_noise_depends_on_request_purpose_position_and_lane_only():
    seeds = jnp.array([[0, 1], [0, 2], [1, 1]], jnp.uint32)
    position = jnp.broadcast_to(jnp.arange(50)[None, :], (3, 50))
    drawn = {
        (purpose, lane): np.asarray(sampling.uniforms(seeds, purpose, position, jnp.full_like(position, lane)))
        for purpose in Purpose
        for lane in range(3)
    }
    everything = np.concatenate([u.ravel() for u in drawn.values()])
    # 1800 draws of 23 bits: two equal ones are expected with probability 0.2; shared keys would repeat hundreds.
    assert len(np.unique(everything)) >= len(everything) - 3
    assert 0.45 < everything.mean() < 0.55 and everything.min() >= 0 and everything.max() < 1
    swapped = sampling.uniforms(seeds[::-1], Purpose.MATCH, position[:, :7])
    np.testing.assert_array_equal(swapped[::-1], drawn[Purpose.MATCH, 0][:, :7])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 1e39}, "temperature"),
        ({"temperature": 1e-46}, "temperature"),
        ({"stop": ("\ud800",)}, "not valid Unicode"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
        ({"top_p": 1.01}, "top_p"),
        ({"min_p": -0.5}, "min_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"stop": ("a", "")}, "stop string must not be empty"),
    ],
)
def test_bad_parameters_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


def test_one_stop_string_may_be_given_bare():
    assert SamplingParams(stop="END").stop == ("END",)
