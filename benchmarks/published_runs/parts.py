"""A plan in, its seconds out as a function of the rates of a cluster: the shardings of the plan, at any prices.

All seconds are linear in a few numbers (`_Rates`), except `max` and `min` of the formulas of plans. `parts_of` measures
the coefficients once, and `total_s` evaluates them:

    pass     = compute + collectives - sum over loops of min(hidable collectives, overlap * compute of the loop)
    step     = the closed formula of a pipeline, as in `inter/build_plan.py`
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn
from numpy.typing import NDArray

from minialpa import ClusterSpec, Plan
from minialpa.cluster import DeviceSpec, KernelRates, LogicalMesh
from minialpa.cost import Collective, adding_s
from minialpa.inter.search.stage_cost import border_bytes
from minialpa.inter.search.stage_times import starts_of
from minialpa.inter.staging.mesh_problem import ShardedView, mesh_equations, task_programs
from minialpa.inter.staging.mesh_problem import mesh_collectives as collectives_of_tasks
from minialpa.inter.staging.staged_step import bind_specs, final_specs, realise
from minialpa.inter.staging.tasks import StagedStep
from minialpa.intra.spmd import Communication
from minialpa.intra.strategies.candidates import candidate_of
from minialpa.intra.strategies.combining import Sharing
from minialpa.intra.strategies.loops import scan_body
from minialpa.intra.strategies.strategies import priced
from minialpa.intra.strategies.strategy_cache import StrategyCache
from minialpa.sharding import EquationSpecs
from minialpa.support.files import write_text
from minialpa.tracing.trace import TracedStep

#: Reciprocals of `sustained`, `attention_efficiency` and `memory_efficiency`; `launch_s`; 1; then alpha and beta of two
#: mesh axes. Coefficients of all seconds, in this order.
Coefficients = NDArray[np.float64]
_N_KERNELS, _N_AXES = 5, 2
_SIZE = _N_KERNELS + 2 * _N_AXES
#: As good as infinite, for the rate of a kernel.
_FAST = 1e12


@dataclass(frozen=True, slots=True)
class Bucket:
    """Collectives of one loop of a pass, or outside of its loops. work: compute beside them; None if it hides none."""

    collectives: Coefficients
    work: Coefficients | None


@dataclass(frozen=True, slots=True)
class Piece:
    """A pass, or the update of a stage."""

    compute: Coefficients
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParts:
    """The work of a stage.

    Attributes:
        submesh, shape: see `ClusterSpec.logical_mesh`.
        passes: for one micro-batch.
        last: the passes that differ in the last micro-batch, by number.
        update: once per step.
        gathers: collectives that gather changed weights, once per step in each chunk.
    """

    submesh: tuple[int, int]
    shape: tuple[int, ...]
    passes: tuple[Piece, ...]
    is_forward: tuple[float, ...]
    last: Mapping[int, Piece]
    update: Piece
    gathers: Coefficients


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A plan as a function of rates.

    Attributes:
        borders: for each border between stages: whether it is inside a host, and its bytes.
        peak_bytes: of the device that needs most.
        hides_gathers: whether the first passes of a step hide `StageParts.gathers`.
    """

    stages: tuple[StageParts, ...]
    borders: tuple[tuple[bool, float], ...]
    n_micro_batches: int
    n_chunks: int
    peak_bytes: float
    plan_s: float
    hides_gathers: bool


# ---- seconds ---------------------------------------------------------------------------------------------------------


def total_s(parts: Parts, cluster: ClusterSpec) -> float:
    """Seconds of a step at the prices of `cluster`."""
    kernels = cluster.device.kernels
    assert kernels is not None, cluster
    pass_s, update_s, saved_s = [], [], []
    for stage in parts.stages:
        rates = _rates(kernels, cluster.logical_mesh(stage.submesh, stage.shape))
        passes = [_exposed(piece, rates, kernels.overlap) for piece in stage.passes]
        extra_s = sum(
            max(0.0, _exposed(piece, rates, kernels.overlap) - passes[number]) for number, piece in stage.last.items()
        )
        compute = [float(piece.compute @ rates) for piece in stage.passes]
        pass_s.append(sum(compute) + sum(passes))
        update_s.append(float(stage.update.compute @ rates) + _exposed(stage.update, rates, kernels.overlap) + extra_s)
        forward_s = sum(part * s for part, s in zip(stage.is_forward, compute, strict=True))
        saved_s.append(min(float(stage.gathers @ rates), forward_s))

    p, n, v = len(pass_s), parts.n_micro_batches, parts.n_chunks
    full = ((v - 1) * max(n, p) + n) / v
    total = full * max(pass_s) + (sum(pass_s) - max(pass_s)) / v + max(update_s)
    for inside, n_bytes in parts.borders:
        link = cluster.link(same_host=inside)
        total += 2 * link.alpha_s + link.beta_s_per_byte * n_bytes
    return total - (saved_s[int(np.argmax(update_s))] if parts.hides_gathers else 0.0)


