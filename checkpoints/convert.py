"""Conversion of checkpoints between formats: streaming, resumable, and published whole or not at all.

    source reader -> pieces of at most 32 MiB, a few tensors at a time -> sink
                     checksum of each tensor ------------------------> manifest, journal

Everything is written into `.NAME.partial` beside the destination and renamed at the end, so what has the destination's name
is complete. In there, `data` becomes the destination; `journal.jsonl` lists the tensors that are on disk, for `resume`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
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
from checkpoints.loading import Reader, check_scales, checkpoint_format, open_reader, read_config, read_draft_config
from checkpoints.manifest import FORMATS, MANIFEST_FILE, Manifest, TensorEntry, config_sha256, read_manifest
from checkpoints.packed import PackedReader, PackedSink
from checkpoints.quantize import QuantizingReader
from checkpoints.shards import DTYPE_NAMES, CheckpointError, read_json, write_json
from muse_jax.config import ModelConfig
from muse_jax.draft_config import DraftConfig
from muse_jax.layout import TensorSpec

DRAFT = "draft"  # the folder of a target's checkpoint that holds its draft
# What else of an HF directory travels: text that people and tokenizers read, in a bounded amount.
_SIDE_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json",
    "README.md", "LICENSE", "LICENSE.txt", modelopt.QUANT_FILE,
)  # fmt: skip
_MAX_SIDE_BYTES = 256 << 20
_SYNC_BYTES = 1 << 30  # written between two waits for the disk, so that a resumed run repeats at most about that much
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 20
DEFAULT_WORKERS = 4


class Sink(Protocol):
    """Writes the tensors of one format; different tensors may be written at the same time."""

    @property
    def num_bytes(self) -> int:
        """Of the files with the tensors."""

    def create(self) -> None:
        """Makes the files, or takes over those of an interrupted run."""

    def pieces(self, spec: TensorSpec) -> Iterator[tuple[slice, ...]]:
        """Boxes of `spec.param_shape` to write, in row-major order."""

    def write(self, spec: TensorSpec, index: tuple[slice, ...], array: np.ndarray) -> None: ...

    def sync(self, specs: list[TensorSpec]) -> Mapping[str, tuple[str, ...]]:
        """Waits until these are on disk. Returns checksums of the parts of those that are split over files."""

    def finish(self) -> None:
        """Called when every tensor is on disk."""


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

    @property
    def tensor_bytes(self) -> int:
        return sum(spec.size * self.reader.dtype(spec).itemsize for spec in self.reader.specs)


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
    target = Path(target).absolute()
    target = target.parent.resolve() / target.name
    if target == source or source in target.parents or target in source.parents:
        raise CheckpointError(f"{target}: source and destination must lie beside each other, not one in the other")
    parts = [_part("", source, options)]
    if parts[0].name == "" and isinstance(parts[0].config, ModelConfig) and os.path.lexists(source / DRAFT):
        parts.append(_part(DRAFT, source / DRAFT, dataclasses.replace(options, quantize=None)))
        if not isinstance(parts[1].config, DraftConfig):
            raise CheckpointError(f"{source / DRAFT}: its config.json describes no draft")
    parent = next(path for path in target.parents if path.is_dir())
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
    Raises:   CheckpointError if the source is damaged (what was written is then removed), if the destination exists, or
              the disk is too small; OSError, KeyboardInterrupt: what was written stays for `resume`.
    """
    began = time.perf_counter()
    _check_free(made)
    with _partial(made, resume) as journal:
        data = made.partial / "data"
        try:
            manifests = {}
            resumed = 0
            counter = _Counter(made, progress)
            for part in made.parts:
                finished = {name: entry for (of, name), entry in journal.finished.items() if of == part.name}
                resumed += sum(part.reader.num_bytes(spec) for spec in part.reader.specs if spec.name in finished)
                manifests[part.name] = _convert_part(part, data, made.options, finished, journal, counter, workers)
            verified = None
            if verify:
                verified = sum(_verify_part(part, data / part.name, progress, made) for part in made.parts)
        except CheckpointError:
            journal.discard = True  # the source is to blame: going on later would not help
            raise
        for part in reversed(made.parts):
            sync_directory(data / part.name)
        made.target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(data, made.target)
        sync_directory(made.target.parent)
        journal.discard = True
    return Result(made, manifests, time.perf_counter() - began, resumed, verified)


def verify_published(made: Plan, progress: Callable[[str, int, int], None] | None = None) -> int:
    """Compares a finished destination with its manifest and, by samples, with the source.

    Returns:  the number of tensors compared.  Raises: CheckpointError at the first difference.
    """
    return sum(_verify_part(part, made.target / part.name, progress, made) for part in made.parts)


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


