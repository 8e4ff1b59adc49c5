"""muse_jax/hlo.py: programs whose collectives and products are known, texts as XLA writes them for GPUs, damaged texts."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from muse_jax import hlo
from muse_jax.sharding import make_mesh

ITEMSIZE = {"f32": 4, "bf16": 2, "s32": 4, "u8": 1}


def compiled(function, *shapes, dtype=jnp.float32, **jit) -> hlo.Module:
    args = [jax.ShapeDtypeStruct(shape, dtype) if isinstance(shape, tuple) else shape for shape in shapes]
    return hlo.parse(jax.jit(function, **jit).lower(*args).compile().as_text())


def on_mesh(function, in_specs, out_specs):
    return jax.shard_map(function, mesh=make_mesh(8), in_specs=in_specs, out_specs=out_specs, check_vma=False)


def matmul(x, w):
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


NUMBER = jax.ShapeDtypeStruct((), jnp.int32)

# ------------------------------------------------------------------------------------------------------------- programs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_collectives_and_products_in_a_loop(dtype):
    @jax.jit
    def layer(x, w):
        with jax.named_scope("block"), jax.named_scope("attention.o_proj"):
            whole = lax.all_gather(x, "tp", axis=1, tiled=True)
        with jax.named_scope("up"):
            y = matmul(whole, w)
        return (y + lax.psum(y[:, :1], "tp")).astype(x.dtype)

    def layers(x, weights):
        return lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]

    specs = (P(None, "tp"), P(None, "tp", None))
    module = compiled(on_mesh(layers, specs, P(None, "tp")), (4, 64), (5, 64, 64), dtype=dtype)
    gathered, reduced = sorted(module.collectives(), key=lambda c: c.kind)
    assert (gathered.kind, gathered.times, gathered.in_unknown_loop, gathered.in_branch) == ("all-gather", 5, False, False)
    assert [array.dims for array in gathered.result] == [(4, 64)]
    assert gathered.result[0].dtype in ({"f32"} if dtype == "float32" else {"f32", "bf16"})  # XLA for CPU may widen it
    assert gathered.payload_bytes == 4 * 64 * ITEMSIZE[gathered.result[0].dtype]
    assert gathered.op_name.endswith("/all_gather")
    assert hlo.scopes(gathered.op_name) == ("block", "attention.o_proj")
    assert (reduced.kind, reduced.result, reduced.payload_bytes, reduced.times) == (
        *("all-reduce", (hlo.Array("f32", (4, 1)),), 16, 5),
    )
    assert hlo.scopes(reduced.op_name) == ()
    (dot,) = module.dots()
    assert (dot.lhs.dims, dot.rhs.dims, dot.result.dims, dot.contracted, dot.times) == ((4, 64), (8, 64), (4, 8), 64, 5)
    assert hlo.scopes(dot.op_name) == ("up",)
    assert module.dot_flops() == dot.flops == 2 * 4 * 8 * 64 * 5
    assert module.unknown_loops() == []


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float32", "bfloat16"])
def test_exchanges(dtype):
    """Payloads are those of the whole array, whatever part of it an instruction's result is."""

    def exchange(x):
        turned = lax.all_to_all(x, "tp", split_axis=1, concat_axis=0, tiled=True)  # [64, 8]
        part = lax.psum_scatter(turned.astype(jnp.float32), "tp", scatter_dimension=0, tiled=True)  # [8, 8]
        moved = lax.ppermute(part, "tp", [(i, (i + 1) % 8) for i in range(8)])
        return turned, moved, lax.pmax(moved, "tp")

    module = compiled(on_mesh(exchange, P(None, None), P(None, None)), (8, 64), dtype=dtype)
    found = {collective.kind: collective for collective in module.collectives()}
    assert set(found) == {"all-to-all", "reduce-scatter", "collective-permute", "all-reduce"}
    exchanged = found["all-to-all"]
    (name,) = {array.dtype for array in exchanged.result}
    assert exchanged.payload_bytes == 8 * 64 * ITEMSIZE[name]
    assert dtype == "bfloat16" or ITEMSIZE[name] == jnp.dtype(dtype).itemsize
    payloads = {kind: collective.payload_bytes for kind, collective in found.items() if kind != "all-to-all"}
    assert payloads == {"reduce-scatter": 64 * 8 * 4, "collective-permute": 8 * 8 * 4, "all-reduce": 8 * 8 * 4}
    assert {collective.times for collective in found.values()} == {1}
    assert module.dots() == []


