"""Functions of a program: placed equations and their specs in, pure jax functions with sharding constraints out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from minialpa.intra.graph import EquationSpecs
from minialpa.jaxprs import aval_of, eval_equation, is_literal, shape_of
from minialpa.program import Function
from minialpa.sharding import AXIS_NAMES, Spec


def struct_of(var: Var) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval_of(var).shape, aval_of(var).dtype)


def task_function(
    name: str,
    mesh: int,
    mesh_shape: tuple[int, ...],
    eqns: Sequence[JaxprEqn],
    invars: Sequence[Var],
    outvars: Sequence[Var],
    specs: Mapping[Var, Spec],
    equations: Mapping[int, EquationSpecs],
    out_specs: Sequence[Spec],
) -> Function:
    """The equations of a task as a function. `equations` maps the id of an equation to its specs."""
    mesh_view = AbstractMesh(mesh_shape, AXIS_NAMES[: len(mesh_shape)], axis_types=(AxisType.Auto,) * len(mesh_shape))

    def constrain(x: Any, spec: Spec) -> Any:
        # On one device a constraint says nothing, and still keeps XLA from simplifying across it.
        if max(mesh_shape) == 1:
            return x
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh_view, spec.partition_spec()))

    def fun(*args: Any) -> tuple[Any, ...]:
        env: dict[Var, Any] = dict(zip(invars, args, strict=True))
        moved: dict[tuple[Var, Spec], Any] = {}

        def operand(v: Any, spec: Spec) -> Any:
            if is_literal(v):
                return v.val
            if spec == specs[v] or not shape_of(v):
                return env[v]
            if (v, spec) not in moved:
                # Both ends are pinned: left to itself, the partitioner carries the new sharding back through the
                # equations that made the value, and has been seen to get a split of both parts of a reshape wrong.
                moved[v, spec] = constrain(constrain(env[v], specs[v]), spec)
            return moved[v, spec]

        for eqn in eqns:
            chosen = equations[id(eqn)]
            out = eval_equation(eqn, [operand(v, s) for v, s in zip(eqn.invars, chosen.operands, strict=True)])
            if chosen.anchored:
                out = [constrain(x, s) if s.dims else x for x, s in zip(out, chosen.results, strict=True)]
            env.update(zip(eqn.outvars, out, strict=True))
        return tuple(env[v] for v in outvars)

    return Function(
        name,
        mesh,
        fun,
        tuple(struct_of(v) for v in invars),
        tuple(specs[v].partition_spec() for v in invars),
        tuple(struct_of(v) for v in outvars),
        tuple(spec.partition_spec() for spec in out_specs),
    )


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a + b.astype(a.dtype),
    "max": jnp.maximum,
    "min": jnp.minimum,
    "and": jnp.logical_and,
    "or": jnp.logical_or,
    "prod": lambda a, b: a * b,
}


def accumulate_function(
    mesh: int, loops: Sequence[Var], totals: Sequence[Var], reductions: Sequence[str], specs: Mapping[Var, Spec]
) -> Function:
    """(*totals, *values) -> totals, elementwise by each one's reduction. Totals are donated."""
    n = len(totals)

    def fun(*args: Any) -> tuple[Any, ...]:
        return tuple(_COMBINE[r](a, b) for r, a, b in zip(reductions, args[:n], args[n:], strict=True))

    total_specs = tuple(specs[v].partition_spec() for v in loops)
    out = tuple(struct_of(v) for v in totals)
    structs = (*out, *(struct_of(v) for v in loops))
    return Function(f"accumulate{mesh}", mesh, fun, structs, total_specs * 2, out, total_specs, tuple(range(n)))


def widen_function(mesh: int, loops: Sequence[Var], totals: Sequence[Var], specs: Mapping[Var, Spec]) -> Function:
    """The values of the first micro-batch in the dtype of their totals."""
    dtypes = [aval_of(v).dtype for v in totals]
    in_specs = tuple(specs[v].partition_spec() for v in loops)

    def fun(*args: Any) -> tuple[Any, ...]:
        return tuple(x.astype(dtype) for x, dtype in zip(args, dtypes, strict=True))

    structs, out = tuple(struct_of(v) for v in loops), tuple(struct_of(v) for v in totals)
    return Function(f"widen{mesh}", mesh, fun, structs, in_specs, out, in_specs)


def concatenate_function(mesh: int, loop: Var, total: Var, dim: int, n: int, spec: Spec) -> Function:
    """The parts of `n` micro-batches, one behind the other."""
    named = spec.partition_spec()
    return Function(
        f"concatenate{mesh}",
        mesh,
        lambda *parts: (jnp.concatenate(parts, axis=dim),),
        (struct_of(loop),) * n,
        (named,) * n,
        (struct_of(total),),
        (named,),
    )


def copy_function(mesh: int, values: Sequence[tuple[Any, Spec]]) -> Function:
    """New arrays with the values of the given ones; an aval and a spec for each."""
    structs = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval, _ in values)
    specs = tuple(spec.partition_spec() for _, spec in values)
    return Function(f"copy{mesh}", mesh, lambda *xs: tuple(map(jnp.copy, xs)), structs, specs, structs, specs)
