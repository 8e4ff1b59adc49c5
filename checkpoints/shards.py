"""The safetensors files of a directory: every header checked before any tensor is read, ranges read, files written.

The files come from strangers. The safetensors library judges a header; the bytes are then read with plain positioned
reads rather than through its memory map, because a map turns a file that shrinks into SIGBUS, which ends the process,
and because mapped pages would count towards the memory a load is allowed to use.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# What a file may cost to read before it has shown that it is a checkpoint. The 816B model with one NVFP4 tensor for each
# expert has an index of 191,000 tensors in 27 MB; one bf16 file of all its experts would have a header of 390,000 members.
_MAX_JSON_BYTES = 32 << 20
_MAX_JSON_MEMBERS = 1 << 19  # of objects and lists together; one takes up to 300 bytes of memory
_MAX_TENSORS = 200_000
_MAX_SHARDS = 4096
_MAX_HEADER_BYTES = 2 * _MAX_JSON_BYTES  # of all shards
_MAX_NAME, _MAX_AXES, _MAX_METADATA = 1000, 16, 1000
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
        (jnp.float8_e4m3fn, "F8_E4M3"),
    )
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
WEIGHT_DTYPES = {name: DTYPES[name] for name in ("BF16", "F32")}


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; one line that names the file or tensor and what is wrong with it."""


class UnreadableError(CheckpointError):
    """A file that cannot be read now: the disk may be to blame, not what the file holds."""


def some(names: Iterable[str], shown: int = 3) -> str:
    """The first few names quoted and cut to a readable length, and how many more there are."""
    names = sorted(names)
    text = ", ".join(repr(name if len(name) <= 120 else name[:117] + "...") for name in names[:shown])
    return text + (f" and {len(names) - shown} more" if len(names) > shown else "")


class StoredTensor(NamedTuple):  # there may be 200,000: half the memory and a third of the time of a frozen dataclass
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
        dtype = DTYPES[self.dtype]
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
                    raise UnreadableError(f"{self.path}: the file changed while it was being loaded")
                for run, position in zip(runs, np.ndindex(outer), strict=True):
                    start = first + sum(i * stride for i, stride in zip(position, strides, strict=False))
                    read_exactly(file, start, memoryview(run.view(np.uint8)))
        except OSError as error:
            raise UnreadableError(f"{self.path}: cannot be read ({error})") from None
        if target is not out:
            out[...] = target


def read_exactly(file: io.FileIO, position: int, buffer: memoryview) -> None:
    """Fills `buffer` with the bytes at `position`. Raises CheckpointError if the file ends before."""
    file.seek(position)
    while buffer:  # one call reads at most 2 GiB on Linux
        count = file.readinto(buffer)
        if not count:
            raise UnreadableError(f"{file.name}: the file ends before its tensors do")
        buffer = buffer[count:]


