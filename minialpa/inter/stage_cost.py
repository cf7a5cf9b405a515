"""Costs of stages: a traced step cut into single layers in, the table that the stage DP searches out.

Each distinct layer is solved once on each candidate submesh and logical shape; a stage costs the sum of its layers.
Borders inside a stage are thereby priced as if both sides agreed on the sharding, which the final solve of the chosen
stage then makes them do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax.extend.core import Var

from minialpa.cluster import ClusterSpec, LogicalMesh
from minialpa.errors import InfeasibleError
from minialpa.inter.mesh_problem import ShardedView, mesh_collectives, mesh_equations, mesh_programs
from minialpa.inter.split import StagedStep, Task
from minialpa.inter.stage_dp import StageCostTable
from minialpa.inter.stage_memory import kept_usages, mesh_memory
from minialpa.inter.stage_times import stage_times
from minialpa.intra.problem import MeshEquations
from minialpa.intra.solve import MeshSolver
from minialpa.intra.usage import MemoryLimit
from minialpa.jaxprs import bytes_of, is_literal
from minialpa.options import AutoShardingOption, AutoStageOption

_LAYER_TIME_LIMIT_S = 5.0
#: What it is worth to keep nothing in memory, in step times of the layer: prices of the memory in a table.
_THRIFT = (0.0, 0.1, 1.0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A submesh of (hosts, devices per host) viewed as a logical shape."""

    submesh: tuple[int, int]
    logical_shape: tuple[int, ...]

    @property
    def n_devices(self) -> int:
        return self.submesh[0] * self.submesh[1]


def candidates(cluster: ClusterSpec, option: AutoStageOption) -> list[Candidate]:
    """Submeshes within a host by the option's rule, then whole hosts; each with its logical shapes."""
    per_host = cluster.devices_per_host
    within = [n for n in range(1, per_host + 1) if option.submesh_physical_shape_space == "all" or n & (n - 1) == 0]
    if per_host not in within:
        within.append(per_host)
    submeshes = [(1, n) for n in within] + [(h, per_host) for h in range(2, cluster.num_hosts + 1)]
    return [Candidate(s, shape) for s in submeshes for shape in logical_shapes(s, option.submesh_logical_shape_space)]


