"""`backend="megakernel"`: the tokens of `xla`, what its step is made of, and what it refuses. On a CPU its call is the Host
reference, which tests/ffi compares with `muse_jax` phase by phase."""

import dataclasses
import functools
import itertools
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding

sys.path += [str(Path(__file__).resolve().parent / "ffi")]

import verify_steps
from verify_steps import BF16, FP32, SMALL, TINY_SIZES, Case

import muse_jax
from ffi import layout, library
from muse_jax import decoding, hlo, megakernel_backend, nvfp4
from muse_jax.backends import XLA, Request, resolve_backend
from muse_jax.config import TINY
from muse_jax.decoding import DecodeState, Model
from muse_jax.layout import parameter_tree
from muse_jax.megakernel_backend import Megakernel
from muse_jax.model import MuseSpark
from muse_jax.muse import Muse
from muse_jax.numerics import HF
from muse_jax.sampling import gumbel_noise
from muse_jax.sharding import ONE_DEVICE, ShardingConfig, make_mesh, param_spec
from muse_jax.speculation import Speculation

pytestmark = pytest.mark.skipif(bool(library.unavailable("cpu")), reason="; ".join(library.unavailable("cpu")))

MUSE_TINY = Path(__file__).resolve().parent.parent / "checkpoints" / "muse_tiny"
# A window has 64 keys and a ring 80 slots, other caches 256. Prompts are shorter than the window, or so long that the rows of
# the last step reach the end of the cache.
SLOTS, NEW_TOKENS = 256, 110
SHORT, LONG = 40, SLOTS - 16 - NEW_TOKENS
NEVER = [3071]  # of the padded vocabulary
SEED = 2**40 + 5
QUESTION = "Ann has 3 pens. Tom has twice as many pens as Ann. How many pens do they have together?\n"
# Two choices may differ where their scores are closer than this: bf16 logits of the two backends, of the same text, are 0.02
# apart (root mean square), and the furthest of a position 0.08, but where a router turns. Few tokens of a text are so close.
TIE, MOST_TIES = 0.1, 2

# What runs for milliseconds is mostly compiled.
QUICKLY = {"xla_backend_optimization_level": 0}
compile_once = functools.partial(jax.jit, compiler_options=QUICKLY)
prefill_chunk = compile_once(decoding.prefill_chunk, donate_argnames=("caches", "last"))
first_token = compile_once(decoding.first_token, donate_argnames="caches")
full_logits = compile_once(decoding.full_logits)
decode = compile_once(muse_jax.decode, donate_argnames="state")


class QuickMuse(Muse):
    def __post_init__(self):
        super().__post_init__()
        self._prefill_chunk, self._first_token, self._logits = prefill_chunk, first_token, full_logits

    @classmethod
    def like(cls, muse: Muse, **changes) -> "QuickMuse":
        return cls(**{field.name: getattr(muse, field.name) for field in dataclasses.fields(muse)} | changes)


@functools.cache
def load(backend: str) -> QuickMuse:
    return QuickMuse.like(muse_jax.load(MUSE_TINY, backend=backend, dtype="bfloat16", prefill_chunk=64))


@functools.cache
def prompt(length: int) -> list[int]:
    return load("xla").tokenizer.encode(QUESTION * 8)[-length:]


@functools.cache
def stepping(backend: str, speculation: str, size: int) -> Model:
    """The model with other steps than trees of 16."""
    model = dataclasses.replace(load(backend).model, speculation=Speculation(speculation), num_rows=size)
    return model if speculation != "off" else dataclasses.replace(model, draft_params=None, draft_graph=None)


def start(muse: Muse, model: Model, tokens: list[int], **settings):
    """Prefills for trees of 16: such a state has room for any steps."""
    state, out = muse.prefill([tokens], **{"max_new_tokens": NEW_TOKENS, "stop_token_ids": NEVER, "seed": SEED, **settings})
    return (state if model.draft_params is not None else dataclasses.replace(state, draft_cache=None)), out


@functools.cache
def program(backend: str, speculation: str, size: int, temperature: float):
    """The compiled step, for all prompts."""
    model = stepping(backend, speculation, size)
    return decode.lower(model, start(load(backend), model, prompt(SHORT), temperature=temperature)[0]).compile()


