"""Records programs for a compiler: shards with their collectives, or equations on whole arrays, in; a `Recording` out.

A loop or branch needs the buffers of its bodies while it runs. Bodies are recorded in the same way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend import core as jex
from jax.extend.core import Jaxpr, JaxprEqn, Primitive, Var

from minialpa.attention.blockwise import attend, differentiate
from minialpa.attention.operation import attention_gradient_p, attention_p, in_ring
from minialpa.attention.ring import Ring
from minialpa.grouped import grouped_product_p, grouped_sum_p, product, sum_of_products
from minialpa.intra.memory.buffers import BufferTimeline, Units, copies_of, pack, timeline_of
from minialpa.intra.memory.compiler import Compiler, ShardValues
from minialpa.intra.spmd import ShardedEquations, ShardOps, split_axes, walk
from minialpa.intra.strategies.loops import ScanBody
from minialpa.intra.strategies.reshard import ReshardStep
from minialpa.intra.strategies.rings import ring_axes
from minialpa.ir.block import Block
from minialpa.ir.equations import Atom, bytes_of, dtype_name, is_literal, shape_of, sub_jaxprs
from minialpa.ir.repeats import NO_REPEATS, Repeats
from minialpa.routed import routed_product_p, routed_sum_p
from minialpa.rules.factors import Factors
from minialpa.rules.registered import function_p, run_function
from minialpa.rules.shards import localize
from minialpa.sharding import EquationSpecs
from minialpa.tracing.flattening import flatten_calls

_LOOPS = ("scan", "while", "cond")
#: Primitives that are functions to compilers.
_FUNCTIONS: dict[Primitive, Callable[..., Any]] = {
    attention_p: attend,
    attention_gradient_p: differentiate,
    grouped_product_p: product,
    grouped_sum_p: sum_of_products,
    # Without foreign rows.
    routed_product_p: lambda *operands, **params: product(*operands[:5], **params),
    routed_sum_p: lambda *operands, **params: sum_of_products(*operands[:5], **params),
    function_p: run_function,
}
#: Compiled programs fill their results late, as their barriers ask.
_FILLED = (grouped_sum_p, routed_sum_p)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A program in the recorder of a compiler.

    arguments: variables of the inputs.
    inputs, results: their values.
    """

    compiler: Compiler
    recorder: ShardValues
    arguments: Sequence[Var]
    inputs: Sequence[int]
    results: Sequence[int]

    def timeline(self, pairs: Sequence[tuple[int, int]] = (), repeats: Repeats = NO_REPEATS) -> BufferTimeline:
        """pairs: (i, o) where result o takes over the buffer of input i."""
        kernels = self.compiler.kernels(self.recorder, self.inputs, self.results)
        sizes = self.recorder.sizes
        timeline = timeline_of(kernels, sizes, inputs=self.inputs, results=self.results, pairs=pairs)
        if not repeats.equations:
            return timeline
        return replace(timeline, copies=copies_of(timeline, kernels, self.inputs, self._units(repeats)))

    def _units(self, repeats: Repeats) -> Units:
        makers = {v: value.maker for v, value in enumerate(self.recorder.values)}
        found = ((v, repeats.equations.get(maker)) for v, maker in makers.items() if not isinstance(maker, str))
        arguments = zip(self.inputs, self.arguments, strict=True)
        return Units(
            places={v: repeated for v, repeated in found if repeated is not None},
            moved={v for v, maker in makers.items() if isinstance(maker, str)},
            arguments={v for v, argument in arguments if repeats.n_variables(argument) > 1},
        )

    def temporaries(self) -> tuple[float, ...]:
        """Bytes at the peak, largest first; all gaps between them count as one more."""
        sizes = self.recorder.sizes
        packed = pack(self.timeline(), sizes, self.compiler.alignment_bytes)
        buffers = [*(sizes[value] for value in packed.values), *packed.scratch]
        gaps = packed.n_bytes - sum(buffers)
        return tuple(sorted((n_bytes for n_bytes in (*buffers, gaps) if n_bytes > 0), reverse=True))


def record_program(program: ShardedEquations, compiler: Compiler) -> Recording:
    mesh_shape = program.mesh.shape
    waits = compiler.waits_at_barriers and not (program.in_loop and compiler.drops_inner_barriers)
    recorder = compiler.recorder(waits_at_barriers=waits)
    add_equation, add_step = compiler.add_equation, compiler.add_step
    inputs = []
    for v in program.invars:
        shape = program.specs[v].shard_shape(shape_of(v), mesh_shape)
        inputs.append(recorder.shard(v, shape, "argument"))

    def move(value: int, step: ReshardStep, atom: Atom) -> int:
        return add_step(recorder, value, step, atom, mesh_shape)

    def run(eqn: JaxprEqn, factors: Factors, chosen: EquationSpecs, operands: list[int]) -> list[int]:
        shapes = [spec.shard_shape(shape_of(v), mesh_shape) for v, spec in zip(eqn.outvars, chosen.made, strict=True)]
        if eqn.primitive in _FUNCTIONS:
            params = localize(eqn, factors, _splits(factors, chosen, mesh_shape))
            n = math.prod(mesh_shape[axis] for axis in ring_axes(factors, chosen.operands))
            ring = Ring(("ring",), n, chosen.is_balanced) if n > 1 else None
            return _add_function(eqn, params, recorder, operands, compiler, ring)
        scratch: tuple[float, ...] = ()
        if eqn.primitive.name in _LOOPS:
            scratch = _body_buffers(_bodies(localize(eqn, factors, _splits(factors, chosen, mesh_shape))), compiler)
        return add_equation(recorder, eqn, operands, shapes, scratch)

    def loop(eqn: JaxprEqn, body: ScanBody, inside: ShardedEquations, operands: list[int]) -> list[int]:
        ends = enumerate(zip(eqn.outvars, inside.out_specs, strict=True))
        shapes = [body.outer_result(r, spec).shard_shape(shape_of(v), mesh_shape) for r, (v, spec) in ends]
        return add_equation(recorder, eqn, operands, shapes, record_program(inside, compiler).temporaries())

    results = walk(program, inputs, ShardOps(recorder.literal, move, run, loop))
    return Recording(compiler=compiler, recorder=recorder, arguments=program.invars, inputs=inputs, results=results)


