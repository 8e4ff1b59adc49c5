"""What the command lines of all scripts have in common: streams, options, Ctrl-C, exit codes and errors of one line."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

FAILED, BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141  # exit codes; the last two are 128 + the number of the signal


class Interrupts:
    """What becomes of Ctrl-C: an exception where the program can bear one, in any case a note that it came."""

    def __init__(self) -> None:
        self.arrived = False
        self._held = False

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Ctrl-C raises KeyboardInterrupt, at the latest at the next `check`: JAX runs some Python code (while it compiles,
        for one) from places that drop what that code raises."""

        def dropped(unraisable: Any) -> None:
            if not (self.arrived and unraisable.exc_type is KeyboardInterrupt):
                hook(unraisable)

        before, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
        if before is signal.SIG_IGN:  # started in the background, or by nohup
            yield
            return
        self._held = False
        signal.signal(signal.SIGINT, self._handle)
        sys.unraisablehook = dropped
        try:
            self.check()
            yield
        except BaseException:
            if self.arrived:  # interrupted imports can end in an error of their own
                raise KeyboardInterrupt from None
            raise
        finally:
            signal.signal(signal.SIGINT, before)
            sys.unraisablehook = hook

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside `raised`: Ctrl-C waits for the end of the block, which does not survive an exception just anywhere."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        self.check()

    def hold(self) -> None:
        """Ctrl-C waits for `raised`."""
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._held = True
            signal.signal(signal.SIGINT, self._handle)

    def check(self) -> None:
        if self.arrived:
            raise KeyboardInterrupt

    def _handle(self, signum: int, frame: Any) -> None:
        if self.arrived:
            os._exit(INTERRUPTED)  # asked twice: does not wait for a compilation to end
        self.arrived = True
        if not self._held:
            raise KeyboardInterrupt


def open_streams() -> None:
    """Stands in for streams that the caller closed, and lets none fail over a character that it cannot show."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (for the process's life)
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def broken_pipe() -> int:
    """The exit code where the reader of stdout has gone."""
    # Python would complain once more when it flushes stdout at its exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


def leave(exit_code: int, at_once: bool = False) -> NoReturn:
    """Ends the process; at once: without waiting for JAX, which may wait for other processes."""
    if at_once or exit_code == INTERRUPTED:
        # A compilation may still be running in XLA's threads; the ordinary exit would take the ground from under it.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(exit_code)
    sys.exit(exit_code)


def guarded(name: str, work: Callable[[], int], *, interrupts: Interrupts | None = None, of_disk: int = BAD_INPUT) -> int:
    """What `work` returns; or where it ends in an error that is none of the program, that error in one line and an exit code.

    Args:     name: of the script.  interrupts: what Ctrl-C goes through; it is then reported, too.  of_disk: the code of an
              OSError.
    """
    try:
        with contextlib.nullcontext() if interrupts is None else interrupts.raised():
            exit_code = work()
            sys.stdout.flush()
            return exit_code
    except KeyboardInterrupt:
        if interrupts is not None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left takes no time
            report(f"{name}: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        return broken_pipe()
    except (ValueError, OSError) as error:
        report(f"{name}: {' '.join(str(error).split())}")
        return of_disk if isinstance(error, OSError) else BAD_INPUT
    except RuntimeError as error:
        report(f"{name}: {device_failure(error)}")
        return FAILED


def device_failure(error: RuntimeError) -> str:
    """What to say of an error of the device (out of memory, most of all). Raises any other one again."""
    if type(error).__name__ != "JaxRuntimeError":  # by its name, for which JAX need not be imported
        raise error
    return f"the device failed: {str(error).splitlines()[0][:300]}"


def report(line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk behind stderr must not cost the answer
        print(line, file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n")


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer above 0")
    return int(text)


def directory(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("'': expected a directory")
    return Path(text)
