"""A step staged with one sublayer per mesh in, seconds and bytes per device of each sublayer on each submesh out.

Equal sublayers, up to names, are solved once. A stage costs the sum of its sublayers, as if neighbours agreed on the
sharding of the values between them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import ClusterSpec, LogicalMesh
from minialpa.cost import adding_s
from minialpa.errors import InfeasibleError, VerifyError
from minialpa.inter.search.stage_memory import kept_usages, mesh_memory
from minialpa.inter.search.stage_times import stage_times
from minialpa.inter.search.submeshes import Candidate
from minialpa.inter.staging.mesh_problem import ShardedView, mesh_collectives, mesh_equations, mesh_programs
from minialpa.inter.staging.tasks import StagedStep, Task
from minialpa.intra.graph.memory_constraints import MemoryLimit, Usage
from minialpa.intra.graph.problem import MeshEquations
from minialpa.intra.graph.solve import MeshSolver
from minialpa.intra.memory.compiler import Compiler
from minialpa.intra.solver.clock import Deadline
from minialpa.intra.strategies.strategy_cache import StrategyCache
from minialpa.ir.equations import Atom, bytes_of, is_literal
from minialpa.options import AutoShardingOption
from minialpa.support.files import write_text
from minialpa.support.recent import Recent

#: Time limit to prove the sharding of one sublayer.
_SUBLAYER_TIME_LIMIT_S = 5.0
#: Measured bytes of one staged equation in the planner.
EQUATION_BYTES = 2000
#: Most micro-batches in flight for which a price of memory counts kept values.
_USUALLY_LIVE = 8
#: Version of cost files. Raise it with each change of costs or their names (rules, strategies, prices, memory).
_VERSION = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class SublayerCost:
    """One sublayer on a mesh; bytes are per device.

    A stage has the sum over its sublayers, and the maximum of `pass_temp_bytes`.

    Attributes:
        seconds: of one micro-batch, forward and backward; inf if the sublayer does not fit.
        step_seconds: once per step.
        fixed_bytes: parameters, optimizer state and accumulators.
        in_flight_bytes: for each micro-batch in flight.
        pass_temp_bytes: further bytes of a pass, without `left_bytes`.
        left_bytes: results that remain at the end of a pass.
        update_temp_bytes: further bytes of the update.
        adding_seconds: part of `seconds` that adds to accumulators, which a single micro-batch does not need.
    """

    seconds: float = math.inf
    step_seconds: float = 0.0
    fixed_bytes: float = 0.0
    in_flight_bytes: float = 0.0
    pass_temp_bytes: float = 0.0
    left_bytes: float = 0.0
    update_temp_bytes: float = 0.0
    adding_seconds: float = 0.0


class SublayerCosts:
    """Costs of the sublayers of a step that is staged with one sublayer on each mesh.

    place: for each sublayer, the mesh with its problem; sublayers may share a mesh, see `short_step`.
    known: costs by name, to which `cost` adds.
    solvers: a cache that all `SublayerCosts` of a search share.
    """

    def __init__(
        self,
        staged: StagedStep,
        *,
        place: Sequence[int],
        cluster: ClusterSpec,
        compiler: Compiler,
        option: AutoShardingOption,
        strategy_cache: StrategyCache,
        known: dict[str, SublayerCost],
        solvers: Recent[MeshSolver],
    ) -> None:
        self.staged, self.cluster, self.compiler = staged, cluster, compiler
        self.strategy_cache, self.known = strategy_cache, known
        self._solvers = solvers
        self._staging_key = object()  # each staging has other variables, and so other solvers
        # With hundreds of costs, a slightly high cost is better than minutes of proof.
        self.option = replace(option, solver_time_limit_s=min(option.solver_time_limit_s, _SUBLAYER_TIME_LIMIT_S))

        self.place = tuple(place)
        self.problems = {mesh: mesh_equations(staged, mesh) for mesh in sorted(set(place))}
        self.digests = {mesh: _problem_digest(problem) for mesh, problem in self.problems.items()}
        digests = [self.digests[mesh] for mesh in self.place]
        self.kind = tuple(digests.index(digest) for digest in digests)

    @property
    def n_bytes(self) -> float:
        return EQUATION_BYTES * sum(len(problem.eqns) for problem in self.problems.values())

    def cost(
        self, sublayer: int, choice: Candidate, fastest: SublayerCost | None, price: float, limited: bool
    ) -> SublayerCost:
        """The least cost of a sublayer on a submesh at a price of memory; `seconds` is inf if it does not fit.

        fastest: the cost without a price, which scales the price; `None` to solve without a price.
        price: of all values of `fastest` in memory, as a multiple of its seconds per step.
        limited: whether the sublayer alone has to fit in the memory of the devices.
        """
        n, place = self.staged.split.n_micro_batches, self.place[sublayer]
        mesh = self.cluster.logical_mesh(choice.submesh, choice.logical_shape, choice.device)
        n_live = min(n, _USUALLY_LIVE)

        byte_s = 0.0
        if fastest is not None and price:
            keeps = max(1.0, fastest.fixed_bytes + n_live * fastest.in_flight_bytes)
            byte_s = price * (n * fastest.seconds + fastest.step_seconds) / keeps

        def known(n_bytes: float | None) -> SublayerCost:
            name = f"{self.digests[place]} {mesh} {self.compiler.name} {self.option} {n_live} {n_bytes} {byte_s}"
            if name not in self.known:
                self.known[name] = self._solve(place, mesh, n_bytes, kept_usages(self.staged, place, n_live), byte_s)
            return self.known[name]

        free, n_bytes = known(None), self.option.limit_bytes(mesh.device)
        # If the unlimited optimum keeps within the limit, it is the limited optimum.
        return free if not limited or n_bytes is None or free.fixed_bytes <= n_bytes else known(n_bytes)

    def _solve(
        self, place: int, mesh: LogicalMesh, n_bytes: float | None, kept: Sequence[Usage], byte_s: float
    ) -> SublayerCost:
        """byte_s: price of each byte of `kept`, in seconds."""
        staged, problem = self.staged, self.problems[place]
        limit = None if n_bytes is None else MemoryLimit(n_bytes)
        try:
            deadline = Deadline(self.option.solver_time_limit_s)
            solution = self._solver(place, mesh).solve(limit, deadline, kept, byte_s)
        except InfeasibleError:
            return SublayerCost()

        view = ShardedView.of(mesh, self.option)
        programs = mesh_programs(staged, place, problem, solution, view)
        # Without hidden collectives, as the solver prices them.
        moved = mesh_collectives(programs)
        times = stage_times(problem, solution, moved, mesh, staged.split.n_loops, hides=False)
        memory = mesh_memory(staged, place, programs, solution, view, compiler=self.compiler)
        return SublayerCost(
            seconds=times.pass_s,
            step_seconds=times.per_step_s,
            fixed_bytes=memory.fixed_bytes,
            in_flight_bytes=memory.in_flight_bytes,
            pass_temp_bytes=memory.pass_temp_bytes - memory.left_bytes,
            left_bytes=memory.left_bytes,
            update_temp_bytes=memory.update_temp_bytes,
            adding_seconds=sum(adding_s(one.accumulator_bytes, mesh) for one in moved),
        )

    def _solver(self, place: int, mesh: LogicalMesh) -> MeshSolver:
        def make() -> MeshSolver:
            return MeshSolver(self.problems[place], mesh, self.option, self.strategy_cache)

        return self._solvers.get_or_make((self._staging_key, place, mesh), make)


def border_bytes(staged: StagedStep) -> list[float]:
    """Bytes of one micro-batch that cross the border after each chunk except the last, in both directions."""
    loop = [task for task in staged.tasks if task.per_micro_batch]
    crossing = [0.0] * len(staged.mesh_of_chunk)
    home: dict[Var, Task] = {v: task for task in loop for v in task.outvars}

    # A value that skips chunks crosses every border between its two ends.
    for task in loop:
        for v in task.invars:
            source = home.get(v, task)
            if source.mesh != task.mesh:
                for border in range(min(source.chunk, task.chunk), max(source.chunk, task.chunk)):
                    crossing[border] += bytes_of(v)
    return crossing[:-1]


def _problem_digest(problem: MeshEquations) -> str:
    return hashlib.sha256(problem_key(problem).encode()).hexdigest()


def problem_key(problem: MeshEquations) -> str:
    """Equal for two problems if they are equal up to the names of variables."""
    number: dict[Var, int] = {}
    types: dict[object, str] = {}

    def type_of(atom: Atom) -> str:
        if atom.aval not in types:
            types[atom.aval] = str(atom.aval)
        return types[atom.aval]

    def name(atom: Atom) -> str:
        if is_literal(atom):
            return f"={np.asarray(atom.val).tolist()!r}{type_of(atom)}"
        return f"{number.setdefault(atom, len(number))}{type_of(atom)}"

    parts = [f"{name(v)} {role} {problem.batch_dims.get(v)}" for v, role in problem.inputs]
    for eqn, times, late in zip(problem.eqns, problem.times, problem.in_update, strict=True):
        # Each layer folds another number into a random key, at the same cost.
        is_folded = eqn.primitive.name == "random_fold_in"
        ends = " ".join(type_of(v) if is_folded and is_literal(v) else name(v) for v in (*eqn.invars, *eqn.outvars))
        dims = [problem.batch_dims.get(v) for v in eqn.outvars]
        parts.append(f"{eqn.primitive.name} {ends} {_costed_params(eqn)} {times} {late} {dims}")
    parts += [f"{name(a)}={name(b)}" for a, b in (*problem.aliases, *problem.equal.items())]
    # Inputs are never partial sums.
    made = (v for eqn in problem.eqns for v in eqn.outvars)
    parts.append(str([number[v] for v in made if v in problem.not_partial]))
    parts.append(str([number[v] for v, _ in problem.results if v in number]))
    return "\n".join(parts)


def _costed_params(eqn: JaxprEqn) -> dict[str, Any]:
    """Parameters without functions and positions: each layer slices another row of a stack at the same cost.

    The shapes of a slice show the cut dimensions.
    """
    if eqn.primitive.name == "slice":
        return {}
    if eqn.primitive.name == "pad":
        return {"is_whole": [tuple(config) == (0, 0, 0) for config in eqn.params["padding_config"]]}
    return {name: value for name, value in eqn.params.items() if not callable(value)}


# ---- costs on disk ---------------------------------------------------------------------------------------------------


def load_costs(path: str | Path | None) -> dict[str, SublayerCost]:
    """By name; empty without a file, or if it has another version. Raises VerifyError if the file holds other data."""
    if path is None or not Path(path).exists():
        return {}
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if data["version"] != _VERSION:
            return {}
        return {name: _decode_cost(values) for name, values in data["costs"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise VerifyError(
            f"`cached_costs` is the file `{path}`, which has no costs of a search ({error!r}). Delete the file, or set "
            "`cached_costs` to another file."
        ) from error


def _decode_cost(values: Sequence[float]) -> SublayerCost:
    names = (field.name for field in dataclasses.fields(SublayerCost))
    return SublayerCost(**{name: float(value) for name, value in zip(names, values, strict=True)})


def save_costs(path: str | Path | None, costs: dict[str, SublayerCost]) -> None:
    if path is None:
        return
    data = {"version": _VERSION, "costs": {name: dataclasses.astuple(cost) for name, cost in sorted(costs.items())}}
    write_text(path, json.dumps(data))