def test_nested_loops_multiply():
    def nested(x, w):
        inner = lambda x: lax.fori_loop(0, 3, lambda _, x: jnp.tanh(matmul(x, w)), x)  # noqa: E731
        return lax.fori_loop(2, 9, lambda _, x: inner(x) + lax.psum(x, "tp"), x)

    module = compiled(on_mesh(nested, P(), P()), (16, 32), (32, 32))
    (dot,), (collective,) = module.dots(), module.collectives()
    assert (dot.times, collective.times) == (21, 7)
    assert module.dot_flops() == 2 * 16 * 32 * 32 * 21


def test_an_unknown_trip_count_is_said():
    def loop(x, w, count):
        body = lambda carry: (carry[0] + 1, lax.psum(jnp.tanh(matmul(carry[1], w)), "tp"))  # noqa: E731
        once = matmul(x, w)
        return lax.while_loop(lambda carry: carry[0] < count, body, (jnp.int32(0), once))[1]

    module = compiled(on_mesh(loop, P(), P()), (16, 32), (32, 32), NUMBER)
    assert [loop.opcode for loop in module.unknown_loops()] == ["while"]
    (collective,) = module.collectives()
    assert (collective.times, collective.in_unknown_loop) == (1, True)
    assert [(dot.times, dot.in_unknown_loop) for dot in module.dots()] in ([(1, True), (1, False)], [(1, False), (1, True)])


def test_every_branch_counts_and_is_marked():
    @jax.jit
    def up(x, w):
        return matmul(lax.all_gather(x, "tp", axis=0, tiled=True), w)

    def choose(x, w, which):
        y = up(x, w) + up(x + 1, w)
        branches = [lambda y: lax.psum(matmul(y, w), "tp"), lambda y: matmul(jnp.tanh(matmul(y, w)), w), lambda y: y * 2]
        return lax.switch(which, branches, y)

    module = compiled(on_mesh(choose, (P("tp", None), P(), P()), P()), (16, 32), (32, 32), NUMBER)
    assert sorted((c.kind, c.in_branch) for c in module.collectives()) == [
        *[("all-gather", False)] * 2,
        ("all-reduce", True),
    ]
    assert sorted(dot.in_branch for dot in module.dots()) == [False, False, True, True, True]
    assert module.dot_flops() == 5 * 2 * 16 * 32 * 32


def test_flops_of_a_device_are_an_eighth_of_the_whole():
    def mlp(x, up, down):
        x = lax.psum(matmul(jnp.tanh(matmul(x, up)), down), "tp")
        return x.astype(jnp.float32)

    specs = (P(), P("tp", None), P(None, "tp"))
    sharded = compiled(on_mesh(mlp, specs, P()), (16, 64), (256, 64), (64, 256))
    whole = compiled(lambda x, up, down: matmul(jnp.tanh(matmul(x, up)), down), (16, 64), (256, 64), (64, 256))
    assert whole.dot_flops() == 2 * 2 * 16 * 64 * 256 == 8 * sharded.dot_flops()
    assert whole.collectives() == []


def test_products_of_batches():
    module = compiled(lambda x, y: jnp.einsum("bnhd,bmhd->bhnm", x, y), (3, 16, 2, 32), (3, 24, 2, 32))
    (dot,) = module.dots()
    assert (dot.contracted, math.prod(dot.result.dims)) == (32, 3 * 2 * 16 * 24)
    assert module.dot_flops() == 2 * 3 * 2 * 16 * 24 * 32


