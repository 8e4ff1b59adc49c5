"""qk_rope: norm and RoPE of queries and keys in one kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muse_jax import ops
from muse_jax.numerics import SERVING, round_to
from pallas_kernels.qk_rope import shapes
from pallas_kernels.qk_rope.kernel import qk_rope
from pallas_kernels.qk_rope.reference import qk_rope as qk_rope_reference


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rope", [False, True])
def test_reference_is_what_the_layer_does(rng, dtype, rope, jit):
    q, k = (jnp.asarray(rng.standard_normal((5, n, 64), np.float32)).astype(dtype) for n in (4, 2))
    tables = ops.rope_tables(jnp.arange(1000, 1005)[None], ops.rope_inverse_frequencies(5e5, 64), SERVING, dtype)

    @jit
    def layer(q, k, tables):
        qk = ops.rms(jnp.concatenate([q[None], k[None]], axis=2), 1e-5)
        qk = ops.apply_rope(qk, tables, SERVING, dtype) if rope else round_to(qk, dtype)
        q, k = jnp.split(qk, [4], axis=2)
        return q[0], k[0].transpose(1, 0, 2)

    tables_of_rows = tuple(table[0] for table in tables) if rope else None
    actual = jit(lambda *args: qk_rope_reference(*args, 1e-5))(q, k, tables_of_rows)
    for x, y in zip(actual, layer(q, k, tables), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_shapes_that_do_not_fit_are_refused(rng):
    q, k, tables = next(shapes.cases()).arguments(rng)
    with pytest.raises(NotImplementedError, match="heads of 32"):
        qk_rope(q[..., :32], k[..., :32], None, 1e-5)
    with pytest.raises(ValueError, match="does not fit"):
        qk_rope(q, k[:8], None, 1e-5)
    with pytest.raises(ValueError, match="tables must be"):
        qk_rope(q, k, (tables[0], tables[1][:8]), 1e-5)
