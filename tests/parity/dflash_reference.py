"""Random DFlash2 drafts of the dflash package, and targets of transformers that they predict now and then.

dflash 0.1.0 with transformers 5.24.0. It serves one sequence at a time, so a batch of ours is compared with one run for each.
"""

from __future__ import annotations

import dataclasses
import math
import time
from unittest import mock

import dflash.model
import numpy as np
import torch
from dflash.model import DFlash2DraftModel, Qwen3Config
from hf_reference import make_hf_config, make_hf_model
from transformers import MuseSparkForConditionalGeneration

SLIDING, FULL = "sliding_attention", "full_attention"
VOCAB_SIZE, HIDDEN_SIZE, NUM_TARGET_LAYERS = 128, 64, 6

# Each names what it is there for. The tests' contexts grow beyond every window.
CASES = {
    "causal": {"is_causal": True, "layer_types": [SLIDING] * 3, "sliding_window": 20, "block_size": 8},
    "bidirectional": {"is_causal": False, "layer_types": [SLIDING] * 3, "sliding_window": 24, "block_size": 16},
    "window narrower than the block": {
        "is_causal": False,
        "layer_types": [SLIDING] * 2,
        "sliding_window": 4,
        "block_size": 8,
        "conv_kernel_size": 3,
    },
    "mixed layers, each kind with its own causality": {
        "layer_types": [SLIDING, FULL, SLIDING],
        "sliding_window": 6,
        "block_size": 16,
        "head_dim": 24,
        "num_key_value_heads": 4,
    },
    "full layers, scaled embeddings": {
        "layer_types": None,
        "input_embedding_scale": 1.7,
        "block_size": 2,
        "conv_group_size": 64,
        "num_hidden_layers": 2,
    },
    "multiplier, cap and epsilon": {
        "is_causal": False,
        "layer_types": [SLIDING] * 2,
        "sliding_window": 16,
        "block_size": 8,
        "output_multiplier": 0.35,
        "final_logit_softcapping": 3.0,
        "rms_norm_eps": 1e-2,  # so large that each norm's own shows
        "conv_kernel_size": 1,
    },
    "one tap, biases": {
        "layer_types": [SLIDING, FULL],
        "sliding_window": 9,
        "is_causal": True,
        "block_size": 8,
        "target_layer_ids": [3],
        "attention_bias": True,
    },
    "taps in another order, biases": {
        "is_causal": False,
        "layer_types": [FULL, SLIDING],
        "sliding_window": 12,
        "block_size": 16,
        "target_layer_ids": [4, 0, 2],
        "attention_bias": True,
        "conv_group_size": 8,
    },
}
# Of dflash_config; the others of a case stand outside.
_INNER = (
    *("target_layer_ids", "mask_token_id", "block_size", "conv_kernel_size", "conv_group_size", "selector_rank"),
    *("selector_top_k", "input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
)


def make_draft_config(**settings) -> Qwen3Config:
    layer_types = settings.get("layer_types")
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "num_hidden_layers": 2 if layer_types is None else len(layer_types),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "num_target_layers": NUM_TARGET_LAYERS,
        "use_sliding_window": layer_types is not None and SLIDING in layer_types,  # without it the config drops the window
        "target_layer_ids": [1, 3, 4],
        "mask_token_id": VOCAB_SIZE - 1,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "architectures": ["DFlash2DraftModel"],
        **settings,
    }
    inner = {name: settings.pop(name) for name in _INNER if name in settings}
    return Qwen3Config(dflash_config=inner, **settings)


