"""Reads the text of a compiled XLA program: what travels between devices, what is multiplied, which arrays are large.

    module = hlo.parse(jax.jit(step).lower(*args).compile().as_text())
    module.collectives()       every collective: what it carries and how often it runs
    module.dots()              every matrix product
    module.largest()           the largest arrays that are neither arguments nor results

The text is the optimised program that one device runs; everything is reported as it stands there. XLA for CPU, for one, widens
some collectives and products of bf16 to f32. Products that XLA has turned into multiplications and sums, and those inside
custom kernels, are no products here. `lowered.as_text("hlo", debug_info=True)`, the program before XLA optimises it, is read
as well: it has the dtypes of the source, but no trip counts.

How often: once per execution, times the trip counts of the loops around. A loop whose trip count XLA does not know counts as
one trip, and what is in it has `in_unknown_loop`. All branches of a conditional count as taken, and what is in them has
`in_branch`. So FLOPs and payloads are lower bounds in such loops and upper bounds in branches.
"""

from __future__ import annotations

import dataclasses
import graphlib
import math
import re
from collections.abc import Iterator

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
# Instructions that run the computations they name; others name a function of scalars, as the sum of a reduction.
_CALLERS = ("async", "call", "conditional", "custom-call", "fusion", "while")
# What has no array of its own: these name, alias or pass on the arrays of other instructions.
_NO_ARRAY = (
    *("after-all", "async", "bitcast", "call", "conditional", "constant", "dynamic-update-slice", "get-tuple-element"),
    *("opt-barrier", "parameter", "tuple", "while"),
)

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](?:\{[^{}]*\})?")
_COMPUTATION = re.compile(r"(ENTRY\s+)?%?([^\s(%{}]+)\s+(?:\(.*->.*)?\{$")
_INSTRUCTION = re.compile(r"\s*(ROOT\s+)?%?([^\s=%(){}]+) = ")
_OPCODE = re.compile(r"\s*([a-z][a-z0-9-]*)\(")
_STRING = r'"(?:[^"\\]|\\.)*"'
_STRING_OR_COMMENT = re.compile(rf"({_STRING})|/\*.*?\*/")
_STRING_OR_BRACKET = re.compile(rf"{_STRING}|[()]")
_NAME = re.compile(r"[^\s,(){}%]+")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([^\s,(){}%]+)")
_CALLED_LIST = re.compile(r"\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Array:
    """Shape and dtype of an array; dtypes as XLA spells them (f32, bf16, u8, pred)."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Numbers of less than a byte count as packed."""
        if self.dtype in ("token", "opaque"):
            return 0
        bits = 8 if self.dtype == "pred" else int(re.search(r"\d+", self.dtype)[0])
        return -(-math.prod(self.dims) * bits // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


Shape = Array | tuple["Shape", ...]


def arrays(shape: Shape) -> tuple[Array, ...]:
    """The arrays of a shape, which may be a tuple of tuples."""
    return (shape,) if isinstance(shape, Array) else tuple(array for part in shape for array in arrays(part))


@dataclasses.dataclass(frozen=True)
class Instruction:
    """opcode: with its -start, -update or -done.  called: names of computations.  attributes: text after the operands."""

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    called: tuple[str, ...]
    attributes: str
    op_name: str  # the path of named scopes, functions and the primitive in JAX; "" where XLA kept none

    @property
    def kind(self) -> str:
        """The opcode, for the three instructions of what runs asynchronously."""
        return re.sub(r"-(start|update|done)$", "", self.opcode)

    @property
    def continues(self) -> bool:
        """Whether it goes on with what a -start instruction began."""
        return self.opcode.endswith(("-update", "-done"))

    @property
    def result(self) -> tuple[Array, ...]:
        """The arrays it computes. A -start instruction gives (operands, results, ...), except that of an all-reduce."""
        started = self.opcode.endswith("-start") and self.kind != "all-reduce"
        if started and isinstance(self.shape, tuple) and len(self.shape) > 1:
            return arrays(self.shape[1])
        return arrays(self.shape)

    @property
    def trip_count(self) -> int | None:
        """Of a while loop; None where XLA does not know it."""
        found = re.search(r"known_trip_count\W+n\W+(\d+)", self.attributes)
        return int(found[1]) if found else None

    def calls(self) -> Iterator[tuple[str, int]]:
        """The computations it runs, and how often each; a loop's condition as often as its body."""
        if self.kind not in _CALLERS or self.continues:
            return
        times = self.trip_count if self.kind == "while" else 1
        for name in self.called:
            yield name, 1 if times is None else times


@dataclasses.dataclass
class Computation:
    name: str
    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)  # by name, in their order
    root: str = ""
    # How often it runs per execution of the module, and where.
    runs: int = 0
    in_unknown_loop: bool = False
    in_branch: bool = False
    fused: bool = False  # its instructions give no arrays in memory


@dataclasses.dataclass(frozen=True)
class Collective:
    """payload_bytes: of the whole array: gathered, reduced (before it is scattered) or exchanged.  times: per execution."""

    kind: str
    name: str
    computation: str
    op_name: str
    result: tuple[Array, ...]
    payload_bytes: int
    times: int
    in_unknown_loop: bool
    in_branch: bool


@dataclasses.dataclass(frozen=True)
class Dot:
    """A matrix product.  contracted: k.  times: per execution.  flops: of all of them, 2 m n k each."""

    name: str
    op_name: str
    lhs: Array
    rhs: Array
    result: Array
    contracted: int
    times: int
    in_unknown_loop: bool
    in_branch: bool

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.result.dims) * self.contracted * self.times


