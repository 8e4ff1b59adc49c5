"""Writes an HF directory piece by piece: every file has its header and its full size before the first tensor is written."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from checkpoints.hf import MASK_FILE, split_files
from checkpoints.pieces import row_boxes
from checkpoints.shards import INDEX_FILE, lay_out, write_exactly, write_json
from muse_jax.config import ModelConfig
from muse_jax.draft_config import DraftConfig
from muse_jax.layout import TensorSpec, tensors

_MASK_TOKEN = "mask_token_id"


class HFSink:
    """The safetensors files of a target or a draft; `directory` may hold what an interrupted run left of the same ones.

    Args:     config: of the tensors.  dtypes: of the arrays that `write` will get, by tensor name.
    """

    def __init__(self, directory: Path, config: ModelConfig | DraftConfig, dtypes: Mapping[str, np.dtype]) -> None:
        self._directory, self._config = directory, config
        sizes = {spec.name: spec.size * dtypes[spec.name].itemsize for spec in tensors(config)}
        shapes = {spec.name: (dtypes[spec.name], spec.shape) for spec in tensors(config)}
        side = shapes.pop("mask_embedding", None)  # of a draft, in a file of its own
        self._shard_of = {
            name: file for file, names in split_files({name: sizes[name] for name in shapes}).items() for name in names
        }
        files = {
            file: {name: shapes[name] for name in shapes if self._shard_of[name] == file} for file in self._shard_of.values()
        }
        if side is not None:
            files[MASK_FILE] = {"embedding": side, _MASK_TOKEN: (np.dtype(np.int64), ())}
        self._headers: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        self._places: dict[str, tuple[Path, int]] = {}
        for file, named in files.items():
            self._headers[file], offsets = lay_out(named)
            self._sizes[file] = len(self._headers[file]) + sum(
                math.prod(shape) * dtype.itemsize for dtype, shape in named.values()
            )
            for name, offset in offsets.items():
                self._places["mask_embedding" if name == "embedding" else name] = (directory / file, offset)

    @property
    def num_bytes(self) -> int:
        """Of the files."""
        return sum(self._sizes.values())

    def intact(self, spec: TensorSpec) -> bool:
        path = self._places[spec.name][0]
        return path.is_file() and path.stat().st_size == self._sizes[path.name]

    def create(self) -> None:
        for file, header in self._headers.items():
            with open(self._directory / file, "ab"):  # makes it, or leaves what is there
                pass
            with open(self._directory / file, "r+b", buffering=0) as out:
                out.truncate(self._sizes[file])
                write_exactly(out, 0, np.frombuffer(header, np.uint8))
        if _MASK_TOKEN in self._places:
            self._write_at(_MASK_TOKEN, 0, np.array(self._config.mask_token_id, np.int64))

    def pieces(self, spec: TensorSpec) -> Iterator[tuple[slice, ...]]:
        return row_boxes(spec.param_shape, 4)  # no dtype is wider

    def write(self, spec: TensorSpec, index: tuple[slice, ...], array: np.ndarray) -> None:
        shape = spec.param_shape
        start = sum(part.start * math.prod(shape[axis + 1 :]) for axis, part in enumerate(index))
        self._write_at(spec.name, start * array.dtype.itemsize, array)

    def sync(self, specs: list[TensorSpec]) -> dict[str, tuple[str, ...]]:
        """Waits until the tensors are on disk."""
        for path in {self._places[spec.name][0] for spec in specs}:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        return {}

    def finish(self) -> None:
        """Writes the index, if there is more than one file."""
        if len(set(self._shard_of.values())) > 1:
            total = sum(self._sizes[file] - len(self._headers[file]) for file in set(self._shard_of.values()))
            write_json(self._directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": self._shard_of})

    def _write_at(self, name: str, start: int, array: np.ndarray) -> None:
        path, offset = self._places[name]
        with open(path, "r+b", buffering=0) as file:
            write_exactly(file, offset + start, array)
