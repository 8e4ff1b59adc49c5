"""The directory that a conversion works in, and its list of what is on disk already.

.NAME.partial/lock             held while a conversion runs
.NAME.partial/journal.jsonl    first line: what is being converted; then a line for each tensor that is on disk
.NAME.partial/data             what will be NAME
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from checkpoints.manifest import TensorEntry
from checkpoints.shards import CheckpointError, some


@dataclasses.dataclass
class Journal:
    """Tensors that are on disk, by part and name. `discard`: the directory is not worth keeping."""

    directory: Path
    finished: dict[tuple[str, str], TensorEntry] = dataclasses.field(default_factory=dict)
    discard: bool = False

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def path(self) -> Path:
        return self.directory / "journal.jsonl"

    def add(self, part: str, entries: Mapping[str, TensorEntry]) -> None:
        """Returns when the lines are on disk."""
        self._append("".join(_line({"part": part, "name": name, **entry.to_json()}) for name, entry in entries.items()))
        self.finished |= {(part, name): entry for name, entry in entries.items()}

    def forget(self, part: str, name: str) -> None:
        """A resumed conversion makes this tensor again."""
        self._append(_line({"part": part, "name": name, "forgotten": True}))

    def begin(self, conversion: Mapping[str, Any]) -> None:
        """Takes over what an interrupted run of the same conversion left, or begins.

        Raises:   CheckpointError if it was another conversion.
        """
        lines = self.check(conversion)
        if not lines:
            shutil.rmtree(self.data, ignore_errors=True)
            with open(self.path, "w", encoding="utf-8"):
                pass
            self._append(_line(conversion))
        whole = 1
        for line in lines[1:]:
            try:
                entry = json.loads(line)
                key = entry["part"], entry["name"]
                made = None if "forgotten" in entry else TensorEntry.from_json(entry)
            except (ValueError, KeyError, TypeError, AttributeError):
                break  # damaged: what follows is made again
            self.finished.pop(key, None)
            if made is not None:
                self.finished[key] = made
            whole += 1
        if lines:
            os.truncate(self.path, sum(len(line.encode()) + 1 for line in lines[:whole]))
        self.data.mkdir(exist_ok=True)

    def check(self, conversion: Mapping[str, Any]) -> list[str]:
        """The lines of the journal, none if it was not begun. Raises CheckpointError if it is of another conversion."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]  # the last may be cut
        try:
            before = json.loads(lines[0]) if lines else conversion
        except ValueError:
            before = None
        if before != conversion:
            raise CheckpointError(
                f"{self.directory}: belongs to another conversion (other {some(_differences(before, conversion))}): "
                "repeat that one with --resume, or remove the directory to begin anew"
            )
        return lines

    def _append(self, text: str) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def working_directory(directory: Path, conversion: Mapping[str, Any], resume: bool) -> Iterator[Journal]:
    """Makes or takes over the directory, locked against other conversions; removes it at the end if `Journal.discard` is set.

    Raises:   CheckpointError if another conversion is running there, or was and is not the one to resume.
    Warns:    if the file system has no locks.
    """
    fresh = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    journal = Journal(directory, discard=fresh)  # until something is in it
    with open(directory / "lock", "w") as lock:
        _lock(lock, directory)
        try:
            if not fresh and not resume and journal.path.exists():
                raise CheckpointError(f"{directory}: an unfinished conversion; go on with --resume, or remove it to begin anew")
            journal.begin(conversion)
            journal.discard = False
            yield journal
        finally:
            if journal.discard:
                shutil.rmtree(directory, ignore_errors=True)


def is_locked(directory: Path) -> bool:
    """Whether a conversion is running in a working directory."""
    try:
        with open(directory / "lock", "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _lock(file: Any, directory: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
            raise CheckpointError(f"{directory}: another conversion is writing there") from None
        warnings.warn(f"{directory}: its file system has no locks; let no second conversion write there", stacklevel=4)


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value) + "\n"


def _differences(before: Any, now: Mapping[str, Any]) -> set[str]:
    """Names of the options and source files that are not as they were."""
    if not isinstance(before, dict):
        return {"journal"}
    found = {name for name in {*before, *now} - {"files"} if before.get(name) != now.get(name)}
    old, new = dict(before.get("files", {})), now["files"]
    return found | {name for name in {*old, *new} if old.get(name) != new.get(name)}
