"""Memory of one device: a program over shards and its donated arguments in, its bytes at the peak out.

    peak = argument + output - alias + temp

Arguments, results and aliases are sizes of shards. `temp` is the most that lies in memory at any time besides, with the
values that are stored and the order in which they are made from fusion.py: a buffer lives from the kernel that writes
it to the last that reads it, both included, and may lie in the buffer of a result that is not made yet.

`lifetimes` says the same of equations without their shardings, which is what a memory limit of the planner needs.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core as jex
from jax.extend.core import JaxprEqn, Var

from minialpa.intra.factors import Factors, localize
from minialpa.intra.fusion import Kernel, kernels_of, run_order
from minialpa.intra.loops import ScanBody
from minialpa.intra.merging import combine
from minialpa.intra.operations import Recorder, local_bytes
from minialpa.intra.spmd import Interpreter, ShardedEquations, split_axes, walk
from minialpa.jaxprs import Atom, bytes_of, dtype_name, flatten_calls, is_literal, shape_of, sub_jaxprs
from minialpa.sharding import EquationSpecs

#: Buffers start at multiples of this.
_ALIGNMENT = 64
#: Several results come with a table of their addresses.
_POINTER_BYTES = 8
_LOOPS = ("scan", "while", "cond")


@dataclass(frozen=True, slots=True)
class LargeTensor:
    """A tensor in memory at the peak. source: the line that made it, or what it is."""

    shape: tuple[int, ...]
    dtype: str
    n_bytes: float
    source: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} {self.n_bytes:,.0f} bytes ({self.source})"


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """Bytes of one program on one device; `largest` are the five largest tensors in memory at the peak."""

    argument_bytes: float
    output_bytes: float
    alias_bytes: float
    temp_bytes: float
    largest: tuple[LargeTensor, ...]

    @property
    def peak_bytes(self) -> float:
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


@dataclass(frozen=True, slots=True)
class Buffer:
    """`value` (of a Recorder) is in memory at the times start, ..., end - 1."""

    value: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """When the values of a program are in memory, besides its arguments.

    results: values in buffers of their own until the end. scratch: (time, bytes) of kernels that need more.
    """

    n_times: int
    temporaries: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    scratch: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """(variable, start, end): times at which it, or a copy of it, is in memory, arguments not counted.

    Several intervals may belong to one variable. Times are 0, ..., n_times - 1.
    """

    n_times: int
    intervals: tuple[tuple[Var, int, int], ...]


def peak_bytes(program: ShardedEquations, donated: Sequence[int] = ()) -> ProgramMemory:
    """Memory of `program` when its outputs may take over the inputs numbered `donated`."""
    recorder, inputs, results = _record(program)
    pairs = donated_pairs(program, donated)
    sizes = [value.n_bytes for value in recorder.values]
    timeline = _timeline(recorder, inputs, results, pairs)
    temp, alive = _pack(timeline, sizes)
    argument = sum(sizes[v] for v in inputs)
    present = sorted({*alive, *inputs, *results}, key=lambda v: -sizes[v])[:5]
    largest = tuple(
        LargeTensor(x.shape, x.dtype, x.n_bytes, x.source) for x in (recorder.values[v] for v in present) if x.n_bytes
    )
    alias = sum(sizes[inputs[i]] for i, _ in pairs)
    table = _POINTER_BYTES * len(results) if len(results) > 1 else 0
    return ProgramMemory(argument, sum(sizes[v] for v in results) + table, alias, temp, largest)


def donated_pairs(program: ShardedEquations, donated: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(input, output) that share a buffer: each output takes the first donated input of its type that is left."""
    free: dict[Any, deque[int]] = defaultdict(deque)
    for i in donated:
        v = program.invars[i]
        free[shape_of(v), dtype_name(v), program.specs[v]].append(i)
    out = []
    for o, (v, spec) in enumerate(zip(program.outvars, program.out_specs, strict=True)):
        waiting = free[shape_of(v), dtype_name(v), spec]
        if waiting:
            out.append((waiting.popleft(), o))
    return tuple(out)