def test_largest_arrays():
    """A temporary of 4 MB; no argument, result or cache, which is updated in place, is among the largest."""

    def step(cache, x, w):
        cache = lax.dynamic_update_slice(cache, x[:1], (jnp.int32(3), jnp.int32(0)))
        hidden = jnp.tanh(matmul(x, w))  # [512, 2048]
        return cache, matmul(hidden, w.T).astype(jnp.bfloat16)

    module = compiled(step, (4096, 1024), (512, 1024), (2048, 1024), donate_argnums=0)
    largest = module.largest(3)
    assert [array.dims for array in largest[0].result] == [(512, 2048)]
    assert sum(array.nbytes for array in largest[0].result) == 4 << 20
    assert all(array.dims != (4096, 1024) for instruction in module.largest(100) for array in instruction.result)
    assert len(module.largest(1)) == 1


# ---------------------------------------------------------------------------------------------------------------- texts

# Lines are broken where a backslash ends them.
GPU = r"""HloModule jit_step, is_scheduled=true, entry_computation_layout={(bf16[2,64]{1,0})->bf16[16,64]{1,0}}, \
num_partitions=8

FileNames
1 "/home/{"

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%gemm_fusion_dot_computation (p0: bf16[16,64], p1: bf16[32,64]) -> f32[16,32] {
  %p0 = bf16[16,64]{1,0} parameter(0)
  %p1 = bf16[32,64]{1,0} parameter(1)
  ROOT %dot.1 = f32[16,32]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={1}, \
metadata={op_name="jit(step)/moe/router/dot_general"}
}

%update_computation (p.4: f32[16,32], p.5: f32[1,32], p.6: s32[]) -> f32[16,32] {
  %p.4 = f32[16,32]{1,0} parameter(0)
  %p.5 = f32[1,32]{1,0} parameter(1)
  %p.6 = s32[] parameter(2)
  ROOT %dynamic-update-slice.1 = f32[16,32]{1,0} dynamic-update-slice(%p.4, %p.5, %p.6, %p.6)
}

%async_computation (p.1: u8[8,4]) -> u8[8,4] {
  %p.1 = u8[8,4]{1,0:T(8,128)(4,1)} parameter(0)
  ROOT %exchange = u8[8,4]{1,0} all-to-all(%p.1), channel_id=5, replica_groups=[1,8]<=[8], dimensions={0}
}, execution_thread="parallel"

%command_buffer (p.2: bf16[16,64], p.3: bf16[32,64]) -> f32[16,32] {
  %p.2 = bf16[16,64]{1,0} parameter(0)
  %p.3 = bf16[32,64]{1,0} parameter(1)
  ROOT %gemm_fusion_dot = f32[16,32]{1,0} fusion(%p.2, %p.3), kind=kCustom, calls=%gemm_fusion_dot_computation, \
backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
}

%body (state: (s32[], f32[16,32])) -> (s32[], f32[16,32]) {
  %state = (s32[], f32[16,32]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %value = f32[16,32]{1,0} get-tuple-element((s32[], f32[16,32]{1,0}) %state), index=1
  %reduce-start = f32[16,32]{1,0} all-reduce-start(f32[16,32]{1,0} %value), channel_id=7, to_apply=%add, \
metadata={op_name="jit(step)/while/body/mlp.down_proj/psum"}
  %reduce-done = f32[16,32]{1,0} all-reduce-done(%reduce-start), metadata={op_name="jit(step)/while/body/psum"}
  ROOT %next = (s32[], f32[16,32]{1,0}) tuple(%i, %reduce-done)
}

%condition (state.1: (s32[], f32[16,32])) -> pred[] {
  %state.1 = (s32[], f32[16,32]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (x.1: bf16[2,64]) -> (f32[16,32], bf16[2,64]) {
  %x.1 = bf16[2,64]{1,0} parameter(0), metadata={op_name="a[\"calls=%add\"] /*index=5*/ (["}
  %weights = bf16[32,64]{1,0} constant({...})
  %tokens = u8[8,4]{1,0} constant({ { 1, 2, 3, 4 }, { 5, 6, 7, 8 } })
  %gather-start = (bf16[2,64]{1,0}, bf16[16,64]{1,0}) all-gather-start(%x.1), channel_id=1, dimensions={0}, \
metadata={op_name="jit(step)/jit(_run_layer)/moe.hidden/all_gather[tiled=True axis=(\'tp\',)]"}
  %gather-done = bf16[16,64]{1,0} all-gather-done(%gather-start)
  %scatter-start = ((bf16[16,64]{1,0}), bf16[2,64]{1,0}) reduce-scatter-start(%gather-done), dimensions={0}, to_apply=%add
  %scatter-done = bf16[2,64]{1,0} reduce-scatter-done(%scatter-start)
  %send-start = (bf16[2,64]{1,0}, bf16[2,64]{1,0}, u32[], u32[]) collective-permute-start(%scatter-done), \
source_target_pairs={{0,1},{1,0}}
  %send-done = bf16[2,64]{1,0} collective-permute-done(%send-start)
  %exchange-start = ((u8[8,4]{1,0}), u8[8,4]{1,0}) async-start(%tokens), calls=%async_computation
  %exchange-update = ((u8[8,4]{1,0}), u8[8,4]{1,0}) async-update(%exchange-start), calls=%async_computation
  %exchange-done = u8[8,4]{1,0} async-done(%exchange-update), calls=%async_computation
  %a = f32[4]{0} constant({1, 2, 3, 4})
  %b = u32[2]{0} constant({1, 2})
  %two-start = ((f32[4]{0}, u32[2]{0}), (f32[32]{0}, /*index=1*/u32[16]{0})) all-gather-start(%a, /*index=1*/%b), \
dimensions={0}
  %two-done = (f32[32]{0}, u32[16]{0}) all-gather-done(%two-start)
  %sum-start = (f32[32]{0}, u32[16]{0}) all-reduce-start(%two-done), to_apply=%add
  %products = f32[16,32]{1,0} call(%gather-done, %weights), to_apply=%command_buffer
  %cublas = (f32[16,32]{1,0}, s8[4194304]{0}) custom-call(%gather-done, %weights), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],\
"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[]}}}
  %product = f32[16,32]{1,0} get-tuple-element(%cublas), index=0
  %older = bf16[16,32]{1,0} custom-call(%gather-done, %weights), custom_call_target="__cublas$lt$matmul", \
backend_config="{\"dot_dimension_numbers\":{\"lhs_contracting_dimensions\":[\"1\"]}}"
  %zero = s32[] constant(0)
  %row = f32[1,32]{1,0} slice(%product), slice={[0:1], [0:32]}
  %written = f32[16,32]{1,0} fusion(%product, %row, %zero), kind=kLoop, calls=%update_computation
  %state.2 = (s32[], f32[16,32]{1,0}) tuple(%zero, %written)
  %loop = (s32[], f32[16,32]{1,0}) while(%state.2), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"3"}}
  %value.1 = f32[16,32]{1,0} get-tuple-element(%loop), index=1
  ROOT %results = (f32[16,32]{1,0}, bf16[2,64]{1,0}) tuple(%value.1, %send-done)
}

""".replace("\\\n", "")


