"""Solved meshes go in; the lines of the step that give shardings come out, with how many of these the plan has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding

from minialpa.errors import InfeasibleError
from minialpa.intra.graph.constraints import constraint_of_equation
from minialpa.intra.strategies.loops import scan_body
from minialpa.ir.equations import is_constraint, source_line
from minialpa.options import AutoShardingOption
from minialpa.plan import UserSharding
from minialpa.sharding import EquationSpecs


def user_shardings(
    meshes: Sequence[tuple[Sequence[JaxprEqn], Sequence[EquationSpecs], tuple[int, ...], AutoShardingOption]],
) -> tuple[UserSharding, ...]:
    """meshes: equations, their specs, shape and options of each mesh."""
    found: dict[str, UserSharding] = {}
    for eqns, specs, shape, option in meshes:
        for eqn, chosen in _constraints(eqns, specs):
            line = source_line(eqn)
            known = found.get(line)
            sharding = eqn.params["sharding"]
            spec = str(sharding.spec if isinstance(sharding, NamedSharding) else sharding)
            found[line] = UserSharding(
                line=line,
                wanted=known.wanted if known else re.sub("(, UNCONSTRAINED)+", ", ...", spec),
                n=1 + (known.n if known else 0),
                n_kept=_is_kept(eqn, chosen, shape, option) + (known.n_kept if known else 0),
                is_pinned=option.shardings == "pin",
            )
    return tuple(found.values())


def _constraints(eqns: Sequence[JaxprEqn], specs: Sequence[EquationSpecs]) -> Iterator[tuple[JaxprEqn, EquationSpecs]]:
    for eqn, chosen in zip(eqns, specs, strict=True):
        if is_constraint(eqn):
            yield eqn, chosen
        elif chosen.body:
            body = scan_body(eqn)
            assert body is not None, eqn.primitive
            yield from _constraints(body.flat.eqns, chosen.body)


def _is_kept(eqn: JaxprEqn, chosen: EquationSpecs, shape: tuple[int, ...], option: AutoShardingOption) -> bool:
    try:
        return constraint_of_equation(eqn, shape, option).allows(chosen.results[0])
    except InfeasibleError:  # for another mesh
        return False