def logical_shapes(submesh: tuple[int, int], space: str) -> list[tuple[int, ...]]:
    n = submesh[0] * submesh[1]
    match space:
        case "same_as_physical":
            return [submesh]
        case "data_parallel_only":
            return [(n, 1)]
        case "model_parallel_only":
            return [(1, n)]
        case _:
            return [(n,)] + [(a, n // a) for a in range(2, n) if n % a == 0]


@dataclass(frozen=True, slots=True)
class _LayerCost:
    """One layer on a mesh, as `StageCostTable` has it for stages; temp_bytes: what its hungriest task has besides."""

    seconds: float = math.inf
    step_seconds: float = 0.0
    fixed_bytes: float = 0.0
    in_flight_bytes: float = 0.0
    temp_bytes: float = 0.0


def layer_table(
    staged: StagedStep,
    cluster: ClusterSpec,
    choices: Sequence[Candidate],
    option: AutoShardingOption,
    progress: Callable[[int, int], None],
) -> tuple[StageCostTable, list[Candidate]]:
    """The cost table of a step staged with one layer on each mesh, and what the candidates of the table are.

    Each of `choices` comes several times, with shardings that are ever thriftier. `progress(done, total)` hears of
    solved layers.
    """
    n = staged.n_meshes
    problems = [mesh_equations(staged, layer) for layer in range(n)]
    keys = [problem_key(problem) for problem in problems]
    costs: list[list[_LayerCost]] = []
    for layer, problem in enumerate(problems):
        first = keys.index(keys[layer])
        if first < layer:
            costs.append(costs[first])
            continue
        costs.append([])
        for m, choice in enumerate(choices):
            progress(layer * len(choices) + m, n * len(choices))
            mesh = cluster.logical_mesh(choice.submesh, choice.logical_shape)
            costs[-1] += _layer_costs(staged, layer, problem, mesh, option)
    progress(n * len(choices), n * len(choices))

    def column(name: str) -> np.ndarray:
        return np.array([[getattr(cost, name) for cost in row] for row in costs])

    columns = [choice for choice in choices for _ in _THRIFT]
    table = StageCostTable(
        n_devices=np.array([c.n_devices for c in columns]),
        seconds=_interval_sums(column("seconds")),
        step_seconds=_interval_sums(column("step_seconds")),
        fixed_bytes=_interval_sums(column("fixed_bytes")) + _interval_maxima(column("temp_bytes")),
        in_flight_bytes=_interval_sums(column("in_flight_bytes")),
        transfer_seconds=np.array(border_seconds(staged, cluster)),
    )
    return table, columns


def _layer_costs(
    staged: StagedStep, layer: int, problem: MeshEquations, mesh: LogicalMesh, option: AutoShardingOption
) -> list[_LayerCost]:
    """The layer at rising prices of the memory that it keeps: points of the convex hull of time and memory."""
    n = staged.split.n_micro_batches
    # A table has hundreds of entries; one that is a little too dear is better than minutes of proof for each.
    option = replace(option, solver_time_limit_s=min(option.solver_time_limit_s, _LAYER_TIME_LIMIT_S))
    n_bytes = option.limit_bytes(mesh.device)
    limit = None if n_bytes is None else MemoryLimit(n_bytes)
    n_live = min(n, max(1, staged.n_meshes // 2))
    kept = kept_usages(staged, layer, n_live)
    view = ShardedView(mesh, option.forbidden_collectives)
    solver = MeshSolver(problem, mesh, option)
    out: list[_LayerCost] = []
    for thrift in _THRIFT:
        # With thrift 1, to keep nothing is worth twice the time.
        unit = (n * out[0].seconds + out[0].step_seconds) / _kept_bytes(out[0], n_live) if out else 0.0
        try:
            solution = solver.solve(limit, option.solver_time_limit_s, kept, thrift * unit)
        except InfeasibleError:
            return [_LayerCost()] * len(_THRIFT)
        programs = mesh_programs(staged, layer, problem, solution, view)
        times = stage_times(problem, solution, mesh_collectives(programs), mesh)
        memory = mesh_memory(staged, layer, programs, solution, view)
        fixed, in_flight, temp = memory.fixed_bytes, memory.in_flight_bytes, memory.temp_bytes
        out.append(_LayerCost(times.pass_s, times.update_s, fixed, in_flight, temp))
    return out


def _kept_bytes(cost: _LayerCost, n_live: int) -> float:
    return max(1.0, cost.fixed_bytes + n_live * cost.in_flight_bytes)


def _interval_sums(per_layer: np.ndarray) -> np.ndarray:
    """out[i, j, m] = sum of rows i..j; inf below the diagonal."""
    n, m = per_layer.shape
    out = np.full((n, n, m), np.inf)
    for i in range(n):
        out[i, i:] = np.cumsum(per_layer[i:], axis=0)
    return out


def _interval_maxima(per_layer: np.ndarray) -> np.ndarray:
    """out[i, j, m] = largest of rows i..j; 0 below the diagonal."""
    n, m = per_layer.shape
    out = np.zeros((n, n, m))
    for i in range(n):
        out[i, i:] = np.maximum.accumulate(per_layer[i:], axis=0)
    return out


def border_seconds(staged: StagedStep, cluster: ClusterSpec) -> list[float]:
    """Seconds for one micro-batch's values, both directions, to cross the border after each chunk but the last."""
    loop = [task for task in staged.tasks if task.per_micro_batch]
    crossing = [0.0] * (max((task.chunk for task in loop), default=0) + 1)
    home: dict[Var, Task] = {v: task for task in loop for v in task.outvars}
    for task in loop:
        for v in task.invars:
            source = home.get(v, task)
            if source.mesh != task.mesh:
                for border in range(min(source.chunk, task.chunk), max(source.chunk, task.chunk)):
                    crossing[border] += bytes_of(v)
    link = cluster.link(same_host=cluster.num_hosts == 1)
    return [2 * link.alpha_s + link.beta_s_per_byte * n_bytes for n_bytes in crossing[:-1]]


def problem_key(problem: MeshEquations) -> str:
    """Text that two problems share if they are the same up to the names of variables."""
    number: dict[Var, int] = {}

    def name(atom: object) -> str:
        if is_literal(atom):
            return f"{getattr(atom, 'val', None)!r}"
        assert isinstance(atom, Var)
        return f"{number.setdefault(atom, len(number))}{atom.aval}"

    parts = [f"{name(v)} {role} {problem.batch_dims.get(v)}" for v, role in problem.inputs]
    for eqn, times, late in zip(problem.eqns, problem.times, problem.in_update, strict=True):
        params = {k: v for k, v in eqn.params.items() if not callable(v)}
        ends = " ".join(name(v) for v in (*eqn.invars, *eqn.outvars))
        dims = [problem.batch_dims.get(v) for v in eqn.outvars]
        parts.append(f"{eqn.primitive.name} {ends} {params} {times} {late} {dims}")
    parts += [f"{name(a)}={name(b)}" for a, b in (*problem.aliases, *problem.equal.items())]
    return "\n".join(parts)
