"""Times decode steps of a few layers of the released model's shape on 1, 2, 4 and 8 devices, and compares their bits.

    python scripts/bench_sharding.py                                 all layouts on as many devices as there are
    python scripts/bench_sharding.py --layers 2 --experts 32 --width 1024    small enough for a CPU

Weights are random and made on the devices. A step is the target's forward pass over 16 rows, a tree without branches, whose
sampled tokens are committed. For every layout of the experts (--moe-sharding) and way of the second exchange it prints the
median of the steps and whether tokens, logits, keys and values have the bits of one device. A layout's time comes after its
verdict.

Exit code: 0; 1 if bits differ or the device fails; 2 for bad arguments; 130 after Ctrl-C; 141 if the reader of stdout has
gone.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import random_models
from command_line import FAILED, Parser, guarded, leave, open_streams, positive_int, report
from generate import virtual_devices

if TYPE_CHECKING:  # JAX takes seconds to import, a mistyped option should not
    from muse_jax.config import ModelConfig
    from muse_jax.decoding import Model

NAME = "bench_sharding.py"
PROMPT, SLOTS, WARM_UP, DIGESTED = 64, 4096, 3, 4
Layout = tuple[str, str, bool]  # layout of the experts, second exchange, slots added by ranks as "expert" has to
LAYOUTS: tuple[Layout, ...] = (
    ("n", "sums", False),
    ("n", "rows", False),
    ("replicated", "sums", False),
    ("n", "sums", True),
    ("expert", "sums", True),
)


def main(argv: Sequence[str] | None = None) -> int:
    open_streams()
    args = parse_arguments(argv)
    return guarded(NAME, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    figures = compare(args)
    if args.json:
        print(json.dumps(figures))
    return 0 if all(result["same_bits"] for result in figures["results"]) else FAILED


def compare(args: argparse.Namespace) -> dict[str, Any]:
    virtual_devices(8 if args.devices is None else max(args.devices))
    import jax

    config = released_layers(args)
    kind, available = jax.devices()[0].device_kind, len(jax.devices())
    report(
        f"{config.num_hidden_layers} layers of {config.hidden_size}, {config.num_local_experts} experts, {args.dtype}, "
        f"activations {args.activations}, {args.rows} rows; {available} x {kind}, jax {jax.__version__}"
    )
    results, expected = [], {}
    for layout in LAYOUTS:
        moe_sharding, exchange, grouped = layout
        for devices in args.devices or [n for n in (1, 2, 4, 8) if n <= available]:
            seconds, digest = time_steps(random_model(config, args, devices, layout), args)
            same = digest == expected.setdefault(grouped, digest)
            median, least = 1e3 * statistics.median(seconds), 1e3 * min(seconds)
            report(
                f"{'same bits' if same else 'BITS DIFFER'}  {moe_sharding:<10} {exchange}  "
                f"{'slots by ranks' if grouped else 'slots in order'}  {devices} devices  {median:.3f} ms (min {least:.3f})"
            )
            settings = dict(zip(("moe_sharding", "moe_exchange", "group_slots"), layout, strict=True))
            results.append(settings | {"devices": devices, "same_bits": same, "ms": median, "min_ms": least})
    return {"config": dataclasses.asdict(config), "jax": jax.__version__, "device": kind, "results": results}


def released_layers(args: argparse.Namespace) -> ModelConfig:
    """The released model with fewer layers and experts, and perhaps narrower."""
    from muse_jax import config as configs

    layers, released = args.layers, configs.MUSE_SPARK_OPEN
    fields = ("hidden_size", "moe_hidden_size", "moe_intermediate_size", "num_attention_heads")
    narrower = {name: getattr(released, name) * args.width // released.hidden_size for name in fields}
    narrower["num_key_value_heads"] = max(8, released.num_key_value_heads * args.width // released.hidden_size)
    return dataclasses.replace(
        configs.MUSE_SPARK_OPEN,
        **narrower,
        vocab_size=args.vocabulary,
        placeholder_token_ids=(),
        bos_token_id=None,
        eos_token_ids=(0,),
        num_hidden_layers=layers,
        num_local_experts=args.experts,
        layer_types=configs.default_layer_types(layers),
        layer_uses_rope=configs.default_layer_uses_rope(layers),
        mlp_layer_types=(configs.MLPKind.SPARSE,) * layers,
        nvfp4_layers=tuple(range(layers)) if args.nvfp4 else (),
    )


def random_model(config: ModelConfig, args: argparse.Namespace, devices: int, layout: Layout) -> Model:
    """A model of random weights, which depend on nothing but the config."""
    import jax
    import jax.numpy as jnp

    from muse_jax import sharding
    from muse_jax.decoding import Model
    from muse_jax.layout import TensorSpec, parameter_tree
    from muse_jax.model import MuseSpark

    mesh = sharding.make_mesh(devices)
    how = sharding.ShardingConfig(devices, *layout, calls=mesh.devices.flat[0].platform != "gpu")
    how.check_fits(config)
    where, _ = sharding.placement(mesh, how)
    dtype = jnp.dtype(args.dtype)

    def leaf(spec: TensorSpec) -> jax.Array:
        draw = functools.partial(random_models.draw, spec, spec.param_shape, dtype, config.moe_hidden_size)
        return jax.jit(draw, out_shardings=where(spec))(random_models.key_of(spec))

    module = MuseSpark(config, dtype=dtype, activations=args.activations, sharding=how)
    return Model.create(module, parameter_tree(config, leaf), mesh=mesh)


def time_steps(model: Model, args: argparse.Namespace) -> tuple[list[float], str]:
    """Seconds of each step, and a digest of tokens, logits, keys and values."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from muse_jax import decoding, tree
    from muse_jax.sampling import SamplingParams

    rows = args.rows

    def step(model: Model, state: decoding.DecodeState) -> tuple[decoding.DecodeState, jax.Array, jax.Array]:
        """A forward pass over `rows` tokens, a chain after the last one; what the target chooses for each becomes the next."""

        def run(model: Model, state: decoding.DecodeState) -> tuple[decoding.DecodeState, jax.Array, jax.Array]:
            drafted = (state.token[:, None] * 7 + jnp.arange(1, rows, dtype=jnp.int32)[None, :]) % model.config.vocab_size
            nodes = tree.chain(state.token, drafted, jnp.zeros(drafted.shape, jnp.float32))
            logits, keys_values, _ = decoding.verify(model, state, nodes)
            ranks = model.module.vocab_ranks
            choice = decoding.choose(logits, state.length[:, None] + nodes.depth + 1, state.sampling, model.valid_vocab, ranks)
            start = state.length + (choice[:, 0] < 0)
            cache = state.cache.commit(keys_values, start, model.config)
            new = dataclasses.replace(state, cache=cache, length=state.length + rows, token=choice[:, -1])
            return new, choice, ranks.join(logits, -1)

        specs = decoding._state_specs(model, state)
        return decoding._on_mesh(model, run, (specs,), (specs, decoding.EVERYWHERE, model.logit_spec), state)

    tokens = jnp.arange(PROMPT, dtype=jnp.int32)[None] * 37 % model.config.vocab_size
    model = dataclasses.replace(model, num_rows=rows)
    make = jax.jit(decoding.empty_caches, static_argnums=(1, 2))
    caches, length = make(model, 1, SLOTS), jnp.int32([PROMPT])
    last = jnp.zeros((1, model.config.hidden_size), jnp.float32)
    caches, last = jax.jit(decoding.prefill_chunk)(model, caches, last, tokens, jnp.int32(0), length)
    first_token = jax.jit(decoding.first_token)
    stops = jnp.full((1, 1), decoding.NO_TOKEN, jnp.int32)
    state, _ = first_token(model, caches, last, length, jnp.int32([SLOTS]), stops, SamplingParams.create(1))
    step = jax.jit(step, donate_argnums=1)
    digest, seconds = hashlib.sha256(), []
    for i in range(args.steps + WARM_UP):
        began = time.perf_counter()
        state, choice, logits = jax.block_until_ready(step(model, state))
        if i >= WARM_UP:
            seconds.append(time.perf_counter() - began)
        if i < DIGESTED:
            digest.update(np.asarray(choice).tobytes() + np.asarray(logits).tobytes())
    for array in jax.tree.leaves(state.cache):
        digest.update(np.asarray(array).tobytes())
    return seconds, digest.hexdigest()


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog=NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--devices", type=positive_int, nargs="+", metavar="N", help="numbers of devices (default: 1, 2, 4, 8 as there are)")
    add("--layers", type=positive_int, default=4, metavar="N", help="layers (default: 4)")
    add("--experts", type=positive_int, default=64, metavar="N", help="experts of a layer, a multiple of 8 (default: 64)")
    add(
        "--width",
        type=positive_int,
        default=8192,
        metavar="N",
        help="of the residual stream, a multiple of 512 (default: 8192)",
    )
    add("--vocabulary", type=positive_int, default=25_256, metavar="N", help="tokens (default: 25256)")
    add("--rows", type=positive_int, default=16, metavar="N", help="rows of a step (default: 16)")
    add("--steps", type=positive_int, default=20, metavar="N", help="timed steps (default: 20)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights (default: bfloat16)")
    add("--bf16-experts", dest="nvfp4", action="store_false", help="experts in --dtype; otherwise they are NVFP4")
    add("--activations", choices=("bf16", "nvfp4"), default="bf16", help="what GEMMs of NVFP4 experts read (default: bf16)")
    add("--json", action="store_true", help="end stdout with a line that holds the figures as a JSON object")
    args = parser.parse_args(argv)
    if args.width % 512 or args.experts % 8:
        parser.error(f"--width {args.width} --experts {args.experts}: expected multiples of 512 and of 8")
    if args.activations == "nvfp4" and not args.nvfp4:
        parser.error("--activations nvfp4 needs NVFP4 experts: not allowed with --bf16-experts")
    return args


if __name__ == "__main__":
    leave(main())
