"""out_gate: norm and gate of attention's output in one kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muse_jax import ops
from muse_jax.numerics import fp32, round_to
from pallas_kernels.out_gate import shapes
from pallas_kernels.out_gate.kernel import out_gate
from pallas_kernels.out_gate.reference import out_gate as out_gate_reference


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_reference_is_what_the_layer_does(rng, dtype, jit):
    out = jnp.asarray(rng.standard_normal((5, 4, 64), np.float32))
    gate = jnp.asarray(3 * rng.standard_normal((5, 256), np.float32)).astype(dtype)

    @jit
    def layer(out, gate):
        normed = ops.rms(out[None], 1e-5)
        return round_to(normed * jax.nn.sigmoid(fp32(gate)).reshape(normed.shape), dtype).reshape(gate.shape)

    actual, expected = jit(lambda *args: out_gate_reference(*args, 1e-5))(out, gate), layer(out, gate)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def test_shapes_that_do_not_fit_are_refused(rng):
    out, gate = next(shapes.cases()).arguments(rng)
    with pytest.raises(NotImplementedError, match="heads of 32"):
        out_gate(out[..., :32], gate[:, : gate.shape[1] // 2], 1e-5)
    with pytest.raises(ValueError, match="a gate"):
        out_gate(out, gate[:8], 1e-5)
