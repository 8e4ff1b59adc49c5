"""Test set-up: eight virtual CPU devices, strict promotion rules, seeds from test names."""

import os
import zlib

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import importlib.util

import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def _has_gpu() -> bool:
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False


def pytest_collection_modifyitems(items):
    skip_gpu = pytest.mark.skip(reason="no GPU")
    skip_parity = pytest.mark.skip(reason="the parity extra is not installed")
    gpu = _has_gpu()
    parity = importlib.util.find_spec("torch") is not None and importlib.util.find_spec("transformers") is not None
    for item in items:
        if "gpu" in item.keywords and not gpu:
            item.add_marker(skip_gpu)
        if "parity" in item.keywords and not parity:
            item.add_marker(skip_parity)


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Random numbers that depend on the test's name alone."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
