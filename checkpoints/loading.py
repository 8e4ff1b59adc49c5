"""Checkpoints of any format into device arrays: which format a directory has, its reader, and loading tensor by tensor."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from checkpoints import hf
from checkpoints.hf import CONFIG_FILE, HFReader, LoadReport
from checkpoints.manifest import Manifest, check_config, read_manifest
from checkpoints.packed import PackedReader
from checkpoints.shards import CheckpointError, read_json
from muse_jax.config import MLPKind, ModelConfig
from muse_jax.draft_config import DraftConfig
from muse_jax.layout import TensorSpec, insert, tensors

# Reads a slice of one parameter: a tuple of slices, leading axes first, in; an array of the parameter's dtype out.
ReadSlice = Callable[[tuple[slice, ...]], np.ndarray]
# Makes a parameter: put(spec, shape, dtype, read_slice) -> leaf.
Put = Callable[[TensorSpec, tuple[int, ...], np.dtype, ReadSlice], Any]


class Reader(Protocol):
    """The tensors of a checkpoint, checked against its config; see `HFReader`."""

    config: ModelConfig | DraftConfig
    specs: tuple[TensorSpec, ...]
    report: LoadReport

    def dtype(self, spec: TensorSpec) -> np.dtype: ...

    def num_bytes(self, spec: TensorSpec) -> int: ...

    def read(self, spec: TensorSpec, dtype: DTypeLike, index: tuple[slice, ...] = ()) -> np.ndarray: ...


def checkpoint_format(directory: str | os.PathLike) -> tuple[str, Manifest | None]:
    """ "hf", "orbax" or "packed", and the manifest of a converted checkpoint. Raises CheckpointError."""
    directory = hf.existing(directory)
    manifest = read_manifest(directory)
    if manifest is not None:
        return manifest.format, manifest
    if list(directory.glob("rank-*-of-*.bin")):
        raise CheckpointError(f"{directory}: a packed checkpoint without its manifest: convert the source again")
    return ("orbax" if _is_orbax(directory) else "hf"), None


def read_config(directory: str | os.PathLike) -> ModelConfig:
    """The model of a checkpoint directory of any format, with the layers whose experts are NVFP4.

    Raises:   CheckpointError if the directory or its config.json is missing or unreadable; ConfigError, also a
              ValueError, if it describes a model that is not implemented.
    Warns:    if quantisation metadata disagrees with the tensors.
    """
    format, manifest = checkpoint_format(directory)
    if format == "hf":
        return hf.read_config(directory)
    config = ModelConfig.from_hf(read_json(Path(directory) / CONFIG_FILE))
    sparse = tuple(i for i, kind in enumerate(config.mlp_layer_types) if kind == MLPKind.SPARSE)
    stored = _stored(directory, manifest)
    scales = (spec for spec in tensors(dataclasses.replace(config, nvfp4_layers=sparse)) if spec.path[-1] == "block_scales")
    return dataclasses.replace(config, nvfp4_layers=tuple(sorted({spec.path[1] for spec in scales if stored(spec)})))


def read_draft_config(directory: str | os.PathLike) -> DraftConfig:
    """The draft of a checkpoint directory of any format; see `hf.read_draft_config`."""
    format, manifest = checkpoint_format(directory)
    config = hf.read_draft_config(directory)
    if format == "hf":
        return config
    stored = _stored(directory, manifest)
    spec = tensors(dataclasses.replace(config, has_mask_embedding=True))[-1]
    return dataclasses.replace(config, has_mask_embedding=stored(spec))


def open_reader(directory: str | os.PathLike, config: ModelConfig | DraftConfig | None = None) -> Reader:
    """The reader of a checkpoint directory of any format, all of whose tensors fit `config`.

    Args:     config: of `read_config` or `read_draft_config`; None: the former's.
    Raises:   CheckpointError, ConfigError.
    """
    format, manifest = checkpoint_format(directory)
    if format == "hf":
        return HFReader(directory, config)
    config = config or read_config(directory)
    if manifest is not None:
        check_config(Path(directory), manifest)
    if format == "packed":
        return PackedReader(Path(directory), manifest, config)
    from checkpoints.orbax import OrbaxReader  # importing Orbax takes seconds

    return OrbaxReader(directory, config)


def load_params(
    source: str | os.PathLike | Reader,
    config: ModelConfig | DraftConfig | None = None,
    *,
    dtype: DTypeLike,
    put: Put | None = None,
    num_ranks: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, Any], LoadReport]:
    """Loads the parameters of a target or a draft, one tensor at a time on the host.

    Args:     source, config: a directory and its config as `open_reader` takes them, or the reader itself.
              dtype: bf16 or fp32, of the parameters; those with a `TensorSpec.dtype` have that in any case.
              put: makes the array of a parameter, `put(spec, shape, dtype, read_slice)`; `read_slice(index)` reads a
                  tuple of slices from the file. Default: whole, on the default device; see also `sharded_put`.
              num_ranks: devices that `put` splits over; a packed checkpoint is for one number of them.
              progress: called with (bytes done, bytes in all) of the files, before the first tensor and after each.
    Returns:  a nested dict following `TensorSpec.path` (under "layers" by layer index), each leaf what `put` returned:
              an array of `param_shape`; and what was found.
    Raises:   CheckpointError; nothing is kept of what was loaded until then.
    """
    dtype = hf.weight_dtype(dtype)
    reader = open_reader(source, config) if isinstance(source, (str, os.PathLike)) else source
    if isinstance(reader, PackedReader) and reader.tp != num_ranks:
        raise CheckpointError(
            f"{reader.directory}: packed for tp = {reader.tp}, to be loaded on {num_ranks} devices: load it on {reader.tp} "
            f"(--devices {reader.tp}, or mesh=), or convert it with --to packed --tp {num_ranks}"
        )
    put = put or _put_whole
    done, total = 0, reader.report.num_bytes
    params: dict[str, Any] = {}
    try:
        if progress:
            progress(done, total)
        for spec in reader.specs:
            leaf_dtype = spec.dtype_in(dtype)
            read_slice = functools.partial(_read_checked, reader, spec, leaf_dtype)
            # Transfers run behind; waiting keeps the host from holding more than this tensor.
            insert(params, spec.path, jax.block_until_ready(put(spec, spec.param_shape, leaf_dtype, read_slice)))
            done += reader.num_bytes(spec)
            if progress:
                progress(done, total)
    except BaseException:
        params.clear()  # whoever keeps the exception would keep this frame, and device memory with it
        raise
    return params, reader.report


def sharded_put(
    shardings: Callable[[TensorSpec], jax.sharding.NamedSharding], copies: Callable[[TensorSpec], int] = lambda spec: 1
) -> Put:
    """A `put` for loading that reads for each device of this process its own slice and no more.

    Args:     copies: neighbouring devices that hold the same part of `TensorSpec.shard_axis`; the array has it as often.
    """

    def put(spec: TensorSpec, shape: tuple[int, ...], dtype: np.dtype, read_slice: ReadSlice) -> jax.Array:
        times, axis, sharding = copies(spec), spec.shard_axis, shardings(spec)
        if times == 1:
            return jax.make_array_from_callback(shape, sharding, read_slice, dtype=dtype)
        shape = tuple(size * (times if i == axis else 1) for i, size in enumerate(shape))

        def read_part(index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[axis].indices(shape[axis])
            rows = stop - start
            start = start // (times * rows) * rows
            return read_slice((*index[:axis], slice(start, start + rows), *index[axis + 1 :]))

        return jax.make_array_from_callback(shape, sharding, read_part, dtype=dtype)

    return put


def check_scales(spec: TensorSpec, values: np.ndarray) -> None:
    """Raises CheckpointError if a scale of NVFP4 weights is not a finite number; other tensors may hold what they like."""
    if spec.path[-1] in ("block_scales", "global_scale", "input_scale"):
        is_nan = (values.view(np.uint8) & 0x7F) == 0x7F if values.dtype == jnp.float8_e4m3fn else ~np.isfinite(values)
        if is_nan.any():
            raise CheckpointError(
                f"{spec.name}: {int(is_nan.sum())} of its scales are NaN or infinite; the checkpoint is damaged"
            )


def _read_checked(reader: Reader, spec: TensorSpec, dtype: np.dtype, index: tuple[slice, ...]) -> np.ndarray:
    values = reader.read(spec, dtype, index)
    check_scales(spec, values)
    return values


def _put_whole(spec: TensorSpec, shape: tuple[int, ...], dtype: np.dtype, read_slice: ReadSlice) -> jax.Array:
    return jax.device_put(read_slice(()))


def _is_orbax(directory: Path) -> bool:
    return any((directory / item / "_METADATA").exists() for item in ("", "default", "state"))


def _stored(directory: str | os.PathLike, manifest: Manifest | None) -> Callable[[TensorSpec], bool]:
    """Whether a packed or Orbax checkpoint has a tensor; one that Orbax made itself has no manifest."""
    if manifest is not None:
        return lambda spec: spec.name in manifest.tensors
    from checkpoints.orbax import array_name, stored_names  # importing Orbax takes seconds

    names = stored_names(directory)
    return lambda spec: array_name(spec) in names
