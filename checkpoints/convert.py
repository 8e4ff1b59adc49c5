"""Conversion of checkpoints between formats: streaming, resumable, and published whole or not at all.

    source reader -> pieces of at most 32 MiB, a few tensors at a time -> sink
                     checksum of each tensor ------------------------> manifest, journal

Everything is written into `.NAME.partial` beside the destination (see `journal`) and renamed at the end, so what has the
destination's name is complete.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from checkpoints import modelopt
from checkpoints.hf import CONFIG_FILE, existing, sync_directory
from checkpoints.hf_sink import HFSink
from checkpoints.journal import Journal, is_locked, working_directory
from checkpoints.loading import Reader, check_scales, checkpoint_format, open_reader, read_draft_config
from checkpoints.manifest import FORMATS, MANIFEST_FILE, Manifest, TensorEntry, config_sha256, read_manifest
from checkpoints.packed import PackedReader, PackedSink
from checkpoints.quantize import NVFP4_FIELDS, QuantizingReader
from checkpoints.shards import INDEX_FILE, CheckpointError, UnreadableError, read_json, write_json
from muse_jax.config import ModelConfig
from muse_jax.draft_config import DraftConfig
from muse_jax.layout import TensorSpec

DRAFT = "draft"  # the folder of a target's checkpoint that holds its draft
# What else of an HF directory travels: text that people and tokenizers read, in a bounded amount.
_SIDE_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
    "processor_config.json", "README.md", "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "NOTICE.md", "NOTICE.txt",
    "USE_POLICY.md", modelopt.QUANT_FILE,
)  # fmt: skip
_MAX_SIDE_BYTES = 256 << 20
_MAX_LISTED = 100
_NOT_ORBAX = (DRAFT, CONFIG_FILE, MANIFEST_FILE, *_SIDE_FILES)
_SYNC_BYTES = 1 << 30  # finished between two waits for the disk: what a resumed run repeats besides tensors on their way
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 20
DEFAULT_WORKERS = 4


class Sink(Protocol):
    """Writes the tensors of one format; different tensors may be written at the same time."""

    @property
    def num_bytes(self) -> int:
        """Of the files with the tensors."""

    def intact(self, spec: TensorSpec) -> bool:
        """Whether the files of a tensor that an interrupted run finished are there, as far as their sizes tell."""

    def create(self) -> None:
        """Makes the files, or takes over those of an interrupted run."""

    def pieces(self, spec: TensorSpec) -> Iterator[tuple[slice, ...]]:
        """Boxes of `spec.param_shape` to write, in row-major order."""

    def write(self, spec: TensorSpec, index: tuple[slice, ...], array: np.ndarray) -> None: ...

    def sync(self, specs: list[TensorSpec]) -> Mapping[str, tuple[str, ...]]:
        """Waits until these are on disk. Returns checksums of the parts of those that are split over files."""

    def finish(self) -> None:
        """Called when every tensor is on disk."""


class MismatchError(CheckpointError):
    """Tensors of the destination, as (part, name), that are not the source's."""

    def __init__(self, tensors: list[tuple[str, str]], message: str) -> None:
        super().__init__(message)
        self.tensors = tensors


class DamagedSourceError(CheckpointError):
    """The source holds what cannot be converted, now or later."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What to make of a checkpoint.

    to: "hf", "orbax" or "packed".  tp: ranks, for "packed" only.  quantize: "nvfp4", the experts of all layers but the
    first and the last sparse one, as in the release; None: tensors stay as they are.
    """

    to: str
    tp: int | None = None
    quantize: str | None = None

    def __post_init__(self) -> None:
        if self.to not in FORMATS:
            raise CheckpointError(f"to = {self.to!r}: allowed are {', '.join(map(repr, FORMATS))}")
        if (self.to == "packed") != (self.tp is not None) or self.tp not in (None, 1, 2, 4, 8):
            raise CheckpointError(f"tp = {self.tp}: expected 1, 2, 4 or 8 with 'packed', and nothing with the other formats")
        if self.quantize not in (None, "nvfp4"):
            raise CheckpointError(f"quantize = {self.quantize!r}: allowed is 'nvfp4'")


