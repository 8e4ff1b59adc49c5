"""Interpreted kernels wait for barriers: one that nobody raises ends the process with a traceback, not a hang."""

import faulthandler

import pytest

SECONDS = 300  # several times the longest test on a busy machine


@pytest.fixture(autouse=True)
def ends():
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
