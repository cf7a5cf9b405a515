"""Equations over shards: equations and their specs in, the program of one device with explicit collectives out.

`walk` goes through equations as a device does: it reshards operands, runs each equation on shards, finishes what is
reduced at once, and reshards results. What a shard is, the caller says: `shard_program` computes with arrays under
`jax.shard_map`, `collectives_of` only counts. So what a plan predicts and what runs are one and the same.

Nothing is left to XLA's partitioner, which does not know partial sums and chooses collectives of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import LogicalMesh
from minialpa.cost import Collective
from minialpa.errors import VerifyError
from minialpa.intra.strategies.candidates import eager_reductions
from minialpa.intra.strategies.loops import ScanBody, body_specs, scan_body
from minialpa.intra.strategies.reshard import Step, reshard_table
from minialpa.rules.factors import Factors, Reduction, factors_of, run_shard
from minialpa.sharding import AXIS_NAMES, EquationSpecs, Spec, abstract_mesh
from minialpa.tracing.jaxprs import (
    Atom,
    aval_of,
    bytes_of,
    eval_equation,
    is_extended,
    is_gradient_marker,
    is_literal,
    operand_vars,
    shape_of,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Interpreter(Generic[T]):
    """What `walk` does with a shard: `literal` makes one, `move` takes a step, `run` an equation, `loop` a scan."""

    literal: Callable[[Atom], T]
    move: Callable[[T, Step, Atom], T]
    run: Callable[[JaxprEqn, Factors, EquationSpecs, list[T]], list[T]]
    loop: Callable[[JaxprEqn, ScanBody, ShardedEquations, list[T]], list[T]]


@dataclass(frozen=True, slots=True, eq=False)
class ShardedEquations:
    """Equations of one program on `mesh`, with the specs of all variables and (by id) of all equations.

    forbidden: kinds of collectives that may not be used for resharding.
    """

    eqns: tuple[JaxprEqn, ...]
    invars: tuple[Var, ...]
    outvars: tuple[Atom, ...]
    specs: Mapping[Var, Spec]
    equations: Mapping[int, EquationSpecs]
    out_specs: tuple[Spec, ...]
    mesh: LogicalMesh
    forbidden: tuple[str, ...] = ()


def walk(program: ShardedEquations, inputs: Sequence[T], interpreter: Interpreter[T]) -> list[T]:
    """Run `program`; a value that is resharded the same way for several readers is resharded once."""
    held: dict[tuple[Var, Spec], T] = {}
    specs, mesh = program.specs, program.mesh

    def moved(value: T, v: Atom, src: Spec, dst: Spec) -> T:
        way = () if src == dst else reshard_table(shape_of(v), bytes_of(v), mesh, program.forbidden).way(src, dst)
        for step in way:
            known = (v, step.dst)
            if not is_literal(v) and known in held:
                value = held[known]
            else:
                value = interpreter.move(value, step, v)
                if not is_literal(v):
                    held[known] = value
        return value

    def operand(v: Atom, spec: Spec) -> T:
        if is_literal(v):
            return moved(interpreter.literal(v), v, Spec.replicated(len(shape_of(v))), spec)
        if (v, spec) not in held:
            moved(held[v, specs[v]], v, specs[v], spec)
        return held[v, spec]

    held.update(((v, specs[v]), x) for v, x in zip(program.invars, inputs, strict=True))
    for eqn in program.eqns:
        chosen = program.equations[id(eqn)]
        operands = [operand(v, s) for v, s in zip(eqn.invars, chosen.operands, strict=True)]
        if chosen.body:
            body, inside = _iteration(eqn, chosen, program)
            results = interpreter.loop(eqn, body, inside, operands)
            held.update(((v, s), x) for v, s, x in zip(eqn.outvars, chosen.results, results, strict=True))
            continue
        factors = factors_of(eqn)
        values = interpreter.run(eqn, factors, chosen, operands)
        finish = eager_reductions(factors, chosen.operands, chosen.made, mesh.shape)
        for v, x, step, made, left in zip(eqn.outvars, values, finish, chosen.made, chosen.results, strict=True):
            whole = x if step is None else interpreter.move(x, step, v)
            held[v, made] = whole
            held[v, left] = moved(whole, v, made, left)
    return [operand(v, spec) for v, spec in zip(program.outvars, program.out_specs, strict=True)]


def _iteration(eqn: JaxprEqn, chosen: EquationSpecs, program: ShardedEquations) -> tuple[ScanBody, ShardedEquations]:
    """The body of a scan, and its program."""
    body = scan_body(eqn)
    assert body is not None, eqn.primitive
    specs, out_specs = body_specs(body, chosen)
    flat = body.flat
    equations = {id(e): s for e, s in zip(flat.eqns, chosen.body, strict=True)}
    invars = (*flat.constvars, *flat.invars)
    return body, replace(
        program, eqns=flat.eqns, invars=invars, outvars=flat.outvars, specs=specs, equations=equations,
        out_specs=out_specs,
    )  # fmt: skip


# ---- counting -------------------------------------------------------------------------------------------------------


class Communication(NamedTuple):
    """A collective, and how often it happens. of_gradient: nothing waits for it but what a step does in the end."""

    collective: Collective
    times: int
    of_gradient: bool


def collectives_of(program: ShardedEquations) -> list[Communication]:
    """What the program communicates when it runs once, in order."""
    found: list[Communication] = []
    gradients = {v for eqn in program.eqns if is_gradient_marker(eqn) for v in operand_vars(eqn)}

    def move(_: None, step: Step, v: Atom) -> None:
        collective = step.collective(bytes_of(v), program.mesh.shape)
        if collective is not None:
            found.append(Communication(collective, 1, not is_literal(v) and v in gradients))

    def run(eqn: JaxprEqn, *_: Any) -> list[None]:
        return [None] * len(eqn.outvars)

    def loop(eqn: JaxprEqn, body: ScanBody, inside: ShardedEquations, _: Any) -> list[None]:
        found.extend(one._replace(times=body.length * one.times) for one in collectives_of(inside))
        return [None] * len(eqn.outvars)

    walk(program, [None] * len(program.invars), Interpreter(lambda _: None, move, run, loop))
    return found


# ---- arrays ---------------------------------------------------------------------------------------------------------


def shard_program(program: ShardedEquations) -> Callable[..., tuple[Any, ...]]:
    """The program as a function of arrays as they are stored (`Spec.stored_shape`), over all devices of its mesh."""
    mesh_shape = program.mesh.shape
    in_specs = [program.specs[v] for v in program.invars]

    def on_shards(*stored: Any) -> tuple[Any, ...]:
        shards = [
            x.reshape(x.shape[len(s.partial) :]) if s.partial else x for x, s in zip(stored, in_specs, strict=True)
        ]
        interpreter = Interpreter(_literal, _move(mesh_shape), _run(mesh_shape), _loop(mesh_shape))
        results = walk(program, shards, interpreter)
        return tuple(
            jnp.expand_dims(x, range(len(s.partial))) if s.partial else x
            for x, s in zip(results, program.out_specs, strict=True)
        )

    if max(mesh_shape) == 1:
        return on_shards
    return jax.shard_map(
        on_shards,
        mesh=abstract_mesh(mesh_shape),
        in_specs=tuple(s.partition_spec() for s in in_specs),
        out_specs=tuple(s.partition_spec() for s in program.out_specs),
        check_vma=False,
    )


def _literal(atom: Atom) -> Any:
    return atom.val


def _move(mesh_shape: tuple[int, ...]) -> Callable[[Any, Step, Atom], Any]:
    def move(x: Any, step: Step, v: Atom) -> Any:
        if is_extended(aval_of(v).dtype):  # typed keys move as the integers that they are made of
            data = take_step(jax.random.key_data(x), step, mesh_shape)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return take_step(jnp.asarray(x, aval_of(v).dtype), step, mesh_shape)

    return move


def _run(mesh_shape: tuple[int, ...]) -> Callable[[JaxprEqn, Factors, EquationSpecs, list[Any]], list[Any]]:
    def run(eqn: JaxprEqn, factors: Factors, chosen: EquationSpecs, operands: list[Any]) -> list[Any]:
        if eqn.effects and max(mesh_shape) > 1:
            return _run_once(eqn, operands, len(mesh_shape))
        axes = split_axes(factors, chosen)
        n_splits = {f: math.prod(mesh_shape[axis] for axis in own) for f, own in axes.items()}
        parts = {f: lax.axis_index(_names(own)) for f, own in axes.items() if f in factors.positional}
        results = run_shard(eqn, factors, operands, n_splits, parts)
        for v, x, spec in zip(eqn.outvars, results, chosen.made, strict=True):
            expected = spec.shard_shape(shape_of(v), mesh_shape)
            if tuple(np.shape(x)) != expected:
                raise VerifyError(
                    f"The rule of `{eqn.primitive.name}` makes a shard of shape {np.shape(x)} where {spec} of "
                    f"{shape_of(v)} is {expected}. The rule is wrong; please report it."
                )
        return results

    return run


def _loop(mesh_shape: tuple[int, ...]) -> Callable[[JaxprEqn, ScanBody, ShardedEquations, list[Any]], list[Any]]:
    def loop(eqn: JaxprEqn, body: ScanBody, inside: ShardedEquations, operands: list[Any]) -> list[Any]:
        interpreter = Interpreter(_literal, _move(mesh_shape), _run(mesh_shape), loop)

        def iteration(carry: Any, slices: Any) -> Any:
            out = walk(inside, [*body.flat.consts, *operands[: body.n_consts], *carry, *slices], interpreter)
            out = [
                jnp.asarray(x, aval_of(v).dtype) if is_literal(v) else x
                for x, v in zip(out, inside.outvars, strict=True)
            ]
            return out[: body.n_carry], out[body.n_carry :]

        carry, stacked = lax.scan(
            iteration,
            operands[body.n_consts : body.n_lead],
            operands[body.n_lead :],
            length=body.length,
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        return [*carry, *stacked]

    return loop


def split_axes(factors: Factors, chosen: EquationSpecs) -> dict[int, tuple[int, ...]]:
    """The mesh axes, outermost first, that split each factor of an equation."""
    splits: dict[int, tuple[int, ...]] = {}
    for arrays, specs in ((factors.operands, chosen.operands), (factors.results, chosen.made)):
        for dims, spec in zip(arrays, specs, strict=True):
            for dim, axes in zip(dims, spec.dims, strict=True):
                if axes:
                    leading = next(f for f in dim if factors.sizes[f] > 1)
                    splits[leading] = axes
    return splits


def _names(axes: Sequence[int]) -> tuple[str, ...]:
    return tuple(AXIS_NAMES[axis] for axis in axes)


def _run_once(eqn: JaxprEqn, operands: list[Any], n_axes: int) -> list[Any]:
    """An equation with side effects runs on the first device only; the others get its results."""
    names = _names(range(n_axes))
    is_first = lax.axis_index(names) == 0
    zeros = [jnp.zeros(shape_of(v), aval_of(v).dtype) for v in eqn.outvars]
    results = lax.cond(is_first, lambda *xs: eval_equation(eqn, xs), lambda *_: zeros, *operands)
    return [_all_reduce(x, names, "or" if x.dtype == np.bool_ else "sum") for x in results]


_REDUCE: dict[Reduction, Callable[..., Any]] = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}


def _all_reduce(x: Any, names: tuple[str, ...], reduction: Reduction) -> Any:
    if reduction in ("and", "or"):
        over = lax.pmin if reduction == "and" else lax.pmax
        return (
            over(x.astype(np.int8), names).astype(np.bool_) if x.dtype == np.bool_ else _gathered(x, names, reduction)
        )
    return _REDUCE[reduction](x, names) if reduction in _REDUCE else _gathered(x, names, reduction)


def _gathered(x: Any, names: tuple[str, ...], reduction: Reduction) -> Any:
    """Reductions that no collective has."""
    parts = lax.all_gather(x, names)
    return {"prod": jnp.prod, "and": jnp.bitwise_and.reduce, "or": jnp.bitwise_or.reduce}[reduction](parts, axis=0)


def take_step(x: Any, step: Step, mesh_shape: tuple[int, ...]) -> Any:
    """One step of a resharding on the shard `x` of this device."""
    names = _names(step.axes)
    match step.kind:
        case "cut":
            size = x.shape[step.dim] // math.prod(mesh_shape[axis] for axis in step.axes)
            return lax.dynamic_slice_in_dim(x, lax.axis_index(names) * size, size, step.dim)
        case "mask":
            return jnp.where(lax.axis_index(names) == 0, x, jnp.zeros_like(x))
        case "all-gather":
            return lax.all_gather(x, names, axis=step.dim, tiled=True)
        case "all-reduce":
            return _all_reduce(x, names, step.reduction)
        case "reduce-scatter":
            return lax.psum_scatter(x, names, scatter_dimension=step.dim, tiled=True)
        case "all-to-all":
            return lax.all_to_all(x, names, step.dim, step.source, tiled=True)