def write_exactly(file: io.FileIO, position: int, data: np.ndarray) -> None:
    """Writes an array's bytes at `position`."""
    file.seek(position)
    buffer = memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8))
    while buffer:
        buffer = buffer[file.write(buffer) :]


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
    _check_members(data, path)
    return _parse_json(data, path)


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """While very many objects are made: the garbage collector would visit all of them, in vain, again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@collector_off()
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
    header_bytes = 0
    paths = {shard: directory / shard for shard in sorted(set(shard_of.values()))}
    for shard, path in paths.items():
        held = read_header(path)
        for name, tensor in held.items():
            if name in tensors:
                raise CheckpointError(f"{directory}: {some([name])} is in both {tensors[name].path.name} and {shard}")
            tensors[name] = tensor
        if unlisted := held.keys() - shard_of.keys():
            raise CheckpointError(f"{index}: does not list {some(unlisted)}, which {shard} holds")
        header_bytes += min((tensor.offset for tensor in held.values()), default=0)  # where the first tensor begins
        if header_bytes > _MAX_HEADER_BYTES:
            raise CheckpointError(f"{directory}: headers of more than {_MAX_HEADER_BYTES} bytes in its shards together")
    for name, shard in shard_of.items():
        if name not in tensors or tensors[name].path is not paths[shard]:
            raise CheckpointError(f"{index}: {some([name])} is said to be in {shard}, which does not hold it")
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
        _check_members(text, path)
        # The library keeps the last of two equal keys, so it only judges the header, and first, because it needs less
        # memory to refuse one: tensors lie one after another, fill the file exactly, and have as many bytes as their
        # shape and dtype need.
        with safe_open(path, framework="numpy"):
            pass
        header = _parse_json(text, path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file ({_short(error)})") from None
    if len(header.pop("__metadata__", None) or ()) > _MAX_METADATA:
        raise CheckpointError(f"{path}: more than {_MAX_METADATA} entries in __metadata__")
    if len(header) > _MAX_TENSORS:
        raise CheckpointError(f"{path}: {len(header)} tensors; at most {_MAX_TENSORS} are read")
    tensors = {}
    for name in list(header):
        entry = header.pop(name)  # its memory is the tensor's
        if not isinstance(entry, dict):  # the library also takes the fields as a list
            raise CheckpointError(f"{path}: the header entry of {some([name])} is not an object")
        if len(name) > _MAX_NAME or len(entry["shape"]) > _MAX_AXES:
            raise CheckpointError(f"{path}: {some([name])} has a name of more than {_MAX_NAME} characters or {_MAX_AXES} axes")
        start, end = entry["data_offsets"]
        offset, dtype = 8 + length + start, sys.intern(entry["dtype"])
        tensors[name] = StoredTensor(path, name, dtype, tuple(entry["shape"]), offset, end - start, stamp)
    return tensors


def allowed_dtypes(dtype: np.dtype | None) -> tuple[str, ...]:
    """Names of the dtypes that a parameter with this `TensorSpec.dtype` may have in a file."""
    return tuple(WEIGHT_DTYPES) if dtype in (None, np.float32) else (DTYPE_NAMES[dtype],)


def unfit(unknown: Collection[str], missing: Collection[str], misshapen: Sequence[str], mistyped: Sequence[str]) -> list[str]:
    """What does not fit a config, a phrase for each kind of fault; the last two are phrases of their own already."""
    faults = [f"{len(names)} {kind}: {some(names)}" for kind, names in (("unknown", unknown), ("missing", missing)) if names]
    for kind, phrases in (("shape", misshapen), ("dtype", mistyped)):
        if phrases:
            faults.append(f"{len(phrases)} with the wrong {kind}: {'; '.join(phrases[:3])}")
    return faults


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


def write_safetensors(path: Path, tensors: Sequence[OutgoingTensor]) -> None:
    """Writes a safetensors file and waits until it is on disk."""
    header, offsets = lay_out({tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors})
    with open(path, "wb", buffering=0) as file:
        write_exactly(file, 0, np.frombuffer(header, np.uint8))
        for tensor in sorted(tensors, key=lambda tensor: offsets[tensor.name]):
            write_exactly(file, offsets[tensor.name], tensor.load())
        os.fsync(file.fileno())


def lay_out(tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """The header of a safetensors file of these dtypes and shapes, and where in the file each tensor begins."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # versions 4 of transformers refuse a file without it
    starts: dict[str, int] = {}
    end = 0
    # Readers view the bytes in place, so the wide dtypes go first: each tensor then starts at a multiple of its item.
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
        starts[name], end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (starts[name], end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + start for name, start in starts.items()}


def write_json(path: Path, value: Any) -> None:
    """Writes an indented JSON file and waits until it is on disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _stamp(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _short(error: Exception) -> str:
    """What another library says, on one line of readable length."""
    text = " ".join(str(error)[:1000].split())
    return text if len(text) <= 300 else text[:297] + "..."


def _check_members(data: bytes, path: Path) -> None:
    """Refuses JSON that would take much more memory than its size: each member follows a comma or opens its container."""
    members = sum(map(data.count, (b",", b"[", b"{")))
    if members > _MAX_JSON_MEMBERS:
        raise CheckpointError(f"{path}: about {members} JSON members; at most {_MAX_JSON_MEMBERS} are read")
    if not data.isascii() and len(data) > _MAX_JSON_BYTES // 4:  # Python then stores every character in up to 4 bytes
        raise CheckpointError(f"{path}: larger than {_MAX_JSON_BYTES // 4} bytes, the most that is read of JSON beyond ASCII")


@collector_off()
def _parse_json(data: bytes, path: Path) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
            raise CheckpointError(f"{path}: {some([repeated])} appears twice in one JSON object")
        return result

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON ({_short(error)})") from None


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
    if len(shard_of) > _MAX_TENSORS or len(set(shard_of.values())) > _MAX_SHARDS:
        raise CheckpointError(f"{path}: more than {_MAX_TENSORS} tensors or {_MAX_SHARDS} files")
    return shard_of
