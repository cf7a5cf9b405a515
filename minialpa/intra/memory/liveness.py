"""Memory of one device: a program over shards and its donated arguments in, its bytes at the peak out.

    peak = argument + output - alias + temp

Arguments, results and aliases are sizes of shards. `temp` is what holds all else, with the values that are stored and
the order in which they are made from fusion.py, and the places of buffers from packing.py. A buffer lives from the
kernel that writes it to the last that reads it, both included, or until that one takes it over.

`lifetimes` says the same of equations without their shardings, which is what a memory limit of the planner needs.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core as jex
from jax.extend.core import JaxprEqn, Var

from minialpa.intra.memory.fusion import Kernel, kernels_of, run_order
from minialpa.intra.memory.merging import combine
from minialpa.intra.memory.operations import Recorder, local_bytes
from minialpa.intra.memory.packing import Buffer, Timeline, pack
from minialpa.intra.memory.scatters import absorb
from minialpa.intra.spmd import Interpreter, ShardedEquations, split_axes, walk
from minialpa.intra.strategies.loops import ScanBody
from minialpa.rules.factors import Factors, localize
from minialpa.sharding import EquationSpecs
from minialpa.tracing.jaxprs import Atom, bytes_of, dtype_name, flatten_calls, is_literal, shape_of, sub_jaxprs

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
    temp, alive = pack(timeline, sizes)
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

    joint_barriers: see `LogicalMesh.waits_at_barriers`.
    """
    recorder, env = _record_whole(eqns, invars, joint_barriers)
    inputs, results = [env[v] for v in invars], [env[v] for v in outvars if not is_literal(v)]
    replaced = [
        (inputs.index(env[a]), results.index(env[b])) for a, b in donated if a in env and not is_literal(b) and b in env
    ]
    timeline = _timeline(recorder, inputs, results, replaced)
    variable: dict[int, Var] = {}
    for v, value in env.items():
        variable.setdefault(value, v)
    for value, source in recorder.origin.items():
        variable.setdefault(value, variable[source])
    copied = {b.value: b for b in timeline.idle}
    ends = {b.value: b.end for b in timeline.temporaries}
    buffers = [b for b in (*timeline.temporaries, *timeline.results) if b.value not in copied]
    # Of an argument that was copied, one of the two buffers is free for others until its result is there.
    buffers += [b for v, x in copied.items() for b in (Buffer(v, x.start - 1, x.start), Buffer(v, x.end, ends[v]))]
    spans = [(variable[b.value], b.start, b.end) for b in buffers if b.value in variable and b.start < b.end]
    return Lifetimes(timeline.n_times, tuple(spans))


# ---- recording ------------------------------------------------------------------------------------------------------


def _record(program: ShardedEquations) -> tuple[Recorder, list[int], list[int]]:
    """Operations of a program with its collectives; values of its inputs and outputs."""
    mesh = program.mesh.shape
    recorder = Recorder(program.mesh.waits_at_barriers)
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
        scratch, _ = pack(_timeline(inner, reads, leaves, ()), [value.n_bytes for value in inner.values])
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
        most = max(most, pack(timeline, [value.n_bytes for value in recorder.values])[0])
    return most


# ---- time -----------------------------------------------------------------------------------------------------------


def _timeline(
    recorder: Recorder, inputs: Sequence[int], results: Sequence[int], pairs: Sequence[tuple[int, int]]
) -> Timeline:
    operations = combine(absorb(recorder.operations, results, recorder.zeros), results, recorder.reduced)
    kernels = kernels_of(operations, results, [value.n_bytes for value in recorder.values])
    order = [kernels[k] for k in run_order(kernels, inputs)]
    home = _homes(order, inputs)
    replaced = {home.get(results[o], results[o]): inputs[i] for i, o in pairs}
    copied = _copied(order, home, replaced)
    start: dict[int, int] = {}
    end: dict[int, int] = {}
    for t, kernel in enumerate(order, len(copied)):
        end.update((home.get(v, v), t + 1) for v in kernel.reads)
        for v in kernel.writes:
            if v not in home:
                start[v] = t
                end.setdefault(v, t + 1)
    n_times = len(copied) + len(order)
    kept = {home.get(v, v) for v in results}
    shared = _shared(order, len(copied), start, end, kept | set(home.values()), recorder)
    # Until then the buffer is that of the operand.
    start.update((w, end[v]) for w, v in shared.items())
    copies = [Buffer(v, t, end[v]) for t, v in enumerate(copied.values())]
    idle = [Buffer(v, t + 1, start[w]) for t, (w, v) in enumerate(copied.items())]
    own = [Buffer(v, t, n_times) for v, t in start.items() if v in kept and v not in replaced]
    others = [Buffer(v, t, end[v]) for v, t in start.items() if v not in kept]
    scratch = tuple((t, k.scratch_bytes) for t, k in enumerate(order, len(copied)) if k.scratch_bytes)
    return Timeline(n_times, (*others, *copies), tuple(own), tuple(idle), scratch, shared)


def _copied(order: Sequence[Kernel], home: Mapping[int, int], replaced: Mapping[int, int]) -> dict[int, int]:
    """Those of `replaced`, results and their arguments, whose argument is copied before all else.

    The compiler decides that before it knows the order: any reader that the result does not wait for may come later.
    """
    maker = {v: t for t, kernel in enumerate(order) for v in kernel.writes}
    below: list[int] = []  # kernels that a kernel waits for, as bits, and itself
    readers: dict[int, int] = defaultdict(int)
    for t, kernel in enumerate(order):
        bits = 1 << t
        for v in kernel.reads:
            bits |= below[maker[v]] if v in maker else 0
            readers[home.get(v, v)] |= 1 << t
        below.append(bits)
    return {w: v for w, v in replaced.items() if w in maker and readers[v] & ~below[maker[w]]}


def _shared(
    order: Sequence[Kernel], first: int, start: Mapping[int, int], end: Mapping[int, int], fixed: set[int],
    recorder: Recorder,
) -> dict[int, int]:  # fmt: skip
    """Values that take over the buffer of an operand, and that operand, where kernels run from the time `first` on.

    The operand is read for the last time, element by element, and is as large. Those of `fixed` have to stay in their
    buffers: results, and what is changed in place or has views.
    """
    shared: dict[int, int] = {}
    changed = {kernel.alias for kernel in order if kernel.in_place}
    for t, kernel in enumerate(order, first):
        w = kernel.writes[0]
        if len(kernel.writes) == 1 and w in start and w not in changed:
            for v in kernel.shares:
                is_last = v in start and v not in fixed and end[v] == t + 1
                if is_last and recorder.values[v].n_bytes == recorder.values[w].n_bytes:
                    shared[w] = v
                    break
    return shared


def _homes(order: Sequence[Kernel], inputs: Sequence[int]) -> dict[int, int]:
    """For values in the buffer of another value, that other value. Arguments are not written in place."""
    home: dict[int, int] = {}
    arguments = set(inputs)
    for kernel in order:
        if kernel.alias is not None and not (kernel.in_place and kernel.alias in arguments):
            home[kernel.writes[0]] = home.get(kernel.alias, kernel.alias)
    return home
