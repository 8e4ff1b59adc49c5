"""Low-latency decoding of Muse Spark Open in JAX.

muse = muse_jax.load("checkpoints/muse_tiny")
for text in muse.generate("..."): print(text, end="")
"""

from muse_jax.config import ConfigError, ModelConfig
from muse_jax.decoding import DecodeState, Model, StepError, StepOutput, decode
from muse_jax.muse import Generation, Muse, load

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "DecodeState",
    "Generation",
    "Model",
    "ModelConfig",
    "Muse",
    "StepError",
    "StepOutput",
    "decode",
    "load",
]
