"""A plan in, its seconds out as a function of the rates of a cluster: the shardings of the plan, at any prices.

All seconds are linear in a few numbers (`_Rates`), except `max` and `min` of the formulas of plans. `parts_of` measures
the coefficients once, and `total_s` evaluates them:

    pass     = compute + collectives
               - sum over loops of min((1 - contention) * hidable collectives, overlap * compute of the loop)
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
from minialpa.cluster import DeviceSpec, KernelRates, LinkSpec, LogicalMesh
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
from minialpa.report.figures import bytes_on_mesh
from minialpa.sharding import EquationSpecs
from minialpa.support.files import write_text
from minialpa.tracing.trace import TracedStep

#: Reciprocals of `sustained`, `attention_efficiency` and `memory_efficiency`; `launch_s`; 1; then alpha and beta of
#: three mesh axes. Coefficients of all seconds, in this order.
Coefficients = NDArray[np.float64]
_N_KERNELS, _N_AXES = 5, 3
_SUMS = ("all-reduce", "reduce-scatter")
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
    """

    submesh: tuple[int, int]
    shape: tuple[int, ...]
    passes: tuple[Piece, ...]
    last: Mapping[int, Piece]
    update: Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A plan as a function of rates.

    Attributes:
        borders: for each border between stages: whether it is inside a host, and its bytes.
        peak_bytes: of the device that needs most.
        uneven_bytes: what the most filled device would save if all devices of its stage had equal parts of the state of
            the optimizer, as trainers with flat buffers have.
        waits: see `Trainer`.
        hides_update: whether one micro-batch hides the collectives of the update.
    """

    stages: tuple[StageParts, ...]
    borders: tuple[tuple[bool, float], ...]
    n_micro_batches: int
    n_chunks: int
    peak_bytes: float
    plan_s: float
    hides_update: bool
    uneven_bytes: float = 0.0
    waits: int = 0


# ---- seconds ---------------------------------------------------------------------------------------------------------


def total_s(parts: Parts, cluster: ClusterSpec) -> float:
    """Seconds of a step at the prices of `cluster`."""
    kernels = cluster.device.kernels
    assert kernels is not None, cluster
    return Timer(parts, cluster).seconds(kernels)


class Timer:
    """Seconds of a step at the links of a cluster, for any rates of kernels."""

    def __init__(self, parts: Parts, cluster: ClusterSpec) -> None:
        self._parts = parts
        self._compute: list[Coefficients] = []  # of each piece, without links
        self._buckets: list[tuple[int, float, Coefficients | None]] = []  # piece, seconds of collectives, work
        self._stages: list[tuple[list[int], dict[int, int], int]] = []  # passes, last passes, update
        for stage in parts.stages:
            links = _links(cluster.logical_mesh(stage.submesh, stage.shape))
            passes = [self._add(piece, links) for piece in stage.passes]
            last = {passes[number]: self._add(piece, links) for number, piece in stage.last.items()}
            self._stages.append((passes, last, self._add(stage.update, links)))
        self._of_pieces = np.array(self._compute)
        self._owners = np.array([piece for piece, _, _ in self._buckets], np.int64)
        self._collectives_s = np.array([seconds for _, seconds, _ in self._buckets])
        self._work = np.array([np.zeros(_N_KERNELS) if work is None else work for _, _, work in self._buckets])
        # The hosts of a stage send their parts of an array at once.
        borders = [
            _border_s(cluster.link(same_host=inside), n_bytes / stage.submesh[0])
            for stage, (inside, n_bytes) in zip(parts.stages, parts.borders, strict=False)
        ]
        self._borders_s = sum(borders)
        n_neighbours = min(2, len(borders))
        self._waits_s = parts.waits * parts.n_chunks * n_neighbours * max(borders, default=0.0)

    def _add(self, piece: Piece, links: Coefficients) -> int:
        number = len(self._compute)
        self._compute.append(piece.compute[:_N_KERNELS])
        for one in piece.buckets:
            work = None if one.work is None else one.work[:_N_KERNELS]
            self._buckets.append((number, float(one.collectives[_N_KERNELS:] @ links), work))
        return number

    def seconds(self, kernels: KernelRates) -> float:
        rates = np.array([
            1 / kernels.sustained, 1 / kernels.attention_efficiency, 1 / kernels.memory_efficiency,
            kernels.launch_s, 1.0,
        ])  # fmt: skip
        compute_s = self._of_pieces @ rates
        exposed_s: NDArray[np.float64] = np.zeros(len(self._compute))
        if self._buckets:
            hidable_s = (1 - kernels.contention) * self._collectives_s
            hidden_s = np.minimum(hidable_s, kernels.overlap * (self._work @ rates))
            np.add.at(exposed_s, self._owners, self._collectives_s - hidden_s)

        pass_s, update_s, saved_s = [], [], []
        for passes, last, update in self._stages:
            extra_s = sum(max(0.0, exposed_s[piece] - exposed_s[plain]) for plain, piece in last.items())
            pass_s.append(float(compute_s[passes].sum() + exposed_s[passes].sum()) + self._waits_s)
            update_s.append(float(compute_s[update] + exposed_s[update] + extra_s))
            hidable_update_s = (1 - kernels.contention) * float(exposed_s[update])
            saved_s.append(min(hidable_update_s, float(compute_s[passes].sum())))

        p, n, v = len(pass_s), self._parts.n_micro_batches, self._parts.n_chunks
        full = ((v - 1) * max(n, p) + n) / v
        total = full * max(pass_s) + (sum(pass_s) - max(pass_s)) / v + max(update_s) + self._borders_s
        return total - (saved_s[int(np.argmax(update_s))] if self._parts.hides_update else 0.0)


def _links(mesh: LogicalMesh) -> Coefficients:
    missing = [0.0] * (_N_AXES - len(mesh.shape))
    return np.array([*mesh.alpha, *missing, *mesh.beta, *missing])


def _border_s(link: LinkSpec, n_bytes: float) -> float:
    return 2 * link.alpha_s + link.beta_s_per_byte * n_bytes


# ---- coefficients ----------------------------------------------------------------------------------------------------


def parts_of(traced: TracedStep, plan: Plan, *, hides_update: bool, plan_s: float, cast_bytes: float = 1.0) -> Parts:
    """plan: of one loop over micro-batches, for equal hosts. cast_bytes: see `Trainer`.

    hides_update: also, whether only the last passes sum gradients, even where the plan has too little memory for whole
    accumulators.
    """
    staged = realise(traced, plan).staged
    assert staged.split.n_loops == 1, staged.split.n_loops
    return Parts(
        stages=tuple(
            _stage_parts(staged, plan, number, cast_bytes, hides_update) for number in range(len(plan.stages))
        ),
        borders=tuple(_borders(staged, plan)),
        n_micro_batches=plan.n_micro_batches,
        n_chunks=max(len({one.chunk for one in stage.passes}) for stage in plan.stages),
        peak_bytes=max(plan.cost.peak_bytes),
        plan_s=plan_s,
        hides_update=hides_update,
        uneven_bytes=_uneven_bytes(plan),
    )


def _uneven_bytes(plan: Plan) -> float:
    peaks = plan.cost.peak_bytes
    mesh = max(range(len(peaks)), key=lambda k: peaks[k])
    stage = plan.stages[mesh]
    whole = (1,) * len(stage.logical_shape)
    return sum(
        bytes_on_mesh(value, mesh, stage.logical_shape) - bytes_on_mesh(value, mesh, whole) / stage.n_devices
        for value, role in zip(plan.inputs, plan.roles, strict=True)
        if role == "optimizer"
    )


def _borders(staged: StagedStep, plan: Plan) -> Iterable[tuple[bool, float]]:
    inside = all(stage.submesh[0] == 1 for stage in plan.stages)
    hosts = [stage.first_device // plan.cluster.devices_per_host for stage in plan.stages]
    for number, n_bytes in enumerate(border_bytes(staged)[: len(plan.stages) - 1]):
        a, b = number % len(hosts), (number + 1) % len(hosts)
        yield inside and hosts[a] == hosts[b], float(n_bytes)


def _stage_parts(staged: StagedStep, plan: Plan, number: int, cast_bytes: float, sums_once: bool) -> StageParts:
    stage = plan.stages[number]
    mesh = plan.cluster.logical_mesh(stage.submesh, stage.logical_shape)
    problem = mesh_equations(staged, number)
    specs, chosen = bind_specs(problem, stage)
    equations = dict(zip(problem.eqns, chosen, strict=True))
    view = ShardedView.of(mesh, stage.option)
    moved = collectives_of_tasks(
        task_programs(staged, number, specs, equations, view, final_specs(staged, plan, number))
    )

    measured = _Compute(mesh, cast_bytes)
    compute = {eqn: problem.repeats.n_equations(eqn) * measured.of(eqn, chosen) for eqn, chosen in equations.items()}
    passes: list[Piece] = []
    last: dict[int, Piece] = {}
    update, in_update = np.zeros(_SIZE), list[Communication]()
    for one in moved:
        work = sum((compute[eqn] for eqn in one.task.eqns), np.zeros(_SIZE))
        if one.task.kind in ("prologue", "update"):
            update = update + work
            # As in `stage_times`: 0 for the group of hidable collectives, -1 for the others.
            in_update += [each._replace(group=0 if each.can_hide else -1, after=0) for each in one.collectives]
            continue
        work[_N_KERNELS - 1] += adding_s(one.accumulator_bytes, mesh)
        # Sums that work can hide are of gradients.
        each = [c for c in one.collectives if not (sums_once and c.can_hide and c.collective.kind in _SUMS)]
        in_last = one.last or (one.collectives if len(each) < len(one.collectives) else None)
        if in_last is not None:
            last[len(passes)] = Piece(work, _buckets(in_last, mesh, work, compute))
        passes.append(Piece(work, _buckets(each, mesh, work, compute)))

    return StageParts(
        submesh=stage.submesh,
        shape=stage.logical_shape,
        passes=tuple(passes),
        last=last,
        update=Piece(update, _buckets(in_update, mesh, update, compute)),
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

    def __init__(self, mesh: LogicalMesh, cast_bytes: float) -> None:
        device = mesh.device
        assert device is not None and device.kernels is not None, mesh
        self._kernels, self._shape, self._cast_bytes = device.kernels, mesh.shape, cast_bytes
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
        if str(eqn.params.get("new_dtype")).startswith("float8"):
            # Of the bytes, one is written at `memory_efficiency`, the others move at the bandwidth.
            found[_N_KERNELS - 1] += (self._cast_bytes - 1) * found[2]
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
            last={int(number): _piece(piece) for number, piece in stage["last"].items()},
            update=_piece(stage["update"]),
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