def _check_free(made: Plan) -> None:
    if made.target.is_dir() and not any(made.target.iterdir()):
        return _check_disk(made)
    if os.path.lexists(made.target):
        raise CheckpointError(f"{made.target}: exists; choose another destination, or remove it first")
    return _check_disk(made)


def _check_disk(made: Plan) -> None:
    if not made.fits:
        raise CheckpointError(
            f"{made.target}: needs {made.bytes_out} bytes, its file system has {made.bytes_free + made.bytes_written} to give"
        )


def _allocated(directory: Path) -> int:
    """Bytes that files under a directory take on the disk."""
    found = 0
    for root, _, files in os.walk(directory):
        for name in files:
            with contextlib.suppress(OSError):
                found += os.lstat(os.path.join(root, name)).st_blocks * 512
    return found


def _fingerprint(made: Plan) -> dict[str, Any]:
    """What must be the same for an interrupted run to be continued."""
    parts = {}
    for part in made.parts:
        table = [(spec.name, DTYPE_NAMES[part.reader.dtype(spec)], spec.shape) for spec in part.reader.specs]
        files = []
        for root, folders, names in os.walk(part.directory):
            folders[:] = sorted(folder for folder in folders if not (folder == DRAFT and Path(root) == part.directory))
            for name in sorted(names):
                with contextlib.suppress(OSError):
                    status = os.stat(os.path.join(root, name))
                    files.append(
                        (os.path.relpath(os.path.join(root, name), part.directory), status.st_size, status.st_mtime_ns)
                    )
        parts[part.name] = hashlib.sha256(json.dumps([table, files]).encode()).hexdigest()
    return {"version": 1, **dataclasses.asdict(made.options), "source": parts}


# -------------------------------------------------------------------------------------------------- the partial directory


