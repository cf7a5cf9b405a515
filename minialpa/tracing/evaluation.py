"""Runs equations, or a flat program, on values or tracers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from minialpa.ir.block import Block, block_of
from minialpa.ir.equations import Atom, is_constraint, is_literal, sub_jaxprs, type_of
from minialpa.support.private_jax import rebind, scopes_of


def eval_equation(eqn: JaxprEqn, args: Sequence[Any], params: Mapping[str, Any] | None = None) -> list[Any]:
    """Bind the equation's primitive on other arguments; new equations keep the source line of the old one."""
    out = rebind(eqn, args, eqn.params if params is None else params)
    return list(out) if eqn.primitive.multiple_results else [out]


def eval_named(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """`eval_equation` in the name scopes of the equation."""
    with scopes_of(eqn):
        return eval_equation(eqn, args)


def eval_on_shards(eqn: JaxprEqn, args: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """`eval_equation` in the program of one device: without sharding constraints, and without shardings in `params`."""
    if is_constraint(eqn):
        return list(args)
    return eval_equation(eqn, args, {name: _without_shardings(value) for name, value in params.items()})


def _without_shardings(param: Any) -> Any:
    """A parameter without shardings, also inside its programs."""
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
    if not _constrains(program.jaxpr):
        return program

    def evaluate(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        with scopes_of(eqn):
            return eval_on_shards(eqn, operands, eqn.params)

    def run(*args: Any) -> list[Any]:
        return eval_flat(block_of(program), args, evaluate)

    avals = [var.aval for var in program.jaxpr.invars]
    return jax.make_jaxpr(run)(*map(type_of, avals))


def _constrains(program: Jaxpr) -> bool:
    return any(is_constraint(eqn) or any(map(_constrains, sub_jaxprs(eqn))) for eqn in program.eqns)


def eval_flat(
    flat: Block, args: Sequence[Any], evaluate: Callable[[JaxprEqn, Sequence[Any]], list[Any]] = eval_named
) -> list[Any]:
    """Run a flat program on values or tracers. `evaluate` maps an equation and its operands to its results."""
    env: dict[Var, Any] = dict(zip(flat.constvars, flat.consts, strict=True))
    env.update(zip(flat.invars, args, strict=True))

    def read(atom: Atom) -> Any:
        return atom.val if is_literal(atom) else env[atom]

    for eqn in flat.eqns:
        env.update(zip(eqn.outvars, evaluate(eqn, list(map(read, eqn.invars))), strict=True))
    return [read(atom) for atom in flat.outvars]
