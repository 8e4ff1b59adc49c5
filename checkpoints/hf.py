"""Hugging Face directories of Muse Spark and of its draft: weights into device arrays, and back.

The bounded-memory rule of both directions: one tensor at a time is on the host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import re
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from checkpoints import modelopt
from checkpoints.shards import (
    DTYPE_NAMES,
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    WEIGHT_DTYPES,
    CheckpointError,
    OutgoingTensor,
    StoredTensor,
    allowed_dtypes,
    collector_off,
    open_directory,
    read_header,
    read_json,
    some,
    unfit,
    write_json,
    write_safetensors,
)
from muse_jax.config import ConfigError, MLPKind, ModelConfig
from muse_jax.draft_config import DraftConfig
from muse_jax.layout import TEXT_PREFIX, TensorSpec, is_skipped
from muse_jax.layout import tensors as tensor_specs

CONFIG_FILE = "config.json"
# A draft may bring its own embedding of the mask token. Others store it as a pickle, which runs code when it is opened.
MASK_FILE = "mask_embedding.safetensors"
_MASK_PICKLE = "mask_embedding.pt"
MAX_SHARD_BYTES = 5_000_000_000

# A stack of experts may also be stored as one tensor per expert and projection (muse_spark.md section 2.3), in the order
# of the stack's leading axes: name of the stack -> projections, and how the name of each one's tensor ends.
_PER_EXPERT_NAMES = {
    f"{stack}{suffix}": (projections, ending)
    for stack, projections in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",)))
    for suffix, ending in (
        ("", "weight"),
        ("_weight_scale", "weight_scale"),
        ("_weight_scale_2", "weight_scale_2"),
        ("_input_scale", "input_scale"),
    )
}
_STACK_OF = {
    (projection, ending): stack for stack, (projections, ending) in _PER_EXPERT_NAMES.items() for projection in projections
}
_PER_EXPERT = re.compile(
    r"(.+\.mlp\.experts)\.[0-9]+\.((?:gate|up|down)_proj)\.(weight|weight_scale|weight_scale_2|input_scale)"
)
# Other names of a draft's tensors (dflash2.md section 1.2), tried in this order.
_DRAFT_ALIASES = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"model\.(.+)", r"\1"),
        (r"midlayer\.(.+)", r"layers.0.\1"),
        (r"encoder\.fc\.weight", "fc.weight"),
        (r"encoder\.output_norm_enc\.weight", "hidden_norm.weight"),
        (r"(candidate_selector\.(?:predecessor|successor)_codebook)\.weight", r"\1"),
    )
)
_QUANTISED = re.compile(r".+[._](?:qweight|qzeros|scales|g_idx|weight_packed|weight_scale|weight_scale_2|input_scale)")


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What a checkpoint holds, and how much of it was left."""

    num_tensors: int  # parameters; a stack of experts is one, however it is stored
    num_bytes: int  # of their tensors in the files
    num_skipped: int  # tensors of the vision and audio towers and other known ones that text does not need
    skipped_bytes: int
    dtypes: tuple[str, ...]  # of the parameters' tensors in the files, as safetensors spells them
    skipped_families: tuple[str, ...] = ()  # what the skipped ones belong to: "model.vision_tower"


