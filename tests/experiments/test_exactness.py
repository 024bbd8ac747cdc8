import numpy as np
import pytest

import spec_jax as sj
from experiments import exactness
from spec_jax.testing import MarkovLM


def test_first_difference():
    assert exactness.first_difference([1, 2], [1, 2]) is None
    assert exactness.first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert exactness.first_difference([1, 2], [1, 2, 3]) == 2


@pytest.mark.parametrize(("gap", "near_tie"), [(5e-5, True), (0.1, False)])
def test_a_difference_is_judged_by_the_gap(gap, near_tie):
    # After token 0, tokens 1 and 2 are all but equally likely, 1 a little more.
    table = np.asarray([[0.1, 0.45 * np.exp(gap), 0.45], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    plain = sj.Decoder(MarkovLM(table), max_len=16)
    difference = exactness.compare([2, 1], [0, 1, 0], [0, 2, 0], "float32", plain)
    assert difference.index == 1
    assert difference.gap == pytest.approx(gap, rel=0.02)
    assert difference.near_tie == near_tie
    assert ("(a tie)" in str(difference)) == near_tie


def test_no_tie_explains_a_third_token_or_an_early_end():
    plain = sj.Decoder(MarkovLM(np.asarray([[0.2, 0.4, 0.4]] * 3)), max_len=16)
    assert exactness.compare([0], [1], [2], "float32", plain).near_tie
    assert not exactness.compare([0], [1], [0], "float32", plain).near_tie
    assert not exactness.compare([0], [1, 1], [1], "float32", plain).near_tie


def test_equal_and_sampled():
    assert exactness.compare([1], [2, 3], [2, 3], "float32", None) is None
    sampled = exactness.compare([1], [2, 3], [2, 4], "float32", None)
    assert (sampled.index, sampled.gap, sampled.near_tie) == (1, None, False)
    assert str(sampled) == "differs from token 1 on"