def finish(step: Callable, model: Model, state, out) -> tuple[list[int], list[int], decoding.DecodeState]:
    """The text, how much each step accepted, and the last state."""
    text, accepted = out.tokens[0, : int(out.count[0])].tolist(), []
    while not out.done[0]:
        state, out = step(model, state)
        text += out.tokens[0, : int(out.count[0])].tolist()
        accepted.append(int(out.accepted[0]))
    return text, accepted, state


def gaps(plain: Muse, tokens: list[int], text: list[int], temperature: float) -> np.ndarray:
    """By how much each token's score is below that of the token which `plain` chooses after those before it."""
    positions = jnp.arange(len(tokens), len(tokens) + len(text), dtype=jnp.int32)
    scores = np.asarray(plain.logits([tokens + text]))[0, len(tokens) - 1 : -1, : plain.model.valid_vocab]
    if temperature:
        words = (jnp.full(len(text), word, jnp.uint32) for word in (SEED % 2**32, SEED >> 32))
        noise = gumbel_noise(*words, positions, jnp.arange(scores.shape[1], dtype=jnp.uint32))
        scores = scores / np.float32(temperature) + np.asarray(noise)
    return scores.max(-1) - scores[np.arange(len(text)), text]


# ------------------------------------------------------------------------------------------------------------------ tokens


@functools.cache
def written(backend: str, speculation: str, size: int, length: int, temperature: float):
    model, step = stepping(backend, speculation, size), program(backend, speculation, size, temperature)
    return finish(step, model, *start(load(backend), model, prompt(length), temperature=temperature))


@pytest.mark.parametrize(
    "speculation, size, temperatures",
    [("off", 1, (0.0,)), ("tree", 16, (0.0, 0.8)), ("tree", 8, (0.0,)), ("chain", 8, (0.0,))],
    ids=["off", "tree16", "tree8", "chain8"],
)
def test_tokens_of_xla(speculation, size, temperatures):
    """Of its plain decoding, greedily and with a seed; a text may part at a tie, after which it is not compared."""
    ties = 0
    for length, temperature in itertools.product((SHORT, LONG), temperatures):
        expected, _, _ = written("xla", "off", 1, length, temperature)
        text, accepted, state = written("megakernel", speculation, size, length, temperature)
        assert len(text) == len(expected) == NEW_TOKENS and len(set(text)) > 20
        i = next((i for i, pair in enumerate(zip(expected, text, strict=True)) if pair[0] != pair[1]), None)
        if i is not None:
            choices = ([*expected[:i], token] for token in (expected[i], text[i]))
            behind = [gaps(load("xla"), prompt(length), choice, temperature)[i] for choice in choices]
            gap = abs(float(behind[1] - behind[0]))
            assert gap < TIE, f"token {i}: {text[i]} instead of {expected[i]}, scores {gap:.2g} apart"
            ties += 1
        if speculation == "off":
            assert len(accepted) == NEW_TOKENS - 1
        else:
            assert np.mean(accepted) > 3  # as the draft had the taps that it was trained with
        assert state.cache.layers[1][0].shape[2] == SLOTS and int(state.length[0]) == length + NEW_TOKENS - 1
    assert ties <= 1


def test_noise_matters():
    assert written("xla", "off", 1, LONG, 0.0)[0] != written("xla", "off", 1, LONG, 0.8)[0]


def test_tokens_of_an_nvfp4_model():
    """Of the first two layers of muse_tiny, the first with NVFP4 experts."""
    plain = load("xla")
    kinds = {name: getattr(plain.config, name)[:2] for name in ("layer_types", "layer_uses_rope", "mlp_layer_types")}
    config = dataclasses.replace(plain.config, num_hidden_layers=2, nvfp4_layers=(0,), **kinds)
    muses = {}
    for backend in (XLA, Megakernel()):
        params = jax.tree.map(jnp.copy, plain.model.params | {"layers": {i: plain.model.params["layers"][i] for i in (0, 1)}})
        mlp = params["layers"][0]["mlp"]
        for name in ("gate_up", "down"):
            mlp[name] = vars(jax.tree.map(jnp.asarray, nvfp4.quantize(np.asarray(mlp[name], np.float32), name)))
        module = MuseSpark(config, dtype=BF16, activations="nvfp4", backend=backend)
        params = backend.stored_params(params, config, ONE_DEVICE, None)
        model = Model.create(module, params, valid_vocab=plain.model.valid_vocab)
        muses[backend.name] = QuickMuse.like(plain, model=model, config=config, draft_config=None)
    muse, tokens = muses["megakernel"], prompt(SHORT)
    text, _, _ = finish(decode, muse.model, *start(muse, muse.model, tokens))
    assert len(text) == NEW_TOKENS and len(set(text)) > 5
    behind = gaps(muses["xla"], tokens, text, 0.0)
    assert behind.max() < TIE and np.count_nonzero(behind) <= MOST_TIES


