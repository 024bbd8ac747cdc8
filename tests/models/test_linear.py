import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.linear import matmul


@pytest.mark.parametrize("dtype, rtol", [("float32", 1e-5), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("input_first", [False, True])
@pytest.mark.parametrize("batch, num_nodes", [(1, 1), (1, 2), (2, 1), (1, 8), (2, 33)])
def test_every_form_is_the_same_product(batch, num_nodes, input_first, dtype, rtol):
    rng = np.random.default_rng(0)
    x_BxNxE = jnp.asarray(rng.normal(size=(batch, num_nodes, 16)), dtype)
    weight_OxE = jnp.asarray(rng.normal(size=(24, 16)), dtype)
    expected = np.asarray(x_BxNxE, np.float64) @ np.asarray(weight_OxE, np.float64).T
    weight = weight_OxE.T if input_first else weight_OxE
    y_BxNxO = matmul(x_BxNxE, weight, input_first)
    assert y_BxNxO.dtype == dtype
    np.testing.assert_allclose(np.asarray(y_BxNxO, np.float64), expected, rtol=rtol, atol=rtol)
    # The sums are float32 whatever the inputs are.
    y_BxNxO = matmul(x_BxNxE, weight, input_first, jnp.dtype("float32"))
    assert y_BxNxO.dtype == jnp.float32
    np.testing.assert_allclose(y_BxNxO, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("platform, barrier", [("cpu", True), ("tpu", False)])
def test_the_form_is_that_of_the_platform_lowered_for(platform, barrier):
    x_BxNxE, weight = jnp.zeros((1, 8, 16)), jnp.zeros((16, 24))
    traced = jax.jit(matmul, static_argnums=2).trace(x_BxNxE, weight, True)
    assert ("optimization_barrier" in traced.lower(lowering_platforms=(platform,)).as_text()) == barrier
