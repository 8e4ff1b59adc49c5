"""route: the choice of experts in one kernel."""

import numpy as np
import pytest

from pallas_kernels import compat
from pallas_kernels.route import shapes
from pallas_kernels.route.kernel import Route, route
from pallas_kernels.route.reference import route as route_reference


def test_ties_go_to_the_lowest_id_and_ids_are_of_experts(rng):
    """Rows of few different logits, of equal ones, of infinities and of NaN."""
    logits = np.round(rng.standard_normal((8, 256), np.float32))
    logits[1] = 0
    logits[2, ::2], logits[2, 1::2] = np.inf, -np.inf
    logits[3] = -np.inf
    bias = np.zeros(256, np.float32)
    logits[4, 5], logits[5], logits[6, 250:] = np.nan, np.nan, np.nan
    idx, weights = route(logits, bias, shapes.CONFIG, compat.interpret_params())
    expected, expected_weights = route_reference(
        logits[:4], bias, shapes.CONFIG.top_k, shapes.CONFIG.multiplier, shapes.CONFIG.scaling
    )
    np.testing.assert_array_equal(np.asarray(idx)[:4], np.asarray(expected))
    np.testing.assert_allclose(np.asarray(weights)[:4], np.asarray(expected_weights), rtol=shapes.RELATIVE_ERROR, atol=0)
    for row in np.asarray(idx):
        assert len(set(row.tolist())) == 8 and row.min() >= 0 and row.max() < 256


def test_the_bias_affects_the_choice_alone(rng):
    logits = rng.standard_normal((4, 256)).astype(np.float32)
    bias = np.zeros(256, np.float32)
    bias[[3, 200]] = 5
    idx, weights = route(logits, bias, shapes.CONFIG, compat.interpret_params())
    assert {3, 200} == set(np.asarray(idx)[0, :2].tolist())
    np.testing.assert_allclose(np.asarray(weights).sum(axis=1), 1, rtol=2.0**-20)
    assert np.asarray(weights).max() < 0.5


def test_shapes_that_do_not_fit_are_refused(rng):
    logits, bias = next(shapes.cases()).arguments(rng)
    with pytest.raises(NotImplementedError, match="200 experts"):
        route(logits[:, :200], bias[:200], shapes.CONFIG)
    with pytest.raises(ValueError, match="float32"):
        route(logits, bias[:8], shapes.CONFIG)
    with pytest.raises(ValueError, match="257 of 256"):
        route(logits, bias, Route(257, 1.0, 1.0))
