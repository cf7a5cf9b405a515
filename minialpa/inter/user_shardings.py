"""Solved meshes go in; the lines of the step that give shardings come out, with how many of these the plan has."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding

from minialpa.cluster import LogicalMesh
from minialpa.errors import InfeasibleError
from minialpa.intra.graph.constraints import Constraint, constraint_of_equation
from minialpa.intra.graph.problem import MeshEquations, MeshSharding
from minialpa.intra.strategies.loops import scan_body
from minialpa.intra.strategies.reshard import reshard_table
from minialpa.ir.equations import bytes_of, is_constraint, shape_of, source_line
from minialpa.options import AutoShardingOption
from minialpa.plan import UserSharding
from minialpa.sharding import EquationSpecs, Spec


def user_shardings(
    meshes: Iterable[tuple[MeshEquations, MeshSharding, LogicalMesh, AutoShardingOption]],
) -> tuple[UserSharding, ...]:
    found: dict[str, UserSharding] = {}
    for problem, solved, mesh, option in meshes:
        runs = zip(problem.eqns, solved.equations, problem.times, strict=True)
        for eqn, chosen, times in _constraints(runs):
            line = source_line(eqn)
            known = found.get(line)
            sharding = eqn.params["sharding"]
            spec = str(sharding.spec if isinstance(sharding, NamedSharding) else sharding)
            constraint = _constraint_on(mesh, eqn, option)
            is_kept = constraint is not None and constraint.allows(chosen.results[0])
            added_s = 0.0 if is_kept else _added_s(eqn, chosen, constraint, mesh, option)
            found[line] = UserSharding(
                line=line,
                wanted=known.wanted if known else re.sub("(, UNCONSTRAINED)+", ", ...", spec),
                n=1 + (known.n if known else 0),
                n_kept=is_kept + (known.n_kept if known else 0),
                is_pinned=option.shardings == "pin",
                added_s=_sum(times * added_s if added_s is not None else None, known.added_s if known else 0.0),
            )
    return tuple(found.values())


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def _constraints(
    runs: Iterable[tuple[JaxprEqn, EquationSpecs, int]],
) -> Iterator[tuple[JaxprEqn, EquationSpecs, int]]:
    """In `runs` and the loops among them. Each run: an equation, its specs, how many times a step runs it."""
    for eqn, chosen, times in runs:
        if is_constraint(eqn):
            yield eqn, chosen, times
        elif chosen.body:
            body = scan_body(eqn)
            assert body is not None, eqn.primitive
            yield from _constraints(
                (inner, specs, times * body.length) for inner, specs in zip(body.flat.eqns, chosen.body, strict=True)
            )


def _constraint_on(mesh: LogicalMesh, eqn: JaxprEqn, option: AutoShardingOption) -> Constraint | None:
    """None if the user's sharding is for another mesh."""
    try:
        return constraint_of_equation(eqn, mesh.shape, option)
    except InfeasibleError:
        return None


def _added_s(
    eqn: JaxprEqn, chosen: EquationSpecs, constraint: Constraint | None, mesh: LogicalMesh, option: AutoShardingOption
) -> float | None:
    """Seconds to reshard the array to the user's sharding and back, in the same plan; None for another mesh."""
    if constraint is None:
        return None
    (before,), (after,), (array,) = chosen.operands, chosen.results, eqn.outvars
    wanted = _completed(constraint, after)
    table = reshard_table(shape_of(array), bytes_of(array), mesh, option.forbidden_collectives)
    if not {before, wanted, after} <= set(table.number):
        return None
    return max(0.0, table.cost(before, wanted) + table.cost(wanted, after) - table.cost(before, after))


def _completed(constraint: Constraint, chosen: Spec) -> Spec:
    """The spec of `constraint`; its free dimensions as in `chosen`, if their axes are free."""
    used = set(constraint.spec.axes)
    return Spec(
        tuple(
            axes if dim in constraint.free and used.isdisjoint(axes) else wanted
            for dim, (axes, wanted) in enumerate(zip(chosen.dims, constraint.spec.dims, strict=True))
        )
    )
