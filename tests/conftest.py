"""Test set-up: eight virtual CPU devices, strict promotion rules, seeds from test names."""

import os
import zlib

# Threads of XLA for CPU wait inside of collectives and interpreted kernels. Two CPUs would give eight for eight devices.
os.environ.setdefault("NPROC", "48")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + " --xla_cpu_collective_call_terminate_timeout_seconds=300"  # a machine that stands still for a while is no failure
)

import dataclasses
import functools
import gc
import importlib.util
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from jax.sharding import Mesh

import checkpoints
import muse_jax
from checkpoints.hf import save_draft, save_hf
from ffi import library
from muse_jax.config import TINY, AttentionKind, MLPKind, ModelConfig
from muse_jax.draft_config import DraftConfig
from muse_jax.layout import parameter_tree
from muse_jax.sharding import ShardingConfig, placement

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def _has_gpu() -> bool:
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False


def pytest_collection_modifyitems(items):
    skip_gpu = pytest.mark.skip(reason="no GPU")
    skip_parity = pytest.mark.skip(reason="the parity extra is not installed")
    gpu = _has_gpu()
    parity = importlib.util.find_spec("torch") is not None and importlib.util.find_spec("transformers") is not None
    for item in items:
        if "gpu" in item.keywords and not gpu:
            item.add_marker(skip_gpu)
        if "parity" in item.keywords and not parity:
            item.add_marker(skip_parity)


@pytest.fixture
def rng(request) -> np.random.Generator:
    """Random numbers that depend on the test's name alone."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def memory_can_be_mapped():
    """Compiled programs keep mappings of memory, of which Linux gives a process 65,530; where there are none left it ends.

    A program for eight devices has hundreds, so files of such tests need more than there are.
    """
    yield
    maps, limit = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
    if limit.exists() and maps.read_text().count("\n") > int(limit.read_text()) // 4:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def interrupts_arrive():
    """Where tests run in the background SIGINT is ignored, and programs they start would inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def emulated_device() -> Iterator[Callable[..., None]]:
    """Sets the device that runs the megakernel's source on a CPU.

    seed: of the order of warps.  ctas_per_rank.  stalled_cta: runs when all others have ended.  is_taken: by another call.
    """

    def settings(seed: int = 1, ctas_per_rank: int = 3, stalled_cta: int = -1, is_taken: bool = False) -> None:
        library.load().muse_ffi_emulation(seed, ctas_per_rank, stalled_cta, is_taken)

    yield settings
    settings()


# ---- A small model as files and as a loaded object, for tests of everything above the model ---------------------------


def _config_json(config: ModelConfig) -> dict:
    fields = {name: value for name, value in dataclasses.asdict(config).items() if name not in _RENAMED}
    return {
        "model_type": "muse_spark_text",
        **fields,
        "layer_rope_theta": [config.rope_theta if rope else 0 for rope in config.layer_uses_rope],
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "eos_token_id": list(config.eos_token_ids),
    }


_RENAMED = ("layer_uses_rope", "rope_theta", "eos_token_ids", "placeholder_token_ids")


@pytest.fixture(scope="session")
def small_config() -> ModelConfig:
    """A sliding layer with experts and a global one without; the vocabulary has five rows that no token has."""
    return dataclasses.replace(
        TINY,
        vocab_size=264,
        num_hidden_layers=2,
        num_key_value_heads=4,
        layer_types=(AttentionKind.SLIDING, AttentionKind.GLOBAL),
        layer_uses_rope=(True, False),
        mlp_layer_types=(MLPKind.SPARSE, MLPKind.DENSE),
        max_position_embeddings=512,
        eos_token_ids=(257,),
    )


@pytest.fixture(scope="session")
def small_params(small_config) -> dict:
    """Random everywhere (fresh norms, gates and biases are zero), and rows of the padded vocabulary that would often win."""
    rng = np.random.default_rng(zlib.crc32(b"small_params"))

    def draw(spec) -> np.ndarray:
        array = rng.standard_normal(spec.param_shape, np.float32)
        array *= 0.3 if array.ndim == 1 else 2 / np.sqrt(array.shape[-1])
        if spec.path == ("final_norm",):
            array += 1
        if spec.path == ("lm_head",):
            array[NUM_TOKENS:] *= 3
        return array

    return parameter_tree(small_config, draw)


@pytest.fixture(scope="session")
def put_on_mesh() -> Callable[[ModelConfig | DraftConfig, dict, Mesh, ShardingConfig], dict]:
    """Parameters of the host as arrays of a mesh."""

    def put_all(config, params, mesh, how) -> dict:
        put = checkpoints.sharded_put(*placement(mesh, how))

        def leaf(spec):
            array = functools.reduce(lambda tree, key: tree[key], spec.path, params)
            return put(spec, spec.param_shape, array.dtype, lambda index: np.ascontiguousarray(array[index]))

        return parameter_tree(config, leaf)

    return put_all


NUM_TOKENS = 259  # bytes, <s>, </s>, <pad>


@pytest.fixture(scope="session")
def checkpoint(small_config, small_params, tmp_path_factory) -> Path:
    """The directory of the small model with a tokenizer of bytes."""
    directory = tmp_path_factory.mktemp("small") / "checkpoint"
    save_hf(small_params, _config_json(small_config), directory, dtype=np.float32)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    backend.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session")
def muse(checkpoint) -> muse_jax.Muse:
    return muse_jax.load(checkpoint, prefill_chunk=64)


# ---- A small draft for it ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def small_draft_json() -> dict:
    """A sliding layer, whose window is smaller than the block, and a full one; both see the whole block in both directions."""
    return {
        "model_type": "qwen3",
        "architectures": ["DFlash2DraftModel"],
        "dtype": "float32",
        "vocab_size": 264,
        "hidden_size": TINY.hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 10,
        "is_causal": False,
        "dflash_config": {
            "target_layer_ids": [1, 0],
            "mask_token_id": 262,
            "block_size": 16,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 8,
            "selector_top_k": 16,
            "output_multiplier": TINY.output_multiplier,
            "final_logit_softcapping": 20.0,
        },
    }


@pytest.fixture(scope="session")
def small_draft_config(small_draft_json) -> DraftConfig:
    return DraftConfig.from_hf(small_draft_json)


@pytest.fixture(scope="session")
def small_draft_params(small_draft_config) -> dict:
    """Random everywhere. It knows nothing of the target, which rarely accepts what it proposes."""
    rng = np.random.default_rng(zlib.crc32(b"small_draft_params"))

    def draw(spec) -> np.ndarray:
        array = rng.standard_normal(spec.param_shape, np.float32)
        array *= 0.3 if array.ndim == 1 else 1 / np.sqrt(array.shape[-1])
        return 1 + array if array.ndim == 1 else array

    return parameter_tree(small_draft_config, draw)


@pytest.fixture(scope="session")
def draft_checkpoint(checkpoint, small_draft_json, small_draft_params, tmp_path_factory) -> Path:
    """The directory of the small model with the draft in it."""
    directory = tmp_path_factory.mktemp("drafted") / "checkpoint"
    shutil.copytree(checkpoint, directory)
    save_draft(small_draft_params, small_draft_json, directory / "draft", dtype=np.float32)
    return directory