@dataclasses.dataclass
class Module:
    name: str
    computations: dict[str, Computation]
    entry: Computation

    def executed(self) -> Iterator[tuple[Computation, Instruction]]:
        """Every instruction that an execution runs, once."""
        for computation in self.computations.values():
            for instruction in computation.instructions.values() if computation.runs else ():
                yield computation, instruction

    def collectives(self) -> list[Collective]:
        """Every collective; those that run asynchronously once."""
        found = []
        for computation, instruction in self.executed():
            if instruction.kind not in COLLECTIVES or instruction.continues:
                continue
            whole = instruction.result
            if instruction.kind == "reduce-scatter":
                operands = (computation.instructions[name] for name in instruction.operands)
                whole = tuple(array for operand in operands for array in arrays(operand.shape))
            payload = sum(array.nbytes for array in whole)
            what = (instruction.kind, instruction.name, computation.name, instruction.op_name, instruction.result, payload)
            found.append(Collective(*what, computation.runs, computation.in_unknown_loop, computation.in_branch))
        return found

    def dots(self) -> list[Dot]:
        """Every product: dots, also those in fusions that a library computes, and GEMMs of cuBLAS.

        Raises ValueError for a custom call to a library's GEMM which does not say over which axes it adds.
        """
        found = []
        for computation, instruction in self.executed():
            axes = _contracted_axes(instruction)
            if axes is None:
                continue
            lhs, rhs = (arrays(computation.instructions[name].shape)[0] for name in instruction.operands[:2])
            contracted = math.prod(lhs.dims[axis] for axis in axes)
            what = (instruction.name, instruction.op_name, lhs, rhs, instruction.result[0], contracted)
            found.append(Dot(*what, computation.runs, computation.in_unknown_loop, computation.in_branch))
        return found

    def dot_flops(self) -> int:
        """FLOPs of all products of an execution."""
        return sum(dot.flops for dot in self.dots())

    def unknown_loops(self) -> list[Instruction]:
        """The loops that count as one trip because XLA does not know their trip count."""
        return [i for _, i in self.executed() if i.kind == "while" and i.trip_count is None]

    def largest(self, count: int = 10) -> list[Instruction]:
        """Instructions by bytes of their results, largest first, as far as they have arrays of their own.

        Left out are arguments, results and constants of the module, what is computed inside a fusion, and updates in place.
        """
        root = self.entry.instructions[self.entry.root]
        results = {root.name, *(root.operands if root.opcode == "tuple" else ())}

        def own(computation: Computation, instruction: Instruction) -> bool:
            is_result = computation is self.entry and instruction.name in results
            started = instruction.opcode.endswith(("-start", "-update"))  # the -done instruction has the result
            if computation.fused or is_result or started or instruction.opcode in _NO_ARRAY:
                return False
            roots = [self.computations[name] for name in instruction.called] if instruction.opcode == "fusion" else []
            return all(fused.instructions[fused.root].opcode != "dynamic-update-slice" for fused in roots)

        found = [instruction for computation, instruction in self.executed() if own(computation, instruction)]
        return sorted(found, key=lambda i: -sum(array.nbytes for array in i.result))[:count]


def scopes(op_name: str) -> tuple[str, ...]:
    """Names that `jax.named_scope` gave, outermost first: op_name without the primitive and what JAX itself adds (the
    formula of an einsum, too)."""
    control = r"while|body|cond|branch_\d+_fun"
    added = rf"{control}|jit\(.*|pjit|shard_map|closed_call|core_call|checkpoint|eval_jaxpr|custom_.*_call|.*->.*"
    return tuple(part for part in op_name.split("/")[:-1] if not re.fullmatch(added, part))


def parse(text: str) -> Module:
    """Reads the text of a compiled program. Raises ValueError if it is something else, or damaged."""
    header = re.match(r"\s*HloModule ([^\s,]+)", text)
    if header is None:
        raise ValueError(f"not the text of an HLO module, which begins with 'HloModule': {text.strip()[:40]!r}")
    computations: dict[str, Computation] = {}
    entry = current = None
    for number, line in enumerate(text.split("\n"), 1):
        if current is None:
            if opened := _COMPUTATION.match(line):  # what else stands there, as the table of source files, says nothing
                current = Computation(opened[2])
                if computations.setdefault(current.name, current) is not current:
                    raise ValueError(f"line {number}: a second computation {current.name}")
                entry = current if opened[1] else entry
        elif line.startswith("}"):
            if not current.root:
                raise ValueError(f"line {number}: computation {current.name} has no ROOT")
            current = None
        else:
            _add_instruction(current, _STRING_OR_COMMENT.sub(r"\1", line), number)
    if current is not None or entry is None:
        what = f"computation {current.name} has no end" if current else "there is no ENTRY"
        raise ValueError(f"HLO module {header[1]}: {what}")
    _count_runs(computations, entry)
    return Module(header[1], computations, entry)


