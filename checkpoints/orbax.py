"""Orbax checkpoints of the parameter tree, read and written in boxes of bounded size.

Orbax saves a tree of arrays that are all in memory, which a checkpoint larger than the host never is. So the arrays are
written here with TensorStore, as Orbax itself does, into the files Orbax expects: Zarr 3 with a checksum of each chunk,
uncompressed. Orbax then writes its metadata for a tree whose leaves are already in their place.

Reading trusts nothing the files say: TensorStore opens paths that are made here from the table of tensors, and shapes,
dtypes and chunks are checked against that table before anything is allocated.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from jax.typing import DTypeLike

from checkpoints.hf import LoadReport
from checkpoints.shards import (
    DTYPE_NAMES,
    WEIGHT_DTYPES,
    CheckpointError,
    UnreadableError,
    allowed_dtypes,
    read_json,
    some,
    unfit,
)
from muse_jax.config import ModelConfig
from muse_jax.draft_config import DraftConfig
from muse_jax.layout import NUM_RANKS, TensorSpec, insert
from muse_jax.layout import tensors as tensor_specs

_TREE_FILE = "_METADATA"
_MANIFEST_FILE = "manifest.ocdbt"
_COMMIT_FILE = "commit_success.txt"
# Where the tree is: at the root, or in the item that CheckpointManager and version 1 of the API name so.
_ITEMS = ("", "default", "state")
_MAX_MANIFEST_BYTES = 32 << 20

_PIECE_BYTES = 64 << 20
_CHUNK_BYTES = 32 << 20
_CHECKSUM_BYTES = 4  # crc32c, after the bytes of each chunk
_OCDBT_CACHE = "cache_pool#ocdbt"


def array_name(spec: TensorSpec) -> str:
    """The name Orbax gives to the array at the path of a parameter: its keys with dots between them."""
    return ".".join(map(str, spec.path))


def stored_names(directory: str | os.PathLike) -> set[str]:
    """The names (see `array_name`) of the arrays that a checkpoint says it has. Raises CheckpointError."""
    return _read_tree(_locate(directory))[0]


class OrbaxReader:
    """The parameters of a target or a draft that Orbax or `OrbaxSink` saved, all checked before any of them is read.

    Both of Orbax's array formats are read (Zarr 2 and 3) and both of its stores (OCDBT, and a directory for each array),
    with the tree at the root or in the item `default` or `state`. Layer indices may be keys of a dict or of a list.

    Args:     directory: holds `_METADATA`, or has an item that does.
              config: says which arrays there are, their `param_shape`, and their dtype: that of `TensorSpec.dtype`, or
                  bfloat16 or float32 where that is float32 or None.
    Raises:   CheckpointError naming every kind of fault found: missing, unknown, misshapen and mistyped arrays; or the
              first array that cannot be opened.
    """

    def __init__(self, directory: str | os.PathLike, config: ModelConfig | DraftConfig) -> None:
        self.config, self.specs = config, tensor_specs(config)
        self._directory = _locate(directory)
        _refuse_special_files(self._directory)
        names, self._use_ocdbt, self._use_zarr3 = _read_tree(self._directory)
        self._context = _context(cache_bytes=0)
        self._stores: dict[str, ts.TensorStore] = {}
        for spec in self.specs:
            if array_name(spec) in names:
                self._stores[spec.name] = self._open(spec, self._context)
        self._check(names)
        # One chunk at a time is held of arrays with chunks of a sensible size. Orbax by default makes one chunk of what
        # each device has; so as not to decode that again for each box, the last such array stays in memory.
        self._kept: tuple[str, ts.TensorStore] | None = None
        self._lock = threading.Lock()
        self.report = LoadReport(
            num_tensors=len(self.specs),
            num_bytes=sum(map(self.num_bytes, self.specs)),
            num_skipped=0,
            skipped_bytes=0,
            dtypes=tuple(sorted({DTYPE_NAMES[self.dtype(spec)] for spec in self.specs})),
        )

    def dtype(self, spec: TensorSpec) -> np.dtype:
        """The dtype of the stored array."""
        return self._stores[spec.name].dtype.numpy_dtype

    def num_bytes(self, spec: TensorSpec) -> int:
        """Bytes of the array, which are those of the files unless they are compressed."""
        return spec.size * self.dtype(spec).itemsize

    def read(self, spec: TensorSpec, dtype: DTypeLike, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads a box of a parameter, and no chunks but those it touches.

        Safe to call from several threads; calls for arrays with chunks of more than 64 MiB wait for each other.

        Args:     index: slices of step 1 into `spec.param_shape`, leading axes first; axes not given are whole.
        Returns:  a new array of `dtype`: the stored one, or of bfloat16 and float32 the other, rounded to nearest even.
        Raises:   CheckpointError if a chunk is missing, short or fails its checksum, or for another conversion.
        """
        dtype, stored, shape = np.dtype(dtype), self.dtype(spec), spec.param_shape
        if dtype != stored and not {dtype, stored} <= set(WEIGHT_DTYPES.values()):
            raise CheckpointError(f"{array_name(spec)} is stored as {stored} and cannot be read as {dtype}")
        index += (slice(None),) * (len(shape) - len(index))
        bounds = [s.indices(size)[:2] for s, size in zip(index, shape, strict=True)]
        out = np.empty([stop - start for start, stop in bounds], dtype)
        with self._store(spec) as store, self._explained(spec):
            for box in _boxes(bounds, store.chunk_layout.read_chunk.shape, stored.itemsize):
                part = out[tuple(slice(s.start - start, s.stop - start) for s, (start, _) in zip(box, bounds, strict=True))]
                if dtype == stored and part.shape:
                    ts.array(part).write(store[box]).result()
                else:
                    part[...] = store[box].read().result()
        return out

    def _open(self, spec: TensorSpec, context: ts.Context) -> ts.TensorStore:
        name = array_name(spec)
        if self._use_ocdbt:
            base = {"driver": "file", "path": f"{self._directory}/"}
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/", "cache_pool": _OCDBT_CACHE}
        else:
            read_json(self._directory / name / ("zarr.json" if self._use_zarr3 else ".zarray"))  # of bounded size
            kvstore = {"driver": "file", "path": f"{self._directory / name}/"}
        json_spec = {
            "driver": "zarr3" if self._use_zarr3 else "zarr",
            "kvstore": kvstore,
            "recheck_cached_data": "open",
            "fill_missing_data_reads": False,  # else zeros stand in for a chunk that is not there
        }
        with self._explained(spec):
            return ts.open(json_spec, read=True, context=context).result()

    @contextlib.contextmanager
    def _store(self, spec: TensorSpec) -> Iterator[ts.TensorStore]:
        store = self._stores[spec.name]
        if math.prod(store.chunk_layout.read_chunk.shape) * self.dtype(spec).itemsize <= _PIECE_BYTES:
            yield store
            return
        with self._lock:
            if self._kept is None or self._kept[0] != spec.name:
                self._kept = None  # before the next one needs the memory
                self._kept = spec.name, self._open(spec, _context(cache_bytes=2 * self.num_bytes(spec)))
            yield self._kept[1]

    def _check(self, names: set[str]) -> None:
        missing, misshapen, mistyped = [], [], []
        for spec in self.specs:
            name = array_name(spec)
            if spec.name not in self._stores:
                missing.append(name)
                continue
            store = self._stores[spec.name]
            if store.shape != spec.param_shape:
                misshapen.append(f"{some([name])} is {list(store.shape)[:8]}, expected {list(spec.param_shape)}")
                continue
            # A chunk is decoded as a whole, so its size is an allocation that the file could ask for.
            for chunk in (store.chunk_layout.read_chunk.shape, store.chunk_layout.write_chunk.shape):
                if any(part > max(size, 1) for part, size in zip(chunk, store.shape, strict=True)):
                    raise CheckpointError(
                        f"{self._directory}: {some([name])} has chunks of {list(chunk)[:8]}, larger than the array"
                    )
            found, allowed = DTYPE_NAMES.get(store.dtype.numpy_dtype, store.dtype.name), allowed_dtypes(spec.dtype)
            if found not in allowed:
                mistyped.append(f"{some([name])} is {found}, expected {' or '.join(allowed)}")
        if faults := unfit(names - set(map(array_name, self.specs)), missing, misshapen, mistyped):
            raise CheckpointError(f"{self._directory}: arrays do not fit the config: {'; '.join(faults)}")

    def _explained(self, spec: TensorSpec) -> contextlib.AbstractContextManager[None]:
        return _explained(f"{self._directory}: {some([array_name(spec)])} cannot be read; copy or convert it again")


