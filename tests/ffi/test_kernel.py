"""The kernel: every phase, any number of ranks, launches and CTAs, what must not be read, and a CTA that does not come.

Its own source runs on the emulated device, where what is relaxed on a GPU happens in order, and on a GPU where there is one.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parent))  # of verify_steps

import verify_steps
from verify_phases import chain, check_phases
from verify_steps import SMALL, TINY_SIZES, TWO_LAYERS, Case

from ffi import library
from ffi.profile import PHASES
from ffi.verify import problem

pytestmark = pytest.mark.skipif(bool(library.unavailable("cpu")), reason="; ".join(library.unavailable("cpu")))


on_every_device = pytest.mark.parametrize("target", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])


# Layers of SMALL: 0 sliding, RoPE, NVFP4; 1 global, NoPE, bf16; 2 sliding, NoPE, bf16; 3 global, RoPE, NVFP4.
@on_every_device
@pytest.mark.parametrize(
    ("case", "i"),
    [
        (Case(), 0),
        (Case(forced=True), 1),
        (Case(activations="nvfp4"), 0),
        (Case(activations="nvfp4", forced=True), 3),
        (Case(rows=7, length=1), 0),
        (Case(rows=7, length=15), 1),
        (Case(rows=1, length=128), 3),  # the cache is full
        (Case(TINY_SIZES, length=75), 0),
        (Case(TINY_SIZES, activations="nvfp4"), 1),
    ],
    ids=str,
)
def test_phases(case, i, target):
    check_phases(case, i, target=target)


@on_every_device
def test_rows_out_of_each_others_window(target):
    check_phases(Case(dataclasses.replace(SMALL, sliding_window=5), length=30), 0, chain(Case(length=30)), target)


@on_every_device
def test_a_context_of_several_blocks_a_cta(target):
    """More than 32 blocks of 128 keys, so that a CTA takes two."""
    check_phases(Case(TINY_SIZES, length=4200, slots=4224, rows=3), 1, target=target)


def bits(result) -> list[bytes]:
    assert not np.any(result.status)
    logits = np.concatenate(result.logits, axis=-1)
    return [np.asarray(x).tobytes() for x in (logits, result.taps, *jax.tree.leaves(result.rows))]


@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_bits_do_not_depend_on_ranks_launches_ctas_or_order(emulated_device, activations):
    case = Case(TWO_LAYERS, rows=3, activations=activations)

    def step(ranks: int = 1, layers_per_launch: int = 1, **settings: int) -> list[bytes]:
        emulated_device(**settings)
        return bits(verify_steps.run(case, ranks, target="emulated", taps=(0,), layers_per_launch=layers_per_launch))

    one = step()
    assert step(layers_per_launch=2, seed=2) == one  # in the next rounds of the same buffers
    assert step(ranks=2, ctas_per_rank=4, seed=3) == one
    assert step(ranks=8, ctas_per_rank=2, seed=4) == one
    assert step(ctas_per_rank=17, seed=5) == one


@pytest.mark.gpu
@pytest.mark.parametrize("activations", ["bf16", "nvfp4"])
def test_bits_on_a_gpu(activations):
    """From run to run, for any number of ranks that the GPU emulates, and of layers in a launch."""
    case = Case(rows=7, activations=activations)

    def step(ranks: int = 1, layers_per_launch: int = 1) -> list[bytes]:
        return bits(verify_steps.run(case, ranks, target="cuda", taps=(0, 3), layers_per_launch=layers_per_launch))

    one = step()
    for _ in range(20):
        assert step() == one
    for ranks in (2, 4, 8):
        for layers_per_launch in (1, 3, 4):
            assert step(ranks, layers_per_launch) == one


@on_every_device
def test_loopback_ends(target):
    """A rank of eight alone does the work of a rank; its results mean nothing."""
    result = verify_steps.run(Case(TWO_LAYERS, rows=4, loopback=8), 8, target=target)
    assert not np.any(result.status) and np.all(np.isfinite(result.logits))


@on_every_device
@pytest.mark.parametrize("length", [1, 90])
def test_what_is_not_committed_is_not_read(length, target):
    case = Case(TWO_LAYERS, length=length, rows=5)

    def step(unused: float | None) -> list[bytes]:
        cache = verify_steps.make_cache(case, unused)
        return bits(verify_steps.run(case, cache=cache, target=target))

    assert step(np.nan) == step(None)


@on_every_device
def test_rows_of_nan_end_as_such(target):
    """The router of such a row chooses different experts, so nobody waits for one that was chosen twice."""
    case = Case(rows=3)
    config = verify_steps.verify_config(case)
    arguments = verify_steps.operands(case, config)
    arguments["embedding"] = jnp.full_like(arguments["embedding"], jnp.nan)
    result = verify_steps.call(config, arguments, target)
    assert not np.any(result.status) and np.all(np.isnan(result.logits))


@pytest.mark.parametrize("stalled_cta", [1, 4])
def test_a_cta_that_does_not_come_is_named_and_the_next_call_works(emulated_device, stalled_cta):
    case = Case(TWO_LAYERS, rows=4)

    def step() -> tuple:
        result = verify_steps.run(case, 2, target="emulated", deadline_ms=1)
        return result, list(np.asarray(result.status))

    good = bits(step()[0])
    for seed in (1, 2, 3):
        emulated_device(seed=seed, stalled_cta=stalled_cta)
        _, (code, rank, layer, _, _, _, *rest) = step()
        # Whoever gave up first, in the embedding or soon after it.
        assert code == 1 and rank in (0, 1) and layer in (-1, 0) and rest == [0, 0]
        emulated_device(seed=seed)
        assert bits(step()[0]) == good


@pytest.mark.parametrize(
    ("target", "deadline_ms", "times"), [("emulated", 1, 2), pytest.param("cuda", 50, 10, marks=pytest.mark.gpu)]
)
def test_who_waits_in_vain_is_named_and_the_next_call_works(target, deadline_ms, times):
    """Of a row's two results of an expert that it has chosen twice only one comes, and `combine` waits for the other."""
    case = Case(TWO_LAYERS, rows=3, forced=True)
    config = verify_steps.verify_config(case, 2, deadline_ms=deadline_ms)
    arguments = verify_steps.operands(case, config)
    experts, weights = arguments["routing"]
    twice = experts.at[1, :, 1].set(experts[1, :, 0])  # in layer 1
    good = bits(verify_steps.call(config, arguments, target))
    # Whoever has no row waits in a later one: the next, or, of many CTAs, any that they have work in.
    combine, last = PHASES.index("combine"), PHASES.index("post_expert_proj" if target == "emulated" else "lm_head")
    for _ in range(times):
        status = verify_steps.call(config, arguments | {"routing": (twice, weights)}, target).status
        code, rank, layer, phase, _, _, *rest = np.asarray(status).tolist()
        assert (code, layer, rest) == (1, 1, [0, 0]) and rank in (0, 1) and combine <= phase <= last
        assert bits(verify_steps.call(config, arguments, target)) == good


