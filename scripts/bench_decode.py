"""Times the decode step of one rank of a model that no single device could hold, with random weights.

    python scripts/bench_decode.py --shape full --backend xla,pallas     all 62 layers, 66.6 GB of weights, on an H200
    python scripts/bench_decode.py --shape full --layers 2 --draft                          any GPU of 24 GB
    python scripts/bench_decode.py                                                          a toy, on a CPU
    python scripts/bench_decode.py --shape full --layers 4 --draft --backend xla,pallas --plot step.png     side by side
    python scripts/bench_decode.py --shape full --backend xla,megakernel --plan         memory that each needs; on any machine

The device plays rank 0 of --tp: it has that rank's part of every weight and of the caches and does all of its work. There are
no other ranks; where data of theirs would arrive it finds its own (loopback), so what it computes means nothing, and what
waiting for others takes is not in the times. Every layer reads exactly --routing distinct experts, which are an input. Of
several backends each has the device for itself, one after the other. All have the same weights, such that it makes no
difference which of its own data a rank takes for another's. The megakernel, which needs bfloat16 and at most 16 rows, keeps
them packed; it is the CUDA kernel on a GPU, compiled on first use (ffi/README.md), and on a CPU its plain reference, whose
times say nothing.

    verdict    before a step is timed: logits, keys and values of two layers against plain XLA with the same weights in fp32
    verify     one target forward over --rows nodes, choice, acceptance, and the caches' update: from the end of one step to the
               end of the next, which the host dispatches meanwhile, as generate.py does; alone: without that
    step       the same after the draft (--draft)
    speed-up   the first backend's time over that of this one
    paths      of each operation that a backend has a kernel for: whether it ran, and if not, why
    bytes      weights that a step must read (layout), of the experts those chosen, and keys and values of the context; the
               same for all backends (packed_bytes: the megakernel's weights as it keeps them, with what fills up its tiles)
    bandwidth  what a reduction over a large array reads per second on this device, in the same run
    launches   kernels and copies of one step, counted in a profiler trace, as what follows (GPU only)
    kernels    how long they ran, added up (device_ms)
    gaps       when none of them ran, of the span from the first one's start to the last one's end: what launching costs
    tok/s      computed: --acceptance tokens per step, nothing else

Exit code: 0; 1 if the verdict is bad or the device fails; 2 for bad arguments or files; 130 after Ctrl-C; 141 if the reader of
stdout has gone.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import itertools
import json
import math
import os
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import random_models
from command_line import FAILED, Parser, guarded, leave, open_streams, positive_int, report
from generate import describe_paths
from output_files import check_plot, picture, write_picture
from profiler_trace import busy_ns, run_kernels, span_ns
from show_collectives import full_size, num_rows

if TYPE_CHECKING:  # JAX takes seconds to import, a mistyped option should not
    import jax
    import numpy as np
    from loopback_megakernel import LoopbackMegakernel
    from matplotlib.figure import Figure

    from muse_jax.config import ModelConfig
    from muse_jax.decoding import DecodeState, Model, StepOutput
    from muse_jax.draft_config import DraftConfig
    from muse_jax.model import Routing
    from muse_jax.tree import Tree

NAME = "bench_decode.py"
WARM_UP = 5
MAX_STEPS = 10_000  # each of them takes slots of the caches
VERDICT_LAYERS = 2
STREAMED_BYTES = 4 << 30  # on a GPU
# Root mean square of the difference over that of the values. A value is rounded 25 times on the way through two layers to a
# logit, each time by up to 2^-9 of its size: 0.05 if all errors added up; 0.01 to 0.02 were seen.
VERDICT_TOLERANCE = 25 * 2.0**-9
PUBLISHED_ACCEPTANCE = 6.6


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code, or raises SystemExit(2) for arguments that do not parse."""
    open_streams()
    return guarded(NAME, lambda: run(parse_arguments(argv)))  # --backend imports JAX, which Ctrl-C may interrupt


def run(args: argparse.Namespace) -> int:
    if args.memory_fraction is not None:
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(args.memory_fraction)
    if args.plan:
        plans = [plan(*shape(args), args, backend) for backend in args.backend]
        for each in plans:
            print(describe_plan(each))
        if args.json:
            print(json.dumps({"plans": plans}))
        return 0
    figures = bench(args)
    if args.plot is not None:
        write_picture(args.plot, draw(figures))
    if args.json:
        print(json.dumps(figures))
    return 0 if all(result["verdict"]["good"] and "failure" not in result for result in figures["results"]) else FAILED