@dataclasses.dataclass(frozen=True)
class Part:
    """A target or a draft on its way: where it is read, and what its destination will hold."""

    name: str  # "" or "draft", the folder in source and destination
    directory: Path
    reader: Reader
    config_json: Mapping[str, Any] | None  # to be written; None: the source's file, byte for byte
    side_files: tuple[Path, ...]  # to be copied

    @property
    def config(self) -> ModelConfig | DraftConfig:
        return self.reader.config

    @functools.cached_property
    def not_carried(self) -> dict[str, Any]:
        """Of the source, or of the source's own source: tensors that are not text, and files that are not known."""
        report = self.reader.report
        found = {"tensors": report.num_skipped, "bytes": report.skipped_bytes, "families": list(report.skipped_families)}
        manifest = read_manifest(self.directory)
        if manifest is not None:
            found |= {name: manifest.not_carried[name] for name in found if name in manifest.not_carried}
        known = {*_SIDE_FILES, CONFIG_FILE, MANIFEST_FILE, *(path.name for path in _weight_files(self.directory))}
        others = sorted(path.name for path in self.directory.iterdir() if path.is_file() and path.name not in known)
        return found | {"files": others[:_MAX_LISTED]}


@dataclasses.dataclass(frozen=True)
class Plan:
    """A conversion before it begins: everything was checked, nothing was written.

    bytes_in: of the tensors to read.  bytes_out: of the files with tensors to write; other files come to a few MB.
    """

    source: Path
    target: Path
    options: Options
    parts: tuple[Part, ...]
    bytes_in: int
    bytes_out: int
    bytes_free: int  # on the destination's file system
    bytes_written: int  # of them, what an interrupted run left

    @property
    def partial(self) -> Path:
        return self.target.parent / f".{self.target.name}.partial"

    @property
    def fits(self) -> bool:
        margin = 64 << 20  # manifest, tokenizer, what the file system itself needs
        return self.bytes_out + margin + self.bytes_out // 200 <= self.bytes_free + self.bytes_written


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished conversion."""

    plan: Plan
    manifests: Mapping[str, Manifest]  # by the name of the part
    seconds: float
    resumed_bytes: int  # of the source, that did not have to be read again
    verified_tensors: int | None


def plan(source: str | os.PathLike, target: str | os.PathLike, options: Options) -> Plan:
    """Opens and checks the source, and counts bytes.

    A target's `draft` folder, where there is one, is converted with it.

    Raises:   CheckpointError, ConfigError.
    """
    source = existing(source).resolve()
    try:
        target = Path(target).resolve()
    except RuntimeError:
        raise CheckpointError(f"{target}: a link to itself") from None
    if target == source or source in target.parents or target in source.parents:
        raise CheckpointError(f"{target}: source and destination must not lie one in the other")
    parts = [_part("", source, options)]
    if isinstance(parts[0].config, ModelConfig) and os.path.lexists(source / DRAFT):
        parts.append(_part(DRAFT, source / DRAFT, dataclasses.replace(options, quantize=None)))
        if not isinstance(parts[1].config, DraftConfig):
            raise CheckpointError(f"{source / DRAFT}: its config.json describes no draft")
    parent = next(path for path in target.parents if path.exists())
    if not parent.is_dir():
        raise CheckpointError(f"{target}: {parent} is no directory")
    made = Plan(
        source=source,
        target=target,
        options=options,
        parts=tuple(parts),
        bytes_in=sum(part.reader.num_bytes(spec) for part in parts for spec in part.reader.specs),
        bytes_out=sum(_sink(part, Path(), options).num_bytes for part in parts),
        bytes_free=shutil.disk_usage(parent).free,
        bytes_written=0,
    )
    return dataclasses.replace(made, bytes_written=_allocated(made.partial))


def convert(
    made: Plan,
    *,
    resume: bool = False,
    verify: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
    workers: int = DEFAULT_WORKERS,
) -> Result:
    """Carries out a plan.

    Args:     resume: go on where an interrupted run of the same plan stopped; without one, begin.
              verify: before publishing, read everything again: checksums of all tensors, and samples against the source.
              progress: called with ("convert" or "verify", bytes done, bytes in all).
              workers: tensors on their way at a time; each needs memory for a few pieces of 32 MiB.
    Raises:   CheckpointError if the destination exists, or the disk is too small; DamagedSourceError, after which what was
              written is removed. It stays for `resume` after everything else: MismatchError of `verify` (those tensors are
              made again), UnreadableError of the source, OSError, KeyboardInterrupt.
    """
    began = time.perf_counter()
    check_destination(made, resume)
    with working_directory(made.partial, _conversion(made), resume) as journal:
        try:
            counter = _Counter("convert", made.bytes_in, _resumed_bytes(made, journal), progress)
            resumed = counter.done
            manifests = {part.name: _convert_part(made, part, journal, counter, workers) for part in made.parts}
        except DamagedSourceError:
            journal.discard = True
            raise
        try:
            verified = _verify(made, journal.data, progress) if verify else None
        except MismatchError as error:
            for part, name in error.tensors:
                journal.forget(part, name)
            raise MismatchError(error.tensors, f"{error}; --resume makes it right") from None
        for part in reversed(made.parts):
            sync_directory(journal.data / part.name)
        os.rename(journal.data, made.target)
        sync_directory(made.target.parent)
        journal.discard = True
    return Result(made, manifests, time.perf_counter() - began, resumed, verified)


def is_published(made: Plan) -> bool:
    """Whether the destination is there already, made from this source with these options."""
    manifests = [read_manifest(made.target / part.name) for part in made.parts]
    conversion = _conversion_sha256(made)
    return all(manifest is not None and manifest.conversion == conversion for manifest in manifests)


def verify_published(made: Plan, progress: Callable[[str, int, int], None] | None = None) -> int:
    """Compares a finished destination with its manifest and, by samples, with the source.

    Returns:  the number of tensors compared.
    Raises:   MismatchError with every tensor that is wrong; CheckpointError if it is not a checkpoint.
    """
    return _verify(made, made.target, progress)


# ------------------------------------------------------------------------------------------------------------- planning


def _part(name: str, directory: Path, options: Options) -> Part:
    raw = read_json(existing(directory) / CONFIG_FILE)
    side_files = _side_files(directory)
    if isinstance(raw, dict) and "dflash_config" in raw:
        if options.quantize:
            raise CheckpointError(f"{directory}: quantize = {options.quantize!r} is for targets; a draft has no experts")
        return Part(name, directory, open_reader(directory, read_draft_config(directory)), None, side_files)
    reader = open_reader(directory)
    if not options.quantize:
        return Part(name, directory, reader, None, side_files)
    quantizing = QuantizingReader(reader)
    config_json = dict(raw) | {"quantization_config": modelopt.flat_metadata(quantizing.config)}
    return Part(name, directory, quantizing, config_json, side_files)


def _side_files(directory: Path) -> tuple[Path, ...]:
    """What is copied as it is. A link may lead to where the Hugging Face cache keeps files, not to anything else."""
    home = directory.resolve()
    allowed = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    found = tuple(path for name in (*_SIDE_FILES, CONFIG_FILE) if (path := directory / name).is_file())
    for path in found:
        if not any(path.resolve().is_relative_to(root) for root in allowed):
            raise CheckpointError(f"{path}: a link out of the checkpoint, which is not copied; put the file itself there")
    if sum(path.stat().st_size for path in found) > _MAX_SIDE_BYTES:
        raise CheckpointError(f"{directory}: more than {_MAX_SIDE_BYTES} bytes of tokenizer and text files")
    return found[:-1]  # without the config


def _sink(part: Part, directory: Path, options: Options) -> Sink:
    dtypes = {spec.name: part.reader.dtype(spec) for spec in part.reader.specs}
    if options.to == "packed":
        return PackedSink(directory, part.config, dtypes, options.tp)
    if options.to == "orbax":
        from checkpoints.orbax import OrbaxSink  # importing Orbax takes seconds

        return OrbaxSink(directory, part.reader.specs, dtypes)
    return HFSink(directory, part.config, dtypes)


def check_destination(made: Plan, resume: bool) -> None:
    """Raises CheckpointError if the conversion cannot begin: there is something, or too little room."""
    target, partial = made.target, made.partial
    if target.is_mount():
        raise CheckpointError(f"{target}: a mount point, which nothing can be renamed to; choose a directory in it")
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(f"{target}: exists; choose another destination, or remove it first")
    if (partial / "journal.jsonl").exists() and not is_locked(partial):
        if not resume:
            raise CheckpointError(f"{partial}: an unfinished conversion; go on with --resume, or remove it to begin anew")
        Journal(partial).check(_conversion(made))
    if not made.fits:
        raise CheckpointError(
            f"{target}: needs {made.bytes_out} bytes, its file system has {made.bytes_free + made.bytes_written} to give"
        )


def _allocated(directory: Path) -> int:
    """Bytes that files under a directory take on the disk."""
    found = 0
    for root, _, files in os.walk(directory):
        for name in files:
            with contextlib.suppress(OSError):
                found += os.lstat(os.path.join(root, name)).st_blocks * 512
    return found


def _conversion(made: Plan) -> dict[str, Any]:
    """What must be the same for an interrupted run to be continued: options, and the files of the source that it reads."""
    files: dict[str, Any] = {}
    for part in made.parts:
        # Files with tensors by size and time, the others, which are small, by what they say.
        for path in _weight_files(part.directory):
            status = path.stat()
            files[str(Path(part.name, path.relative_to(part.directory)))] = [status.st_size, status.st_mtime_ns]
        for path in (*part.side_files, part.directory / CONFIG_FILE):
            files[str(Path(part.name, path.name))] = _sha256(path)
    return {"version": 1, **dataclasses.asdict(made.options), "files": files}


def _conversion_sha256(made: Plan) -> str:
    return hashlib.sha256(json.dumps(_conversion(made), sort_keys=True).encode()).hexdigest()


def _weight_files(directory: Path) -> list[Path]:
    format, manifest = checkpoint_format(directory)
    if format == "hf":
        found = [*directory.glob("*.safetensors"), *directory.glob(INDEX_FILE)]
    elif format == "packed":
        found = list(directory.glob("rank-*.bin"))
    else:
        found = [path for path in directory.rglob("*") if path.relative_to(directory).parts[0] not in _NOT_ORBAX]
    found += [directory / MANIFEST_FILE] if manifest is not None else []
    return sorted(path for path in found if path.is_file())


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------------------------------------------------- converting


class _Counter:
    """Bytes done so far, from all threads."""

    def __init__(self, phase: str, total: int, done: int, progress: Callable[[str, int, int], None] | None) -> None:
        self.done, self._phase, self._total, self._progress = done, phase, total, progress
        self._lock = threading.Lock()
        self.add(0)

    def add(self, count: int) -> None:
        with self._lock:
            self.done += count
            if self._progress:
                self._progress(self._phase, self.done, self._total)


def _resumed_bytes(made: Plan, journal: Journal) -> int:
    return sum(
        part.reader.num_bytes(spec)
        for part in made.parts
        for spec in part.reader.specs
        if (part.name, spec.name) in journal.finished
    )


class _Stopped(Exception):
    """Another thread failed, or the user interrupted."""


def _convert_part(made: Plan, part: Part, journal: Journal, counter: _Counter, workers: int) -> Manifest:
    directory, reader = journal.data / part.name, part.reader
    directory.mkdir(exist_ok=True)
    sink = _sink(part, directory, made.options)
    # What somebody removed from the directory since is made again.
    intact = {spec.name for spec in reader.specs if (part.name, spec.name) in journal.finished and sink.intact(spec)}
    entries = {name: entry for (of, name), entry in journal.finished.items() if of == part.name and name in intact}
    sink.create()
    source_manifest = read_manifest(part.directory)
    stop = threading.Event()

    def run(group: list[TensorSpec]) -> dict[str, TensorEntry]:
        return {spec.name: _convert_tensor(reader, sink, spec, source_manifest, counter, stop) for spec in group}

    groups = [[spec for spec in group if spec.name not in entries] for group in _groups(reader.specs)]
    groups = [group for group in groups if group]
    fresh: dict[str, TensorEntry] = {}
    unsynced = 0
    pool = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix="convert")
    try:
        futures = {pool.submit(run, group): group for group in groups}
        for future in concurrent.futures.as_completed(futures):
            fresh |= future.result()
            unsynced += sum(spec.size * reader.dtype(spec).itemsize for spec in futures[future])
            if unsynced >= _SYNC_BYTES:
                entries |= _settle(part, sink, fresh, journal)
                fresh, unsynced = {}, 0
        entries |= _settle(part, sink, fresh, journal)
    except BaseException:
        stop.set()
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()
    sink.finish()
    return _write_rest(made, part, directory, entries)


def _groups(specs: tuple[TensorSpec, ...]) -> list[list[TensorSpec]]:
    """The tensors of one NVFP4 weight together: a quantising source makes them from one reading. Others alone."""
    groups: dict[tuple, list[TensorSpec]] = {}
    for spec in specs:
        packed = spec.path[-1] in NVFP4_FIELDS
        groups.setdefault(spec.path[:-1] if packed else spec.path, []).append(spec)
    return list(groups.values())


def _convert_tensor(
    reader: Reader, sink: Sink, spec: TensorSpec, source: Manifest | None, counter: _Counter, stop: threading.Event
) -> TensorEntry:
    dtype, digest = reader.dtype(spec), hashlib.sha256()
    share, size = reader.num_bytes(spec), max(1, spec.size)
    done = counted = 0
    for box in sink.pieces(spec):
        if stop.is_set():
            raise _Stopped
        array = _read(reader, spec, dtype, box)
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        sink.write(spec, box, array)
        done += array.size
        counter.add(share * done // size - counted)
        counted = share * done // size
    checksum = digest.hexdigest()
    known = source.tensors.get(spec.name) if source else None
    if known is not None and known.dtype == dtype and known.sha256 != checksum:
        raise DamagedSourceError(f"{spec.name} does not have the checksum of the source's manifest: the source is damaged")
    report = reader.quantization(spec) if isinstance(reader, QuantizingReader) else known and known.quantization
    return TensorEntry(dtype, checksum, quantization=report)


def _read(reader: Reader, spec: TensorSpec, dtype: np.dtype, box: tuple[slice, ...]) -> np.ndarray:
    try:
        array = reader.read(spec, dtype, box)
        check_scales(spec, array)
    except UnreadableError:
        raise
    except CheckpointError as error:
        raise DamagedSourceError(str(error)) from None
    return array


def _settle(part: Part, sink: Sink, fresh: dict[str, TensorEntry], journal: Journal) -> dict[str, TensorEntry]:
    """Waits until tensors are on disk and notes them in the journal."""
    specs = [spec for spec in part.reader.specs if spec.name in fresh]
    ranks = sink.sync(specs)
    entries = {spec.name: dataclasses.replace(fresh[spec.name], rank_sha256=ranks.get(spec.name, ())) for spec in specs}
    journal.add(part.name, entries)
    return entries


def _write_rest(made: Plan, part: Part, directory: Path, entries: dict[str, TensorEntry]) -> Manifest:
    """Config, tokenizer and manifest, in that order."""
    for path in part.side_files:
        _copy(path, directory / path.name)
    if part.config_json is None:
        _copy(part.directory / CONFIG_FILE, directory / CONFIG_FILE)
    else:
        write_json(directory / CONFIG_FILE, part.config_json)
        write_json(directory / modelopt.QUANT_FILE, modelopt.metadata(part.config))
    manifest = Manifest(
        format=made.options.to,
        tp=made.options.tp or 1,
        config_sha256=config_sha256(directory),
        conversion=_conversion_sha256(made),
        source=_source(part),
        not_carried=part.not_carried,
        files={name: _sha256(directory / name) for name in (CONFIG_FILE, *_SIDE_FILES) if (directory / name).is_file()},
        tensors={spec.name: entries[spec.name] for spec in part.reader.specs},
    )
    write_json(directory / MANIFEST_FILE, manifest.to_json())
    return manifest


def _source(part: Part) -> dict[str, Any]:
    """Where a checkpoint came from; that of a converted one is its own source's."""
    format, manifest = checkpoint_format(part.directory)
    if manifest is not None:
        return dict(manifest.source)
    found = re.search(r"/snapshots/([0-9a-f]{40})(?:/|$)", str(part.directory))  # the Hugging Face cache
    return {"format": format, "name": part.directory.name, "revision": found[1] if found else None}


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())


