"""scripts/command_line.py: errors and exit codes that all scripts have. Streams and Ctrl-C are in test_generate.py."""

import signal
import sys
from pathlib import Path

import jax
import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "scripts"))  # as where the script is started

from command_line import Interrupts, guarded

pytestmark = pytest.mark.usefixtures("interrupts_arrive")


def ends_in(error):
    def work() -> int:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "exit_code", "line"),
    [
        (ValueError("of two\n lines"), 2, "x.py: of two lines\n"),
        (FileNotFoundError(2, "No such file", "a"), 2, "x.py: [Errno 2] No such file: 'a'\n"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory\nmore"),
            1,
            "x.py: the device failed: RESOURCE_EXHAUSTED: no memory\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors(error, exit_code, line, capsys):
    assert guarded("x.py", ends_in(error)) == exit_code
    assert capsys.readouterr() == ("", line)


def test_of_disk(capsys):
    assert guarded("x.py", ends_in(OSError(28, "No space left")), of_disk=1) == 1
    assert guarded("x.py", ends_in(ValueError("bad")), of_disk=1) == 2
    assert capsys.readouterr().err == "x.py: [Errno 28] No space left\nx.py: bad\n"


@pytest.mark.parametrize("error", [RuntimeError("a mistake"), NotImplementedError("a mistake"), KeyError("a mistake")])
def test_errors_of_the_program_are_not_hidden(error, capsys):
    with pytest.raises(type(error), match="a mistake"):
        guarded("x.py", ends_in(error))
    assert capsys.readouterr() == ("", "")


def test_exit_code_of_work():
    assert (guarded("x.py", lambda: 0), guarded("x.py", lambda: 1)) == (0, 1)


def test_interrupts_are_told(capsys):
    before = signal.getsignal(signal.SIGINT)
    try:
        assert guarded("x.py", lambda: signal.raise_signal(signal.SIGINT), interrupts=Interrupts()) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr() == ("", "x.py: interrupted\n")


def test_no_reader(tmp_path, monkeypatch):
    """Also where it shows only when what was printed is flushed."""

    class Closed:
        def __init__(self, file):
            self.fileno = file.fileno

        def flush(self) -> None:
            raise BrokenPipeError

    with open(tmp_path / "out", "w") as file:
        monkeypatch.setattr("sys.stdout", Closed(file))
        assert guarded("x.py", lambda: 0) == 141
