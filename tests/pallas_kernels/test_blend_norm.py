"""blend_norm: post-norm, residual gate and next norm in one kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muse_jax import ops
from muse_jax.config import RESIDUAL_GATE_FLOOR
from muse_jax.numerics import SERVING
from pallas_kernels.blend_norm import shapes
from pallas_kernels.blend_norm.kernel import BlendNorm, blend_norm
from pallas_kernels.blend_norm.reference import blend_norm as blend_norm_reference
from pallas_kernels.blend_norm.reference import gate_factors

TEMPERATURE = 0.3


def equal(actual, expected) -> None:
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("scaled", [False, True])
def test_reference_is_what_the_layer_does(rng, dtype, scaled, jit):
    d = 192
    stream, branch = (jnp.asarray(3 * rng.standard_normal((5, d), np.float32)) for _ in range(2))
    gate, *weights = (jnp.asarray(rng.standard_normal(d, np.float32)) for _ in range(3))
    next_weight, branch_weight = (w.astype(dtype) for w in weights)
    branch = branch.astype(dtype) if scaled else branch

    @jit
    def layer(stream, branch, gate, next_weight, branch_weight):
        stream, branch = stream[None], branch[None]
        if scaled:
            branch = ops.input_scaled_norm(branch, branch_weight, 1e-8, SERVING, dtype)
        else:
            branch = ops.rms(branch, 1e-8)
        new = ops.residual_gate(stream, branch, gate, TEMPERATURE)
        return new[0], ops.centred_norm(new, next_weight, 1e-5, SERVING, dtype)[0]

    factors = jit(lambda gate: gate_factors(gate, TEMPERATURE, RESIDUAL_GATE_FLOOR))(gate)
    reference = jit(lambda *args: blend_norm_reference(*args, 1e-8, 1e-5))
    actual = reference(stream, branch, *factors, next_weight, branch_weight if scaled else None)
    equal(actual, layer(stream, branch, gate, next_weight, branch_weight))


def test_shapes_that_do_not_fit_are_refused(rng):
    args = next(shapes.cases(rows=(2,), d=1024)).arguments(rng)
    config = BlendNorm(1e-8, 1e-5, 1)
    with pytest.raises(NotImplementedError, match="multiple of 2048"):
        blend_norm(*args, BlendNorm(1e-8, 1e-5, 4))
    with pytest.raises(ValueError, match="vectors of 1024"):
        blend_norm(*args[:2], args[2][:512], *args[3:], config)
    with pytest.raises(ValueError, match="must be float32"):
        blend_norm(args[0].astype(jnp.bfloat16), *args[1:], config)