def _rates(kernels: KernelRates, mesh: LogicalMesh) -> Coefficients:
    missing = [0.0] * (_N_AXES - len(mesh.shape))
    compute = [
        1 / kernels.sustained, 1 / kernels.attention_efficiency, 1 / kernels.memory_efficiency, kernels.launch_s, 1.0,
    ]  # fmt: skip
    return np.array([*compute, *mesh.alpha, *missing, *mesh.beta, *missing])


def _exposed(piece: Piece, rates: Coefficients, overlap: float) -> float:
    total = 0.0
    for bucket in piece.buckets:
        seconds = float(bucket.collectives @ rates)
        hidden_s = 0.0 if bucket.work is None else min(seconds, overlap * float(bucket.work @ rates))
        total += seconds - hidden_s
    return total


# ---- coefficients ----------------------------------------------------------------------------------------------------


def parts_of(traced: TracedStep, plan: Plan, *, hides_gathers: bool, plan_s: float) -> Parts:
    """plan: of one loop over micro-batches, for equal hosts."""
    staged = realise(traced, plan).staged
    assert staged.split.n_loops == 1, staged.split.n_loops
    return Parts(
        stages=tuple(_stage_parts(staged, plan, number) for number in range(len(plan.stages))),
        borders=tuple(_borders(staged, plan)),
        n_micro_batches=plan.n_micro_batches,
        n_chunks=max(len({one.chunk for one in stage.passes}) for stage in plan.stages),
        peak_bytes=max(plan.cost.peak_bytes),
        plan_s=plan_s,
        hides_gathers=hides_gathers,
    )