# -------------------------------------------------------------------------------------------------------------- the weights


def packed_model(case: Case) -> Model:
    backend = Megakernel()
    plain = verify_steps.make_model(case, BF16)
    module = MuseSpark(case.config, dtype=BF16, activations=case.activations, backend=backend)
    return Model.create(module, backend.stored_params(plain.params, case.config, ONE_DEVICE, None))


def test_layers_are_kept_packed_only():
    case = Case(TINY_SIZES)
    plain, backend = verify_steps.make_model(case, BF16).params, Megakernel()
    natural = {i: jax.tree.leaves(layer) for i, layer in plain["layers"].items()}
    stored = backend.stored_params(plain, case.config, ONE_DEVICE, None)
    for i, layer in stored["layers"].items():
        assert set(layer) == {"input_norm", "weights"}
        assert [x.is_deleted() for x in natural[i]].count(False) == 1 and not layer["input_norm"].is_deleted()
        table = layout.layer_table(verify_steps.verify_config(case).shape, i in case.config.nvfp4_layers)
        assert layer["weights"].shape == (1, layout.table_bytes(table)) and layer["weights"].dtype == jnp.uint8
    # The draft reads these at every step.
    assert stored["embedding"] is plain["embedding"] and stored["lm_head"] is plain["lm_head"]


def test_what_prefill_runs_on_is_what_was_packed():
    """The same bits as `xla`, through layers of bf16 and of NVFP4 experts."""
    case = Case(TINY_SIZES)
    tokens = jnp.asarray(np.arange(48, dtype=np.int32)[None] * 5 % case.config.vocab_size)
    expected = full_logits(verify_steps.make_model(case, BF16), tokens)
    np.testing.assert_array_equal(full_logits(packed_model(case), tokens), expected)


# ----------------------------------------------------------------------------------------------------------------- the step


