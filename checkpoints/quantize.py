"""A bf16 or fp32 target read as if its experts were NVFP4: rounding happens where the converter reads."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from checkpoints.loading import Reader
from checkpoints.shards import CheckpointError
from muse_jax import nvfp4
from muse_jax.config import MLPKind, ModelConfig
from muse_jax.layout import TensorSpec, tensors

NVFP4_FIELDS = tuple(field.name for field in dataclasses.fields(nvfp4.NVFP4Weight))


class QuantizingReader:
    """The tensors of `reader` with the experts of all sparse layers but the first and the last one rounded to NVFP4.

    Those two stay as they are in the release too (muse_spark.md section 2.4). A weight's four tensors are made from one
    reading if they are read one after the other, codes first and experts in order.

    Raises:   CheckpointError for a draft, a target that is NVFP4 already, or one without a layer in between.
    """

    def __init__(self, reader: Reader) -> None:
        config = reader.config
        if not isinstance(config, ModelConfig) or config.nvfp4_layers:
            raise CheckpointError("quantize = 'nvfp4': the source must be a target whose experts are not NVFP4 yet")
        sparse = [i for i, kind in enumerate(config.mlp_layer_types) if kind == MLPKind.SPARSE]
        if len(sparse) < 3:
            raise CheckpointError(
                f"quantize = 'nvfp4': needs a sparse layer between two others, there are {len(sparse)} in all"
            )
        self._reader, self.report = reader, reader.report
        self.config = dataclasses.replace(config, nvfp4_layers=tuple(sparse[1:-1]))
        self.specs = tensors(self.config)
        sources = {spec.path: spec for spec in reader.specs}
        self._source = {spec.name: sources[spec.path[:-1]] for spec in self.specs if spec.path[-1] in NVFP4_FIELDS}
        self._last: dict[str, tuple[int, nvfp4.NVFP4Weight]] = {}
        self._scales: dict[str, dict[int, nvfp4.NVFP4Weight]] = {}
        self._errors: dict[str, dict[int, tuple[nvfp4.QuantizationError, float]]] = {}

    def dtype(self, spec: TensorSpec) -> np.dtype:
        return spec.dtype if spec.name in self._source else self._reader.dtype(spec)

    def num_bytes(self, spec: TensorSpec) -> int:
        """Bytes of the source's files that are read for it."""
        if spec.name not in self._source:
            return self._reader.num_bytes(spec)
        return self._reader.num_bytes(self._source[spec.name]) if spec.path[-1] == "codes" else 0

    def read(self, spec: TensorSpec, dtype: DTypeLike, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A box of a parameter; of a quantised one `dtype` must be its own."""
        if spec.name not in self._source:
            return self._reader.read(spec, dtype, index)
        source, field = self._source[spec.name], spec.path[-1]
        experts = range(*(index[0] if index else slice(None)).indices(spec.param_shape[0]))
        out = np.stack([getattr(self._expert(source, expert, field), field)[tuple(index[1:])] for expert in experts])
        if field == NVFP4_FIELDS[-1] and experts.stop == spec.param_shape[0]:
            self._scales.pop(source.name, None)
        return out

    def quantization(self, spec: TensorSpec) -> dict[str, Any] | None:
        """What rounding cost, of codes that were read: see `nvfp4.QuantizationError`. None for other tensors."""
        source = self._source.get(spec.name)
        if source is None or spec.path[-1] != "codes":
            return None
        errors = self._errors[source.name]
        energy = sum(energy for _, energy in errors.values())
        worst = max(errors, key=lambda expert: errors[expert][0].worst_block)
        return {
            "relative_rms": math.sqrt(sum(error.relative_rms**2 * own for error, own in errors.values()) / (energy or 1)),
            "worst_block": errors[worst][0].worst_block,
            "worst_block_index": [worst, *errors[worst][0].worst_block_index],
            "saturated": sum(error.saturated for error, _ in errors.values()),
        }

    def _expert(self, source: TensorSpec, expert: int, field: str) -> nvfp4.NVFP4Weight:
        """One expert's weight; without its codes, if others are wanted and were made before."""
        scales = self._scales.setdefault(source.name, {})
        if field != "codes" and expert in scales:
            return scales[expert]
        if source.name in self._last and self._last[source.name][0] == expert:
            return self._last[source.name][1]
        weight = self._reader.read(source, self._reader.dtype(source), (slice(expert, expert + 1),))[0]
        try:
            packed = nvfp4.quantize(weight, f"{source.name}[{expert}]")
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        energy = float(np.sum(np.square(weight, dtype=np.float32), dtype=np.float64))
        self._errors.setdefault(source.name, {})[expert] = nvfp4.quantization_error(weight, packed), energy
        self._last[source.name] = expert, packed
        if field == "codes":
            scales[expert] = dataclasses.replace(packed, codes=None)
        return packed