def test_a_call_beside_another_is_refused(emulated_device):
    """And the next one, after that other, works."""
    case = Case(TWO_LAYERS, rows=4)

    def step():
        return verify_steps.run(case, 2, target="emulated")

    good = bits(step())
    emulated_device(is_taken=True)
    assert list(np.asarray(step().status)) == [2, *[0] * 7]
    emulated_device()
    assert bits(step()) == good


# ---- What a status says -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ((0, 1, 2, 3), None),
        (
            (1, 3, 12, PHASES.index("o_sum"), 17, 5),
            "rank 3 gave up waiting in layer 12, phase o_sum, CTA 17: data of rank 5 did not come within deadline_ms; see what "
            "stopped rank 5, or raise it",
        ),
        (
            (1, 0, -1, PHASES.index("embed"), 2, -1),
            "rank 0 gave up waiting in the embedding, phase embed, CTA 2: something did not come within deadline_ms; if that "
            "is too short here, raise it",
        ),
        ((1, 0, 1, 99, 0, -1), "rank 0 gave up waiting in layer 1, phase 99, CTA 0: something did not come within deadline_ms; "
         "if that is too short here, raise it"),
        ((2,), "another call for the same model and devices was running; repeat this one when that is over"),
        ((7,), "it has status 7, which this version does not know"),
    ],
)  # fmt: skip
def test_a_status_in_words(status, expected):
    assert problem(np.int32([*status, *[0] * (8 - len(status))])) == expected