def _add_instruction(computation: Computation, line: str, number: int) -> None:
    begun = _INSTRUCTION.match(line)
    if begun is None:
        raise ValueError(f"line {number}: not an instruction: {line.strip()[:60]!r}")
    name = begun[2]
    shape, end = _shape(line, begun.end(), number)
    opened = _OPCODE.match(line, end)
    if opened is None:
        raise ValueError(f"line {number}: instruction {name} has no opcode")
    opcode, close = opened[1], _closing(line, opened.end(), number)
    attributes = line[close + 1 :]
    plain = re.sub(_STRING, '""', attributes)  # a string may say anything
    called = [*_CALLED.findall(plain), *(name for names in _CALLED_LIST.findall(plain) for name in _NAME.findall(names))]
    found = re.search(rf"\bop_name=({_STRING})", attributes)
    op_name = re.sub(r"\\(.)", r"\1", found[1][1:-1]) if found else ""
    named = "" if opcode in ("constant", "parameter") else _ARRAY.sub("", line[opened.end() : close])
    operands = tuple(_NAME.findall(named))
    for operand in operands:
        if operand not in computation.instructions:
            raise ValueError(f"line {number}: operand {operand} of {name} is not defined before it")
    if name in computation.instructions:
        raise ValueError(f"line {number}: a second instruction {name}")
    computation.instructions[name] = Instruction(name, opcode, shape, operands, tuple(called), attributes, op_name)
    if begun[1]:
        computation.root = name


def _shape(line: str, at: int, number: int) -> tuple[Shape, int]:
    """The shape that begins at `at`, and where it ends."""
    open_tuples: list[list[Shape]] = [[]]
    while True:
        if line.startswith("(", at):
            open_tuples.append([])
            at += 1
        elif line.startswith(")", at) and len(open_tuples) > 1:
            closed = tuple(open_tuples.pop())
            open_tuples[-1].append(closed)
            at += 1
        elif found := _ARRAY.match(line, at):
            if not re.fullmatch(r"pred|token|opaque|[a-z]+\d\w*", found[1]):
                raise ValueError(f"line {number}: unknown dtype {found[1]!r}")
            open_tuples[-1].append(Array(found[1], tuple(map(int, re.findall(r"\d+", found[2])))))
            at = found.end()
        else:
            raise ValueError(f"line {number}: not a shape: {line[at : at + 40]!r}")
        if len(open_tuples) == 1:
            return open_tuples[0][0], at
        at = re.compile(r"[,\s]*").match(line, at).end()


def _closing(line: str, at: int, number: int) -> int:
    """Where the bracket that was opened before `at` is closed."""
    depth = 1
    for found in _STRING_OR_BRACKET.finditer(line, at):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    raise ValueError(f"line {number}: a bracket is not closed: {line.strip()[:60]!r}")


def _contracted_axes(instruction: Instruction) -> list[int] | None:
    """Axes of the left operand that a product adds over; None for what is no product."""
    if instruction.opcode in ("dot", "scaled-dot"):
        axes = r"\blhs_contracting_dims=\{([\d,]*)\}"
    elif instruction.opcode == "custom-call" and re.search(r'custom_call_target="__[^"]*(gemm|matmul)', instruction.attributes):
        axes = r"\blhs_contracting_dimensions\W+\[([^\]]*)\]"
    else:
        return None
    found = re.search(axes, instruction.attributes)
    if found is None:
        raise ValueError(f"{instruction.opcode} {instruction.name} does not say over which axes it adds")
    return [int(i) for i in re.findall(r"\d+", found[1])]


def _count_runs(computations: dict[str, Computation], entry: Computation) -> None:
    """Sets how often each computation runs, and where."""
    graph = {}
    for computation in computations.values():
        graph[computation.name] = {name for i in computation.instructions.values() for name in i.called}
        if unknown := graph[computation.name] - computations.keys():
            raise ValueError(f"computation {computation.name} calls {min(unknown)}, which is not there")
    try:
        callees_first = list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        raise ValueError(f"computations call each other in a circle: {', '.join(error.args[1])}") from None
    entry.runs = 1
    for name in reversed(callees_first):
        caller = computations[name]
        for instruction in caller.instructions.values() if caller.runs else ():
            unknown_trips = instruction.kind == "while" and instruction.trip_count is None
            for called, times in instruction.calls():
                callee = computations[called]
                callee.runs += caller.runs * times
                callee.in_unknown_loop |= caller.in_unknown_loop or unknown_trips
                callee.in_branch |= caller.in_branch or instruction.kind == "conditional"
                callee.fused |= caller.fused or instruction.kind == "fusion"