# ------------------------------------------------------------------------------------------------------------ verifying


def _verify(made: Plan, directory: Path, progress: Callable[[str, int, int], None] | None) -> int:
    """Reads the destination again. Returns the number of tensors; raises one MismatchError with all that are wrong."""
    readers = {part.name: _reopen(made, part, directory / part.name) for part in made.parts}
    _drop_cached(directory)
    total = sum(reader.num_bytes(spec) for reader in readers.values() for spec in reader.specs)
    counter = _Counter("verify", total, 0, progress)
    wrong: list[tuple[str, str]] = []
    first = ""
    for part in made.parts:
        reader, manifest = readers[part.name], read_manifest(directory / part.name)
        pick = np.random.default_rng(int(manifest.weights_sha256[:16], 16))
        sampled = set(pick.choice(len(reader.specs), min(_SAMPLES, len(reader.specs)), replace=False).tolist())
        for i, spec in enumerate(reader.specs):
            entry = manifest.tensors[spec.name]
            box = _sample(spec, entry.dtype, pick) if i in sampled else None
            expected = None if box is None else part.reader.read(spec, entry.dtype, box)
            try:
                _verify_tensor(made, part, reader, spec, entry, counter)
                if box is not None and reader.read(spec, entry.dtype, box).tobytes() != expected.tobytes():
                    raise CheckpointError(f"{spec.name} differs from the source")
            except CheckpointError as error:
                wrong.append((part.name, spec.name))
                first = first or f"{directory / part.name}: {error}"
    if wrong:
        more = f" (and {len(wrong) - 1} other tensors)" if len(wrong) > 1 else ""
        raise MismatchError(wrong, first + more)
    return sum(len(reader.specs) for reader in readers.values())