def make_draft(config: Qwen3Config, rng: np.random.Generator) -> DFlash2DraftModel:
    """A draft in fp32 with every tensor random: initial convolutions do nothing, and initial norms hide mistakes."""
    model = DFlash2DraftModel(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(torch.from_numpy(_random_values(name, tuple(tensor.shape), rng)))
    return model


def _random_values(name: str, shape: tuple, rng: np.random.Generator) -> np.ndarray:
    values = rng.normal(size=shape)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        values = 1.5 + 0.4 * values  # attention that prefers some keys, so that a wrong window shows
    elif name.endswith("norm.weight"):
        values = 1.0 + 0.3 * values
    elif name.endswith("base_kernel"):
        values = 0.4 * values + np.array([1.0] + [0.0] * (shape[1] - 1))[None, :, None]
    elif name.endswith("bias"):
        values = 0.3 * values
    elif "codebook" not in name:
        values = values * (0.3 if "kernel_projection" in name else 1.0) / math.sqrt(shape[-1])
    return values.astype(np.float32)


@dataclasses.dataclass
class Drafter:
    """A draft of dflash while it serves one sequence.

    embedding, lm_head: the target's, [V, D].
    """

    model: DFlash2DraftModel
    embedding: torch.Tensor
    lm_head: torch.Tensor

    def __post_init__(self) -> None:
        self.cache = dflash.model._make_cache(self.model.config)
        self.start = 0

    @torch.inference_mode()
    def round(self, taps: np.ndarray, anchor: int) -> torch.Tensor:
        """Drafts after `anchor`, which follows the tokens that `taps` [n, taps * D], the newly committed ones, complete.

        Returns the hidden rows of the predicted positions, [P, D].
        """
        model, size = self.model, self.model.block_size
        first, self.start = self.start, self.start + len(taps)
        tokens = torch.tensor([anchor] + [model.mask_token_id] * (size - 1))
        scale = model.config.dflash_config.get("input_embedding_scale", 1.0)
        hidden = model(
            target_hidden=torch.from_numpy(taps)[None],
            noise_embedding=(self.embedding[tokens] * scale)[None],
            position_ids=torch.arange(first, self.start + size)[None],
            past_key_values=self.cache,
            use_cache=True,
        )
        dflash.model._crop_to(self.cache, self.start)
        return hidden[0, 1:]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[P, D] -> [P, V], with the draft's multiplier and cap."""
        return self.model.compute_logits(hidden, lambda rows: rows @ self.lm_head.T)

    @torch.inference_mode()
    def lattice(self, hidden: torch.Tensor, anchor: int, ids: np.ndarray) -> np.ndarray:
        """Scores of each of `ids` [P, K] after each of those of the position before: [P, K before, K]."""
        selector, ids = self.model.candidate_selector, torch.tensor(ids, dtype=torch.long)
        before = torch.cat([torch.full_like(ids[:1], anchor), ids[:-1]])
        left = selector.predecessor_codebook(before) * selector.hidden_projection(hidden)[:, None]
        unary = self.logits(hidden).gather(1, ids)
        return (unary[:, None] + left @ selector.successor_codebook(ids).transpose(1, 2)).numpy()

    @torch.inference_mode()
    def path(self, hidden: torch.Tensor, anchor: int) -> tuple[np.ndarray, np.ndarray]:
        """What dflash proposes: its greedy path [P], and its candidates of each position [P, K] in no particular order."""
        path, candidates, _ = self.model.propose(hidden[None], torch.tensor([anchor]), lambda rows: rows @ self.lm_head.T, 0.0)
        return path[0].numpy(), candidates[0].numpy()


def make_target(rng: np.random.Generator) -> tuple[MuseSparkForConditionalGeneration, np.ndarray]:
    """A Muse Spark in fp32 that mostly, but not always, goes round a random cycle of the whole vocabulary.

    A random model's continuation soon repeats a few tokens. Here lm_head answers each embedding with its successor, some
    louder than others, gates let the context in, and what it says wins where the answer is quiet.

    Returns the model and each token's successor [V].
    """
    mlps = ["sparse"] + ["dense"] * (NUM_TARGET_LAYERS - 1)
    config = make_hf_config(num_hidden_layers=NUM_TARGET_LAYERS, mlp_layer_types=mlps)
    model = make_hf_model(config, torch.float32, rng)
    cycle = rng.permutation(VOCAB_SIZE)
    successor = np.empty_like(cycle)
    successor[cycle] = np.roll(cycle, -1)
    embedding, lm_head = rng.normal(size=(2, VOCAB_SIZE, HIDDEN_SIZE)) * np.array([0.2, 0.5])[:, None, None]
    embedding[-1] *= 3.0  # the mask: see `plant_selector`
    normed = embedding / np.sqrt(np.mean(embedding**2, axis=1, keepdims=True))
    lm_head[successor] += rng.uniform(0.28, 0.52, (VOCAB_SIZE, 1)) * normed
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(torch.from_numpy(embedding))
        model.lm_head.weight.copy_(torch.from_numpy(lm_head))
        for name, gate in model.named_parameters():
            if name.endswith("residual_gate.gate"):
                gate.copy_(torch.from_numpy(rng.normal(-0.5, 0.15, tuple(gate.shape))))
    return model, successor


def plant_selector(
    draft: DFlash2DraftModel, target: MuseSparkForConditionalGeneration, successor: np.ndarray, rng: np.random.Generator
) -> None:
    """Gives a draft's selector the target's habit: a candidate that is the successor of the one before scores higher.

    Hidden rows have a common direction, since all start from the embedding of the mask; projecting on it gives about 1, and the
    score is then the product of two codes. A path is wrong where the random unary scores leave a successor out of the
    candidates, and where a row is far from the common direction: accepted lengths depend on every part of the draft.
    """
    drafter = Drafter(draft, target.get_input_embeddings().weight, target.lm_head.weight)
    features = len(draft.target_layer_ids) * HIDDEN_SIZE
    rows = [drafter.round(rng.standard_normal((3, features), np.float32), int(rng.integers(VOCAB_SIZE))) for _ in range(20)]
    common = torch.cat(rows).mean(0)
    selector = draft.candidate_selector
    code = torch.from_numpy(rng.choice([-1.0, 1.0], selector.successor_codebook.weight.shape))
    with torch.no_grad():
        selector.successor_codebook.weight.copy_(code)
        selector.predecessor_codebook.weight.copy_(2.0 * code[successor])
        selector.hidden_projection.weight.copy_((common / (common @ common)).expand_as(selector.hidden_projection.weight))


def generate(
    draft: DFlash2DraftModel, target: MuseSparkForConditionalGeneration, prompt: np.ndarray, max_new_tokens: int
) -> tuple[list[int], list[int]]:
    """Greedy speculative decoding by dflash.

    Returns the new tokens, and n of every round with a whole block (towards the end dflash makes blocks shorter).
    """
    with mock.patch.object(dflash.model, "_cuda_time", time.perf_counter):  # statistics include times, which ask for a GPU
        result = dflash.model.dflash_generate(
            draft, target, torch.tensor(prompt)[None], max_new_tokens, stop_token_ids=None, return_stats=True
        )
    tokens = result.output_ids[0, len(prompt) :].tolist()
    # A round begins with one token emitted that is not committed; one row more than the block, and nothing is clipped.
    left = max_new_tokens - np.cumsum([0, *result.acceptance_lengths[:-1]])
    return tokens, [n for n, rows in zip(result.acceptance_lengths, left, strict=True) if rows > draft.block_size]