@pytest.mark.parametrize(
    "case",
    [
        Case(TINY_SIZES, rows=16, activations="nvfp4"),
        Case(TINY_SIZES, rows=5, length=30, forced=True),
        Case(TINY_SIZES, rows=1, length=127),
    ],
    ids=str,
)
def test_a_step_is_the_call(case):
    """The same bits as of `ffi.verify.verify` with operands that the tests of ffi make."""
    taps, nodes = (1, 0), verify_steps.make_nodes(case)
    placeholder = int(nodes.token[0, -1])
    config = dataclasses.replace(case.config, placeholder_token_ids=(placeholder,))
    backend = Megakernel()
    stored = backend.stored_params(verify_steps.make_model(case, BF16).params, config, ONE_DEVICE, None)
    model = Model.create(MuseSpark(config, dtype=BF16, activations=case.activations, backend=backend), stored)

    @compile_once
    def step(model: Model, nodes, length: jax.Array, cache, routing: list):
        return backend.verify(model.module, nodes, length, cache, taps, routing)

    routing = verify_steps.make_routing(case)
    [logits], rows, tapped, status = step(model, nodes, jnp.int32([case.length]), verify_steps.make_cache(case), routing)
    known = nodes._replace(token=jnp.where(nodes.token == placeholder, 0, nodes.token))
    expected = verify_steps.run(case, nodes=known, taps=taps)
    assert not np.any(status)
    np.testing.assert_array_equal(logits, expected.logits)
    np.testing.assert_array_equal(tapped[0], np.concatenate(expected.taps, axis=-1))
    for ours, theirs in zip(jax.tree.leaves(rows), jax.tree.leaves(expected.rows), strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    assert backend.paths == {"verify": ["megakernel (Host reference)"]}


def test_forced_routing_is_of_all_layers_or_of_none():
    case = Case(TINY_SIZES, rows=2, forced=True)
    model, routing = packed_model(case), [None, verify_steps.make_routing(case)[1]]
    with pytest.raises(ValueError, match=r"^routing: of every layer, or of none$"):
        decoding.verify(model, verify_steps.make_state(model, case), verify_steps.make_nodes(case), routing)


def copied(program: hlo.Module, arrays) -> list[str]:
    """Instructions of a compiled program that give an array of the dtype and the size of one of these, but for parameters and
    updates in place. XLA for CPU widens updates of bf16, whatever the backend: these are not counted either."""
    names = {"bfloat16": "bf16", "uint8": "u8"}
    like = {(names[x.dtype.name], x.size) for x in arrays}
    in_place = {"parameter", "get-tuple-element", "bitcast", "tuple", "call", "dynamic-update-slice"}

    def updates(name: str) -> bool:
        """Whether a computation is an update of a slice, perhaps widened."""
        computation = program.computations[name]
        root = computation.instructions[computation.root]
        if root.opcode == "convert":
            root = computation.instructions[root.operands[0]]
        return root.opcode == "dynamic-update-slice"

    def copies(instruction: hlo.Instruction) -> bool:
        shapes = {(array.dtype, math.prod(array.dims)) for array in hlo.arrays(instruction.shape)}
        return bool(shapes & like) and instruction.opcode not in in_place and not any(map(updates, instruction.called))

    executed = program.executed()
    return [f"{each.opcode} {each.name}" for where, each in executed if copies(each) and not where.fused]


@pytest.mark.parametrize("speculation, size", [("off", 1), ("tree", 16)])
def test_a_step_copies_no_cache_and_no_weights(speculation, size):
    model, step = stepping("megakernel", speculation, size), program("megakernel", speculation, size, 0.0)
    state, _ = start(load("megakernel"), model, prompt(SHORT))
    caches, weights = jax.tree.leaves(state.cache.layers), [layer["weights"] for layer in model.params["layers"].values()]
    weights += [model.params[name] for name in ("head", "lm_head", "embedding")]
    text = step.as_text()
    parsed = hlo.parse(text)
    assert copied(parsed, caches + weights) == []
    # The check sees what is copied.
    for like in (caches[0], weights[2]):
        for change in (jnp.copy, lambda x: x + jnp.ones_like(x)):
            assert copied(hlo.parse(jax.jit(change).lower(like).compile().as_text()), caches + weights)

    # The call reads the arguments themselves, but for the axis that the embedding gets.
    [(computation, call)] = [each for each in parsed.executed() if "muse_verify" in each[1].attributes]
    operands = [computation.instructions[name] for name in call.operands]
    large = [x.opcode for x in operands if math.prod(x.shape.dims) >= min(x.size for x in caches)]
    assert sorted(large) == ["bitcast", *["parameter"] * (len(caches) + 6 + 1)]

    donated = jax.tree.leaves((state.cache, state.draft_cache))
    aliased = re.search(r"input_output_alias=\{(.*?)\}, entry", text.partition("\n")[0])[1]
    assert {int(i) for i in re.findall(r"\{(\d+)\}: \(", aliased)} >= set(range(len(donated)))
    before = [x.unsafe_buffer_pointer() for x in donated]
    state, _ = step(model, state)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves((state.cache, state.draft_cache))] == before


# --------------------------------------------------------------------------------------------------------------- on a mesh

STEPS = 24  # tokens, or steps without a draft


@functools.cache
def tiny_on(devices: int) -> QuickMuse:
    """muse_tiny as `load` puts it on a mesh, with its draft."""
    return QuickMuse.like(muse_jax.load(MUSE_TINY, backend="megakernel", mesh=make_mesh(devices), prefill_chunk=64))


@functools.cache
def small_on(devices: int | None, deadline_ms: int = megakernel_backend.HOST_DEADLINE_MS) -> QuickMuse:
    """A random model whose eight KV heads eight ranks can share, without a draft."""
    config, mesh = dataclasses.replace(SMALL, num_local_experts=8), None if devices is None else make_mesh(devices)
    how, backend = ShardingConfig(devices), Megakernel(deadline_ms=deadline_ms)

    def put(spec) -> jax.Array:
        value = functools.reduce(lambda tree, key: tree[key], spec.path, verify_steps.all_params(config))
        return jax.device_put(value, None if mesh is None else NamedSharding(mesh, param_spec(spec, how)))

    params = backend.stored_params(parameter_tree(config, put), config, how, mesh)
    module = MuseSpark(config, dtype=BF16, activations="nvfp4", sharding=how, backend=backend)
    model = Model.create(module, params, mesh=mesh)
    return QuickMuse.like(load("xla"), model=model, config=config, draft_config=None, tokenizer=None, mesh=mesh)


