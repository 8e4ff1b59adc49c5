"""Checkpoints of Muse Spark and its draft in three formats, HF, Orbax and packed: into device arrays and to each other."""

from checkpoints.hf import HFReader, LoadReport, checkpoint_dtype, save_draft, save_hf
from checkpoints.loading import load_params, open_reader, read_config, read_draft_config, sharded_put
from checkpoints.shards import CheckpointError

__all__ = [
    "CheckpointError",
    "HFReader",
    "LoadReport",
    "checkpoint_dtype",
    "load_params",
    "open_reader",
    "read_config",
    "read_draft_config",
    "save_draft",
    "save_hf",
    "sharded_put",
]