def bench(args: argparse.Namespace) -> dict[str, Any]:
    """All figures, as --json prints them; prints those of a backend once they are there.

    Raises: ValueError for settings that do not fit, or that a backend does not do.
    """
    import jax
    import loopback_megakernel

    if args.plot is not None:
        check_plot(args.plot)
    config, draft_config = shape(args)
    device = jax.devices()[0]
    if args.shape == "full" and device.platform != "gpu":
        raise ValueError(f"--shape full needs an NVIDIA GPU, found {device.platform}; --shape tiny runs everywhere")
    conditions = {
        "shape": args.shape,
        "tp": args.tp,
        "rank": 0,
        "layers": config.num_hidden_layers,
        "rows": args.rows,
        "context": args.context,
        "routing": args.routing,
        "activations": args.activations,
        "dtype": args.dtype,
        "collectives": "loopback",
        "device": device.device_kind,
        "jax": jax.__version__,
    }
    report(", ".join(f"{name} {value}" for name, value in conditions.items()))
    if "megakernel" in args.backend:  # before anything else takes time
        megakernel(config, args).prepare(config, args.activations)
    check_memory([plan(config, draft_config, args, backend) for backend in args.backend], device)
    bandwidth = streaming_bandwidth()
    report(f"streaming: {bandwidth / 1e12:.3f} TB/s")
    bytes_read = step_bytes(config, draft_config, args)
    expected = reference(config, args)
    results: list[dict[str, Any]] = []
    for backend in args.backend:
        result: dict[str, Any] = {"backend": backend}
        if backend == "megakernel":
            how = megakernel(config, args)
            called = how.verify_config(config, args.activations, ())
            result |= {"implementation": how.implementation, "layers_per_launch": args.layers_per_launch}
            result["packed_bytes"] = loopback_megakernel.bytes_read(called, args.routing)
        try:
            result["verdict"] = verdict = judge(config, args, backend, expected)
            of_call = f", {verdict['failure']}" if "failure" in verdict else ""
            report(f"{backend}: verdict {'good' if verdict['good'] else 'BAD'}, {verdict['differences']}{of_call}")
            if verdict["good"]:
                result |= measure(config, draft_config, args, backend, bytes_read, bandwidth)
                for line in describe_paths(result["paths"]) + ([result["failure"]] if "failure" in result else []):
                    report(f"{backend}: {line}")
        except NotImplementedError as error:
            raise ValueError(f"--backend {backend}: {error}") from error
        if results:
            result |= speed_up(result, results[0])
        results.append(result)
        print_result(result)
    return {**conditions, "bandwidth_bytes_per_s": bandwidth, "bytes": bytes_read, "results": results}