def bits(state: DecodeState) -> list[bytes]:
    """Of the caches and all else."""
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


@functools.cache
def written_on(devices: int, name: str = "small") -> tuple[list[int], list[bytes]]:
    muse, tokens = (small_on(devices), SMALL_PROMPT) if name == "small" else (tiny_on(devices), prompt(LONG))
    text, _, state = finish(decode, muse.model, *start(muse, muse.model, tokens, max_new_tokens=STEPS, stop_token_ids=[]))
    return text, bits(state)


SMALL_PROMPT = [7 * i % 251 for i in range(50)]  # longer than the window


def test_any_number_of_devices_gives_the_same_tokens_and_caches():
    text, caches = written_on(1)
    assert len(text) == STEPS and len(set(text)) > 8
    for devices in (2, 8):
        assert written_on(devices) == (text, caches)


def test_a_mesh_is_as_one_device():
    """From the caches that a mesh prefilled, as prefill without a mesh rounds elsewhere."""
    muse, alone = small_on(8), small_on(None)
    state, out = start(muse, muse.model, SMALL_PROMPT, max_new_tokens=STEPS, stop_token_ids=[])
    text, _, state = finish(decode, alone.model, jax.device_put(jax.device_get(state)), out)
    assert (text, bits(state)) == written_on(8)


def test_a_loaded_model_and_its_draft_on_a_mesh():
    text, caches = written_on(1, "tiny")
    assert written_on(2, "tiny") == (text, caches)
    behind = gaps(load("xla"), prompt(LONG), text, 0.0)
    assert len(text) == STEPS and behind.max() < TIE and np.count_nonzero(behind) <= MOST_TIES
    muse = tiny_on(2)
    assert muse.backend == "megakernel" and muse.model.module.backend.paths == {"verify": ["megakernel (Host reference)"]}


def test_each_device_packs_its_own_part():
    devices, config = 8, dataclasses.replace(SMALL, num_local_experts=8)
    params = small_on(devices).model.params
    case = Case(config)
    head, layers = verify_steps.packed(config, verify_steps.verify_config(case, devices).shape, devices)
    for ours, theirs in [(params["head"], head), *zip((x["weights"] for x in params["layers"].values()), layers, strict=True)]:
        assert {tuple(shard.data.shape) for shard in ours.addressable_shards} == {(1, theirs.shape[1])}
        np.testing.assert_array_equal(ours, theirs)


def test_a_step_on_a_mesh_copies_no_weights_and_moves_no_cache():
    muse = tiny_on(2)
    state, _ = start(muse, muse.model, prompt(LONG), max_new_tokens=STEPS, stop_token_ids=[])
    step = decode.lower(muse.model, state).compile()
    weights = [layer["weights"] for layer in muse.model.params["layers"].values()]
    weights += [muse.model.params[name] for name in ("head", "lm_head", "embedding")]
    # Caches of one KV head are as small as other arrays; that they are updated where they are must do.
    assert copied(hlo.parse(step.as_text()), [x.addressable_shards[0].data for x in weights]) == []

    def places(state: DecodeState) -> list[int]:
        arrays = jax.tree.leaves((state.cache.layers, state.draft_cache.layers))
        return [shard.data.unsafe_buffer_pointer() for x in arrays for shard in x.addressable_shards]

    before = places(state)
    assert places(step(muse.model, state)[0]) == before


