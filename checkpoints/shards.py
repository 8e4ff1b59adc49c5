"""The safetensors files of a directory: every header checked before any tensor is read, ranges read, files written.

The files come from strangers. The safetensors library judges a header; the bytes are then read with plain positioned
reads rather than through its memory map, because a map turns a file that shrinks into SIGBUS, which ends the process,
and because mapped pages would count towards the memory a load is allowed to use.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# A file with one tensor per expert, the largest case, needs 8 MB of header for the 816B model.
_MAX_JSON_BYTES = 32 << 20
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors")

DTYPE_NAMES = {
    np.dtype(dtype): name
    for dtype, name in (
        (jnp.bfloat16, "BF16"),
        (np.float64, "F64"),
        (np.float32, "F32"),
        (np.float16, "F16"),
        (np.int64, "I64"),
        (np.int32, "I32"),
        (np.int16, "I16"),
        (np.int8, "I8"),
        (np.uint8, "U8"),
        (np.bool_, "BOOL"),
    )
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
WEIGHT_DTYPES = {name: _DTYPES[name] for name in ("BF16", "F32")}


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; one line that names the file or tensor and what is wrong with it."""


def some(names: Iterable[str], shown: int = 3) -> str:
    """The first few names quoted and cut to a readable length, and how many more there are."""
    names = sorted(names)
    text = ", ".join(repr(name if len(name) <= 120 else name[:117] + "...") for name in names[:shown])
    return text + (f" and {len(names) - shown} more" if len(names) > shown else "")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: `nbytes` bytes from byte `offset` of the file at `path`, row major."""

    path: Path
    name: str  # in that file
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    stamp: tuple[int, int]  # size and modification time of the file when its header was checked

    def read_into(self, out: np.ndarray, shape: tuple[int, ...], bounds: Sequence[tuple[int, int]]) -> None:
        """Reads a box of a tensor and touches no other bytes of the file.

        Args:     out: contiguous array of the box's shape; values are rounded where it is not of the file's dtype.
                  shape: the tensor as the caller sees it, as many elements in the same order as in the file.
                  bounds: (start, stop) of the box for each axis of `shape`.
        Raises:   CheckpointError if the file is no longer the one that was checked, or ends early.
        """
        dtype = _DTYPES[self.dtype]
        target = out if out.dtype == dtype else np.empty(out.shape, dtype)
        # Bytes lie together over the axes that are taken whole and one more before them: one read for each such run.
        cut = [axis for axis, (start, stop) in enumerate(bounds) if stop - start != shape[axis]]
        run_axis = cut[-1] if cut else 0
        strides = [math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape))]
        first = self.offset + sum(start * stride for (start, _), stride in zip(bounds, strides, strict=True))
        outer = out.shape[:run_axis]
        runs = target.reshape(math.prod(outer), math.prod(out.shape[run_axis:]))
        try:
            with open(self.path, "rb", buffering=0) as file:
                if _stamp(file.fileno()) != self.stamp:
                    raise CheckpointError(f"{self.path}: the file changed while it was being loaded")
                for run, position in zip(runs, np.ndindex(outer), strict=True):
                    file.seek(first + sum(i * stride for i, stride in zip(position, strides, strict=False)))
                    self._fill(file, memoryview(run.view(np.uint8)))
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error})") from None
        if target is not out:
            out[...] = target

    def _fill(self, file, buffer: memoryview) -> None:
        while buffer:  # one call reads at most 2 GiB on Linux
            count = file.readinto(buffer)
            if not count:
                raise CheckpointError(f"{self.path}: the file ends before its tensors do")
            buffer = buffer[count:]


def read_json(path: Path) -> Any:
    """A JSON file of bounded size in which no object repeats a key. Raises CheckpointError."""
    if not os.path.isfile(path):  # also keeps pipes and devices from being opened
        raise CheckpointError(f"{path}: no such file")
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    if len(data) > _MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: larger than {_MAX_JSON_BYTES} bytes, the most that is read as JSON")
    return _parse_json(data, path)


def open_directory(directory: Path) -> dict[str, StoredTensor]:
    """Checks the headers of a directory's safetensors files, which are `model.safetensors` or those its index names.

    The index and the headers must agree. A shard's name must be a plain file name, since the index may come from
    anyone; the file itself may be a symbolic link, since whoever filled the directory made it (the Hugging Face cache
    links every file to a store beside the directory).

    Returns:  where each tensor lies, by name; nothing but headers has been read.
    Raises:   CheckpointError.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if not index.exists():
        if not os.path.isfile(single):
            raise CheckpointError(f"{directory}: no {SINGLE_FILE} and no {INDEX_FILE}")
        return read_header(single)
    if single.exists():
        raise CheckpointError(f"{directory}: {SINGLE_FILE} and {INDEX_FILE} both exist; only one can be the checkpoint")
    shard_of = _read_index(index)
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(shard_of.values())):
        for name, tensor in read_header(directory / shard).items():
            if name in tensors:
                raise CheckpointError(f"{directory}: {some([name])} is in both {tensors[name].path.name} and {shard}")
            tensors[name] = tensor
    for name, shard in shard_of.items():
        if name not in tensors or tensors[name].path.name != shard:
            raise CheckpointError(f"{index}: {some([name])} is said to be in {shard}, which does not hold it")
    if unlisted := tensors.keys() - shard_of.keys():
        raise CheckpointError(f"{index}: does not list {some(unlisted)}, which the shards hold")
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Where each tensor of a safetensors file lies, by name; the header has been checked. Raises CheckpointError."""
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: no such file")
    try:
        with open(path, "rb") as file:
            stamp = _stamp(file.fileno())
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_JSON_BYTES:
                raise CheckpointError(f"{path}: header of {length} bytes; at most {_MAX_JSON_BYTES} are read")
            text = file.read(length)
        if len(text) < length:
            raise CheckpointError(f"{path}: the file ends inside its header")
        header = _parse_json(text, path)
        # The library keeps the last of two equal keys, so the header is read here, and only judged there: tensors lie
        # one after another, fill the file exactly, and have as many bytes as their shape and dtype need.
        with safe_open(path, framework="numpy"):
            pass
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({error})") from None
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if not isinstance(entry, dict):  # the library also takes the fields as a list
            raise CheckpointError(f"{path}: the header entry of {some([name])} is not an object")
        start, end = entry["data_offsets"]
        offset = 8 + length + start
        tensors[name] = StoredTensor(path, name, entry["dtype"], tuple(entry["shape"]), offset, end - start, stamp)
    return tensors


@dataclasses.dataclass(frozen=True)
class OutgoingTensor:
    """A tensor to write. `load` is called when its turn comes, so that a file of any size needs one tensor's memory."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(path: Path, tensors: Iterable[OutgoingTensor]) -> None:
    """Writes a safetensors file and waits until it is on disk."""
    # Readers view the bytes in place, so the wide dtypes go first: each tensor then starts at a multiple of its item.
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # versions 4 of transformers refuse a file without it
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        dtype = DTYPE_NAMES[tensor.dtype]
        header[tensor.name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(np.ascontiguousarray(tensor.load()).reshape(-1).view(np.uint8))
        _flush(file)


def write_json(path: Path, value: Any) -> None:
    """Writes an indented JSON file and waits until it is on disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2) + "\n")
        _flush(file)


def _flush(file) -> None:
    file.flush()
    os.fsync(file.fileno())


def _stamp(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _parse_json(data: bytes, path: Path) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise CheckpointError(f"{path}: {some([key])} appears twice in one JSON object")
            result[key] = value
        return result

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({error})") from None


def _read_index(path: Path) -> dict[str, str]:
    index = read_json(path)
    shard_of = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(f"{path}: expected an object whose weight_map gives the file of each tensor")
    for name, shard in shard_of.items():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            shard = some([shard]) if isinstance(shard, str) else type(shard).__name__
            raise CheckpointError(
                f"{path}: {some([name])} is in {shard}; expected a file of this directory, named like "
                "'model-00001-of-00002.safetensors'"
            )
    return shard_of