def _reopen(made: Plan, part: Part, directory: Path) -> Reader:
    """The reader of a part of the destination, whose manifest and small files are as they must be."""
    manifest = read_manifest(directory)
    if manifest is None or manifest.format != made.options.to or manifest.tp != (made.options.tp or 1):
        raise CheckpointError(f"{directory}: not a checkpoint that this conversion made: its manifest is missing or another's")
    for name, checksum in manifest.files.items():
        if not (directory / name).is_file() or _sha256(directory / name) != checksum:
            raise CheckpointError(f"{directory / name}: missing, or not as it was converted")
    config = read_draft_config(directory) if isinstance(part.config, DraftConfig) else None
    reader = open_reader(directory, config)
    if reader.specs != part.reader.specs:
        raise CheckpointError(f"{directory}: does not have the tensors of the source")
    return reader


def _verify_tensor(made: Plan, part: Part, reader: Reader, spec: TensorSpec, entry: TensorEntry, counter: _Counter) -> None:
    digest, share = hashlib.sha256(), reader.num_bytes(spec)
    done = counted = 0
    for box in _sink(part, Path(), made.options).pieces(spec):
        array = reader.read(spec, entry.dtype, box)
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        done += array.size
        counter.add(share * done // max(1, spec.size) - counted)
        counted = share * done // max(1, spec.size)
    if digest.hexdigest() != entry.sha256:
        raise CheckpointError(f"{spec.name} does not have the checksum of its manifest")
    if isinstance(reader, PackedReader):
        reader.check_ranks(spec)


def _sample(spec: TensorSpec, dtype: np.dtype, pick: np.random.Generator) -> tuple[slice, ...]:
    """A random box of about a MiB: one index of each leading axis, some rows of the last two."""
    box = []
    for axis, size in enumerate(spec.param_shape):
        if axis < len(spec.param_shape) - 2:
            rows = 1
        elif axis == len(spec.param_shape) - 2:
            rows = max(1, min(size, _SAMPLE_BYTES // (spec.param_shape[-1] * dtype.itemsize)))
        else:
            rows = size
        start = int(pick.integers(0, size - rows + 1))
        box.append(slice(start, start + rows))
    return tuple(box)


def _drop_cached(directory: Path) -> None:
    """Asks for the files to be read from the disk, not from memory, where the system can do that (Linux)."""
    if not hasattr(os, "posix_fadvise"):
        return
    for root, _, names in os.walk(directory):
        for name in names:
            with open(os.path.join(root, name), "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