def test_a_rank_that_does_not_come_fails_the_step_on_all_devices(monkeypatch):
    muse, missing = small_on(8, deadline_ms=300), 3
    state, first = start(muse, muse.model, SMALL_PROMPT, max_new_tokens=STEPS, stop_token_ids=[])
    before = bits(state)

    def absent(config, *, rank: jax.Array, **arguments):
        call = lambda: verify(config, rank=rank, **arguments)  # noqa: E731
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(call))
        return lax.cond(rank[0] == missing, lambda: nothing, call)

    verify = megakernel_backend.verify
    with monkeypatch.context() as patch:
        patch.setattr(megakernel_backend, "verify", absent)
        same, out = jax.jit(muse_jax.decode, compiler_options=QUICKLY)(muse.model, state)
    expected = rf"rank 0 gave up waiting before the first phase: the call of rank {missing} did not come within deadline_ms$"
    with pytest.raises(muse_jax.StepError, match=expected):
        out.check()
    for array in (out.count, out.accepted, out.done, same.length, out.status[:1]):
        values = [np.asarray(shard.data).tolist() for shard in array.addressable_shards]
        assert len(values) == 8 and values == values[:1] * 8
    assert int(out.count[0]) == 0 and int(same.length[0]) == len(SMALL_PROMPT)
    assert bits(state) == before
    text, _, end = finish(decode, small_on(8).model, same, first)
    assert (text, bits(end)) == written_on(8)


# ------------------------------------------------------------------------------------------------------------- a step fails


@functools.cache
def emulated() -> QuickMuse:
    """The kernel's own source, which waits."""
    muse = load("megakernel")
    module = MuseSpark(muse.config, dtype=BF16, backend=Megakernel(deadline_ms=1, emulated=True))
    graph, _ = nnx.split(module)
    emulated = QuickMuse.like(muse, model=dataclasses.replace(muse.model, graph=graph))
    emulated._decode = decode
    return emulated


GAVE_UP = (
    r"^the step emitted nothing, and its state is as before: rank 0 gave up waiting in (the embedding|layer 0), phase \w+, "
    r"CTA [0-2]: something did not come within deadline_ms; if that is too short here, raise it$"
)


def test_a_failed_step_is_an_error_and_leaves_the_state_as_it_was(emulated_device):
    muse = emulated()
    (state, _), (expected, _) = (muse.prefill([prompt(SHORT)], max_new_tokens=NEW_TOKENS) for _ in range(2))
    expected, out = muse.decode(expected)
    out.check()
    assert int(out.count[0]) > 1
    emulated_device(stalled_cta=1)
    state, failed = jax.block_until_ready(muse.decode(state))
    emulated_device()
    with pytest.raises(muse_jax.StepError, match=GAVE_UP):
        failed.check()
    assert failed.status.shape == (8,) and int(failed.status[0]) == 1
    assert (int(failed.count[0]), int(failed.accepted[0]), bool(failed.done[0])) == (0, 0, False)
    assert np.all(np.asarray(failed.tokens) == decoding.NO_TOKEN)
    # Muse.decode says so once, without taking the state, which then gives what it would have given.
    with pytest.raises(muse_jax.StepError, match=GAVE_UP):
        muse.decode(state)
    assert int(state.length[0]) == SHORT
    state, again = muse.decode(state)
    np.testing.assert_array_equal(again.tokens, out.tokens)
    for ours, theirs in zip(*map(jax.tree.leaves, (state, expected)), strict=True):
        if ours.ndim < 4:
            np.testing.assert_array_equal(ours, theirs)
    length = int(state.length[0])
    for caches in ((state.cache, expected.cache), (state.draft_cache, expected.draft_cache)):
        for ours, theirs in zip(*map(jax.tree.leaves, (cache.layers for cache in caches)), strict=True):
            # What lies beyond is hidden, and yet finite: in the draft it counts, times zero.
            assert np.all(np.isfinite(np.asarray(ours, np.float32)))
            np.testing.assert_array_equal(ours[:, :, :length], theirs[:, :, :length])


def test_generate_raises(emulated_device):
    """And an answer after that is not affected."""
    pieces = emulated().generate(prompt(SHORT), max_new_tokens=3)
    emulated_device(stalled_cta=2)
    with pytest.raises(muse_jax.StepError, match=GAVE_UP):
        list(pieces)
    emulated_device()
    answer = emulated().generate(prompt(SHORT), max_new_tokens=3)
    assert list(answer) and len(answer.tokens) == 3


def test_a_call_beside_another(emulated_device):
    muse = emulated()
    state, _ = muse.prefill([prompt(SHORT)], max_new_tokens=NEW_TOKENS)
    emulated_device(is_taken=True)
    _, out = decode(muse.model, state)
    with pytest.raises(muse_jax.StepError, match="another call for the same model and devices was running; repeat this one"):
        out.check()