def record_equations(
    eqns: Sequence[JaxprEqn],
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    compiler: Compiler,
    *,
    waits_at_barriers: bool,
) -> tuple[Recording, dict[Var, int]]:
    """On whole arrays; with the value of each variable."""
    recorder = compiler.recorder(waits_at_barriers=waits_at_barriers)
    env = {v: recorder.shard(v, shape_of(v), "argument") for v in invars}
    inputs = list(env.values())
    _add_equations(eqns, env, recorder, compiler, _body_buffers)
    results = [env[atom] for atom in outvars if not is_literal(atom)]
    recording = Recording(compiler=compiler, recorder=recorder, arguments=invars, inputs=inputs, results=results)
    return recording, env


def _add_equations(
    eqns: Sequence[JaxprEqn],
    env: dict[Var, int],
    recorder: ShardValues,
    compiler: Compiler,
    buffers_of: Callable[[tuple[Jaxpr, ...], Compiler], tuple[float, ...]],
) -> None:
    """buffers_of: temporaries of loop bodies."""
    for eqn in eqns:
        reads = [recorder.literal(atom) if is_literal(atom) else env[atom] for atom in eqn.invars]
        if eqn.primitive in _FUNCTIONS:
            made = _add_function(eqn, eqn.params, recorder, reads, compiler)
        elif eqn.params.get("branches_platforms"):
            # The last is for all other platforms. The planner does not know which kernels the devices have.
            (*_, branch) = sub_jaxprs(eqn)
            flat = flatten_calls(branch, [None] * len(branch.constvars))
            env.update(zip(flat.invars, reads[1:], strict=True))
            _add_equations(flat.eqns, env, recorder, compiler, buffers_of)
            made = [recorder.literal(atom) if is_literal(atom) else env[atom] for atom in flat.outvars]
        else:
            is_loop = eqn.primitive.name in _LOOPS and bool(sub_jaxprs(eqn))
            scratch = buffers_of(_bodies(eqn.params), compiler) if is_loop else ()
            made = compiler.add_equation(recorder, eqn, reads, [shape_of(v) for v in eqn.outvars], scratch)
        env.update(zip(eqn.outvars, made, strict=True))


def _splits(factors: Factors, chosen: EquationSpecs, mesh_shape: tuple[int, ...]) -> dict[int, int]:
    axes_of = split_axes(factors, chosen)
    return {factor: math.prod(mesh_shape[axis] for axis in axes) for factor, axes in axes_of.items()}


def _add_function(
    eqn: JaxprEqn,
    params: Mapping[str, Any],
    recorder: ShardValues,
    operands: Sequence[int],
    compiler: Compiler,
    ring: Ring | None = None,
) -> list[int]:
    """Record a function, such as attention, by its equations; `eqn` is the maker of all values."""
    arrays = tuple((recorder.values[v].shape, recorder.values[v].dtype) for v in operands)
    flat = _flat_function(eqn.primitive, tuple(params.items()), arrays, ring)
    constants = [recorder.value(bytes_of(v), shape_of(v), dtype_name(v), "constant") for v in flat.constvars]
    env = dict(zip((*flat.constvars, *flat.invars), (*constants, *operands), strict=True))

    first, waits = len(recorder.values), recorder.waits_at_barriers
    recorder.waits_at_barriers = waits and (eqn.primitive in _FILLED or not compiler.drops_inner_barriers)
    _add_equations(flat.eqns, env, recorder, compiler, _body_buffers_once)
    recorder.waits_at_barriers = waits
    recorder.values[first:] = [value._replace(maker=eqn) for value in recorder.values[first:]]
    return [recorder.literal(atom) if is_literal(atom) else env[atom] for atom in flat.outvars]


@functools.lru_cache(maxsize=256)
def _flat_function(
    primitive: Primitive,
    params: tuple[tuple[str, Hashable], ...],
    arrays: tuple[tuple[tuple[int, ...], str], ...],
    ring: Ring | None,
) -> Block:
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arrays]
    fun = _FUNCTIONS[primitive] if ring is None else functools.partial(in_ring(primitive), ring)
    axes = [] if ring is None else [(name, ring.n) for name in ring.names]
    closed = jax.make_jaxpr(functools.partial(fun, **dict(params)), axis_env=axes)(*avals)
    return flatten_calls(closed.jaxpr, [None] * len(closed.jaxpr.constvars))


def _bodies(params: Mapping[str, Any]) -> tuple[Jaxpr, ...]:
    return tuple(jex.jaxprs_in_params(dict(params)))


def _body_buffers(bodies: Sequence[Jaxpr], compiler: Compiler) -> tuple[float, ...]:
    """In one pass through the largest body."""
    most: tuple[float, ...] = ()
    for jaxpr in bodies:
        flat = flatten_calls(jaxpr, [None] * len(jaxpr.constvars))
        invars = (*flat.constvars, *flat.invars)
        # No compiler waits at barriers here.
        recording, _ = record_equations(flat.eqns, invars, flat.outvars, compiler, waits_at_barriers=False)
        most = max(most, recording.temporaries(), key=sum)
    return most


#: Bodies of `_flat_function` are the same objects each time.
_body_buffers_once = functools.lru_cache(maxsize=1024)(_body_buffers)
