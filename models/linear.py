"""The one matrix product of the models, in the form that each platform runs fastest."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def matmul(
    x_BxNxE: Float[Array, "B N E"], weight_OxE: Float[Array, "O E"], out_dtype: jnp.dtype | None = None
) -> Float[Array, "B N O"]:
    """`x @ weight.T` with float32 sums, weights stored [out, in].

    The form depends on the platform and on the static number of positions B*N, never on data. The forms differ in
    rounding only.

    Args:
      x_BxNxE: activations, in the dtype of the weight.
      weight_OxE: the weight.
      out_dtype: dtype of the result, that of `x` by default.
    """
    batch, num_nodes, width = x_BxNxE.shape
    if batch * num_nodes == 1 and jax.default_backend() == "cpu":
        y_BxNxO = _one_position_on_cpu(x_BxNxE.reshape(1, width), weight_OxE)[None]
    else:
        y_BxNxO = lax.dot_general(x_BxNxE, weight_OxE, (((2,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return y_BxNxO.astype(x_BxNxE.dtype if out_dtype is None else out_dtype)


def _one_position_on_cpu(x_1xE, weight_OxE):
    if weight_OxE.dtype == jnp.bfloat16:
        # XLA:CPU has no fast bfloat16 matrix-vector product. It fuses this conversion into a float32 one, which
        # reads the weight once, as bfloat16.
        return x_1xE.astype(jnp.float32) @ weight_OxE.astype(jnp.float32).T
    # The weight as the left operand: the other order runs at two thirds of the speed.
    return (weight_OxE @ x_1xE.T).T