def speed_up(result: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """How many times as fast as `first` it is, by part of a step; nothing where either was not measured."""
    parts = {name: first[name]["ms"] / result[name]["ms"] for name in ("verify", "step") if name in result and name in first}
    return {"speed_up": {"over": first["backend"], **parts}} if parts else {}


def shape(args: argparse.Namespace) -> tuple[ModelConfig, DraftConfig | None]:
    """The config to measure and its draft's. Raises ValueError for settings that do not fit it."""
    from muse_jax.config import TINY, MLPKind

    if args.shape == "full":
        config, draft = full_size()
    else:
        sizes = {"moe_hidden_size": 128, "moe_intermediate_size": 256, "num_attention_heads": 16, "num_key_value_heads": 8}
        sizes |= {"num_local_experts": 16, "num_experts_per_tok": 4}
        kinds = (MLPKind.SPARSE,) * TINY.num_hidden_layers
        config, draft = dataclasses.replace(TINY, **sizes, mlp_layer_types=kinds, nvfp4_layers=(1,)), None
    layers = min(args.layers or config.num_hidden_layers, config.num_hidden_layers)
    if args.layers is not None and args.layers > layers:
        raise ValueError(f"--layers {args.layers}: the {args.shape} shape has {layers}")
    config = first_layers(config, layers)
    if args.draft and draft is None:
        raise ValueError(f"--draft: the {args.shape} shape has none")
    if args.draft:
        draft = dataclasses.replace(draft, target_layer_ids=tuple(min(i, layers - 1) for i in draft.target_layer_ids))
    room = config.max_position_embeddings - args.rows
    if args.context > room:
        raise ValueError(f"--context {args.context}: at most {room}, which leaves room for the rows of the step")
    most = min(config.num_local_experts, args.rows * config.num_experts_per_tok)
    if not config.num_experts_per_tok <= args.routing <= most:
        raise ValueError(
            f"--routing {args.routing}: {args.rows} rows of {config.num_experts_per_tok} experts each can choose "
            f"{config.num_experts_per_tok} to {most} distinct ones"
        )
    if "megakernel" in args.backend:
        megakernel(config, args).check(config, args.dtype, args.rows, args.activations)
    return config, draft if args.draft else None


def first_layers(config: ModelConfig, layers: int) -> ModelConfig:
    per_layer = ("layer_types", "layer_uses_rope", "mlp_layer_types")
    return dataclasses.replace(
        config,
        num_hidden_layers=layers,
        **{name: getattr(config, name)[:layers] for name in per_layer},
        nvfp4_layers=tuple(i for i in config.nvfp4_layers if i < layers),
    )


# ------------------------------------------------------------------------------------------------------- a step's arguments


def make_state(model: Model, args: argparse.Namespace) -> DecodeState:
    """One sequence of `context` committed positions with random keys and values."""
    import jax
    import jax.numpy as jnp

    from muse_jax import decoding
    from muse_jax.sampling import SamplingParams

    slots = args.context + (args.steps + WARM_UP + 1) * args.rows * 2
    random = random_values()

    def fill(path: tuple, x: jax.ShapeDtypeStruct) -> jax.Array:
        if x.dtype == jnp.int32:  # the position in each slot of a ring: the newest before `context` that belongs there
            ring = x.shape[1]
            newest = args.context - 1 - (args.context - 1 - jnp.arange(ring, dtype=jnp.int32)) % ring
            return jnp.where(newest >= 0, newest, -1)[None]
        return random(jnp.uint32(zlib.crc32(jax.tree_util.keystr(path).encode())), x.shape, x.dtype)

    empty = jax.eval_shape(lambda model: decoding.empty_caches(model, 1, slots), model)
    cache, draft_cache = jax.tree_util.tree_map_with_path(fill, empty)
    one = jnp.ones(1, jnp.int32)
    return decoding.DecodeState(
        cache=cache,
        draft_cache=draft_cache,
        length=one * args.context,
        token=one,
        remaining=one << 30,
        done=jnp.zeros(1, bool),
        stop_ids=jnp.full((1, 1), decoding.NO_TOKEN, jnp.int32),
        sampling=SamplingParams.create(1),
        num_rows=model.num_rows,
    )


@functools.cache  # a program for each shape, not for each array: these would take longer to compile than all else
def random_values() -> Callable[[jax.Array, tuple[int, ...], jax.typing.DTypeLike], jax.Array]:
    """From -1 to 1, of a seed, a shape and a dtype."""
    import jax

    def draw(seed: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
        return jax.random.uniform(jax.random.key(seed), shape, minval=-1).astype(dtype)

    return jax.jit(draw, static_argnums=(1, 2))


def make_nodes(model: Model, args: argparse.Namespace) -> Tree:
    """A chain of `rows` tokens of the part of the vocabulary that rank 0 has."""
    import jax.numpy as jnp

    from muse_jax import tree

    known = model.params["embedding"].shape[0]
    tokens = (jnp.arange(1, args.rows, dtype=jnp.int32) * 37 % known)[None]
    return tree.chain(jnp.ones(1, jnp.int32), tokens, jnp.zeros(tokens.shape, jnp.float32))


def make_routing(config: ModelConfig, args: argparse.Namespace) -> list[Routing]:
    """For each layer experts of which exactly `routing` are distinct, in different places, with random weights."""
    import jax.numpy as jnp
    import numpy as np

    rng, top_k = np.random.default_rng(0), config.num_experts_per_tok
    routing: list[Routing] = []
    for _ in range(config.num_hidden_layers):
        chosen = rng.permutation(config.num_local_experts)[: args.routing]
        # Dealt in turn, so that the experts of a row are distinct.
        idx = np.resize(chosen, (args.rows, top_k))
        weights = rng.random((args.rows, top_k), np.float32) + 0.1
        weights *= config.routed_scaling_factor / weights.sum(axis=1, keepdims=True)
        routing.append((jnp.asarray(idx, jnp.int32), jnp.asarray(weights)))
    return routing


def routing_for(backend: str, config: ModelConfig, args: argparse.Namespace) -> list[Routing] | Routing:
    """`make_routing` as a backend takes it: the megakernel all layers in one, so that a step need not put them together."""
    import jax.numpy as jnp

    routing = make_routing(config, args)
    return tuple(map(jnp.stack, zip(*routing, strict=True))) if backend == "megakernel" else routing


# ------------------------------------------------------------------------------------------------------------- what is said


def build(config: ModelConfig, draft_config: DraftConfig | None, args: argparse.Namespace, backend: str) -> Model:
    """Rank 0's part with random weights, which are the same for all backends."""
    gc.collect()  # no cycle may keep an earlier model: two of them are more than a device has
    settings = args.tp, args.dtype, args.rows, args.activations
    how = megakernel(config, args) if backend == "megakernel" else backend
    model = random_models.rank_zero(config, draft_config, *settings, backend=how)
    return dataclasses.replace(model, num_rows=args.rows)


def megakernel(config: ModelConfig, args: argparse.Namespace, platform: str | None = None) -> LoopbackMegakernel:
    """For `rank_zero`, not prepared.  platform: of the device."""
    import jax
    from loopback_megakernel import LoopbackMegakernel

    return LoopbackMegakernel(args.tp, platform or jax.default_backend(), args.layers_per_launch)


def problem_in(statuses: Sequence[jax.Array | None]) -> str | None:
    """Of the first call that gave up."""
    import numpy as np

    from ffi.verify import problem

    problems = (problem(np.asarray(status)) for status in statuses if status is not None)
    return next((found for found in problems if found is not None), None)


def reference(config: ModelConfig, args: argparse.Namespace) -> list[np.ndarray]:
    """What `outcome` should be: that of plain XLA with the same weights, keys and values in fp32, of the verdict's layers."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from muse_jax.model import MuseSpark

    config = first_layers(config, min(VERDICT_LAYERS, config.num_hidden_layers))
    model = build(config, None, args, "xla")

    def widen(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tree)

    module = MuseSpark(config, dtype=jnp.dtype(jnp.float32), activations=args.activations, sharding=model.module.sharding)
    graph, _ = nnx.split(module)
    wide = dataclasses.replace(model, graph=graph, params=widen(model.params))
    return outcome(wide, widen(make_state(model, args)), make_nodes(model, args), make_routing(config, args))[0]


def judge(config: ModelConfig, args: argparse.Namespace, backend: str, expected: list[np.ndarray]) -> dict[str, Any]:
    """Logits, keys and values of two layers beside those of the reference: relative root mean squares."""
    import numpy as np

    config = first_layers(config, min(VERDICT_LAYERS, config.num_hidden_layers))
    model = build(config, None, args, backend)
    found, problem = outcome(model, make_state(model, args), make_nodes(model, args), routing_for(backend, config, args))
    differences = {}
    for name, ours, exact in zip(("logits", "keys and values"), found, expected, strict=True):
        differences[name] = float(np.sqrt(np.mean(np.square(ours - exact)) / np.mean(np.square(exact))))
    good = problem is None and all(np.isfinite(value) and value <= VERDICT_TOLERANCE for value in differences.values())
    verdict = {"good": good, "differences": differences, "tolerance": VERDICT_TOLERANCE, "layers": config.num_hidden_layers}
    return verdict | ({} if problem is None else {"failure": problem})


def outcome(
    model: Model, state: DecodeState, nodes: Tree, routing: list[Routing] | Routing
) -> tuple[list[np.ndarray], str | None]:
    """All logits of a step, and all its keys and values, as fp32; why the call gave up, None: it did not."""
    import jax
    import numpy as np

    def run(model: Model, state: DecodeState, nodes: Tree, routing: Any) -> tuple:
        logits, rows, _, status = model.module.backend.verify(model.module, nodes, state.length, state.cache, (), routing)
        return (logits, rows), status

    found, status = jax.jit(run)(model, state, nodes, routing)
    values = [np.concatenate([np.ravel(np.asarray(x, np.float32)) for x in jax.tree.leaves(each)]) for each in found]
    return values, problem_in([status])


def measure(
    config: ModelConfig,
    draft_config: DraftConfig | None,
    args: argparse.Namespace,
    backend: str,
    bytes_read: dict[str, int],
    bandwidth: float,
) -> dict[str, Any]:
    """The times of a backend. All that it puts on the device is gone when it returns."""
    import jax

    began = time.perf_counter()
    model = build(config, draft_config, args, backend)
    jax.block_until_ready((model.params, model.draft_params))
    report(f"{backend}: weights are there after {time.perf_counter() - began:.1f} s")
    nodes, routing = make_nodes(model, args), routing_for(backend, config, args)
    target_only = without_draft(model)

    def of_bytes(figures: dict[str, Any], nbytes: int) -> dict[str, Any]:
        floor = 1e3 * nbytes / bandwidth
        return figures | {"bytes": nbytes, "floor_ms": floor, "bandwidth_share": floor / figures["ms"]}

    state = make_state(target_only, args)
    verified, problem = timed(jax.jit(verify, donate_argnums=1), target_only, state, args, nodes, routing)
    paths = {"paths": model.module.backend.paths}
    if problem is not None:
        return paths | {"failure": problem}
    figures: dict[str, Any] = {"verify": of_bytes(verified, bytes_read["verify"])}
    whole = figures["verify"]
    if draft_config is not None:
        stepped, problem = timed(jax.jit(step, donate_argnums=1), model, make_state(model, args), args, routing)
        if problem is not None:
            return figures | paths | {"failure": problem}
        figures["step"] = whole = of_bytes(stepped, bytes_read["verify"] + bytes_read["draft"])
        figures["draft_ms"] = whole["ms"] - figures["verify"]["ms"]
    computed = {"computed_tokens_per_s": args.acceptance / (whole["ms"] / 1e3), "acceptance": args.acceptance}
    return figures | computed | {"paths": model.module.backend.paths}


def verify(model: Model, state: DecodeState, nodes: Tree, routing: Any) -> tuple[DecodeState, StepOutput]:
    from muse_jax import decoding

    return decoding.verify_and_commit(model, state, nodes, routing=routing)[:2]


def step(model: Model, state: DecodeState, routing: Any) -> tuple[DecodeState, StepOutput]:
    from muse_jax import decoding

    nodes, ids, proposal = decoding.propose_nodes(model, state)
    return decoding.verify_and_commit(model, state, nodes, ids, proposal, routing)[:2]


def without_draft(model: Model) -> Model:
    return dataclasses.replace(model, draft_params=None, draft_graph=None)


def timed(
    step: Callable, model: Model, state: DecodeState, args: argparse.Namespace, *rest: Any
) -> tuple[dict[str, Any], str | None]:
    """What it takes, and why a call gave up, None: none did.

    Milliseconds of a step: median, least and most, from the end of one to the end of the next, which was dispatched before
    it, as `generate` does; `alone_ms`, the median from the call to the end where nothing else runs; seconds to compile;
    `on_device`."""
    import jax

    began = time.perf_counter()
    compiled = step.lower(model, state, *rest).compile()
    compile_seconds = time.perf_counter() - began
    alone, ends, statuses = [], [], []
    for _ in range(WARM_UP):
        began = time.perf_counter()
        state, out = jax.block_until_ready(compiled(model, state, *rest))
        alone.append(1e3 * (time.perf_counter() - began))
        statuses.append(out.status)
    for _ in range(args.steps + 2):
        state, following = compiled(model, state, *rest)
        jax.block_until_ready(out)
        ends.append(time.perf_counter())
        out = following
        statuses.append(out.status)
    jax.block_until_ready(out)
    milliseconds = [1e3 * (end - begin) for begin, end in itertools.pairwise(ends[1:])]  # the first had nothing before it
    figures = {
        "ms": statistics.median(milliseconds),
        "min_ms": min(milliseconds),
        "max_ms": max(milliseconds),
        "alone_ms": statistics.median(alone),
        "compile_s": compile_seconds,
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        **on_device(lambda: jax.block_until_ready(compiled(model, state, *rest))),
    }
    return figures, problem_in(statuses)


def on_device(work: Callable[[], Any]) -> dict[str, Any]:
    """What a GPU does in `work`: launches of kernels and copies, their milliseconds added up, those from the start of the first
    to the end of the last, and those of them in which none runs. None without a GPU."""
    import jax

    if jax.default_backend() != "gpu":
        return dict.fromkeys(("launches", "device_ms", "span_ms", "gaps_ms"))
    kernels = run_kernels(work)
    span = span_ns(kernels)
    return {
        "launches": len(kernels),
        "device_ms": sum(kernel.duration_ns for kernel in kernels) / 1e6,
        "span_ms": span / 1e6,
        "gaps_ms": (span - busy_ns(kernels)) / 1e6,
    }


def streaming_bandwidth() -> float:
    """Bytes per second that a sum over a large array reads: the best of five."""
    import jax
    import jax.numpy as jnp

    size = STREAMED_BYTES if jax.default_backend() == "gpu" else 64 << 20
    x = jax.jit(lambda: jnp.ones(size // 4, jnp.int32))()
    total = jax.jit(lambda x: jnp.sum(x.reshape(1024, -1), axis=1))
    jax.block_until_ready(total(x))
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(total(x))
        seconds.append(time.perf_counter() - began)
    return size / min(seconds)


def step_bytes(config: ModelConfig, draft_config: DraftConfig | None, args: argparse.Namespace) -> dict[str, int]:
    """Bytes that rank 0 must read in a step: every weight once, of the experts those chosen, keys and values that are seen."""
    from muse_jax import roofline

    config = dataclasses.replace(config, dtype=args.dtype)
    settings = roofline.Settings(args.tp, args.rows, args.context, args.routing, args.activations)
    phases = roofline.step(config, draft_config, settings)
    result = {}
    for name, in_draft in (("verify", False), ("draft", True)):
        result[name] = sum(phase.weight_bytes + phase.kv_bytes for phase in phases if phase.in_draft == in_draft)
    return result


# ------------------------------------------------------------------------------------------------------------------ memory


def plan(config: ModelConfig, draft_config: DraftConfig | None, args: argparse.Namespace, backend: str) -> dict[str, Any]:
    """Bytes that a backend needs on the device, without what XLA's programs need while they run.

    peak: of the fullest moment. Where the megakernel packs a layer, and for that needs its buffer twice at most, all layers
    that come after it are still there as they were drawn; `pallas` has one array twice at a time.
    """
    import jax

    from ffi import layout

    def drawn(config: ModelConfig, draft: DraftConfig | None = None) -> Model:
        return abstract_model(config, draft, args, "xla")

    def state_bytes(model: Model) -> int:
        return nbytes(jax.eval_shape(functools.partial(make_state, args=args), model))

    few, model = drawn(first_layers(config, min(VERDICT_LAYERS, config.num_hidden_layers))), drawn(config, draft_config)
    draft, caches = nbytes(model.draft_params), state_bytes(model)
    # The reference has its weights in fp32, too, of which those in bf16 become twice as large.
    reference = sum(x.size * (x.dtype.itemsize + (4 if x.dtype.itemsize == 2 else 0)) for x in jax.tree.leaves(few.params))
    weights = packing = nbytes(model.params)
    if backend == "pallas":
        packing += max(map(nbytes, jax.tree.leaves(model.params)))
    if backend == "megakernel":
        how = megakernel(config, args)
        shape = how.verify_config(config, args.activations, ()).shape
        for i, layer in model.params["layers"].items():
            buffer = layout.table_bytes(layout.layer_table(shape, i in config.nvfp4_layers))
            packing = max(packing, weights + 2 * buffer)
            weights += buffer - nbytes(layer)
        weights += layout.table_bytes(layout.head_table(shape))
    peak = max(STREAMED_BYTES, reference + 3 * state_bytes(few), packing + draft, weights + draft + caches)
    return {"backend": backend, "weights": weights, "draft": draft, "caches": caches, "peak": peak}


def abstract_model(
    config: ModelConfig, draft_config: DraftConfig | None, args: argparse.Namespace, backend: str | LoopbackMegakernel
) -> Model:
    """`build`, with shapes in place of arrays."""
    settings = args.tp, args.dtype, args.rows, args.activations
    model = random_models.rank_zero(config, draft_config, *settings, backend, abstract=True)
    return dataclasses.replace(model, num_rows=args.rows)


def nbytes(tree: Any) -> int:
    import jax

    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def describe_plan(each: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {each[name] / 1e9:.2f}" for name in ("weights", "draft", "caches"))
    return f"{each['backend']:<12} memory  {parts}; at the peak {each['peak'] / 1e9:.2f} GB, and what XLA's programs take"


def check_memory(plans: list[dict[str, Any]], device: jax.Device) -> None:
    """Says what each backend needs. Raises ValueError if that is more than JAX may take of the device."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    for each in plans:
        report(describe_plan(each))
    for each in plans:
        if limit is not None and each["peak"] > limit:
            raise ValueError(
                f"--backend {each['backend']} needs {each['peak'] / 1e9:.1f} GB, JAX may take {limit / 1e9:.1f} GB of this "
                "device: fewer --layers need less, --memory-fraction lets it take more"
            )


def print_result(result: dict[str, Any]) -> None:
    """Nothing for a backend whose verdict is bad."""
    if "verify" not in result:
        return
    if "implementation" in result:
        print(
            f"{result['backend']:<12} is the {result['implementation']}, layers in a launch: {result['layers_per_launch']}; of "
            f"its buffers a step reads {result['packed_bytes'] / 1e9:.3f} GB"
        )
    gained = result.get("speed_up", {})
    for name in ("verify", "step"):
        if name not in result:
            continue
        each = result[name]
        faster = f", {gained[name]:.2f} times as fast as {gained['over']}" if name in gained else ""
        print(
            f"{result['backend']:<12} {name:<7} {each['ms']:9.3f} ms (min {each['min_ms']:.3f}, max {each['max_ms']:.3f}; "
            f"alone {each['alone_ms']:.3f}), {each['bytes'] / 1e9:.3f} GB, {each['bandwidth_share']:.1%} of the bandwidth"
            f"{faster}, compiled in {each['compile_s']:.1f} s"
        )
        if each["launches"] is not None:
            print(
                f"{'':<12} {'':<7} {each['span_ms']:9.3f} ms on the device: {each['launches']:,} launches, "
                f"kernels {each['device_ms']:.3f}, gaps {each['gaps_ms']:.3f}"
            )
    if "draft_ms" in result:
        print(f"{result['backend']:<12} draft   {result['draft_ms']:9.3f} ms, the difference of the two")
    if "computed_tokens_per_s" in result:
        print_computed(result)
    sys.stdout.flush()


def print_computed(result: dict[str, Any]) -> None:
    print(
        f"{result['backend']:<12} computed {result['computed_tokens_per_s']:,.0f} tok/s at {result['acceptance']:g} tokens per "
        "step, without what collectives take"
    )


def draw(figures: dict[str, Any]) -> Figure:
    """A bar for each backend, of verify and draft, and a line at the time that the bytes alone take."""
    from matplotlib.figure import Figure

    results = figures["results"]
    figure = Figure(figsize=(9, 2.2 + 0.8 * len(results)), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.set_yticks(range(len(results)), [caption(result) for result in results])
    axes.set_ylim(len(results) - 0.5, -0.5)
    measured = [(y, result) for y, result in enumerate(results) if "verify" in result]
    ends = {y: result["verify"]["ms"] for y, result in measured}
    axes.barh(list(ends), list(ends.values()), height=0.6, color="#0072B2", label="verify")
    if any("step" in result for _, result in measured):
        drafted = [max(0.0, result["draft_ms"]) for _, result in measured]
        axes.barh(list(ends), drafted, left=list(ends.values()), height=0.6, color="#E69F00", label="draft")
        ends = {y: end + ms for (y, end), ms in zip(ends.items(), drafted, strict=True)}
    for y, result in measured:
        part = "step" if "step" in result else "verify"
        faster = f", {result['speed_up'][part]:.2f} times as fast" if "speed_up" in result else ""
        text = f"{result[part]['ms']:,.4g} ms{faster}"
        axes.annotate(text, (ends[y], y), (4, 0), textcoords="offset points", va="center")
    floor = 1e3 * sum(figures["bytes"].values()) / figures["bandwidth_bytes_per_s"]
    label = f"the bytes alone, at {figures['bandwidth_bytes_per_s'] / 1e12:.3g} TB/s: {floor:.4g} ms"
    axes.axvline(floor, color="black", linestyle="--", label=label)
    axes.set_xlim(0, 1.25 * max(floor, *ends.values()) if ends else None)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_xlabel("milliseconds of a step, as the host sees it")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    facts = {name: figures[name] for name in ("layers", "rows", "context", "routing", "activations")}
    how = ", ".join(f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}" for name, value in facts.items())
    who = f"rank {figures['rank']} of {figures['tp']}, {figures['shape']} shape, {figures['device']}"
    figure.suptitle(f"One decode step of {who}\n{how}", fontsize=11)
    return figure


def caption(result: dict[str, Any]) -> str:
    """Of a bar: the backend, the operations that it had kernels for, its share of the bandwidth, and what a GPU launched."""
    whole = result.get("step", result.get("verify"))
    if whole is None:
        return f"{result['backend']}\n{'failed' if 'failure' in result else 'verdict bad'}"
    lines = [caption_name(result), f"{whole['bandwidth_share']:.1%} of the bandwidth"]
    if paths := result["paths"]:
        lines.insert(1, f"kernels of {sum(result['backend'] in each for each in paths.values())} of {len(paths)} operations")
    if whole["launches"] is not None:
        lines.append(f"{whole['launches']:,} launches, gaps {whole['gaps_ms']:.3g} ms")
    return "\n".join(lines)


def caption_name(result: dict[str, Any]) -> str:
    return ", ".join([result["backend"], *([result["implementation"]] if "implementation" in result else [])])


# ------------------------------------------------------------------------------------------------------------- command line


def backends(text: str) -> list[str]:
    """Of a list with commas or spaces."""
    from muse_jax.backends import BACKENDS

    names = text.replace(",", " ").split()
    for name in names or [""]:
        if name not in BACKENDS:
            raise argparse.ArgumentTypeError(f"{name!r}: expected one or several of {', '.join(BACKENDS)}")
    return names


def num_steps(text: str) -> int:
    if (steps := positive_int(text)) > MAX_STEPS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer from 1 to {MAX_STEPS}")
    return steps


def fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0, at most 1")
    return value


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--shape", choices=("full", "tiny"), default="tiny", help="the released model, or a toy (default: tiny)")
    add("--tp", type=int, choices=(2, 4, 8), default=8, help="ranks that would share the model (default: 8)")
    add(
        "--rank",
        type=int,
        choices=(0,),
        default=0,
        metavar="R",
        help="which rank to play; all do the same, so there is 0 alone",
    )
    add("--layers", type=positive_int, metavar="N", help="the first N layers only")
    add("--rows", type=num_rows, default=16, metavar="N", help="nodes that a step verifies, 1 to 32 (default: 16)")
    add("--context", type=positive_int, default=2048, metavar="N", help="committed positions (default: 2048)")
    add("--routing", type=positive_int, metavar="N", help="distinct experts of a layer (default: 49, of the toy 8)")
    add("--steps", type=num_steps, default=20, metavar="N", help=f"timed steps, at most {MAX_STEPS:,} (default: 20)")
    backend_help = "xla, pallas or megakernel, one or several: xla,pallas compares the second with the first (default: xla)"
    add("--backend", type=backends, nargs="+", default=[["xla"]], metavar="NAME", help=backend_help)
    add("--draft", action="store_true", help="with the draft, of the published shape")
    add("--activations", choices=("bf16", "nvfp4"), default="bf16", help="of NVFP4 experts (default: bf16)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the other weights (default: bfloat16)")
    acceptance_help = "tokens per step, 1 to --rows (default: 6.6, published, or --rows if that is less)"
    add("--acceptance", type=float, metavar="X", help=acceptance_help)
    launch_help = "layers that a launch of the megakernel runs (default: 1)"
    add("--layers-per-launch", type=positive_int, default=1, metavar="N", help=launch_help)
    fraction_help = "of the GPU's memory that JAX takes (default: JAX's, 0.75)"
    add("--memory-fraction", type=fraction, metavar="X", help=fraction_help)
    add("--plan", action="store_true", help="only say what each backend needs of the device's memory; needs no GPU")
    add("--json", action="store_true", help="end stdout with a line that holds the figures as a JSON object")
    add("--plot", type=picture, metavar="FILE", help="also draw a chart, .png, .svg or .pdf; needs the extra `plot`")
    args = parser.parse_args(argv)
    args.backend = [name for names in args.backend for name in names]
    if len(set(args.backend)) < len(args.backend):
        parser.error(f"--backend {','.join(args.backend)}: each of them once")
    if args.routing is None:
        args.routing = 49 if args.shape == "full" else 8
    if args.acceptance is None:
        args.acceptance = min(PUBLISHED_ACCEPTANCE, float(args.rows))
    if not 1 <= args.acceptance <= args.rows:
        parser.error(f"--acceptance {args.acceptance:g}: expected 1 to {args.rows} tokens of a step of {args.rows} rows")
    return args


if __name__ == "__main__":
    leave(main())