def test_other_backends_have_no_status():
    muse = load("xla")
    state, out = start(muse, muse.model, prompt(SHORT))
    assert out.status is None and jax.eval_shape(muse_jax.decode, muse.model, state)[1].status is None
    assert out.check() is None


def test_outputs_of_prefill_and_decode_have_one_structure():
    muse = load("megakernel")
    state, out = start(muse, muse.model, prompt(SHORT))
    step = jax.eval_shape(muse_jax.decode, muse.model, state)[1]
    assert jax.tree.structure(out) == jax.tree.structure(step) and step.status.shape == out.status.shape == (8,)


# ----------------------------------------------------------------------------------------------------------- what is refused


def test_bfloat16_unless_asked_for_otherwise():
    muse = muse_jax.load(MUSE_TINY, backend="megakernel")
    assert muse.backend == "megakernel" and muse.model.module.dtype == BF16
    assert muse.model.draft.dtype == muse.model.params["embedding"].dtype == BF16
    assert muse_jax.load(MUSE_TINY).model.module.dtype == FP32


ROWS = r"steps of 24 rows \(tree_size\): at most 16 are possible"
DTYPE = "dtype = 'float32': it takes 'bfloat16'"
NUMERICS = "it rounds as serving does, not as 'hf'"
MESH = "kv_heads = 2: 4 ranks cannot share them"
EXPERTS = r"moe_sharding = '\w+': a rank has a part of every expert, 'n'"


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"numerics": "hf"}, NUMERICS),
        ({"dtype": "float32"}, DTYPE),
        ({"tree_size": 24}, ROWS),
        ({"mesh": 4}, MESH),
        ({"mesh": 2, "moe_sharding": "expert"}, EXPERTS),
        ({"mesh": 2, "moe_sharding": "replicated"}, EXPERTS),
        (
            {"numerics": "hf", "dtype": "float32", "tree_size": 24, "mesh": 4, "moe_sharding": "expert"},
            f"{NUMERICS}; {DTYPE}; {ROWS}; {EXPERTS}; {MESH}",
        ),
    ],
    ids=["hf", "fp32", "tree", "mesh", "expert", "replicated", "all"],
)
def test_what_it_does_not_serve(settings, reason):
    """In one line, before weights are read."""
    if "mesh" in settings:
        settings = settings | {"mesh": make_mesh(settings["mesh"])}
    with pytest.raises(ValueError, match=rf"^backend = 'megakernel': {reason}; 'xla' serves everywhere$"):
        muse_jax.load(MUSE_TINY, backend="megakernel", **settings)


def test_a_tree_that_no_draft_fills_is_no_problem():
    with pytest.raises(ValueError, match=ROWS):
        muse_jax.load(MUSE_TINY, backend="megakernel", tree_size=24)
    for settings in ({"speculation": "off"}, {"speculation": "chain"}):  # of one row, and of the draft's 16
        assert muse_jax.load(MUSE_TINY, backend="megakernel", tree_size=24, **settings).model.num_rows <= 16


def test_dense_layers_and_sizes(checkpoint):
    with pytest.raises(
        ValueError, match=r"^backend = 'megakernel': layers without experts \(1\): it has sparse ones only; 'xla'"
    ):
        muse_jax.load(checkpoint, backend="megakernel")
    config = dataclasses.replace(TINY_SIZES, head_dim=80, num_experts_per_tok=9, num_local_experts=300)
    with pytest.raises(ValueError, match=r"head_dim = 80: .*; experts = 300: at most 256 are possible; 'xla'"):
        resolve_backend("megakernel", request=Request(config, BF16))
    config = dataclasses.replace(config, head_dim=64, num_local_experts=32)
    with pytest.raises(ValueError, match=r"top_k = 9: allowed are 1 to 8; 'xla'"):
        resolve_backend("megakernel", request=Request(config, BF16))


