"""What the tests of both kinds of checkpoint share."""

import contextlib
import os

import pytest


@pytest.fixture
def interrupted(monkeypatch):
    """A context in which the given one of the calls that make a save durable raises KeyboardInterrupt.

    It yields a function that says how many such calls there were.
    """

    @contextlib.contextmanager
    def interrupted(call: int):
        count = 0

        def stopping(function):
            def wrapped(*args, **kwargs):
                nonlocal count
                count += 1
                if count == call:
                    raise KeyboardInterrupt
                return function(*args, **kwargs)

            return wrapped

        with monkeypatch.context() as patch:
            for name in ("fsync", "replace", "unlink"):
                patch.setattr(os, name, stopping(getattr(os, name)))
            yield lambda: count

    return interrupted
