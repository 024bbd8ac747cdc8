import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import metrics
from spec_jax.metrics import Counters, Stats


def test_the_seed_arithmetic():
    conditional = (0.85, 0.75, 0.60, 0.40)
    survival = metrics.survival(conditional)
    np.testing.assert_allclose(survival, (0.8500, 0.6375, 0.3825, 0.1530), atol=1e-12)
    assert metrics.expected_tokens(survival) == pytest.approx(3.0230, abs=5e-5)
    assert metrics.independent_expected_tokens(np.mean(conditional), 4) == pytest.approx(2.5256, abs=5e-5)


def test_predicted_speedup():
    assert metrics.predicted_speedup(3.0, 30.0, 5.0, 40.0, 1.0) == pytest.approx(90 / 46)


def test_counters_count_what_was_committed():
    counters = Counters.create(4, 4)
    counters = counters.after(
        active_B=jnp.array([True, True, True, False]),
        drafted_B=jnp.array([3, 3, 2, 3], jnp.int32),
        num_nodes=4,
        accepted_B=jnp.array([3, 3, 1, 2], jnp.int32),
        emitted_B=jnp.array([4, 2, 2, 0], jnp.int32),  # row 1 was cut inside the accepted run
        at_leaf_B=jnp.array([True, True, False, False]),
    )
    total = Stats.of(counters)
    assert total == Stats(3, 8, 12, accepted=6, corrections=1, bonuses=1, accepted_histogram=(0, 1, 1, 1))
    assert total.tokens == 8 and total.tokens_per_cycle == pytest.approx(8 / 3)
    assert total.survival == pytest.approx((1.0, 2 / 3, 1 / 3))
    assert total.conditional_acceptance == pytest.approx((1.0, 2 / 3, 0.5))
    rows = [Stats.of(counters, row) for row in range(4)]
    assert rows[3].tokens_per_cycle == 0.0 and rows[3].survival == (0.0, 0.0, 0.0)
    assert sum(rows[1:], rows[0]) == total