@dataclasses.dataclass(frozen=True)
class _Source:
    """A parameter in the files: a row-major grid of tensors, each holding the parameter's remaining axes."""

    grid: tuple[int, ...]
    parts: tuple[StoredTensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def read_config(directory: str | os.PathLike) -> ModelConfig:
    """The model of a checkpoint directory; which layers have NVFP4 experts is seen from the tensors.

    Raises:   CheckpointError if the directory or its config.json is missing or unreadable; ConfigError, also a
              ValueError, if it describes a model that is not implemented.
    Warns:    if the quantisation metadata disagrees with the tensors.
    """
    directory = existing(directory)
    config = ModelConfig.from_hf(read_json(directory / CONFIG_FILE))
    has_weights = any((directory / name).exists() for name in (SINGLE_FILE, INDEX_FILE))
    return _with_nvfp4_layers(directory, config, open_directory(directory)) if has_weights else config


def read_draft_config(directory: str | os.PathLike) -> DraftConfig:
    """The draft of a checkpoint directory; `has_mask_embedding` says whether mask_embedding.safetensors is there.

    Raises:   CheckpointError if the directory or its config.json is missing or unreadable, or if a mask embedding is
              there as a pickle only; ConfigError for a draft that is not implemented.
    """
    directory = existing(directory)
    try:
        config = DraftConfig.from_hf(read_json(directory / CONFIG_FILE))
    except ConfigError as error:  # its fields have the names of the target's
        raise ConfigError(f"{directory / CONFIG_FILE}: {error}") from None
    return dataclasses.replace(config, has_mask_embedding=_has_mask_file(directory))


def checkpoint_dtype(config: ModelConfig | DraftConfig) -> np.dtype:
    """The dtype most of the checkpoint's tensors have, bf16 or fp32."""
    return jnp.dtype(config.dtype)


class HFReader:
    """The text tensors of a target or the tensors of a draft, all checked against the config before any of them is read.

    Args:     directory: holds `model.safetensors`, or `model.safetensors.index.json` and its shards; of a draft also
                  `mask_embedding.safetensors`, if it has one.
              config: says which tensors there are and their shapes; None: the target that config.json describes. BF16 and
                  F32 are accepted for each but the codes (U8) and block scales (F8_E4M3) of NVFP4 experts.
    Raises:   CheckpointError naming every kind of fault found: unreadable files, and missing, unknown, misshapen,
              quantised or doubly stored tensors.
    """

    @collector_off()
    def __init__(self, directory: str | os.PathLike, config: ModelConfig | DraftConfig | None = None) -> None:
        directory = existing(directory)
        if config is None:  # without `read_config`, so that the headers are read once
            config = ModelConfig.from_hf(read_json(directory / CONFIG_FILE))
            stored = open_directory(directory)
            config = _with_nvfp4_layers(directory, config, stored)
        else:
            stored = open_directory(directory)
        self.config = config
        self.specs = tensor_specs(config)
        is_draft = isinstance(config, DraftConfig)
        self.skipped = tuple(filter(_is_rotary_buffer if is_draft else is_skipped, stored))
        parameters = {name: stored[name] for name in stored.keys() - self.skipped}
        if is_draft:
            parameters = _draft_names(directory, [*parameters.items(), *_mask_embedding(directory, config)])
        self._sources = _match(directory, self.specs, parameters)
        parts = [part for source in self._sources.values() for part in source.parts]
        self.report = LoadReport(
            num_tensors=len(self.specs),
            num_bytes=sum(part.nbytes for part in parts),
            num_skipped=len(self.skipped),
            skipped_bytes=sum(stored[name].nbytes for name in self.skipped),
            dtypes=tuple(sorted({part.dtype for part in parts})),
            skipped_families=tuple(sorted({".".join(name.split(".")[:2]) for name in self.skipped})),
        )

    def num_bytes(self, spec: TensorSpec) -> int:
        """Bytes of the files that hold the parameter."""
        return self._sources[spec.name].nbytes

    def dtype(self, spec: TensorSpec) -> np.dtype:
        """The parameter's dtype in the files; the widest, if the tensors of a stack differ."""
        return max((DTYPES[part.dtype] for part in self._sources[spec.name].parts), key=lambda dtype: dtype.itemsize)

    def read(self, spec: TensorSpec, dtype: DTypeLike, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Reads a slice of a parameter and no other bytes.

        Args:     index: slices of step 1 into `spec.param_shape`, leading axes first; axes not given are whole.
        Returns:  a new array of `dtype`; fp32 in the file is rounded to nearest even for bf16.
        Raises:   CheckpointError if a file changed since it was checked, or ends early.
        """
        source, shape = self._sources[spec.name], spec.param_shape
        whole = (slice(None),) * (len(shape) - len(index))
        bounds = [s.indices(size)[:2] for s, size in zip(index + whole, shape, strict=True)]
        out = np.empty([stop - start for start, stop in bounds], dtype)
        axes = len(source.grid)
        for cell in np.ndindex(out.shape[:axes]):
            position = tuple(start + i for (start, _), i in zip(bounds, cell, strict=False))
            part = source.parts[np.ravel_multi_index(position, source.grid) if axes else 0]
            part.read_into(out[(*cell, ...)], shape[axes:], bounds[axes:])  # the ellipsis keeps a scalar a view
        return out


def save_hf(
    params: Mapping[str, Any],
    config_json: dict[str, Any],
    directory: str | os.PathLike,
    *,
    dtype: DTypeLike,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a directory that `load_params` and transformers load; a checkpoint already there is replaced.

    An interrupted run leaves what was there before, or a directory without config.json, which nothing loads. Other
    files of the directory (a tokenizer) are not touched.

    Args:     params: nested dict of arrays as `load_params` returns it, of any floating dtype, sharded or not.
              config_json: the content of config.json, stored as it is; its dtype must be `dtype`.
              dtype: bf16 or fp32, of the text tensors; those with a `TensorSpec.dtype` have that in any case.
              extra_tensors: weights of the towers by their names in the file, stored as they are.
              max_shard_bytes: beyond this the tensors are split into several files, in the order of the layout.
    Raises:   CheckpointError if params, extra_tensors or dtype do not fit the config; ConfigError; OSError.
    """
    dtype = weight_dtype(dtype)
    tensors = _outgoing(params, ModelConfig.from_hf(config_json), dtype)
    _save(directory, config_json, [*tensors, *_outgoing_extra(extra_tensors or {})], max_shard_bytes)


def save_draft(
    params: Mapping[str, Any],
    config_json: dict[str, Any],
    directory: str | os.PathLike,
    *,
    dtype: DTypeLike,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a draft that `load_params` and dflash load, with the published names; as atomic as `save_hf`.

    A mask embedding in `params` goes to mask_embedding.safetensors, which dflash does not read.

    Args:     params: nested dict of arrays as `load_params` returns it, of any floating dtype, sharded or not.
              config_json, dtype, max_shard_bytes: as in `save_hf`.
    Raises:   CheckpointError if params or dtype do not fit the config; ConfigError; OSError.
    """
    config = dataclasses.replace(DraftConfig.from_hf(config_json), has_mask_embedding="mask_embedding" in params)
    tensors = _outgoing(params, config, weight_dtype(dtype))
    side_files = {MASK_FILE: [], _MASK_PICKLE: []}
    if config.has_mask_embedding:
        token = np.array(config.mask_token_id, np.int64)
        side_files[MASK_FILE] = [
            dataclasses.replace(tensors.pop(), name="embedding"),  # the last of the table
            OutgoingTensor("mask_token_id", token.dtype, token.shape, lambda: token),
        ]
    _save(directory, config_json, tensors, max_shard_bytes, side_files)


def existing(directory: str | os.PathLike) -> Path:
    path = Path(directory)
    if not path.is_dir():
        raise CheckpointError(f"{path}: {'not a directory' if path.exists() else 'no such directory'}")
    return path


def weight_dtype(dtype: DTypeLike) -> np.dtype:
    dtype = jnp.dtype(dtype)
    if dtype not in WEIGHT_DTYPES.values():
        raise CheckpointError(f"dtype = {dtype.name}: allowed are bfloat16 and float32")
    return dtype


def _has_mask_file(directory: Path) -> bool:
    if (directory / MASK_FILE).exists():
        return True
    if (directory / _MASK_PICKLE).exists():
        raise CheckpointError(
            f"{directory / _MASK_PICKLE}: a pickle, which is never opened; store it as {MASK_FILE} with the tensors "
            "'embedding' [hidden_size] and 'mask_token_id' (I64)"
        )
    return False


def _mask_embedding(directory: Path, config: DraftConfig) -> list[tuple[str, StoredTensor]]:
    """The parameter that mask_embedding.safetensors holds, if there is one, and the name it has in the table."""
    if not _has_mask_file(directory):
        return []
    path = directory / MASK_FILE
    stored = read_header(path)
    if stored.keys() != {"embedding", "mask_token_id"}:
        raise CheckpointError(f"{path}: has {some(stored)}; expected 'embedding' and 'mask_token_id' and no others")
    token = stored["mask_token_id"]
    if token.dtype != "I64" or token.shape not in ((), (1,)):
        raise CheckpointError(f"{path}: 'mask_token_id' is {token.dtype} {list(token.shape)[:8]}; expected one I64 number")
    value = np.empty(token.shape, np.int64)
    token.read_into(value, token.shape, [(0, size) for size in token.shape])
    if value.item() != config.mask_token_id:
        raise CheckpointError(f"{path}: mask_token_id = {value.item()}, config.json has {config.mask_token_id}")
    return [("mask_embedding", stored["embedding"])]


def _is_rotary_buffer(name: str) -> bool:
    """Whether a tensor of a draft is a table of the rotary embedding, which follows from the config."""
    return "rotary_emb" in name.split(".")


def _draft_names(directory: Path, stored: Iterable[tuple[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """A draft's tensors by their names in the table; a tensor unknown to it keeps its own."""
    named: dict[str, StoredTensor] = {}
    for name, tensor in stored:
        for pattern, replacement in _DRAFT_ALIASES:
            if match := pattern.fullmatch(name):
                name = match.expand(replacement)
        if name in named:
            raise CheckpointError(f"{directory}: {some([named[name].name, tensor.name])} are two names for one tensor")
        named[name] = tensor
    return named


def _with_nvfp4_layers(directory: Path, config: ModelConfig, stored: Mapping[str, StoredTensor]) -> ModelConfig:
    """The config with what the tensors say about the experts; warns if the quantisation metadata says something else."""
    config = dataclasses.replace(config, nvfp4_layers=_nvfp4_layers(config, stored))
    excluded = modelopt.read_excluded(directory, read_json(directory / CONFIG_FILE))
    if excluded is not None and (note := modelopt.disagreement(excluded, config)):
        warnings.warn(f"{directory}: {note}", stacklevel=3)
    return config


def _nvfp4_layers(config: ModelConfig, stored: Mapping[str, StoredTensor]) -> tuple[int, ...]:
    """The sparse layers of which some expert matrix is uint8 and has block scales, however the experts are stored."""

    def is_packed(experts: str, name: str) -> bool:
        (first, *_), ending = _PER_EXPERT_NAMES[name]
        pairs = ((f"{experts}.{name}", "_weight_scale"), (f"{experts}.0.{first}.{ending}", "_scale"))
        return any(weight + scale in stored and weight in stored and stored[weight].dtype == "U8" for weight, scale in pairs)

    return tuple(
        i
        for i, kind in enumerate(config.mlp_layer_types)
        if kind == MLPKind.SPARSE
        and any(is_packed(f"{TEXT_PREFIX}layers.{i}.mlp.experts", name) for name in ("gate_up_proj", "down_proj"))
    )


def _match(directory: Path, specs: tuple[TensorSpec, ...], stored: Mapping[str, StoredTensor]) -> dict[str, _Source]:
    """Finds the tensors of each parameter, or raises one CheckpointError with everything that does not fit."""
    matches = filter(None, map(_PER_EXPERT.fullmatch, stored))
    per_expert = Counter((match[1], _STACK_OF[match[2], match[3]]) for match in matches)
    per_expert_prefixes = {prefix for prefix, _ in per_expert}
    sources: dict[str, _Source] = {}
    missing: list[str] = []
    misshapen: list[str] = []
    mistyped: list[str] = []
    used: set[str] = set()
    for spec in specs:
        prefix, _, stem = spec.name.rpartition(".")
        grid: tuple[int, ...] = ()
        names, shape = [spec.name], spec.shape
        if prefix in per_expert_prefixes and stem in _PER_EXPERT_NAMES:
            if spec.name in stored:
                raise CheckpointError(f"{directory}: {prefix} has both the stack {stem} and tensors for each expert")
            projections, ending = _PER_EXPERT_NAMES[stem]
            axes = 2 if len(projections) == 2 else 1  # experts, and gate and up
            grid, shape = spec.param_shape[:axes], spec.param_shape[axes:]
            if 2 * per_expert[prefix, stem] < math.prod(grid):  # keeps names that are not there from becoming a long list
                found = sum(count for (owner, _), count in per_expert.items() if owner == prefix)
                raise CheckpointError(f"{directory}: {prefix} has {found} tensors for num_local_experts = {grid[0]}")
            names = [
                f"{prefix}.{expert}.{projection}.{ending}"
                for expert, projection in itertools.product(range(grid[0]), projections)
            ]
        used.update(names)
        found = {name: stored[name] for name in names if name in stored}
        missing += [name for name in names if name not in found]
        allowed = allowed_dtypes(spec.dtype)
        for part in found.values():
            if part.shape != shape and not (shape == () and part.shape == (1,)):
                misshapen.append(f"{some([part.name])} is {list(part.shape)[:8]}, expected {list(shape)}")
            if part.dtype not in allowed:
                mistyped.append(f"{some([part.name])} is {part.dtype}, expected {' or '.join(allowed)}")
        sources[spec.name] = _Source(grid, tuple(found.values()))
    faults = []
    unknown = stored.keys() - used
    if quantised := [name for name in unknown if _QUANTISED.fullmatch(name)]:
        faults.append(f"quantised weights are not supported ({some(quantised)}) but for the experts of a target, as NVFP4")
        unknown -= set(quantised)
    faults += unfit([stored[name].name for name in unknown], missing, misshapen, mistyped)
    if faults:
        raise CheckpointError(f"{directory}: tensors do not fit config.json: {'; '.join(faults)}")
    return sources


def _leaves(tree: Mapping, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _outgoing(params: Mapping[str, Any], config: ModelConfig | DraftConfig, dtype: np.dtype) -> list[OutgoingTensor]:
    """The parameters in the order of the table, all checked against the config, none of them on the host yet."""
    if checkpoint_dtype(config) != dtype:
        raise CheckpointError(f"config.json has dtype {config.dtype!r} but the tensors are to be stored as {dtype.name}")
    leaves = dict(_leaves(params))
    specs = tensor_specs(config)
    expected = {spec.path for spec in specs}
    for fault, paths in (("missing", expected - leaves.keys()), ("unknown", leaves.keys() - expected)):
        if paths:
            raise CheckpointError(f"params: {len(paths)} {fault}: {some('/'.join(map(str, path)) for path in paths)}")
    tensors = []
    for spec in specs:
        leaf, leaf_dtype = leaves[spec.path], spec.dtype_in(dtype)
        if leaf.shape != spec.param_shape:
            path = "/".join(map(str, spec.path))
            raise CheckpointError(f"params: {path} is {list(leaf.shape)}, expected {list(spec.param_shape)}")
        tensors.append(OutgoingTensor(spec.name, leaf_dtype, spec.shape, functools.partial(_to_host, leaf, leaf_dtype)))
    return tensors


def _outgoing_extra(extra_tensors: Mapping[str, np.ndarray]) -> list[OutgoingTensor]:
    if unknown := [name for name in extra_tensors if not is_skipped(name)]:
        raise CheckpointError(f"extra_tensors: {some(unknown)} would be refused as unknown when loading")
    tensors = []
    for name, array in extra_tensors.items():
        if array.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"extra_tensors: {some([name])} is {array.dtype}: allowed are {some(map(str, DTYPE_NAMES), 99)}"
            )
        tensors.append(OutgoingTensor(name, array.dtype, array.shape, functools.partial(np.asarray, array)))
    return tensors


def _to_host(leaf: Any, dtype: np.dtype) -> np.ndarray:
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf).astype(dtype, copy=False)
    if not leaf.is_fully_addressable:
        raise CheckpointError("params: an array is spread over several processes; saving needs all of it in one")
    # np.asarray leaves a host copy with the array it is given; a copy on the CPU takes that one with it when it goes.
    cpu = jax.local_devices(backend="cpu")[0]
    out = np.empty(leaf.shape, dtype)
    for shard in leaf.addressable_shards:
        if shard.replica_id == 0:
            out[shard.index] = np.asarray(jax.device_put(shard.data, cpu))
    return out


def split_files(nbytes: Mapping[str, int], max_shard_bytes: int = MAX_SHARD_BYTES) -> dict[str, list[str]]:
    """Tensors by file name, filled in order; a tensor larger than the limit has a file to itself."""
    shards: list[list[str]] = []
    room = 0
    for name, size in nbytes.items():
        if not shards or size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def _save(
    directory: str | os.PathLike,
    config_json: dict[str, Any],
    tensors: list[OutgoingTensor],
    max_shard_bytes: int,
    side_files: Mapping[str, list[OutgoingTensor]] = MappingProxyType({}),
) -> None:
    """Writes the files of a checkpoint beside its directory and moves them into place.

    side_files: others that belong to the checkpoint, by name; one without tensors is only removed.
    """
    directory = Path(directory).resolve()  # through links, so that the temporary directory has the same file system
    directory.mkdir(parents=True, exist_ok=True)
    with _beside(directory) as partial:
        write_json(partial / CONFIG_FILE, config_json)
        shards = split_files({tensor.name: tensor.nbytes for tensor in tensors}, max_shard_bytes)
        by_name = {tensor.name: tensor for tensor in tensors}
        for file, names in shards.items():
            write_safetensors(partial / file, [by_name[name] for name in names])
        for file, side in side_files.items():
            if side:
                write_safetensors(partial / file, side)
        if len(shards) > 1:
            shard_of = {name: file for file, names in shards.items() for name in names}
            total = sum(tensor.nbytes for tensor in tensors)
            write_json(partial / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": shard_of})
        _publish(partial, directory, side_files)


@contextlib.contextmanager
def _beside(directory: Path) -> Iterator[Path]:
    """A temporary directory on the same file system, so that its files can be moved into place."""
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".partial", dir=directory.parent))
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _publish(partial: Path, directory: Path, side_files: Iterable[str]) -> None:
    """Moves a finished checkpoint into place; without config.json, which goes first and comes last, nothing loads."""
    (directory / CONFIG_FILE).unlink(missing_ok=True)
    sync_directory(directory)
    old_files = [directory / name for name in (SINGLE_FILE, INDEX_FILE, *side_files)]
    for old in (*old_files, *directory.glob("model-*-of-*.safetensors")):
        old.unlink(missing_ok=True)
    for new in sorted(partial.iterdir(), key=lambda path: path.name == CONFIG_FILE):
        if new.name == CONFIG_FILE:
            sync_directory(directory)
        os.replace(new, directory / new.name)
    sync_directory(directory)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
