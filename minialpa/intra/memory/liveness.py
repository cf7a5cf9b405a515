"""Memory of one device: a program of shards in, the bytes at its peak out, by the liveness of its buffers.

    peak = argument + output - alias + temp

Arguments, results and aliases are sizes of shards. `temp` holds all other buffers: the compiler makes kernels
(recording.py), which use buffers at certain times, and these are packed (buffers.py).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import JaxprEqn, Var

from minialpa.intra.memory.buffers import pack
from minialpa.intra.memory.compiler import Compiler, ShardValues
from minialpa.intra.memory.recording import record_equations, record_program
from minialpa.intra.spmd import ShardedEquations
from minialpa.ir.equations import Atom, dtype_name, is_in_host, is_literal, shape_of
from minialpa.ir.repeats import NO_REPEATS, Repeats
from minialpa.sharding import Spec
from minialpa.support.sizes import bytes_text

#: Length of `ProgramMemory.largest`.
_N_LARGEST = 5


@dataclass(frozen=True, slots=True)
class LargeTensor:
    """A shard in memory at the peak. source: the line that makes it, or a word such as "argument"."""

    shape: tuple[int, ...]
    dtype: str
    n_bytes: float
    source: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} {bytes_text(self.n_bytes)} ({self.source})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramMemory:
    """Bytes of one program on one device.

    output_bytes: includes the table of addresses of results.
    alias_bytes: of arguments that results take over.
    largest: tensors at the peak, largest first.
    host_temp_bytes: in host memory; the other fields are of device memory.
    """

    argument_bytes: float
    output_bytes: float
    alias_bytes: float
    temp_bytes: float
    largest: tuple[LargeTensor, ...]
    host_temp_bytes: float = 0.0

    @property
    def peak_bytes(self) -> float:
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """When the variables of a program are in memory.

    intervals: (variable, start, end, n): n copies of the variable are in memory at times start, ..., end - 1. A
        variable may have several intervals; arguments have no interval.
    """

    n_times: int
    intervals: tuple[tuple[Var, int, int, int], ...]


# ---- programs of shards ---------------------------------------------------------------------------------------------


def peak_bytes(program: ShardedEquations, donated: Sequence[int] = (), *, compiler: Compiler) -> ProgramMemory:
    """Outputs may take over the inputs numbered `donated`."""
    recording = record_program(program, compiler)
    inputs, results, sizes = recording.inputs, recording.results, recording.recorder.sizes
    pairs = donated_pairs(program, donated)
    timeline, host_sizes = recording.timeline(pairs, program.repeats), recording.recorder.host_sizes
    packed = pack(timeline, sizes, compiler.alignment_bytes)
    host_bytes = 0.0
    if any(host_sizes):
        host_bytes = pack(replace(timeline, scratch=()), host_sizes, compiler.alignment_bytes).n_bytes

    table_bytes = compiler.address_bytes * len(results) if len(results) > 1 else 0
    n_inputs, n_results = _n_copies(program, program.invars), _n_copies(program, program.outvars)
    for i, o in pairs:
        n_results[o] = n_inputs[i]
    argument_bytes = sum(n * sizes[v] for n, v in zip(n_inputs, inputs, strict=True))
    alias_bytes = sum(n_inputs[i] * sizes[inputs[i]] for i, _ in pairs)
    output_bytes = sum(n * sizes[v] for n, v in zip(n_results, results, strict=True)) + table_bytes
    modelled_bytes = argument_bytes + output_bytes - alias_bytes + packed.n_bytes
    return ProgramMemory(
        argument_bytes=argument_bytes,
        output_bytes=output_bytes,
        alias_bytes=alias_bytes,
        temp_bytes=packed.n_bytes + compiler.reserve * modelled_bytes,
        largest=_largest_tensors(recording.recorder, {*packed.values, *inputs, *results}),
        host_temp_bytes=host_bytes,
    )


def _n_copies(program: ShardedEquations, atoms: Sequence[Atom]) -> list[int]:
    n_of = program.repeats.n_variables
    return [1 if is_literal(atom) else n_of(atom) for atom in atoms]


def _largest_tensors(recorder: ShardValues, present: set[int]) -> tuple[LargeTensor, ...]:
    by_size = sorted(present, key=lambda v: -recorder.values[v].n_bytes)
    values = [recorder.values[v] for v in by_size[:_N_LARGEST]]
    return tuple(
        LargeTensor(value.shape, value.dtype, value.n_bytes, value.source) for value in values if value.n_bytes
    )


def donated_pairs(program: ShardedEquations, donated: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(input, output) that share a buffer: each output takes the first free donated input of its type."""
    free: dict[Any, deque[int]] = defaultdict(deque)
    for i in donated:
        v = program.invars[i]
        free[_kind(v, program.specs[v])].append(i)

    pairs = []
    for o, (atom, spec) in enumerate(zip(program.outvars, program.out_specs, strict=True)):
        alike = free[_kind(atom, spec)]
        if alike:
            pairs.append((alike.popleft(), o))
    return tuple(pairs)


def _kind(atom: Atom, spec: Spec) -> Hashable:
    return shape_of(atom), dtype_name(atom), is_in_host(atom.aval), spec


# ---- equations on whole arrays --------------------------------------------------------------------------------------


def lifetimes(
    eqns: Sequence[JaxprEqn],
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    donated: Sequence[tuple[Var, Atom]] = (),
    *,
    compiler: Compiler,
    repeats: Repeats = NO_REPEATS,
) -> Lifetimes:
    """Under any shardings; the planner limits memory by these times. donated: inputs, and their replacements."""
    waits = compiler.waits_at_barriers
    recording, env = record_equations(eqns, invars, outvars, compiler, waits_at_barriers=waits)
    pairs = [
        (recording.inputs.index(env[given]), recording.results.index(env[result]))
        for given, result in donated
        if given in env and not is_literal(result) and result in env
    ]
    timeline = recording.timeline(pairs, repeats)

    variable = _variables(recording.recorder, env)
    buffers = ((buffer, 1) for buffer in (*timeline.temporaries, *timeline.results))
    stored = [(buffer, n) for buffer, n in (*timeline.copies, *buffers) if buffer.value in variable]
    intervals = tuple((variable[b.value], b.start, b.end, n) for b, n in stored if b.start < b.end)
    return Lifetimes(timeline.n_times, intervals)


def _variables(recorder: ShardValues, env: Mapping[Var, int]) -> dict[int, Var]:
    """Copies have the variable of their origin."""
    variable: dict[int, Var] = {}
    for v, value in env.items():
        variable.setdefault(value, v)
    for value, source in recorder.origin.items():
        if source in variable:  # values inside of functions have no variable
            variable.setdefault(value, variable[source])
    return variable