class OrbaxSink:
    """Writes an Orbax checkpoint piece by piece; stock Orbax restores it as the nested parameter tree.

    First `create`; then for each of the `specs` `write` all of its `pieces`, then `sync`; when all are there, `finish`. The
    directory may hold what an interrupted run left: a piece written again replaces what was there, and arrays that were
    synced need not be written again. A chunk file is either absent or whole at any time.

    Chunks end at the ends of eight equal parts of `TensorSpec.shard_axis`, so that each of eight ranks reads its own.

    Args:     dtypes: of the arrays to write, by `TensorSpec.name`.
    """

    def __init__(self, directory: str | os.PathLike, specs: Sequence[TensorSpec], dtypes: Mapping[str, np.dtype]) -> None:
        self._directory = Path(directory).absolute()
        self._specs = tuple(specs)
        self._dtypes = {spec.name: np.dtype(dtypes[spec.name]) for spec in self._specs}
        self._stores: dict[str, ts.TensorStore] = {}
        self._context = _context(cache_bytes=0)

    @property
    def num_bytes(self) -> int:
        """Of the files with the chunks."""
        return sum(math.prod(self._grid(spec)) * self._chunk_file_bytes(spec) for spec in self._specs)

    def intact(self, spec: TensorSpec) -> bool:
        """Whether all chunks of an array are there and whole, and its metadata is what `write` would make."""
        try:
            self._check(spec)
            ts.open(self._json_spec(spec) | {"create": False}, context=self._context).result()
        except Exception:  # TensorStore has no exception classes of its own
            shutil.rmtree(self._path(spec), ignore_errors=True)  # metadata that it cannot read it would not replace
            return False
        return True

    def create(self) -> None:
        """Makes the directory, if it is not there."""
        self._directory.mkdir(parents=True, exist_ok=True)

    def pieces(self, spec: TensorSpec) -> Iterator[tuple[slice, ...]]:
        """Boxes of `spec.param_shape` in row-major order, together all of it; each is whole chunks, at most 64 MiB."""
        dtype = self._dtypes[spec.name]
        return _boxes([(0, size) for size in spec.param_shape], _chunk_shape(spec, dtype), dtype.itemsize)

    def write(self, spec: TensorSpec, index: tuple[slice, ...], array: np.ndarray) -> None:
        """Writes one of the `pieces`. Different specs may be written at the same time.

        Raises:   ValueError if the array has not the piece's shape and the dtype that was announced; OSError if it cannot
                  be written, or if the array was begun with another shape or dtype.
        """
        dtype, shape = self._dtypes[spec.name], tuple(s.stop - s.start for s in index)
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(f"{array_name(spec)}: got {array.dtype} {list(array.shape)}, expected {dtype} {list(shape)}")
        with self._explained(spec):
            if spec.name not in self._stores:
                self._stores[spec.name] = ts.open(self._json_spec(spec), context=self._context).result()
            self._stores[spec.name][index].write(array, can_reference_source_data_indefinitely=True).result()

    def sync(self, specs: Sequence[TensorSpec]) -> dict[str, tuple[str, ...]]:
        """Returns when these arrays are on disk. Raises CheckpointError if not all of their pieces were written."""
        for spec in specs:
            self._stores.pop(spec.name, None)
            self._check(spec)
            # TensorStore has waited for each file before it gave it its name; the names are what is left.
            _sync(self._path(spec))
        _sync(self._directory)
        return {}

    def finish(self) -> None:
        """Lets Orbax write its metadata, with which the directory is a checkpoint.

        Raises:   CheckpointError if an array is not complete.
        """
        for spec in self._specs:
            self._check(spec)
        tree: dict[str, Any] = {}
        for spec in self._specs:
            insert(tree, tuple(map(str, spec.path)), _Stored())
        staging = self._directory / ".orbax-metadata"
        for left in self._directory.glob(f"{staging.name}*"):
            shutil.rmtree(left)
        _save_metadata(staging, tree)
        (staging / _COMMIT_FILE).unlink(missing_ok=True)  # it says where the directory was
        for file in sorted(staging.iterdir(), key=lambda path: path.name == _TREE_FILE):  # without which nothing reads it
            _sync(file)
            os.replace(file, self._directory / file.name)
        staging.rmdir()
        _sync(self._directory)

    def _path(self, spec: TensorSpec) -> Path:
        return self._directory / array_name(spec)

    def _json_spec(self, spec: TensorSpec) -> dict[str, Any]:
        dtype = self._dtypes[spec.name]
        chunk_shape = _chunk_shape(spec, dtype)
        return {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{self._path(spec)}/"},
            "open": True,
            "create": True,
            "store_data_equal_to_fill_value": True,
            "metadata": {
                "shape": spec.param_shape,
                "data_type": dtype.name,
                # All chunks in one directory, which is one to wait for.
                "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
                "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            },
        }

    def _grid(self, spec: TensorSpec) -> list[int]:
        chunk_shape = _chunk_shape(spec, self._dtypes[spec.name])
        return [-(-size // part) for size, part in zip(spec.param_shape, chunk_shape, strict=True)]

    def _chunk_file_bytes(self, spec: TensorSpec) -> int:
        dtype = self._dtypes[spec.name]
        return math.prod(_chunk_shape(spec, dtype)) * dtype.itemsize + _CHECKSUM_BYTES

    def _check(self, spec: TensorSpec) -> None:
        path, num_bytes = self._path(spec), self._chunk_file_bytes(spec)
        for chunk in np.ndindex(*self._grid(spec)):
            file = path / ".".join(("c", *map(str, chunk)))
            if not file.is_file() or file.stat().st_size != num_bytes:
                raise CheckpointError(f"{file}: missing or incomplete; write all pieces of {spec.name} before finishing")

    def _explained(self, spec: TensorSpec) -> contextlib.AbstractContextManager[None]:
        return _explained(f"{self._directory}: {some([array_name(spec)])} cannot be written", OSError)


class _Stored:
    """A leaf whose array is in the checkpoint already."""


def _save_metadata(directory: Path, tree: dict[str, Any]) -> None:
    """Saves a tree of `_Stored` leaves, of which Orbax writes the metadata only."""
    import orbax.checkpoint as ocp  # takes a second, and initialises JAX when it saves

    class StoredHandler(ocp.type_handlers.TypeHandler):
        def typestr(self) -> str:
            # What is restored without a target: as a jax.Array it would need the sharding it was saved with.
            return "np.ndarray"

        async def serialize(self, values, infos, args=None):
            return []

        async def deserialize(self, infos, args=None):
            raise NotImplementedError("restoring uses Orbax's own handlers")

        async def metadata(self, infos):
            raise NotImplementedError("restoring uses Orbax's own handlers")

    registry = ocp.type_handlers.create_type_handler_registry((_Stored, StoredHandler()))
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)  # it warns that there are no arrays to save
    try:
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True, type_handler_registry=registry)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(directory, args=ocp.args.PyTreeSave(tree))
    finally:
        absl.setLevel(level)


def _locate(directory: str | os.PathLike) -> Path:
    directory = Path(directory).absolute()
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: {'not a directory' if directory.exists() else 'no such directory'}")
    for item in _ITEMS:
        if (directory / item / _TREE_FILE).exists():
            return directory / item
    items = " or ".join(filter(None, _ITEMS))
    raise CheckpointError(
        f"{directory}: no {_TREE_FILE} here or in {items}: not an Orbax checkpoint (of several steps, give one's directory)"
    )


def _refuse_special_files(directory: Path) -> None:
    """TensorStore opens whatever has the name of a chunk, and opening a pipe may wait for ever."""
    directories = [os.fspath(directory)]
    try:
        while directories:
            with os.scandir(directories.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        directories.append(entry.path)
                    elif not entry.is_file() and not entry.is_dir():
                        raise CheckpointError(f"{entry.path}: neither a file nor a directory")
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read ({error})") from None


def _read_tree(directory: Path) -> tuple[set[str], bool, bool]:
    """The names of a checkpoint's arrays, whether they are in an OCDBT store, and whether they are Zarr 3."""
    path = directory / _TREE_FILE
    metadata = read_json(path)
    tree = metadata.get("tree_metadata") if isinstance(metadata, dict) else None
    if not isinstance(tree, dict) or not tree:
        raise CheckpointError(f"{path}: expected an object whose tree_metadata lists the arrays")
    names = set()
    for entry in tree.values():
        keys = entry.get("key_metadata") if isinstance(entry, dict) else None
        if not isinstance(keys, list) or not all(isinstance(key, dict) and isinstance(key.get("key"), str) for key in keys):
            raise CheckpointError(f"{path}: an entry of tree_metadata has no key_metadata with the keys of its path")
        names.add(".".join(key["key"] for key in keys))
    manifest = directory / _MANIFEST_FILE
    use_ocdbt = metadata.get("use_ocdbt")
    if use_ocdbt is None:  # older versions do not say
        use_ocdbt = manifest.exists()
    if use_ocdbt and not (manifest.is_file() and manifest.stat().st_size <= _MAX_MANIFEST_BYTES):
        raise CheckpointError(f"{manifest}: missing, or larger than {_MAX_MANIFEST_BYTES} bytes")
    return names, bool(use_ocdbt), bool(metadata.get("use_zarr3"))


def _context(cache_bytes: int) -> ts.Context:
    """cache_bytes: of decoded chunks that are kept after they were used."""
    return ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}, _OCDBT_CACHE: {"total_bytes_limit": 16 << 20}})


