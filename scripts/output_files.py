"""Files that scripts write: whole or not at all, and refused before the work where they cannot be written."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import io
import os
import stat
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an extra
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")


def real_file(path: Path) -> Path | None:
    """The file at the end of links, there or not yet; None for what cannot be replaced: a pipe, a device, stdout."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return Path(os.path.realpath(path))
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    replaceable = stat.S_ISREG(status.st_mode) and not is_stdout(path)
    return Path(os.path.realpath(path)) if replaceable else None


def is_stdout(path: Path) -> bool:
    """Whether `path` is the file that stdout writes to, under any name (/dev/stdout)."""
    try:
        return os.path.samestat(path.stat(), os.fstat(sys.stdout.fileno()))
    except OSError:  # nothing there, or stdout is no file
        return False


def check_output(path: Path) -> None:
    """Raises OSError if `write_file` may not write there."""
    file = real_file(path)
    if (file is None or file.exists()) and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    if file is not None:
        tempfile.TemporaryFile(dir=file.parent).close()


def check_option(option: str, path: Path) -> None:
    """Raises ValueError with the option's name if `write_file` may not write there."""
    try:
        check_output(path)
    except OSError as error:
        raise ValueError(f"{option} {path}: cannot be written: {error.strerror}") from None


def write_file(path: Path, data: bytes) -> None:
    """Writes all of it or nothing, links followed; a pipe or a device is written to as it is."""
    file = real_file(path)
    if file is None:
        # Opened anew, a file behind stdout would be written over by what stdout still has to write.
        with open(sys.stdout.fileno() if is_stdout(path) else path, "wb", closefd=not is_stdout(path)) as stream:
            stream.write(data)
        return
    partial = file.with_name(f".{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------------- pictures


def picture(text: str) -> Path:
    """The name of a file that `write_picture` can write, as an option's value."""
    if Path(text).suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a name that ends in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}")
    return Path(text)


def check_matplotlib(option: str) -> None:
    """Raises ValueError where it is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{option}: matplotlib is not installed: pip install -e '.[plot]'")


def check_plot(path: Path) -> None:
    """Raises ValueError if a picture cannot be drawn, or not be written there."""
    check_matplotlib("--plot")
    check_option("--plot", path)


def write_picture(path: Path, figure: Figure) -> None:
    """In the format that the file's name ends in."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix[1:].lower())
    write_file(path, buffer.getvalue())
