"""Says which option leaves a problem without a sharding, and at which operation.

The problem is solved again with a high price on the collectives that the options forbid, so that the solution has as
few of them as possible. The message names the first place that still needs one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import LogicalMesh
from minialpa.errors import InfeasibleError
from minialpa.intra.graph.builder import GraphBuilder
from minialpa.intra.graph.option_constraints import forbidden_message
from minialpa.intra.graph.problem import MeshEquations, MeshSharding
from minialpa.intra.solver.solve import Deadline, solve_graph
from minialpa.intra.strategies.loops import body_specs, scan_body
from minialpa.intra.strategies.reshard import reshard_table
from minialpa.intra.strategies.strategy_cache import StrategyCache
from minialpa.ir.equations import bytes_of, is_literal, shape_of, source_line
from minialpa.options import AutoShardingOption
from minialpa.sharding import EquationSpecs, Spec

#: Seconds that a forbidden collective costs: far more than any step, and little enough that in float64 the seconds of
#: a step are not lost beside a sum of these.
_FORBIDDEN_S = 1e7


class _Resharded(NamedTuple):
    """An array that is made in one spec, and which `reader`, an operation or result, wants in another."""

    var: Var
    made: Spec
    wanted: Spec
    reader: str


def why_infeasible(
    problem: MeshEquations, mesh: LogicalMesh, option: AutoShardingOption, cache: StrategyCache, time_limit_s: float
) -> str | None:
    """Why forbidden collectives leave no sharding; None if they are not what leaves none."""
    if not option.forbidden_collectives:
        return None

    builder = GraphBuilder(problem, mesh, option, folded=True, cache=cache, forbidden_s=_FORBIDDEN_S)
    try:
        sharding = builder.read(solve_graph(builder.graph(), Deadline(time_limit_s)))
    except InfeasibleError:
        return None

    # In order, so that the first place is named.
    makers = {var: eqn for eqn in _all_equations(problem.eqns) for var in eqn.outvars}
    for array in _resharded(problem, sharding):
        table = reshard_table(
            shape_of(array.var), bytes_of(array.var), mesh, option.forbidden_collectives, forbidden_s=_FORBIDDEN_S
        )
        if table.cost(array.made, array.wanted) >= _FORBIDDEN_S:
            made_by = _name_of(makers[array.var]) if array.var in makers else f"`{problem.paths.get(array.var, '')}`"
            return forbidden_message(
                option, array.var, array.made, array.wanted, f", from {made_by} to {array.reader},"
            )
    return None


def _resharded(problem: MeshEquations, sharding: MeshSharding) -> Iterator[_Resharded]:
    """Every array of the problem, as it is made and as each reader wants it, in order."""
    yield from _resharded_in(problem.eqns, sharding.equations, sharding.specs)
    for var, path in problem.results:
        yield _Resharded(var, sharding.specs[var], sharding.results[var], f"the result `{path}`")


def _resharded_in(
    eqns: Sequence[JaxprEqn], chosen: Sequence[EquationSpecs], specs: Mapping[Var, Spec]
) -> Iterator[_Resharded]:
    for eqn, own in zip(eqns, chosen, strict=True):
        for operand, wanted in zip(eqn.invars, own.operands, strict=True):
            if not is_literal(operand):
                yield _Resharded(operand, specs[operand], wanted, _name_of(eqn))

        if own.body:
            body = scan_body(eqn)
            assert body is not None, eqn.primitive
            inside, left = body_specs(body, own)
            yield from _resharded_in(body.flat.eqns, own.body, inside)
            for atom, wanted in zip(body.flat.outvars, left, strict=True):
                if not is_literal(atom):
                    yield _Resharded(atom, inside[atom], wanted, _name_of(eqn))


def _all_equations(eqns: Sequence[JaxprEqn]) -> Iterator[JaxprEqn]:
    """Equations, and those inside the scans that are planned as loops."""
    for eqn in eqns:
        yield eqn
        body = scan_body(eqn)
        if body is not None:
            yield from _all_equations(body.flat.eqns)


def _name_of(eqn: JaxprEqn) -> str:
    return f"`{eqn.primitive.name}` at {source_line(eqn)}"
