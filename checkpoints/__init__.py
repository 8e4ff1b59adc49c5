"""Muse Spark checkpoints on disk: Hugging Face directories of safetensors, read into device arrays and written back."""

from checkpoints.hf import (
    CheckpointReader,
    LoadReport,
    checkpoint_dtype,
    load_text_params,
    read_config,
    save_hf,
    sharded_put,
)
from checkpoints.shards import CheckpointError

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "LoadReport",
    "checkpoint_dtype",
    "load_text_params",
    "read_config",
    "save_hf",
    "sharded_put",
]