def test_text_of_a_gpu():
    """Asynchronous pairs count once, with the shape of their result; GEMMs may be custom calls, or in fusions."""
    module = hlo.parse(GPU)
    assert (module.name, module.entry.name, len(module.computations)) == ("jit_step", "main", 8)
    assert [(c.kind, c.name, ",".join(map(str, c.result)), c.payload_bytes, c.times) for c in module.collectives()] == [
        ("all-to-all", "exchange", "u8[8,4]", 32, 1),
        ("all-reduce", "reduce-start", "f32[16,32]", 2048, 3),
        ("all-gather", "gather-start", "bf16[16,64]", 2048, 1),
        ("reduce-scatter", "scatter-start", "bf16[2,64]", 2048, 1),
        ("collective-permute", "send-start", "bf16[2,64]", 256, 1),
        ("all-gather", "two-start", "f32[32],u32[16]", 192, 1),
        ("all-reduce", "sum-start", "f32[32],u32[16]", 192, 1),
    ]
    scopes = [hlo.scopes(collective.op_name) for collective in module.collectives()]
    assert scopes == [(), ("mlp.down_proj",), ("moe.hidden",), (), (), (), ()]
    assert [(dot.name, str(dot.result), dot.contracted, dot.flops) for dot in module.dots()] == [
        (name, result, 64, 2 * 16 * 32 * 64)
        for name, result in (("dot.1", "f32[16,32]"), ("cublas", "f32[16,32]"), ("older", "bf16[16,32]"))
    ]
    assert [dot.name for dot in module.dots() if "router" in dot.op_name] == ["dot.1"]
    argument = module.entry.instructions["x.1"]
    assert (argument.op_name, argument.called) == ('a["calls=%add"] /*index=5*/ ([', ())
    names = [instruction.name for instruction in module.largest(100)]
    assert names[0] == "cublas"  # with its workspace
    assert {"row", "gather-done", "gemm_fusion_dot", "reduce-done", "exchange"} < set(names)
    assert not {"dot.1", "send-done", "gather-start", "reduce-start", "loop", "products", "written"} & set(names)