@dataclasses.dataclass
class _Journal:
    path: Path
    finished: dict[tuple[str, str], TensorEntry]
    discard: bool = False

    def add(self, part: str, entries: Mapping[str, TensorEntry]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            for name, entry in entries.items():
                file.write(json.dumps({"part": part, "name": name, **entry.to_json()}) + "\n")
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def _partial(made: Plan, resume: bool) -> Iterator[_Journal]:
    """The partial directory with its journal, locked against a second conversion to the same destination."""
    partial, fingerprint = made.partial, _fingerprint(made)
    journal = _Journal(partial / "journal.jsonl", {})
    if not resume and partial.exists():
        raise CheckpointError(f"{partial}: an unfinished conversion; go on with --resume, or remove it to begin anew")
    partial.mkdir(parents=True, exist_ok=True)
    with open(partial / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(f"{partial}: another conversion is writing there") from None
        if journal.path.exists():
            _read_journal(journal, fingerprint)
        else:
            shutil.rmtree(partial / "data", ignore_errors=True)
            with open(journal.path, "w", encoding="utf-8") as file:
                file.write(json.dumps(fingerprint) + "\n")
                file.flush()
                os.fsync(file.fileno())
        (partial / "data").mkdir(exist_ok=True)
        try:
            yield journal
        finally:
            if journal.discard:
                shutil.rmtree(partial, ignore_errors=True)


def _read_journal(journal: _Journal, fingerprint: dict[str, Any]) -> None:
    lines = journal.path.read_text(encoding="utf-8").split("\n")
    try:
        first = json.loads(lines[0])
    except ValueError:
        first = None  # killed before the first line was whole
    if first is not None and first != fingerprint:
        raise CheckpointError(
            f"{journal.path.parent}: belongs to a conversion with other options or of another source; "
            "repeat that one with --resume, or remove the directory to begin anew"
        )
    if first is None:
        journal.path.write_text(json.dumps(fingerprint) + "\n", encoding="utf-8")
        return
    whole = lines[:-1]  # what follows the last line end was cut off
    for line in whole[1:]:
        entry = json.loads(line)
        journal.finished[entry["part"], entry["name"]] = TensorEntry.from_json(entry)
    os.truncate(journal.path, sum(len(line.encode()) + 1 for line in whole))


# ---------------------------------------------------------------------------------------------------------- converting


class _Counter:
    """Bytes read so far, from all threads."""

    def __init__(self, made: Plan, progress: Callable[[str, int, int], None] | None) -> None:
        self._done, self._total, self._progress = 0, made.bytes_in, progress
        self._lock = threading.Lock()
        self.add(0)

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._progress:
                self._progress("convert", self._done, self._total)


class _Stopped(Exception):
    """Another thread failed, or the user interrupted."""


def _convert_part(
    part: Part,
    data: Path,
    options: Options,
    finished: dict[str, TensorEntry],
    journal: _Journal,
    counter: _Counter,
    workers: int,
) -> Manifest:
    directory, reader = data / part.name, part.reader
    directory.mkdir(exist_ok=True)
    sink = _sink(part, directory, options)
    sink.create()
    entries = dict(finished)
    counter.add(sum(reader.num_bytes(spec) for spec in reader.specs if spec.name in entries))
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
    return _write_rest(part, directory, options, entries)


def _groups(specs: tuple[TensorSpec, ...]) -> list[list[TensorSpec]]:
    """The tensors of one NVFP4 weight together: a quantising source makes them from one reading. Others alone."""
    groups: dict[tuple, list[TensorSpec]] = {}
    for spec in specs:
        packed = spec.path[-1] in ("codes", "block_scales", "global_scale", "input_scale")
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
        array = reader.read(spec, dtype, box)
        check_scales(spec, array)
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        sink.write(spec, box, array)
        done += array.size
        counter.add(share * done // size - counted)
        counted = share * done // size
    checksum = digest.hexdigest()
    known = source.tensors.get(spec.name) if source else None
    if known is not None and known.dtype == dtype and known.sha256 != checksum:
        raise CheckpointError(f"{spec.name} does not have the checksum of the source's manifest: the source is damaged")
    report = reader.quantization(spec) if isinstance(reader, QuantizingReader) else known and known.quantization
    return TensorEntry(dtype, checksum, quantization=report)


def _settle(part: Part, sink: Sink, fresh: dict[str, TensorEntry], journal: _Journal) -> dict[str, TensorEntry]:
    """Waits until tensors are on disk and notes them in the journal."""
    specs = [spec for spec in part.reader.specs if spec.name in fresh]
    ranks = sink.sync(specs)
    entries = {spec.name: dataclasses.replace(fresh[spec.name], rank_sha256=ranks.get(spec.name, ())) for spec in specs}
    journal.add(part.name, entries)
    return entries


def _write_rest(part: Part, directory: Path, options: Options, entries: dict[str, TensorEntry]) -> Manifest:
    """Config, tokenizer and manifest, in that order."""
    for path in part.side_files:
        _copy(path, directory / path.name)
    if part.config_json is None:
        _copy(part.directory / CONFIG_FILE, directory / CONFIG_FILE)
    else:
        write_json(directory / CONFIG_FILE, part.config_json)
        write_json(directory / modelopt.QUANT_FILE, modelopt.metadata(part.config))
    report = part.reader.report
    manifest = Manifest(
        format=options.to,
        tp=options.tp or 1,
        config_sha256=config_sha256(directory),
        source=_source(part),
        not_carried={"tensors": report.num_skipped, "bytes": report.skipped_bytes, "families": list(report.skipped_families)},
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


def _verify_part(part: Part, directory: Path, progress: Callable[[str, int, int], None] | None, made: Plan) -> int:
    """Reads a part of the destination again. Raises CheckpointError at the first difference."""
    manifest = read_manifest(directory)
    if manifest is None or manifest.format != made.options.to or manifest.tp != (made.options.tp or 1):
        raise CheckpointError(f"{directory}: not a checkpoint that this conversion made: its manifest is missing or another's")
    config = read_draft_config(directory) if isinstance(part.config, DraftConfig) else read_config(directory)
    reader = open_reader(directory, config)
    if reader.specs != part.reader.specs:
        raise CheckpointError(f"{directory}: does not have the tensors of the source")
    _drop_cached(directory)
    pick = np.random.default_rng(int(manifest.weights_sha256[:16], 16))
    sampled = set(pick.choice(len(reader.specs), min(_SAMPLES, len(reader.specs)), replace=False).tolist())
    total, done = sum(reader.num_bytes(spec) for spec in reader.specs), 0
    for i, spec in enumerate(reader.specs):
        entry, digest = manifest.tensors[spec.name], hashlib.sha256()
        for box in _sink(part, directory, made.options).pieces(spec):
            digest.update(np.ascontiguousarray(reader.read(spec, entry.dtype, box)).reshape(-1).view(np.uint8))
        if digest.hexdigest() != entry.sha256:
            raise CheckpointError(f"{directory}: {spec.name} does not have the checksum of its manifest")
        if i in sampled:
            box = _sample(spec, entry.dtype, pick)
            same = reader.read(spec, entry.dtype, box).tobytes() == part.reader.read(spec, entry.dtype, box).tobytes()
            if not same:
                raise CheckpointError(f"{directory}: {spec.name} differs from the source")
        if isinstance(reader, PackedReader):
            reader.check_ranks(spec)
        done += reader.num_bytes(spec)
        if progress:
            progress("verify", done, total)
    return len(reader.specs)


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
    """Asks for the files to be read from the disk, not from memory, where the system can do that."""
    for root, _, names in os.walk(directory):
        for name in names:
            with open(os.path.join(root, name), "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
