"""Equations run again, on values or tracers: one equation, one of a shard, or a flat program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Var

from minialpa.support.private_jax import bind_again
from minialpa.tracing.jaxprs import Atom, FlatJaxpr, is_constraint, is_literal


def eval_equation(eqn: JaxprEqn, args: Sequence[Any], params: Mapping[str, Any] | None = None) -> list[Any]:
    """Bind the equation's primitive again on new arguments; new equations keep the source line of the old one."""
    out = bind_again(eqn, args, eqn.params if params is None else params)
    return list(out) if eqn.primitive.multiple_results else [out]


def eval_on_shards(eqn: JaxprEqn, args: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """`eval_equation` in the program of one device, where shardings on a mesh of the user have no meaning."""
    if is_constraint(eqn):
        return list(args)
    local = {name: None if isinstance(value, jax.sharding.Sharding) else value for name, value in params.items()}
    return eval_equation(eqn, args, local)


def eval_flat(flat: FlatJaxpr, args: Sequence[Any]) -> list[Any]:
    """Run a flat program on values or tracers."""
    env: dict[Var, Any] = dict(zip(flat.constvars, flat.consts, strict=True))
    env.update(zip(flat.invars, args, strict=True))

    def read(atom: Atom) -> Any:
        return atom.val if is_literal(atom) else env[atom]

    for eqn in flat.eqns:
        out = eval_equation(eqn, [read(atom) for atom in eqn.invars])
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(atom) for atom in flat.outvars]
