"""The one matrix product of the models, in the form that each platform runs fastest.

On CPU the form decides between speculation that pays and speculation that does not: XLA has a fast matrix-vector
product, and several ways to multiply a weight with a handful of positions that differ by up to ten times. The forms
differ in rounding only. Measured for SmolLM2 on two AVX2 cores (layers and head, ms): float32 with 1, 4, 8 positions
26, 50, 56 (`x @ W.T`: 26, 57, 78); bfloat16 with 1, 2, 4, 8 positions 15, 32, 41, 52 (a plain product at one: 230).
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float


def input_first(dtype: str | np.dtype) -> bool:
    """Whether a layer's weight is stored [in, out]: the faster way for float32, the slower for bfloat16."""
    return jnp.dtype(dtype) == jnp.float32


def matmul(
    x_BxNxE: Float[Array, "B N E"],
    weight: Float[Array, "I J"],
    weight_is_input_first: bool = False,
    out_dtype: jnp.dtype | None = None,
) -> Float[Array, "B N O"]:
    """`x @ weight.T` with float32 sums (`x @ weight` where the weight is stored [in, out]).

    The form depends on the platform the program is lowered for and on the static number of positions B*N, never on
    data.

    Args:
      x_BxNxE: activations, in the dtype of the weight.
      weight: stored [out, in], or [in, out].
      weight_is_input_first: which of the two.
      out_dtype: dtype of the result, that of `x` by default.
    """
    batch, num_nodes, width = x_BxNxE.shape
    x_TxE = x_BxNxE.reshape(batch * num_nodes, width)
    on_cpu = _on_cpu_input_first if weight_is_input_first else _on_cpu
    elsewhere = functools.partial(_product, weight_is_input_first)
    y_TxO = lax.platform_dependent(x_TxE, weight, cpu=on_cpu, default=elsewhere)
    return y_TxO.astype(x_BxNxE.dtype if out_dtype is None else out_dtype).reshape(batch, num_nodes, -1)


def _product(weight_is_input_first: bool, x_TxE, weight):
    axis = 0 if weight_is_input_first else 1
    return lax.dot_general(x_TxE, weight, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def _on_cpu(x_TxE, weight_OxE):
    if weight_OxE.dtype == jnp.bfloat16 and len(x_TxE) == 1:
        # There is no fast bfloat16 matrix-vector product, but XLA fuses a conversion into the float32 one, which then
        # reads the weight once, as bfloat16. Without the barrier it would convert all weights ahead of the loop.
        x_TxE, weight_OxE = lax.optimization_barrier((x_TxE, weight_OxE))
        return x_TxE.astype(jnp.float32) @ weight_OxE.astype(jnp.float32).T
    return _product(False, x_TxE, weight_OxE)


def _on_cpu_input_first(x_TxE, weight_ExO):
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    if len(x_TxE) == 1:
        return product(x_TxE, weight_ExO)
    if len(x_TxE) == 2:
        # Two matrix-vector products: the second finds the weight in the cache. The barrier keeps XLA from merging them.
        return jnp.concatenate([product(lax.optimization_barrier(x_TxE[t : t + 1]), weight_ExO) for t in range(2)])
    # Feature-major, behind a barrier: XLA's general product, which is faster here than its small-matrix library.
    x_ExT = lax.optimization_barrier(x_TxE.T)
    return lax.dot_general(weight_ExO, x_ExT, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32).T