def test_a_module_that_it_cannot_run_is_not_made():
    backend = Megakernel()
    with pytest.raises(ValueError, match=NUMERICS):
        MuseSpark(TINY_SIZES, dtype=BF16, numerics=HF, backend=backend)
    with pytest.raises(ValueError, match=r"layers without experts \(5\)"):
        MuseSpark(TINY, dtype=BF16, backend=backend)
    with pytest.raises(ValueError, match="kv_heads = 2: 8 ranks cannot share them"):
        MuseSpark(TINY_SIZES, dtype=BF16, sharding=ShardingConfig(8), backend=backend)
    with pytest.raises(ValueError, match=EXPERTS):
        MuseSpark(TINY_SIZES, dtype=BF16, sharding=ShardingConfig(2, "expert"), backend=backend)
    with pytest.raises(ValueError, match="a mesh of emulated devices: there is one"):
        MuseSpark(TINY_SIZES, dtype=BF16, sharding=ShardingConfig(2), backend=Megakernel(emulated=True))
    module = MuseSpark(TINY_SIZES, dtype=BF16)
    module.embedding = nnx.Param(jnp.zeros((256, 192), BF16))
    with pytest.raises(ValueError, match="it takes parameters from a checkpoint, not fresh ones"):
        backend.arrange(module)
    with pytest.raises(ValueError, match="one rank without the others"):
        backend.stored_params({}, TINY_SIZES, ShardingConfig(8, loopback=True), None)


def test_meshes_that_it_does_not_serve():
    request = Request(SMALL, BF16, devices=8, processes=2)
    with pytest.raises(ValueError, match=r"^backend = 'megakernel': a mesh of 2 processes: its ranks are in one; 'xla' serves"):
        resolve_backend("megakernel", request=request)
    with pytest.raises(ValueError, match=r"ranks = 3: allowed are 1, 2, 4, 8; .*'xla' serves everywhere$"):
        resolve_backend("megakernel", request=dataclasses.replace(request, devices=3, processes=1))
    config = dataclasses.replace(SMALL, num_attention_heads=24, num_key_value_heads=12)
    with pytest.raises(ValueError, match="a mesh of 4 devices: attention of 24 heads with 12 KV heads is not cut"):
        resolve_backend("megakernel", request=Request(config, BF16, devices=4))
    assert resolve_backend("megakernel", request=Request(config, BF16, devices=1)).name == "megakernel"


def test_batches():
    message = r"^a batch of 2: backend = 'megakernel' decodes at most 1 at a time$"
    with pytest.raises(ValueError, match=message):
        load("megakernel").prefill([[1, 2], [3]])
    case = Case(TINY_SIZES, rows=2)
    model, nodes = packed_model(case), verify_steps.make_nodes(case)
    with pytest.raises(ValueError, match=message):
        decoding.verify(model, verify_steps.make_state(model, case), jax.tree.map(lambda x: jnp.concatenate([x, x]), nodes))
    case = dataclasses.replace(case, rows=17)
    with pytest.raises(ValueError, match=r"steps of 17 rows \(tree_size\): at most 16 are possible"):
        decoding.verify(model, verify_steps.make_state(model, case), verify_steps.make_nodes(case))


@pytest.mark.parametrize(
    "reasons, expected",
    [(["no driver", "old toolkit"], "no driver; old toolkit"), ([], "it has not run on a GPU yet")],
)
def test_gpus(monkeypatch, reasons, expected):
    monkeypatch.setattr(library, "unavailable", {"CUDA": reasons, "cpu": []}.__getitem__)
    with pytest.raises(ValueError, match=rf"^backend = 'megakernel': {expected}; 'xla' serves everywhere$"):
        resolve_backend("megakernel", "gpu")
    with pytest.raises(ValueError, match=rf"^backend = 'megakernel': {expected}; {NUMERICS}; 'xla' serves everywhere$"):
        resolve_backend("megakernel", "gpu", HF)
    assert resolve_backend("auto", "cpu").name == "xla"


def test_other_platforms(monkeypatch):
    with pytest.raises(ValueError, match="it needs a CPU or an NVIDIA GPU, not a tpu"):
        resolve_backend("megakernel", "tpu")
    monkeypatch.setattr(library, "unavailable", lambda platform: [f"{platform}: no compiler"])
    with pytest.raises(ValueError, match=r"^backend = 'megakernel': cpu: no compiler; 'xla' serves everywhere$"):
        resolve_backend("megakernel", "cpu")


def test_a_library_that_does_not_compile(monkeypatch):
    def fail(platform: str):
        raise RuntimeError("g++ says:\n  no space left")

    monkeypatch.setattr(library, "load", fail)
    with pytest.raises(ValueError, match=r"^backend = 'megakernel': g\+\+ says: no space left; 'xla' serves everywhere$"):
        resolve_backend("megakernel", "cpu")
