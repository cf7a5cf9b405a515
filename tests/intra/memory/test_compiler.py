"""A second compiler is a second `Compiler`: liveness, donation and packing know none by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from minialpa import LogicalMesh
from minialpa.intra.memory.compiler import Compiler, Kernel, Values
from minialpa.intra.memory.liveness import lifetimes, peak_bytes
from minialpa.intra.memory.xla.model import XLA_CPU
from minialpa.intra.spmd import ShardedEquations
from minialpa.intra.strategies.reshard import ReshardStep
from minialpa.ir.equations import Atom, shape_of
from minialpa.sharding import EquationSpecs, Spec
from minialpa.tracing.flattening import trace_flat

# ---- a compiler that fuses nothing ----------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class PlainRecorder(Values):
    """Each equation and each step of a resharding is a kernel."""

    kernels: list[Kernel] = field(default_factory=list)


def add_equation(
    recorder: PlainRecorder,
    eqn: JaxprEqn,
    reads: Sequence[int],
    shapes: Sequence[Sequence[int]],
    scratch: tuple[float, ...],
) -> list[int]:
    writes = [recorder.shard(v, shape, eqn) for v, shape in zip(eqn.outvars, shapes, strict=True)]
    recorder.kernels.append(Kernel(reads=tuple(reads), writes=tuple(writes), scratch=scratch))
    return writes


def add_step(recorder: PlainRecorder, v: int, step: ReshardStep, atom: Atom, mesh_shape: tuple[int, ...]) -> int:
    result = recorder.shard(atom, step.dst.shard_shape(shape_of(atom), mesh_shape), step.kind)
    recorder.kernels.append(Kernel(reads=(v,), writes=(result,)))
    return result


PLAIN = Compiler(
    name="plain",
    waits_at_barriers=False,
    alignment_bytes=256,
    address_bytes=0,
    recorder=PlainRecorder,
    add_equation=add_equation,
    add_step=add_step,
    kernels=lambda recorder, inputs, results: recorder.kernels,
)

# ---- programs of 200 float32, 400 bytes on each of two devices -------------------------------------------------------

SPLIT, REPLICATED = Spec.parse("S0"), Spec.parse("R")


def chain(x: jax.Array, y: jax.Array) -> jax.Array:
    a = x + y
    b = jnp.sin(a)
    return b * a


def program(out_spec: Spec) -> ShardedEquations:
    """`chain` of two arrays, with everything split over two devices, except the result."""
    flat, _ = trace_flat(chain, *[jax.ShapeDtypeStruct((200,), jnp.float32)] * 2)
    made = [v for eqn in flat.eqns for v in eqn.outvars]

    def specs_of(eqn: Any) -> EquationSpecs:
        results = (SPLIT,) * len(eqn.outvars)
        return EquationSpecs((SPLIT,) * len(eqn.invars), results, results)

    return ShardedEquations(
        eqns=tuple(flat.eqns),
        invars=tuple(flat.invars),
        outvars=tuple(flat.outvars),
        specs=dict.fromkeys([*flat.invars, *made], SPLIT),
        equations={eqn: specs_of(eqn) for eqn in flat.eqns},
        out_specs=(out_spec,),
        mesh=LogicalMesh((2,)),
    )


def test_every_equation_of_a_plain_compiler_has_a_buffer() -> None:
    """`a` and `b` are in use when the product is written: 2 x 400 bytes, each in a slot of 512."""
    memory = peak_bytes(program(SPLIT), compiler=PLAIN)
    assert (memory.argument_bytes, memory.output_bytes, memory.temp_bytes) == (800, 400, 2 * 512)
    assert memory.peak_bytes == 800 + 400 + 1024


def test_a_plain_compiler_gathers_in_a_kernel() -> None:
    """The gathered result has 800 bytes. Until it is written, `a` is in its buffer; `b` and the product are beside."""
    memory = peak_bytes(program(REPLICATED), compiler=PLAIN)
    assert memory.peak_bytes == 800 + 800 + 2 * 512


def test_a_result_takes_over_a_donated_argument_under_any_compiler() -> None:
    """The product takes over the buffer of `x`, which nothing reads by then."""
    memory = peak_bytes(program(SPLIT), (0,), compiler=PLAIN)
    assert memory.alias_bytes == 400
    assert memory.peak_bytes == 800 + 400 - 400 + 2 * 512


def test_a_compiler_that_fuses_stores_nothing_of_the_same_program() -> None:
    assert peak_bytes(program(SPLIT), compiler=XLA_CPU).peak_bytes == 800 + 400


def test_lifetimes_are_those_of_the_kernels_of_a_plain_compiler() -> None:
    """Kernels 0, 1, 2 write a, b and the product; a and b are read until the end of the last."""
    of_chain = program(SPLIT)
    found = lifetimes(of_chain.eqns, of_chain.invars, of_chain.outvars, compiler=PLAIN)
    made = {eqn.outvars[0]: eqn.primitive.name for eqn in of_chain.eqns}
    assert found.n_times == 3
    assert {(made[v], start, end) for v, start, end in found.intervals} == {("add", 0, 3), ("sin", 1, 3), ("mul", 2, 3)}
