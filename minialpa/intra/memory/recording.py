"""Programs as recorded operations: of a program of shards with its collectives, and of equations on whole arrays.

Either becomes a `Recording`, from which the kernels of a compiler and their timeline follow. Loops and branches are
kernels of their own, whose scratch memory is what their bodies need, recorded in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core as jex
from jax.extend.core import JaxprEqn, Var

from minialpa.intra.memory.compiler import scheduled_kernels
from minialpa.intra.memory.lowering import add_equation, add_step
from minialpa.intra.memory.operations import Recorder
from minialpa.intra.memory.packing import pack
from minialpa.intra.memory.timeline import Timeline, timeline_of
from minialpa.intra.spmd import ShardedEquations, ShardOps, split_axes, walk
from minialpa.intra.strategies.loops import ScanBody
from minialpa.intra.strategies.reshard import ReshardStep
from minialpa.rules.factors import Factors, localize
from minialpa.sharding import EquationSpecs
from minialpa.tracing.jaxprs import Atom, bytes_of, dtype_name, flatten_calls, is_literal, shape_of, sub_jaxprs

_LOOPS = ("scan", "while", "cond")


@dataclass(frozen=True, slots=True)
class Recording:
    """A program as operations.

    Attributes:
        recorder: the operations and their values.
        inputs: values of the arguments, in order.
        results: values of the results, in order.
    """

    recorder: Recorder
    inputs: Sequence[int]
    results: Sequence[int]

    def timeline(self, pairs: Sequence[tuple[int, int]] = ()) -> Timeline:
        """When its buffers are in use. pairs: (i, o) where result o takes over the buffer of input i."""
        kernels = scheduled_kernels(self.recorder, self.inputs, self.results)
        return timeline_of(kernels, self.recorder.sizes, self.inputs, self.results, pairs)

    def temp_bytes(self) -> float:
        """What it needs besides arguments and results."""
        n_bytes, _ = pack(self.timeline(), self.recorder.sizes)
        return n_bytes


def record_program(program: ShardedEquations) -> Recording:
    """The operations of a program with its collectives."""
    mesh_shape = program.mesh.shape
    recorder = Recorder(joint_barriers=program.mesh.waits_at_barriers)
    inputs = []
    for v in program.invars:
        shape = program.specs[v].shard_shape(shape_of(v), mesh_shape)
        inputs.append(recorder.shard(v, shape, "argument"))

    def move(value: int, step: ReshardStep, atom: Atom) -> int:
        return add_step(recorder, value, step, atom, mesh_shape)

    def run(eqn: JaxprEqn, factors: Factors, chosen: EquationSpecs, operands: list[int]) -> list[int]:
        made = zip(eqn.outvars, chosen.made, strict=True)
        shapes = [spec.shard_shape(shape_of(v), mesh_shape) for v, spec in made]
        scratch_bytes = _local_body_bytes(eqn, factors, chosen, mesh_shape) if eqn.primitive.name in _LOOPS else 0.0
        return add_equation(recorder, eqn, operands, shapes, scratch_bytes)

    def loop(eqn: JaxprEqn, body: ScanBody, inside: ShardedEquations, operands: list[int]) -> list[int]:
        ends = enumerate(zip(eqn.outvars, inside.out_specs, strict=True))
        shapes = [body.outer_result(r, spec).shard_shape(shape_of(v), mesh_shape) for r, (v, spec) in ends]
        return add_equation(recorder, eqn, operands, shapes, record_program(inside).temp_bytes())

    results = walk(program, inputs, ShardOps(recorder.literal, move, run, loop))
    return Recording(recorder, inputs, results)


def record_equations(
    eqns: Sequence[JaxprEqn], invars: Sequence[Var], outvars: Sequence[Atom], joint_barriers: bool = False
) -> tuple[Recording, dict[Var, int]]:
    """The operations of equations on whole arrays; the value of each variable. Literals are no results."""
    recorder = Recorder(joint_barriers=joint_barriers)
    env = {v: recorder.value(bytes_of(v), shape_of(v), dtype_name(v), "argument") for v in invars}
    for eqn in eqns:
        reads = [recorder.literal(atom) if is_literal(atom) else env[atom] for atom in eqn.invars]
        scratch_bytes = _body_bytes(eqn.params) if eqn.primitive.name in _LOOPS and sub_jaxprs(eqn) else 0.0
        shapes = [shape_of(v) for v in eqn.outvars]
        env.update(zip(eqn.outvars, add_equation(recorder, eqn, reads, shapes, scratch_bytes), strict=True))

    results = [env[atom] for atom in outvars if not is_literal(atom)]
    return Recording(recorder, [env[v] for v in invars], results), env


def _local_body_bytes(eqn: JaxprEqn, factors: Factors, chosen: EquationSpecs, mesh_shape: tuple[int, ...]) -> float:
    """The same as `_body_bytes` for a loop or branch over shards."""
    splits = {
        factor: math.prod(mesh_shape[axis] for axis in axes) for factor, axes in split_axes(factors, chosen).items()
    }
    return _body_bytes(localize(eqn, factors, splits))


def _body_bytes(params: Mapping[str, Any]) -> float:
    """What one pass through the largest body of a loop, or branch, needs besides its operands and results."""
    most = 0.0
    for jaxpr in jex.jaxprs_in_params(dict(params)):
        flat = flatten_calls(jaxpr, [None] * len(jaxpr.constvars))
        recording, _ = record_equations(flat.eqns, (*flat.constvars, *flat.invars), flat.outvars)
        most = max(most, recording.temp_bytes())
    return most
