"""A `Residual` in; its best choices and a lower bound out, from an integer program (PuLP and HiGHS).

    minimise   sum_v c_v . x_v + sum_(v,w) E_vw . y_vw
    subject to sum_i x_v[i] = 1                                             one strategy per node        -> _choose_one
               sum_j y_vw[i, j] = x_v[i],  sum_i y_vw[i, j] = x_w[j]        equal marginals of an edge   -> _join
               base[r] + sum_v u_v[r] . x_v <= limit                        usage row r                  -> limit_row
               sum_(v in C) sum_(i: u_v[r, i] >= U_v) x_v[i] <= |C| - 1     cover C of row r             -> _Row.cover
    x binary; y >= 0, which is integral where x is. Forbidden entries of E have no y.

The marginals are the relaxation of Schlesinger (1976); the covers are cover inequalities of knapsacks (Balas, 1975).

A usage row enters the program when a solution, checked in integers, exceeds it. If HiGHS exceeds a row of the program
by a small fraction, the nodes C with the largest usages U_v exceed it by themselves: at most |C| - 1 of them may use
that much. Components without a common edge or row are solved one by one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pulp

from minialpa.errors import InfeasibleError
from minialpa.intra.solver.bucket import components
from minialpa.intra.solver.clock import Deadline
from minialpa.intra.solver.cost_graph import Floats
from minialpa.intra.solver.residual import Residual, check_base

#: Largest coefficient of the scaled objective: HiGHS compares reduced costs with an absolute 1e-7.
_LARGEST_COST = 1e4
#: Least gap of the scaled objective at which HiGHS stops; its default.
_LEAST_GAP = 1e-6
#: Operations per row and column between callbacks of HiGHS: 9 us; measured 4 to 30 us, for 2,000 to 40,000 of both.
_OF_LOOK = 9000.0
#: Operations per variable of writing the program, about.
_OF_WRITING = 20_000.0


@dataclass(frozen=True, slots=True)
class ProgramSolution:
    """choices: for each node, an index of `Residual.costs`; None without time."""

    choices: dict[int, int] | None
    bound: float


@dataclass(frozen=True, slots=True)
class _Row:
    """The `usage` of each (node, strategy) of `places` in a usage row; `slack` is limit - base."""

    places: tuple[tuple[int, int], ...]
    usage: tuple[int, ...]
    slack: int

    def cover(self, choices: dict[int, int]) -> list[tuple[int, int]]:
        """The (node, strategy) pairs of the last formula, for `choices` that exceed the row.

        C is the smallest set of nodes that exceeds it, by largest usage.
        """
        used = {node: usage for (node, i), usage in zip(self.places, self.usage, strict=True) if choices[node] == i}
        total, least = 0, dict[int, int]()
        for node in sorted(used, key=lambda node: -used[node]):
            least[node], total = used[node], total + used[node]
            if total > self.slack:
                break
        assert total > self.slack, (total, self.slack)

        pairs = zip(self.places, self.usage, strict=True)
        return [(node, i) for (node, i), usage in pairs if usage >= least.get(node, usage + 1)]


def solve_program(residual: Residual, deadline: Deadline, allowed: float = 0.0) -> ProgramSolution:
    """Choices for the undecided nodes of `residual`, and a lower bound on the cost of the original graph.

    allowed: absolute gap. Raises InfeasibleError if forbidden pairs and the limit leave no choices.
    """
    check_base(residual)
    independent = _independent_components(residual)
    parts = [_solve_part(residual, nodes, deadline, allowed / len(independent)) for nodes in independent]
    bound = residual.offset + sum(part.bound for part in parts)

    choices: dict[int, int] = {}
    for part in parts:
        if part.choices is None:
            return ProgramSolution(None, bound)
        choices |= part.choices
    return ProgramSolution(choices, bound)


def _independent_components(residual: Residual) -> list[list[int]]:
    """Components with usage terms count as one, as rows may join them."""
    apart, joined = [], []
    for component in components(residual):
        if any(residual.terms[v] for v in component):
            joined += component
        else:
            apart.append(component)
    return [sorted(joined), *apart] if joined else apart


def _solve_part(residual: Residual, nodes: list[int], deadline: Deadline, allowed: float) -> ProgramSolution:
    """Rows are added until a solution keeps to all."""
    model = _Model(residual, nodes)
    deadline.spend(_OF_WRITING * model.problem.numVariables())
    while not deadline.is_over:
        choices = model.solve(deadline, allowed)
        if choices is None:
            break
        exceeded = _exceeded_rows(residual, choices)
        if not exceeded:
            return ProgramSolution(choices, model.bound)
        for row in exceeded:
            model.limit_row(row, choices)
    return ProgramSolution(None, model.bound)


def _exceeded_rows(residual: Residual, choices: dict[int, int]) -> list[int]:
    """The worst of each range of neighbouring rows that exceed the limit."""
    change = np.zeros(len(residual.base) + 1, np.int64)
    for v, i in choices.items():
        for (first, end), usage in residual.terms[v].items():
            change[first] += usage[i]
            change[end] -= usage[i]

    used = residual.base + np.cumsum(change[:-1])
    rows = np.flatnonzero(used > residual.limit)
    stretches = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    return [int(stretch[used[stretch].argmax()]) for stretch in stretches if len(stretch)]


def _row(residual: Residual, nodes: Iterable[int], r: int) -> _Row:
    total: dict[tuple[int, int], int] = {}
    for node in nodes:
        for (first, end), usage in residual.terms[node].items():
            if first <= r < end:
                for i in np.flatnonzero(usage).tolist():
                    total[node, i] = total.get((node, i), 0) + int(usage[i])
    return _Row(tuple(total), tuple(total.values()), residual.limit - int(residual.base[r]))


class _Model:
    """The program in PuLP. bound: the best lower bound so far."""

    def __init__(self, residual: Residual, nodes: list[int]) -> None:
        self.residual = residual
        self.problem = pulp.LpProblem("core", pulp.LpMinimize)
        self.bound = -np.inf
        self._objective: list[tuple[Any, float]] = []
        self._rows: dict[int, _Row] = {}

        self.x = {v: self._choose_one(v) for v in nodes}
        for v in nodes:
            for w, cost in residual.adjacent[v].items():
                if v < w:
                    self._join(v, w, cost.dense())

        largest = max((abs(cost) for _, cost in self._objective), default=1.0)
        self.scale = _LARGEST_COST / max(1e-300, largest)
        scaled = [(variable, cost * self.scale) for variable, cost in self._objective]
        self.problem.setObjective(pulp.LpAffineExpression(scaled))

    def _choose_one(self, v: int) -> list[Any]:
        x = [self.problem.add_variable(f"x_{v}_{i}", cat=pulp.LpBinary) for i in range(len(self.residual.costs[v]))]
        self._constrain([(one, 1) for one in x], pulp.LpConstraintEQ, 1)
        self._objective += zip(x, self.residual.costs[v].tolist(), strict=True)
        return x

    def _join(self, v: int, w: int, cost: Floats) -> None:
        rows: list[list[Any]] = [[] for _ in self.x[v]]
        columns: list[list[Any]] = [[] for _ in self.x[w]]
        for i, j in np.argwhere(np.isfinite(cost)).tolist():
            pair = self.problem.add_variable(f"y_{v}_{w}_{i}_{j}", lowBound=0)
            rows[i].append(pair)
            columns[j].append(pair)
            self._objective.append((pair, float(cost[i, j])))

        for one, pairs in zip(self.x[v] + self.x[w], rows + columns, strict=True):
            self._constrain([(one, -1), *((pair, 1) for pair in pairs)], pulp.LpConstraintEQ, 0)

    def _constrain(self, terms: Iterable[tuple[Any, float]], sense: int, bound: float) -> None:
        self.problem.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(list(terms)), sense=sense, rhs=bound))

    def limit_row(self, r: int, choices: dict[int, int]) -> None:
        """Add usage row `r`, which `choices` exceed, or a cover of `choices` if the program has the row."""
        if r in self._rows:
            cover = self._rows[r].cover(choices)
            n_nodes = len({node for node, _ in cover})
            self._constrain([(self.x[node][i], 1) for node, i in cover], pulp.LpConstraintLE, n_nodes - 1)
            return

        row = self._rows[r] = _row(self.residual, self.x, r)
        if row.slack < 0 or not row.places:
            raise self._infeasible()
        # Scaled to 1: HiGHS compares rows with an absolute tolerance.
        largest = max(row.usage)
        pairs = zip(row.places, row.usage, strict=True)
        terms = [(self.x[node][i], usage / largest) for (node, i), usage in pairs]
        self._constrain(terms, pulp.LpConstraintLE, row.slack / largest)

    def _infeasible(self) -> InfeasibleError:
        return InfeasibleError(
            "No sharding satisfies both the memory limit and the options of the step. Raise `memory_limit_bytes`, or "
            "remove options that forbid shardings."
        )

    def solve(self, deadline: Deadline, allowed: float) -> dict[int, int] | None:
        """None without choices; updates `bound`. allowed: see `solve_program`."""
        bound = _run_highs(self.problem, deadline, allowed * self.scale) / self.scale
        if self.problem.status == pulp.LpStatusInfeasible:
            raise self._infeasible()
        if self.problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            self.bound = max(self.bound, bound)
            return None

        choices = {node: int(np.argmax([one.varValue or 0.0 for one in x])) for node, x in self.x.items()}
        cost = _cost_of(self.residual, choices)
        # The exact cost: the bound of HiGHS has tolerances.
        if self.problem.sol_status == pulp.LpSolutionOptimal and np.isfinite(cost):
            bound = cost if allowed == 0 else min(bound, cost)
        self.bound = max(self.bound, bound)
        return choices if np.isfinite(cost) else None


def _cost_of(residual: Residual, choices: dict[int, int]) -> float:
    cost = sum(float(residual.costs[node][i]) for node, i in choices.items())
    for node, i in choices.items():
        edges = residual.adjacent[node].items()
        cost += sum(edge.at(i, choices[other]) for other, edge in edges if node < other)
    return cost


def _run_highs(problem: Any, deadline: Deadline, allowed: float) -> float:
    """Solve up to the gap `allowed` and return the lower bound, both in units of the scaled objective.

    Callbacks of HiGHS count as work. They depend only on the program, so the search stops at the same point every time,
    unlike with the time limit of HiGHS.
    """
    import highspy

    operations = _OF_LOOK * (problem.numVariables() + problem.numConstraints())

    def look(_kind: Any, _message: str, _output: Any, answer: Any, _user: Any) -> None:
        deadline.spend(operations)
        answer.user_interrupt = deadline.is_over

    options = {
        "output_flag": False,
        "threads": 1,
        "random_seed": 0,
        "mip_rel_gap": 0.0,
        "mip_abs_gap": max(_LEAST_GAP, allowed),
        "time_limit": max(0.0, deadline.processor_left_s),
    }

    class Quiet(highspy.Highs):
        def enableCallbacks(self) -> None:
            # With output on, the first callback prints the version.
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    class Solver(pulp.HiGHS):
        def createAndConfigureSolver(self, lp: Any) -> None:
            lp.solverModel = Quiet()
            lp.solverModel.setCallback(look, None)
            lp.solverModel.startCallback(highspy.cb.HighsCallbackType.kCallbackMipInterrupt)
            for name, value in options.items():
                lp.solverModel.setOptionValue(name, value)

    problem.solve(Solver())
    bound = float(problem.solverModel.getInfo().mip_dual_bound)
    return bound if np.isfinite(bound) else -np.inf
