"""A `MeshEquations` and a logical mesh in; the cheapest shardings out, or the option that rules all out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import LogicalMesh
from minialpa.errors import InfeasibleError, MinialpaError
from minialpa.intra.graph.builder import GraphBuilder
from minialpa.intra.graph.memory_constraints import MemoryLimit, Usage
from minialpa.intra.graph.option_constraints import forbidden_message
from minialpa.intra.graph.problem import MeshEquations, MeshSharding
from minialpa.intra.solver.solve import Deadline, solve_graph
from minialpa.intra.strategies.combining import StartCounts
from minialpa.intra.strategies.loops import body_specs, scan_body
from minialpa.intra.strategies.reshard import reshard_table
from minialpa.intra.strategies.strategy_cache import StrategyCache
from minialpa.ir.equations import bytes_of, is_literal, shape_of, source_line
from minialpa.options import PLANNED_STEPS, AutoShardingOption
from minialpa.sharding import EquationSpecs, Spec

#: Allowed relative gap under a memory limit: far below the errors of the costs.
_GAP = 1e-3
#: Seconds of training that a nominal second of the solver must save. With 1, plans were up to 1.4 % slower.
_SAVED = 0.1
#: Seconds of a forbidden collective: far more than a step, without loss of its seconds in float64.
_FORBIDDEN_S = 1e7


class MeshSolver:
    def __init__(
        self,
        problem: MeshEquations,
        mesh: LogicalMesh,
        option: AutoShardingOption,
        cache: StrategyCache | None = None,
        counted: StartCounts | None = None,
        *,
        hidden_price: float = 1.0,
    ) -> None:
        """cache: shared with other problems. counted, hidden_price: see `CollectedCosts`."""
        self.problem, self.mesh, self.option, self.cache = problem, mesh, option, cache or StrategyCache()
        self.hidden_price = hidden_price
        with _memory_errors(mesh):
            self.builder = GraphBuilder(
                problem, mesh, option, cache=self.cache, counted=counted, hidden_price=hidden_price
            )

    def solve(
        self, limit: MemoryLimit | None, deadline: Deadline, kept: Sequence[Usage] = (), byte_s: float = 0.0
    ) -> MeshSharding:
        """The shardings of all values with the least seconds per step, within `limit`.

        Each byte per device of `kept` costs `byte_s` seconds. Raises InfeasibleError.
        """
        graph, n_steps = self.builder.graph(limit, kept, byte_s), PLANNED_STEPS[self.option.planning_effort]
        gap = _GAP if math.isfinite(n_steps) else 0.0
        with _memory_errors(self.mesh):
            solution = solve_graph(graph, deadline, gap=gap, cost_per_s=_SAVED / n_steps)
        return replace(self.builder.read(solution), counted_bytes=graph.peak_usage(solution.choices))

    def why_infeasible(self, time_limit_s: float) -> str | None:
        return _why_infeasible(self.problem, self.mesh, self.option, self.cache, time_limit_s)

    @property
    def n_bytes(self) -> float:
        return self.builder.n_bytes


@contextmanager
def _memory_errors(mesh: LogicalMesh) -> Iterator[None]:
    """A lack of memory while planning becomes an error of minialpa that names the mesh."""
    try:
        yield
    except MemoryError as error:
        raise MinialpaError(
            f"The planner needs more memory than this process can have, on a logical mesh of shape {mesh.shape}. "
            "Choose a `logical_shape` with fewer axes, set `fixed_specs` or `force_batch_dim_to_mesh_dim`, or plan on "
            "a machine with more memory."
        ) from error


# ---- forbidden collectives ------------------------------------------------------------------------------------------


class _Resharding(NamedTuple):
    """An operation or result, `reader`, requires another spec than the array is made in."""

    var: Var
    made: Spec
    required: Spec
    reader: str


def _why_infeasible(
    problem: MeshEquations, mesh: LogicalMesh, option: AutoShardingOption, cache: StrategyCache, time_limit_s: float
) -> str | None:
    """A message with the first array that needs a forbidden collective, or None.

    A second solve allows forbidden collectives at a high price, so its solution has as few as possible.
    """
    if not option.forbidden_collectives:
        return None

    builder = GraphBuilder(problem, mesh, option, cache=cache, forbidden_s=_FORBIDDEN_S)
    try:
        sharding = builder.read(solve_graph(builder.graph(), Deadline(time_limit_s)))
    except InfeasibleError:
        return None

    makers = {var: eqn for eqn in _all_equations(problem.eqns) for var in eqn.outvars}
    for array in _reshardings(problem, sharding):
        table = reshard_table(
            shape_of(array.var), bytes_of(array.var), mesh, option.forbidden_collectives, forbidden_s=_FORBIDDEN_S
        )
        if table.cost(array.made, array.required) >= _FORBIDDEN_S:
            made_by = _name_of(makers[array.var]) if array.var in makers else f"`{problem.paths.get(array.var, '')}`"
            return forbidden_message(
                option, array.var, array.made, array.required, f", from {made_by} to {array.reader},"
            )
    return None


def _reshardings(problem: MeshEquations, sharding: MeshSharding) -> Iterator[_Resharding]:
    yield from _reshardings_in(problem.eqns, sharding.equations, sharding.specs)
    for var, path in problem.results:
        yield _Resharding(var, sharding.specs[var], sharding.results[var], f"the result `{path}`")


def _reshardings_in(
    eqns: Sequence[JaxprEqn], chosen: Sequence[EquationSpecs], specs: Mapping[Var, Spec]
) -> Iterator[_Resharding]:
    for eqn, of_eqn in zip(eqns, chosen, strict=True):
        for operand, required in zip(eqn.invars, of_eqn.operands, strict=True):
            if not is_literal(operand):
                yield _Resharding(operand, specs[operand], required, _name_of(eqn))

        if of_eqn.body:
            body = scan_body(eqn)
            assert body is not None, eqn.primitive
            inside, left = body_specs(body, of_eqn)
            yield from _reshardings_in(body.flat.eqns, of_eqn.body, inside)
            for atom, required in zip(body.flat.outvars, left, strict=True):
                if not is_literal(atom):
                    yield _Resharding(atom, inside[atom], required, _name_of(eqn))


def _all_equations(eqns: Sequence[JaxprEqn]) -> Iterator[JaxprEqn]:
    for eqn in eqns:
        yield eqn
        body = scan_body(eqn)
        if body is not None:
            yield from _all_equations(body.flat.eqns)


def _name_of(eqn: JaxprEqn) -> str:
    return f"`{eqn.primitive.name}` at {source_line(eqn)}"
