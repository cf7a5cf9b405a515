"""Equations run again, on values or tracers: one equation, one of a shard, or a flat program."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from minialpa.ir.block import Block
from minialpa.ir.equations import Atom, is_constraint, is_literal, sub_jaxprs
from minialpa.support.private_jax import bind_again


def eval_equation(eqn: JaxprEqn, args: Sequence[Any], params: Mapping[str, Any] | None = None) -> list[Any]:
    """Bind the equation's primitive again on new arguments; new equations keep the source line of the old one."""
    out = bind_again(eqn, args, eqn.params if params is None else params)
    return list(out) if eqn.primitive.multiple_results else [out]


def eval_on_shards(eqn: JaxprEqn, args: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """`eval_equation` in the program of one device, where shardings on a mesh of the user have no meaning."""
    if is_constraint(eqn):
        return list(args)
    return eval_equation(eqn, args, {name: _without_shardings(value) for name, value in params.items()})


def _without_shardings(param: Any) -> Any:
    """A parameter of an equation, without shardings and without the constraints in its programs."""
    match param:
        case jax.sharding.Sharding():
            return None
        case ClosedJaxpr():
            return _without_constraints(param)
        case tuple() if param and all(isinstance(one, ClosedJaxpr) for one in param):
            return tuple(map(_without_constraints, param))
        case _:
            return param


@functools.lru_cache(maxsize=256)
def _without_constraints(program: ClosedJaxpr) -> ClosedJaxpr:
    """The program itself if nothing in it, or inside its loops and branches, constrains shardings."""
    if not _constrains(program.jaxpr):
        return program

    def run(*args: Any) -> list[Any]:
        env: dict[Var, Any] = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
        env.update(zip(program.jaxpr.invars, args, strict=True))

        def read(atom: Atom) -> Any:
            return atom.val if is_literal(atom) else env[atom]

        for eqn in program.jaxpr.eqns:
            env.update(zip(eqn.outvars, eval_on_shards(eqn, list(map(read, eqn.invars)), eqn.params), strict=True))
        return [read(atom) for atom in program.jaxpr.outvars]

    avals = [var.aval for var in program.jaxpr.invars]
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in avals]
    return jax.make_jaxpr(run)(*structs)


def _constrains(program: Jaxpr) -> bool:
    return any(is_constraint(eqn) or any(map(_constrains, sub_jaxprs(eqn))) for eqn in program.eqns)


def eval_flat(flat: Block, args: Sequence[Any]) -> list[Any]:
    """Run a flat program on values or tracers."""
    env: dict[Var, Any] = dict(zip(flat.constvars, flat.consts, strict=True))
    env.update(zip(flat.invars, args, strict=True))

    def read(atom: Atom) -> Any:
        return atom.val if is_literal(atom) else env[atom]

    for eqn in flat.eqns:
        out = eval_equation(eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(atom) for atom in flat.outvars]
