"""What a conversion writes beside its tensors: where they come from, and a checksum of every one.

A tensor's `sha256` is of its row-major bytes in its own dtype, so it is the same in every format, and `weights_sha256`,
over all of them, identifies weights whatever files they are in.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.shards import DTYPE_NAMES, DTYPES, CheckpointError, read_json, some
from muse_jax.config import shown

MANIFEST_FILE = "muse_manifest.json"
FORMATS = ("hf", "orbax", "packed")
VERSION = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One tensor of the manifest."""

    dtype: np.dtype  # in the source, and of the bytes that `sha256` is of
    sha256: str
    rank_sha256: tuple[str, ...] = ()  # packed: of the bytes in each rank's file
    quantization: Mapping[str, Any] | None = None  # what rounding to NVFP4 cost, of a tensor that was quantised

    def to_json(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"dtype": DTYPE_NAMES[self.dtype], "sha256": self.sha256}
        if self.rank_sha256:
            entry["rank_sha256"] = list(self.rank_sha256)
        if self.quantization is not None:
            entry["quantization"] = dict(self.quantization)
        return entry

    @classmethod
    def from_json(cls, raw: Any) -> TensorEntry:
        """Raises ValueError, TypeError, KeyError or AttributeError for anything that `to_json` cannot have written."""
        ranks, quantization = raw.get("rank_sha256", []), raw.get("quantization")
        if raw["dtype"] not in DTYPES or not all(_SHA256.fullmatch(digest) for digest in (raw["sha256"], *ranks)):
            raise ValueError("a dtype or checksum that is none")
        if not isinstance(ranks, list) or not (quantization is None or _is_report(quantization)):
            raise TypeError("checksums that are no list, or a report that is none")
        return cls(DTYPES[raw["dtype"]], raw["sha256"], tuple(ranks), quantization)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The file of this name in a converted checkpoint."""

    format: str
    tp: int  # ranks of a packed checkpoint, else 1
    config_sha256: str  # of what config.json says, see `config_sha256`
    conversion: str  # identifies source, options and destination format: what `--resume` compares
    source: Mapping[str, Any]  # format, name, and revision if known
    not_carried: Mapping[str, Any]  # of the source: tensors that are not text (how many, bytes, families), and other files
    files: Mapping[str, str]  # SHA-256 of config.json, tokenizer and the other files that lie beside the tensors
    tensors: Mapping[str, TensorEntry]  # by their names in an HF file

    @property
    def weights_sha256(self) -> str:
        lines = (f"{name} {DTYPE_NAMES[entry.dtype]} {entry.sha256}\n" for name, entry in sorted(self.tensors.items()))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "version": VERSION,
            "tp": self.tp,
            "config_sha256": self.config_sha256,
            "conversion": self.conversion,
            "weights_sha256": self.weights_sha256,
            "source": dict(self.source),
            "not_carried": dict(self.not_carried),
            "files": dict(self.files),
            "tensors": {name: entry.to_json() for name, entry in self.tensors.items()},
        }


def _is_report(raw: Any) -> bool:
    """Whether this is what `QuantizingReader.quantization` says of a tensor."""
    fields = {"relative_rms": float, "worst_block": float, "worst_block_index": list, "saturated": int}
    if {name: type(value) for name, value in raw.items()} != fields:
        return False
    index = raw["worst_block_index"]
    return len(index) <= 8 and all(type(i) is int and i < 2**31 for i in index)


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a directory, None if it has none. Raises CheckpointError if it is damaged or of another version."""
    path = directory / MANIFEST_FILE
    if not path.exists():
        return None
    raw = read_json(path)
    if not isinstance(raw, dict) or raw.get("format") not in FORMATS:
        known = ", ".join(map(repr, FORMATS))
        raise CheckpointError(f"{path}: not a manifest of this project (expected an object whose format is one of {known})")
    if raw.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: format version {shown(raw.get('version'))}, this program reads {VERSION}: convert the source again"
        )
    try:
        manifest = Manifest(
            format=raw["format"],
            tp=raw["tp"],
            config_sha256=raw["config_sha256"],
            source={**raw["source"]},  # TypeError for what is no object
            not_carried={**raw["not_carried"]},
            conversion=raw["conversion"],
            files={**raw["files"]},
            tensors={name: TensorEntry.from_json(entry) for name, entry in raw["tensors"].items()},
        )
        whole = raw["weights_sha256"] == manifest.weights_sha256
        whole &= all(_SHA256.fullmatch(digest) for digest in (manifest.conversion, *manifest.files.values())) is True
        whole &= type(manifest.tp) is int and manifest.tp in ((1, 2, 4, 8) if manifest.format == "packed" else (1,))
        whole &= all(len(entry.rank_sha256) in (0, manifest.tp) for entry in manifest.tensors.values())
    except (KeyError, TypeError, ValueError, AttributeError):
        whole = False
    if not whole:
        raise CheckpointError(f"{path}: damaged (its fields or checksums do not fit together): convert the source again")
    return manifest


def config_sha256(directory: Path) -> str:
    """Identifies what config.json says, whatever its spacing. Raises CheckpointError."""
    return hashlib.sha256(json.dumps(read_json(directory / "config.json"), sort_keys=True).encode()).hexdigest()


def check_config(directory: Path, manifest: Manifest) -> None:
    """Raises CheckpointError unless config.json is the one that was converted: another may read the same bytes as noise."""
    if config_sha256(directory) != manifest.config_sha256:
        raise CheckpointError(
            f"{directory / 'config.json'}: not the config that was converted: restore it, or change the source's and convert "
            "that again"
        )


def check_names(directory: Path, manifest: Manifest, names: set[str]) -> None:
    """Raises CheckpointError unless the manifest lists just the tensors of the config."""
    for fault, found in (("misses", names - manifest.tensors.keys()), ("has unknown", manifest.tensors.keys() - names)):
        if found:
            raise CheckpointError(f"{directory / MANIFEST_FILE}: does not fit config.json: {fault} {some(found)}")
