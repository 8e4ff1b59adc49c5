"""The packed layout: one file a rank, with its part of every parameter, matrices in tiles (`layout.PackedTensor`)."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from jax.typing import DTypeLike

from checkpoints.hf import LoadReport
from checkpoints.manifest import Manifest, check_names
from checkpoints.pieces import PIECE_BYTES, row_boxes
from checkpoints.shards import DTYPE_NAMES, CheckpointError, read_exactly, write_exactly
from muse_jax.config import ModelConfig
from muse_jax.draft_config import DraftConfig
from muse_jax.layout import TILE_ROWS, PackedTensor, TensorSpec, packed_tensors


def rank_file(tp: int, rank: int) -> str:
    return f"rank-{rank}-of-{tp}.bin"


def file_bytes(table: tuple[PackedTensor, ...]) -> int:
    """Size of each rank's file."""
    return table[-1].offset + table[-1].nbytes


class PackedReader:
    """The parameters of a packed checkpoint, reassembled from its ranks or read rank by rank.

    Args:     directory: of the files.  manifest: of that directory.  config: says which tensors there are.
    Raises:   CheckpointError if the manifest does not fit the config, or a file is missing or has another size.
    """

    def __init__(self, directory: Path, manifest: Manifest, config: ModelConfig | DraftConfig) -> None:
        self.config, self.directory, self.tp, self._manifest = config, directory, manifest.tp, manifest
        table = packed_tensors(config, self.tp)
        self.specs = tuple(tensor.spec for tensor in table)
        self._table = {tensor.spec.name: tensor for tensor in table}
        check_names(directory, manifest, set(self._table))
        for name, entry in manifest.tensors.items():
            if len(entry.rank_sha256) != self.tp or not _holds(self._table[name].dtype, entry.dtype):
                raise CheckpointError(f"{directory}: {name} is {entry.dtype} in the manifest, which does not fit config.json")
        self._files = [directory / rank_file(self.tp, rank) for rank in range(self.tp)]
        expected = file_bytes(table)
        for path in self._files:
            size = path.stat().st_size if path.is_file() else None
            if size != expected:
                found = "no such file" if size is None else f"has {size} bytes, expected {expected}"
                raise CheckpointError(f"{path}: {found}: convert the source again, or resume the conversion")
        self.report = LoadReport(
            num_tensors=len(table),
            num_bytes=sum(self.num_bytes(spec) for spec in self.specs),
            num_skipped=0,
            skipped_bytes=0,
            dtypes=tuple(sorted({DTYPE_NAMES[tensor.dtype] for tensor in table})),
        )

    def dtype(self, spec: TensorSpec) -> np.dtype:
        """The dtype the parameter had where it was converted from; what is stored may be wider."""
        return self._manifest.tensors[spec.name].dtype

    def num_bytes(self, spec: TensorSpec) -> int:
        return spec.size * self._table[spec.name].dtype.itemsize

    def read(self, spec: TensorSpec, dtype: DTypeLike, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads a slice of a parameter from the ranks that hold it, as `HFReader.read` does.

        A rank's whole part is compared with its checksum; of a smaller slice the bytes alone are read.
        """
        packed = self._table[spec.name]
        box = [s.indices(size)[:2] for s, size in zip(index, spec.param_shape, strict=False)]
        box += [(0, size) for size in spec.param_shape[len(box) :]]
        out = np.empty([stop - start for start, stop in box], packed.dtype)
        for rank in spec.holders(self.tp):
            part = spec.rank_part(self.tp, rank)
            cut = [(max(start, p.start), min(stop, p.stop)) for (start, stop), p in zip(box, part, strict=True)]
            if all(start < stop for start, stop in cut):
                target = out[tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(cut, box, strict=True))]
                self._read_part(packed, rank, [(a - p.start, b - p.start) for (a, b), p in zip(cut, part, strict=True)], target)
        return out.astype(dtype, copy=False)

    def check_ranks(self, spec: TensorSpec) -> None:
        """Compares a parameter's bytes in every rank's file with the manifest; `read` takes a replicated one from one rank.

        Raises:   CheckpointError at a difference.
        """
        packed = self._table[spec.name]
        for rank, path in enumerate(self._files):
            digest = hashlib.sha256()
            with open(path, "rb", buffering=0) as file:
                for start in range(0, packed.nbytes, PIECE_BYTES):
                    data = np.empty(min(PIECE_BYTES, packed.nbytes - start), np.uint8)
                    read_exactly(file, packed.offset + start, memoryview(data))
                    digest.update(data)
            self._compare(packed, rank, digest.hexdigest())

    def _compare(self, packed: PackedTensor, rank: int, checksum: str) -> None:
        if checksum != self._manifest.tensors[packed.spec.name].rank_sha256[rank]:
            raise CheckpointError(
                f"{self._files[rank]}: {packed.spec.name} does not have the checksum of the manifest, the file is damaged: "
                "convert the source again, or take the file from a good copy"
            )

    def _read_part(self, packed: PackedTensor, rank: int, box: list[tuple[int, int]], out: np.ndarray) -> None:
        """Reads a box of a rank's part into `out`."""
        whole = all(bounds == (0, size) for bounds, size in zip(box, packed.shape, strict=True))
        digest = hashlib.sha256() if whole else None
        path = self._files[rank]
        with open(path, "rb", buffering=0) as file:
            for position in np.ndindex(*(stop - start for start, stop in box[:-2])):
                leading = [start + i for (start, _), i in zip(box, position, strict=False)]
                matrix = np.ravel_multi_index(leading, packed.shape[:-2]) if leading else 0
                rows, columns = ((0, 1),) * (2 - len(box)) + tuple(box[-2:])
                target = out[position] if len(box) > 1 else out.reshape(1, -1)
                self._read_matrix(file, packed, int(matrix), rows, columns, target, digest)
        if digest is not None:
            self._compare(packed, rank, digest.hexdigest())

    def _read_matrix(self, file, packed: PackedTensor, matrix: int, rows, columns, out: np.ndarray, digest) -> None:
        """Reads rows and columns of one matrix of a part into out [rows, columns]; other rows of their tiles are read too."""
        num_rows, row_bytes = _matrix_bytes(packed)
        tile_rows = packed.tile[0] if packed.tile else 1
        step = max(1, PIECE_BYTES // (tile_rows * row_bytes)) * tile_rows
        for first in range(rows[0] // tile_rows * tile_rows, rows[1], step):
            last = min(num_rows, first + step, -(-rows[1] // tile_rows) * tile_rows)
            data = np.empty((last - first) * row_bytes, np.uint8)
            read_exactly(file, packed.offset + (matrix * num_rows + first) * row_bytes, memoryview(data))
            if digest is not None:
                digest.update(data)
            if packed.tile:
                data = from_tiles(data, row_bytes, packed.tile)
            values = data.reshape(last - first, row_bytes).view(packed.dtype)
            start, stop = max(first, rows[0]), min(last, rows[1])
            out[start - rows[0] : stop - rows[0]] = values[start - first : stop - first, columns[0] : columns[1]]


class PackedSink:
    """Writes the files of a packed checkpoint; `directory` may hold what an interrupted run left of the same ones.

    Args:     config: of the tensors.  dtypes: of the arrays that `write` will get, by tensor name.
    Raises:   CheckpointError if one is wider than the layout's, so that it would be rounded.
    """

    def __init__(self, directory: Path, config: ModelConfig | DraftConfig, dtypes: Mapping[str, np.dtype], tp: int) -> None:
        self._table = {tensor.spec.name: tensor for tensor in packed_tensors(config, tp)}
        self._tp = tp
        for name, tensor in self._table.items():
            if not _holds(tensor.dtype, dtypes[name]):
                raise CheckpointError(
                    f"{name} is {dtypes[name].name} and would be rounded to {tensor.dtype.name}, the dtype of config.json: "
                    "store the checkpoint in one dtype first"
                )
        self._files = [directory / rank_file(tp, rank) for rank in range(tp)]
        self._digests: dict[str, list] = {}

    @property
    def num_bytes(self) -> int:
        """Of the files."""
        return self._tp * file_bytes(tuple(self._table.values()))

    def intact(self, spec: TensorSpec) -> bool:
        size = file_bytes(tuple(self._table.values()))
        return all(path.is_file() and path.stat().st_size == size for path in self._files)

    def create(self) -> None:
        size = file_bytes(tuple(self._table.values()))
        for path in self._files:
            with open(path, "ab") as file:
                os.truncate(file.fileno(), size)

    def pieces(self, spec: TensorSpec) -> Iterator[tuple[slice, ...]]:
        packed = self._table[spec.name]
        # Rows of a matrix are cut where a rank's part begins and where a tile does.
        is_row_axis = spec.shard_axis == len(spec.param_shape) - 2
        period = packed.shape[-2] if is_row_axis else None
        yield from row_boxes(spec.param_shape, packed.dtype.itemsize, rows=TILE_ROWS, period=period)

    def write(self, spec: TensorSpec, index: tuple[slice, ...], array: np.ndarray) -> None:
        packed = self._table[spec.name]
        array = array.astype(packed.dtype, copy=False)
        digests = self._digests.setdefault(spec.name, [hashlib.sha256() for _ in range(self._tp)])
        data = None
        for rank, (path, digest) in enumerate(zip(self._files, digests, strict=True)):
            part = spec.rank_part(self._tp, rank)
            cut = [(max(i.start, p.start), min(i.stop, p.stop)) for i, p in zip(index, part, strict=True)]
            if any(start >= stop for start, stop in cut):
                continue
            if data is None or rank in spec.holders(self._tp):  # others have the same as the one before
                values = array[tuple(slice(a - i.start, b - i.start) for (a, b), i in zip(cut, index, strict=True))]
                data = _part_bytes(values, packed)
            first = [a - p.start for (a, _), p in zip(cut, part, strict=True)]
            digest.update(data)
            start = sum(i * math.prod(packed.shape[axis + 1 :]) for axis, i in enumerate(first)) * packed.dtype.itemsize
            with open(path, "r+b", buffering=0) as file:
                write_exactly(file, packed.offset + start, data)

    def sync(self, specs: list[TensorSpec]) -> dict[str, tuple[str, ...]]:
        """Waits until the tensors are on disk. Returns the checksum of each one's bytes in each rank's file."""
        for path in self._files:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        return {spec.name: tuple(digest.hexdigest() for digest in self._digests.pop(spec.name)) for spec in specs}

    def finish(self) -> None:
        """Nothing is left to write."""


def to_tiles(matrix: np.ndarray, tile: tuple[int, int]) -> np.ndarray:
    """A matrix of bytes [rows, row_bytes] in tile order, flat."""
    flat = np.empty(matrix.size, np.uint8)
    for tiles, rows in _tile_views(flat, matrix, tile):
        tiles[...] = rows
    return flat


def from_tiles(flat: np.ndarray, row_bytes: int, tile: tuple[int, int]) -> np.ndarray:
    """The inverse of `to_tiles`: bytes in tile order as a matrix [rows, row_bytes]."""
    matrix = np.empty((flat.size // row_bytes, row_bytes), np.uint8)
    for tiles, rows in _tile_views(flat, matrix, tile):
        rows[...] = tiles
    return matrix


def _tile_views(flat: np.ndarray, matrix: np.ndarray, tile: tuple[int, int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs of views of the same bytes: one of `flat`, in tile order, and one of `matrix`, that cover both."""
    (num_rows, row_bytes), (tile_rows, tile_bytes) = matrix.shape, tile
    full = num_rows // tile_rows * tile_rows
    wide = row_bytes // tile_bytes * tile_bytes
    for first, last, height in ((0, full, tile_rows), (full, num_rows, num_rows - full)):
        if first == last:
            continue
        rows = matrix[first:last].reshape(-1, height, row_bytes)
        bands = flat[first * row_bytes : last * row_bytes].reshape(len(rows), height * row_bytes)
        if wide:
            tiles = bands[:, : height * wide].reshape(len(rows), -1, height, tile_bytes)
            yield tiles, rows[:, :, :wide].reshape(len(rows), height, -1, tile_bytes).swapaxes(1, 2)
        if wide < row_bytes:
            yield bands[:, height * wide :].reshape(len(rows), height, -1), rows[:, :, wide:]


def _part_bytes(values: np.ndarray, packed: PackedTensor) -> np.ndarray:
    """The bytes of a box of a rank's part as they lie in its file; the box is whole bands of tiles."""
    values = np.ascontiguousarray(values)
    if not packed.tile:
        return values.reshape(-1).view(np.uint8)
    matrices = values.reshape(-1, *values.shape[-2:]).view(np.uint8)
    return np.concatenate([to_tiles(matrix, packed.tile) for matrix in matrices])


def _matrix_bytes(packed: PackedTensor) -> tuple[int, int]:
    """Rows, and bytes of a row, of each matrix of a rank's part; a vector is one row."""
    rows = packed.shape[-2] if len(packed.shape) > 1 else 1
    return rows, packed.shape[-1] * packed.dtype.itemsize


def _holds(dtype: np.dtype, narrower: np.dtype) -> bool:
    """Whether every value of `narrower` is one of `dtype`."""
    return dtype == narrower or (dtype == np.float32 and DTYPE_NAMES.get(narrower) == "BF16")