def test_loops_and_branches_without_annotations():
    def reduced_in(text):
        return next((c for c in hlo.parse(text).collectives() if c.name == "reduce-start"), None)

    unknown = GPU.replace(', backend_config={"known_trip_count":{"n":"3"}}', "")
    reduced = reduced_in(unknown)
    assert (reduced.times, reduced.in_unknown_loop) == (1, True)
    never = GPU.replace('{"n":"3"}', '{"n":"0"}')
    assert reduced_in(never) is None
    branches = GPU.replace(
        "while(%state.2), condition=%condition, body=%body",
        "conditional(%zero, %state.2, %state.2), branch_computations={%body, %body}",
    )
    reduced = reduced_in(branches)
    assert (reduced.times, reduced.in_branch, reduced.in_unknown_loop) == (2, True, False)


def test_sizes():
    sizes = {"pred": 24, "bf16": 48, "c64": 192, "f8e4m3fn": 24, "u4": 12, "f4e2m1fn": 12, "s2": 6, "token": 0}
    assert {dtype: hlo.Array(dtype, (2, 3, 4)).nbytes for dtype in sizes} == sizes
    assert hlo.Array("f32", ()).nbytes == 4 and hlo.Array("f32", (0, 3)).nbytes == 0 and hlo.Array("u4", (3,)).nbytes == 2


@pytest.mark.parametrize("text", ["", "no program", "module @jit_f attributes {}", 'x = "HloModule m"', "HloModule"])
def test_other_texts(text):
    with pytest.raises(ValueError, match=r"^not the text of an HLO module"):
        hlo.parse(text)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ENTRY %main", "%main", "HLO module jit_step: there is no ENTRY"),
        ("%value.1, %send-done)\n}\n\n", "%value.1, %send-done)", "HLO module jit_step: computation main has no end"),
        ("ROOT %results", "%results", "computation main has no ROOT"),
        ("all-gather-done(%gather-start)", "all-gather-done(%gather)", "operand gather of gather-done is not defined"),
        ("body=%body", "body=%busy", "computation main calls busy, which is not there"),
        ("to_apply=%command_buffer", "to_apply=%main", "computations call each other in a circle: main, main"),
        ("%product = f32", "%cublas = f32", "a second instruction cublas"),
        ("%condition (state", "%body (state", "a second computation body"),
        ("constant({...})", "constant({...}", "a bracket is not closed"),
        ("f32[16,32]{1,0} get-tuple-element(%loop)", "float[16,32]{1,0} get-tuple-element(%loop)", "unknown dtype 'float'"),
        ("= u8[8,4]{1,0} async-done", "= (u8[8,4]{1,0} async-done", "not a shape: 'async-done"),
        ("%value.1, %send-done)", "%value.1, %send-done)\n  results", "not an instruction: 'results'"),
        ("} call(%gather-done", "} (%gather-done", "instruction products has no opcode"),
    ],
)
def test_damaged_texts(old, new, message):
    assert old in GPU
    with pytest.raises(ValueError) as error:
        hlo.parse(GPU.replace(old, new, 1))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_cut_texts():
    """Wherever a text ends, it is refused: nothing is counted of half a program."""
    end = GPU.rindex("}")
    for length in range(0, end, 97):
        with pytest.raises(ValueError):
            hlo.parse(GPU[:length])


def test_a_gemm_without_axes():
    module = hlo.parse(GPU.replace('"lhs_contracting_dimensions":["1"],', ""))
    with pytest.raises(ValueError, match=r"^custom-call cublas does not say over which axes it adds"):
        module.dots()