def _borders(staged: StagedStep, plan: Plan) -> Iterable[tuple[bool, float]]:
    inside = all(stage.submesh[0] == 1 for stage in plan.stages)
    hosts = [stage.first_device // plan.cluster.devices_per_host for stage in plan.stages]
    for number, n_bytes in enumerate(border_bytes(staged)[: len(plan.stages) - 1]):
        a, b = number % len(hosts), (number + 1) % len(hosts)
        yield inside and hosts[a] == hosts[b], float(n_bytes)


def _stage_parts(staged: StagedStep, plan: Plan, number: int) -> StageParts:
    stage = plan.stages[number]
    mesh = plan.cluster.logical_mesh(stage.submesh, stage.logical_shape)
    problem = mesh_equations(staged, number)
    specs, chosen = bind_specs(problem, stage)
    equations = dict(zip(problem.eqns, chosen, strict=True))
    view = ShardedView.of(mesh, stage.option)
    moved = collectives_of_tasks(
        task_programs(staged, number, specs, equations, view, final_specs(staged, plan, number))
    )

    measured = _Compute(mesh)
    compute = {eqn: problem.repeats.n_equations(eqn) * measured.of(eqn, chosen) for eqn, chosen in equations.items()}
    passes: list[Piece] = []
    last: dict[int, Piece] = {}
    forward: list[float] = []
    update, in_update = np.zeros(_SIZE), list[Communication]()
    for one in moved:
        work = sum((compute[eqn] for eqn in one.task.eqns), np.zeros(_SIZE))
        if one.task.kind in ("prologue", "update"):
            update = update + work
            # As in `stage_times`: 0 for the group of hidable collectives, -1 for the others.
            in_update += [each._replace(group=0 if each.can_hide else -1, after=0) for each in one.collectives]
            continue
        work[_N_KERNELS - 1] += adding_s(one.accumulator_bytes, mesh)
        if one.last is not None:
            last[len(passes)] = Piece(work, _buckets(one.last, mesh, work, compute))
        passes.append(Piece(work, _buckets(one.collectives, mesh, work, compute)))
        forward.append({"forward": 1.0, "step": 1 / 3}.get(one.task.kind, 0.0))

    gathers = np.zeros(_SIZE)
    n_chunks = len({one.chunk for one in stage.passes})
    for each in plan.collectives:
        if each.stage == number and each.kind == "all-gather" and each.times_per_step <= n_chunks:
            gathers += _collective(Collective(each.kind, each.n_bytes, each.axes), mesh)
    return StageParts(
        submesh=stage.submesh,
        shape=stage.logical_shape,
        passes=tuple(passes),
        is_forward=tuple(forward),
        last=last,
        update=Piece(update, _buckets(in_update, mesh, update, compute)),
        gathers=gathers,
    )


def _buckets(
    collectives: Sequence[Communication], mesh: LogicalMesh, work: Coefficients, compute: Mapping[JaxprEqn, Any]
) -> tuple[Bucket, ...]:
    found: dict[tuple[JaxprEqn | None, bool], Coefficients] = defaultdict(lambda: np.zeros(_SIZE))
    for one, can_hide in starts_of(collectives, mesh):
        found[one.loop, can_hide] += one.times * _collective(one.collective, mesh)
    in_loops = {one.loop for one in collectives if one.loop is not None}
    outside = work - sum((compute[loop] for loop in in_loops), np.zeros(_SIZE))
    return tuple(
        Bucket(n, (outside if loop is None else compute[loop]) if can_hide else None)
        for (loop, can_hide), n in found.items()
    )


def _collective(one: Collective, mesh: LogicalMesh) -> Coefficients:
    """Starts and bytes along each axis."""
    found, zeros = np.zeros(_SIZE), (0.0,) * len(mesh.shape)
    for axis in range(len(mesh.shape)):
        unit = tuple(float(other == axis) for other in range(len(mesh.shape)))
        found[_N_KERNELS + axis] = one.seconds(dataclasses.replace(mesh, alpha=unit, beta=zeros))
        found[_N_KERNELS + _N_AXES + axis] = one.seconds(dataclasses.replace(mesh, alpha=zeros, beta=unit))
    return found


class _Compute:
    """Coefficients of the compute of equations in given specs, each kind of equation once."""

    def __init__(self, mesh: LogicalMesh) -> None:
        device = mesh.device
        assert device is not None and device.kernels is not None, mesh
        self._kernels, self._shape = device.kernels, mesh.shape
        self._cache, self._known = StrategyCache(), dict[Any, Coefficients]()
        # A device without the seconds of each kind of kernel.
        changes: list[dict[str, float]] = [
            {}, {"sustained": _FAST}, {"attention_efficiency": _FAST}, {"memory_efficiency": _FAST}, {"launch_s": 0.0},
        ]  # fmt: skip
        self._meshes = [dataclasses.replace(mesh, device=_changed(device, change)) for change in changes]

    def of(self, eqn: JaxprEqn, chosen: EquationSpecs) -> Coefficients:
        if chosen.body:
            body = scan_body(eqn)
            assert body is not None, eqn.primitive
            inner = zip(body.flat.eqns, chosen.body, strict=True)
            return body.length * sum((self.of(one, specs) for one, specs in inner), np.zeros(_SIZE))
        if eqn.primitive.name == "optimization_barrier":
            return np.zeros(_SIZE)
        key = (id(self._cache.kind_of(eqn)), chosen.operands, chosen.made)
        if key not in self._known:
            self._known[key] = self._measured(eqn, chosen)
        return self._known[key]

    def _measured(self, eqn: JaxprEqn, chosen: EquationSpecs) -> Coefficients:
        factors = self._cache.kind_of(eqn).factors
        candidates = candidate_of(eqn, factors, self._shape, chosen.operands, chosen.made)
        seconds = [
            float(priced(eqn, factors, mesh, candidates, sharing=Sharing()).compute_s[0]) for mesh in self._meshes
        ]
        whole, *without = seconds
        products_s, attention_s, other_s, starts_s = (whole - one for one in without)
        found, kernels = np.zeros(_SIZE), self._kernels
        found[:_N_KERNELS] = (
            products_s * kernels.sustained,
            attention_s * kernels.attention_efficiency,
            other_s * kernels.memory_efficiency,
            starts_s / kernels.launch_s,
            whole - products_s - attention_s - other_s - starts_s,
        )
        return found


def _changed(device: DeviceSpec, change: Mapping[str, float]) -> DeviceSpec:
    assert device.kernels is not None, device
    return dataclasses.replace(device, kernels=dataclasses.replace(device.kernels, **change))


# ---- files -----------------------------------------------------------------------------------------------------------


def key_of(*inputs: Any) -> str:
    """The name of the file of a plan with these inputs."""
    return hashlib.sha256(repr([_given_fields(one) for one in inputs]).encode()).hexdigest()[:24]


def _given_fields(value: Any) -> Any:
    """Without defaults, so that a new field keeps the names of files."""
    if not dataclasses.is_dataclass(value):
        return value
    given = [(field.name, getattr(value, field.name), field.default) for field in dataclasses.fields(value)]
    return [(name, _given_fields(own)) for name, own, default in given if own != default]


def load(path: Path) -> Parts | str:
    """The parts in a file, or the reason for which there is no plan."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if "failure" in data:
        return str(data["failure"])
    stages = tuple(
        StageParts(
            submesh=tuple(stage["submesh"]),
            shape=tuple(stage["shape"]),
            passes=tuple(map(_piece, stage["passes"])),
            is_forward=tuple(stage["is_forward"]),
            last={int(number): _piece(piece) for number, piece in stage["last"].items()},
            update=_piece(stage["update"]),
            gathers=np.array(stage["gathers"]),
        )
        for stage in data.pop("stages")
    )
    return Parts(stages=stages, **{**data, "borders": tuple(map(tuple, data["borders"]))})


def _piece(data: dict[str, Any]) -> Piece:
    buckets = (
        Bucket(np.array(one["collectives"]), None if one["work"] is None else np.array(one["work"]))
        for one in data["buckets"]
    )
    return Piece(np.array(data["compute"]), tuple(buckets))


def save(path: Path, parts: Parts | str) -> None:
    data = {"failure": parts} if isinstance(parts, str) else dataclasses.asdict(parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(data, default=np.ndarray.tolist))
