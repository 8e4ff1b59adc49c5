"""Checkpoints of Muse Spark and its draft: Hugging Face directories of safetensors, into device arrays and back."""

from checkpoints.hf import (
    CheckpointReader,
    LoadReport,
    checkpoint_dtype,
    load_draft_params,
    load_text_params,
    read_config,
    read_draft_config,
    save_draft,
    save_hf,
    sharded_put,
)
from checkpoints.shards import CheckpointError

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "LoadReport",
    "checkpoint_dtype",
    "load_draft_params",
    "load_text_params",
    "read_config",
    "read_draft_config",
    "save_draft",
    "save_hf",
    "sharded_put",
]
