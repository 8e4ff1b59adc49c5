"""What the tests of checkpoints share; makes this folder's other modules importable (tests/ has no packages)."""

import contextlib
import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


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