def lifetimes(
    eqns: Sequence[JaxprEqn],
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    donated: Sequence[tuple[Var, Atom]] = (),
    *,
    joint_barriers: bool = False,
) -> Lifetimes:
    """When the variables of a program are in memory; `donated` are inputs and the outputs that replace them.

    joint_barriers: see `DeviceSpec.waits_at_barriers`.
    """
    recorder, env = _record_whole(eqns, invars, joint_barriers)
    inputs, results = [env[v] for v in invars], [env[v] for v in outvars if not is_literal(v)]
    replaced = [
        (inputs.index(env[a]), results.index(env[b])) for a, b in donated if a in env and not is_literal(b) and b in env
    ]
    timeline = _timeline(recorder, inputs, results, replaced)
    variable = {value: v for v, value in env.items()}
    for value, source in recorder.origin.items():
        variable.setdefault(value, variable[source])
    spans = [
        (variable[b.value], b.start, b.end) for b in (*timeline.temporaries, *timeline.results) if b.value in variable
    ]
    return Lifetimes(timeline.n_times, tuple(spans))


# ---- recording ------------------------------------------------------------------------------------------------------


def _record(program: ShardedEquations) -> tuple[Recorder, list[int], list[int]]:
    """Operations of a program with its collectives; values of its inputs and outputs."""
    mesh = program.mesh.shape
    recorder = Recorder(program.mesh.device is not None and program.mesh.device.waits_at_barriers)
    inputs = []
    for v in program.invars:
        shape = program.specs[v].shard_shape(shape_of(v), mesh)
        inputs.append(recorder.value(local_bytes(v, shape), shape, dtype_name(v), "argument"))

    def run(eqn: JaxprEqn, factors: Factors, chosen: EquationSpecs, operands: list[int]) -> list[int]:
        shapes = [s.shard_shape(shape_of(v), mesh) for v, s in zip(eqn.outvars, chosen.made, strict=True)]
        scratch = 0.0
        if eqn.primitive.name in _LOOPS:
            splits = {f: math.prod(mesh[a] for a in axes) for f, axes in split_axes(factors, chosen).items()}
            scratch = _body_bytes(localize(eqn, factors, splits))
        return recorder.equation(eqn, operands, shapes, scratch)

    def loop(eqn: JaxprEqn, body: ScanBody, inside: ShardedEquations, operands: list[int]) -> list[int]:
        inner, reads, leaves = _record(inside)
        scratch, _ = _pack(_timeline(inner, reads, leaves, ()), [value.n_bytes for value in inner.values])
        ends = enumerate(zip(eqn.outvars, inside.out_specs, strict=True))
        shapes = [body.outer_result(r, s).shard_shape(shape_of(v), mesh) for r, (v, s) in ends]
        return recorder.equation(eqn, operands, shapes, scratch)

    interpreter = Interpreter(recorder.literal, lambda x, step, v: recorder.step(x, step, v, mesh), run, loop)
    results = walk(program, inputs, interpreter)
    return recorder, inputs, results


def _record_whole(
    eqns: Sequence[JaxprEqn], invars: Sequence[Var], joint_barriers: bool = False
) -> tuple[Recorder, dict[Var, int]]:
    """Operations of equations on whole arrays; the value of each variable."""
    recorder = Recorder(joint_barriers)
    env = {v: recorder.value(bytes_of(v), shape_of(v), dtype_name(v), "argument") for v in invars}
    for eqn in eqns:
        reads = [recorder.literal(a) if is_literal(a) else env[a] for a in eqn.invars]
        scratch = _body_bytes(eqn.params) if eqn.primitive.name in _LOOPS and sub_jaxprs(eqn) else 0.0
        shapes = [shape_of(v) for v in eqn.outvars]
        env.update(zip(eqn.outvars, recorder.equation(eqn, reads, shapes, scratch), strict=True))
    return recorder, env