@contextlib.contextmanager
def _explained(message: str, kind: type[Exception] = UnreadableError) -> Iterator[None]:
    """Makes one line of what TensorStore raises, which has no exception classes of its own."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()).split(" [tensorstore_spec=")[0].split(" [source locations=")[0]
        raise kind(f"{message} ({reason[:400]})") from None


def _chunk_shape(spec: TensorSpec, dtype: np.dtype) -> tuple[int, ...]:
    """Chunks of at most 32 MiB that end where eight ranks' parts do.

    Eight chunks beside each other, if that is not how they lie in the array anyway, are one piece: what other layouts
    have in one run is then in chunks that are read once.
    """
    chunk = list(spec.param_shape)
    split = spec.shard_axis
    if split is not None:
        chunk[split] //= spec.num_parts
    limit = min(_CHUNK_BYTES, _PIECE_BYTES // NUM_RANKS) if split is not None and split > 0 else _CHUNK_BYTES
    for axis, size in enumerate(chunk):
        most = max(1, limit // (math.prod(chunk) // size * dtype.itemsize))
        if most >= size:
            continue
        if axis == split:
            chunk[axis] = next(part for part in range(most, 0, -1) if size % part == 0)
        else:
            chunk[axis] = -(-size // -(-size // most))  # as many as needed, as equal as can be
    return tuple(chunk)


def _boxes(bounds: Sequence[tuple[int, int]], chunk: Sequence[int], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Cuts a box along the borders of chunks into boxes of at most 64 MiB, or of one chunk, in row-major order."""
    block = list(chunk)
    num_bytes = math.prod(chunk) * itemsize
    for axis in reversed(range(len(block))):
        start, stop = bounds[axis]
        whole = -(-stop // chunk[axis]) - start // chunk[axis]
        count = max(1, min(whole, _PIECE_BYTES // num_bytes))
        block[axis] *= count
        num_bytes *= count
        if count < whole:
            break
    cuts: Iterable[list[slice]] = (
        [slice(max(at, start), min(at + size, stop)) for at in range(start // part * part, stop, size)]
        for (start, stop), part, size in zip(bounds, chunk, block, strict=True)
    )
    return itertools.product(*cuts)


def _sync(path: str | os.PathLike) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
