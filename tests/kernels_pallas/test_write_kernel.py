"""The write kernel against the reference: new rows at each row's own place, and every other row as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.checks import KernelError
from kernels_pallas.chips import CHIPS
from kernels_pallas.write import write, write_reference
from tests.kernels_pallas.common import interpreter

V6E = CHIPS["v6e"]


def drawn(starts, new, dtype, capacity=256, kv_heads=2, dim=64):
    rng = np.random.default_rng(new)
    k, v = (jnp.asarray(rng.standard_normal((len(starts), kv_heads, capacity, dim)), dtype) for _ in range(2))
    k = k.at[:, :, -1].set(jnp.nan)  # What nobody wrote stays, whatever it is.
    new_k, new_v = (jnp.asarray(rng.standard_normal((len(starts), new, kv_heads, dim)), dtype) for _ in range(2))
    return k, v, jnp.asarray(starts, jnp.int32), new_k, new_v


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("new", [1, 7, 33, 150])
@pytest.mark.parametrize("mode", ["plain", "races"])
def test_write_equals_reference(mode, new, dtype):
    # In the middle, on and beside a tile's border, over the end of the row, and all behind it.
    k, v, start, new_k, new_v = drawn((0, 5, 16, 31, 100, 256 - new, 255, 256, 300), new, dtype)
    with interpreter(mode) as interpret:
        keys, values = write(k, v, start, new_k, new_v, chip=V6E, interpret=interpret)
    for got, rows, new_rows in ((keys, k, new_k), (values, v, new_v)):
        want = write_reference(rows, start, new_rows)
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_gradients_are_the_references():
    k, v, start, new_k, new_v = drawn((0, 5, 126, 200), 3, jnp.float32, capacity=128)
    k = jnp.nan_to_num(k)

    def loss(write, k, v, new_k, new_v):
        keys, values = write(k, v, start, new_k, new_v)
        return jnp.sum(jnp.sin(keys)) + jnp.sum(jnp.cos(values) * keys)

    def kernel(*arguments):
        return write(*arguments, chip=V6E, interpret=True)

    def reference(k, v, start, new_k, new_v):
        return write_reference(k, start, new_k), write_reference(v, start, new_v)

    got, want = (jax.grad(loss, argnums=(1, 2, 3, 4))(f, k, v, new_k, new_v) for f in (kernel, reference))
    for ours, theirs in zip(got, want, strict=True):
        assert np.asarray(ours).any()
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(new_keys_BxNxKxD=jnp.zeros((2, 3, 1, 64))), r"new_keys_BxNxKxD.shape=\(2, 3, 1, 64\)"),
        (dict(start_B=jnp.zeros(3, jnp.int32)), r"starts must be int32 \[2\]"),
        (dict(values_BxKxSxD=jnp.zeros((2, 2, 128, 64))), r"values.shape=\(2, 2, 128, 64\)"),
        (dict(chip="v6e"), "Chip"),
        (
            {name: jnp.zeros((2, 0, 2, 64)) for name in ("new_keys_BxNxKxD", "new_values_BxNxKxD")},
            r"every array needs a value, got new \[2, 0, 2, 64\]",
        ),
    ],
)
def test_refusals(untyped, change, message):
    k, v, start, new_k, new_v = drawn((0, 5), 3, jnp.float32)
    names = ("keys_BxKxSxD", "values_BxKxSxD", "start_B", "new_keys_BxNxKxD", "new_values_BxNxKxD")
    arguments = dict(zip(names, (k, v, start, new_k, new_v), strict=True)) | dict(chip=V6E, interpret=True)
    with pytest.raises(KernelError, match=message):
        write(**(arguments | change))