def _body_bytes(params: Mapping[str, Any]) -> float:
    """What one pass through the largest body of a loop, or branch, needs besides what it is given."""
    most = 0.0
    for jaxpr in jex.jaxprs_in_params(dict(params)):
        flat = flatten_calls(jaxpr, [None] * len(jaxpr.constvars))
        recorder, env = _record_whole(flat.eqns, (*flat.constvars, *flat.invars))
        inputs = [env[v] for v in (*flat.constvars, *flat.invars)]
        results = [env[v] for v in flat.outvars if not is_literal(v)]
        timeline = _timeline(recorder, inputs, results, ())
        most = max(most, _pack(timeline, [value.n_bytes for value in recorder.values])[0])
    return most


# ---- time -----------------------------------------------------------------------------------------------------------


def _timeline(
    recorder: Recorder, inputs: Sequence[int], results: Sequence[int], pairs: Sequence[tuple[int, int]]
) -> Timeline:
    operations = combine(recorder.operations, results, recorder.reduced)
    kernels = kernels_of(operations, results, [value.n_bytes for value in recorder.values])
    order = [kernels[k] for k in run_order(kernels, inputs)]
    home = _homes(order, inputs)
    start: dict[int, int] = {}
    end: dict[int, int] = {}
    for t, kernel in enumerate(order):
        end.update((home.get(v, v), t + 1) for v in kernel.reads)
        for v in kernel.writes:
            if v not in home:
                start[v] = t
                end.setdefault(v, t + 1)
    kept = {home.get(v, v) for v in results}
    replaced = {home.get(results[o], results[o]): inputs[i] for i, o in pairs}
    # A donated argument that is read after its replacement was written has been copied before.
    copies = [Buffer(v, 0, end[v]) for w, v in replaced.items() if w in start and end.get(v, 0) > start[w] + 1]
    own = [Buffer(v, t, len(order)) for v, t in start.items() if v in kept and v not in replaced]
    others = [Buffer(v, t, end[v]) for v, t in start.items() if v not in kept]
    scratch = tuple((t, kernel.scratch_bytes) for t, kernel in enumerate(order) if kernel.scratch_bytes)
    return Timeline(len(order), (*others, *copies), tuple(own), scratch)


def _homes(order: Sequence[Kernel], inputs: Sequence[int]) -> dict[int, int]:
    """For values in the buffer of another value, that other value. Arguments are not written in place."""
    home: dict[int, int] = {}
    arguments = set(inputs)
    for kernel in order:
        if kernel.alias is not None and not (kernel.in_place and kernel.alias in arguments):
            home[kernel.writes[0]] = home.get(kernel.alias, kernel.alias)
    return home


def _pack(timeline: Timeline, sizes: Sequence[float]) -> tuple[float, list[int]]:
    """Most bytes of temporaries at any time, and which they are then.

    The largest are placed first, into the buffer of a result that is large enough and free for their time.
    """
    taken = [(_aligned(sizes[b.value]), [(b.start, b.end)]) for b in timeline.results]
    left: list[Buffer] = []
    for b in heapq.nlargest(len(timeline.temporaries), timeline.temporaries, key=lambda b: (sizes[b.value], b.start)):
        size = _aligned(sizes[b.value])
        for room, spans in taken:
            if room >= size and all(b.end <= start or end <= b.start for start, end in spans):
                spans.append((b.start, b.end))
                break
        else:
            left.append(b)
    change = [0.0] * (timeline.n_times + 1)
    for b in left:
        change[b.start] += _aligned(sizes[b.value])
        change[b.end] -= _aligned(sizes[b.value])
    for t, n_bytes in timeline.scratch:
        change[t] += n_bytes
        change[t + 1] -= n_bytes
    most, now, at = 0.0, 0.0, 0
    for t, step in enumerate(change):
        now += step
        if now > most:
            most, at = now, t
    return most, [b.value for b in left if b.start <= at < b.end]


def _aligned(n_bytes: float) -> float:
    return math.ceil(n_bytes / _ALIGNMENT) * _ALIGNMENT
