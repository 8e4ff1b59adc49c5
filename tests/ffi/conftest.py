"""Set-up of tests that may run on an emulated device and on a GPU."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def everything_else_is_on_the_cpu() -> Iterator[None]:
    """Also where there is a GPU: references and the emulated device are. `verify_steps.call` sends operands to the GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield
