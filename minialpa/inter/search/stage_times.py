"""The solved tasks of a mesh and their collectives in, the seconds of each pass and of the update out.

    seconds of a task = compute + exposed copies + collectives - min((1 - contention) * hidable, overlap * compute)

Copies between device and host memory run beside compute, one after the other in each direction. They are exposed while
a reader, a barrier or the end of the task waits.

Collectives that start as one take one alpha. A loop that communicates counts separately.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import LogicalMesh
from minialpa.cost import GPU_COMBINED_BYTES, Collective, CollectiveKind, adding_s, combined_kinds, is_gpu
from minialpa.inter.staging.mesh_problem import TaskCollectives
from minialpa.intra.graph.problem import MeshEquations, MeshSharding
from minialpa.intra.spmd import Communication
from minialpa.intra.strategies.combining import WITH_GRADIENTS, StartCounts
from minialpa.ir.equations import aval_of, is_in_host, moves_memory, operand_vars
from minialpa.plan import PlannedPass

#: The group of collectives of an update that no work hides. Other groups have numbers from 0.
_EXPOSED = -1


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of a stage.

    passes: for one micro-batch.
    update_s: once per step, before the first loop and after the last.
    between_s: once per step, after each other loop.
    """

    passes: tuple[PlannedPass, ...]
    update_s: float
    between_s: tuple[float, ...] = ()

    @property
    def pass_s(self) -> float:
        return sum(one.seconds for one in self.passes)

    @property
    def per_step_s(self) -> float:
        return self.update_s + sum(self.between_s)


def stage_times(
    problem: MeshEquations,
    sharding: MeshSharding,
    moved: Sequence[TaskCollectives],
    mesh: LogicalMesh,
    n_loops: int = 1,
    *,
    hides: bool = True,
) -> StageTimes:
    """Times of a mesh under `sharding`.

    moved: the tasks of the mesh, in order, with their collectives.
    n_loops: loops over the micro-batches.
    hides: whether work hides collectives on GPUs. Solvers of sublayers assume that it does not.
    """
    n_of = problem.repeats.n_equations
    compute_s = {eqn: n_of(eqn) * seconds for eqn, seconds in zip(problem.eqns, sharding.compute_s, strict=True)}
    passes: list[PlannedPass] = []

    # By loop: seconds of the work after the loop, extra waits of its last pass, collectives of the work.
    per_step_s, waited_s = [0.0] * n_loops, [0.0] * n_loops
    in_update: list[list[Communication]] = [[] for _ in range(n_loops)]
    for one in moved:
        task = one.task
        compute = sum(compute_s[eqn] for eqn in task.eqns if not moves_memory(eqn))
        copies_s = _exposed_copies_s(task.eqns, compute_s)
        after_pass = (task.loop or n_loops) - 1  # A prologue counts with the update.
        if task.kind == "prologue" or task.kind == "update":
            per_step_s[after_pass] += compute + copies_s
            # Hidable collectives of a kind start together, and so do the others.
            groups = {True: WITH_GRADIENTS, False: _EXPOSED}
            in_update[after_pass] += [each._replace(group=groups[each.can_hide], after=0) for each in one.collectives]
            continue

        compute += adding_s(one.accumulator_bytes, mesh)
        exposed_s, hidden_s = _communication_s(one.collectives, mesh, compute, compute_s if hides else None)
        passes.append(
            PlannedPass(
                kind=task.kind,
                chunk=task.chunk,
                compute_s=compute,
                communication_s=exposed_s + copies_s,
                loop=task.loop,
                hidden_s=hidden_s,
            )
        )
        if one.last is not None:
            # The extra wait of the last pass counts once per step.
            last_s, _ = _communication_s(one.last, mesh, compute, compute_s if hides else None)
            waited_s[after_pass] += max(0.0, last_s - exposed_s)

    *between, update = (
        work_s + extra_s + _communication_s(collectives, mesh, work_s, compute_s if hides else None)[0]
        for work_s, extra_s, collectives in zip(per_step_s, waited_s, in_update, strict=True)
    )
    return StageTimes(tuple(passes), update, tuple(between))


def _exposed_copies_s(eqns: Sequence[JaxprEqn], seconds: Mapping[JaxprEqn, float]) -> float:
    if not any(map(moves_memory, eqns)):
        return 0.0
    now = compute_s = 0.0
    free = {True: 0.0, False: 0.0}  # ends of the last copies to the host, and from it
    ends: dict[Var, float] = {}
    for eqn in eqns:
        waits_until = max((ends.pop(v) for v in operand_vars(eqn) if v in ends), default=0.0)
        if moves_memory(eqn):
            to_host = is_in_host(aval_of(eqn.outvars[0]))
            free[to_host] = max(now, waits_until, free[to_host]) + seconds[eqn]
            ends[eqn.outvars[0]] = free[to_host]
        else:
            now = max(now, waits_until) + seconds[eqn]
            compute_s += seconds[eqn]
    return max(now, *free.values()) - compute_s


def gradient_starts(moved: Sequence[TaskCollectives], kinds: Sequence[CollectiveKind]) -> StartCounts:
    """(kind, axes, n): n collectives start with the sums of gradients, in the task with most of them."""
    most: Counter[tuple[CollectiveKind, tuple[int, ...]]] = Counter()
    for task in moved:
        most |= Counter(
            (one.collective.kind, one.collective.axes)
            for one in task.last or task.collectives
            if one.group == WITH_GRADIENTS and one.collective.kind in kinds
        )
    return tuple((kind, axes, n) for (kind, axes), n in sorted(most.items()))


def starts_s(counts: StartCounts, mesh: LogicalMesh) -> float:
    """Without their bytes."""
    return sum(Collective(kind, 0.0, axes).seconds(mesh) for kind, axes, _ in counts)


def _work_s(
    collectives: Sequence[Communication], total_s: float, compute_s: Mapping[JaxprEqn, float]
) -> dict[JaxprEqn | None, float]:
    """Seconds of work by `scan` or `while` loop that communicates; under `None`, the rest of `total_s`."""
    loops = dict.fromkeys(one.loop for one in collectives if one.loop is not None)  # in an order that repeats
    in_loops: dict[JaxprEqn | None, float] = {loop: compute_s[loop] for loop in loops}
    return {**in_loops, None: max(0.0, total_s - sum(in_loops.values()))}


def _communication_s(
    collectives: Sequence[Communication], mesh: LogicalMesh, total_s: float, compute_s: Mapping[JaxprEqn, float] | None
) -> tuple[float, float]:
    """(Seconds that collectives add, seconds that work hides).

    total_s: of the work. compute_s: by equation; `None` if work hides no collectives.
    """
    work_s = {} if compute_s is None else _work_s(collectives, total_s, compute_s)
    seconds: dict[tuple[JaxprEqn | None, bool], float] = defaultdict(float)
    for one, can_hide in starts_of(collectives, mesh, hides=compute_s is not None):
        seconds[one.loop, can_hide] += one.times * one.collective.seconds(mesh)

    overlap, contention = (1.0, 0.0) if mesh.device is None else (mesh.device.overlap, mesh.device.contention)
    hidden_s = sum(
        min((1 - contention) * s, overlap * work_s[loop]) for (loop, is_hidden), s in seconds.items() if is_hidden
    )
    return sum(seconds.values()) - hidden_s, hidden_s


def starts_of(
    collectives: Sequence[Communication], mesh: LogicalMesh, *, hides: bool = True
) -> list[tuple[Communication, bool]]:
    """Collectives that start as one, as one with the sum of their bytes; and whether work hides it.

    hides: whether work hides collectives on GPUs.
    """
    starts = _first_of_start(collectives, mesh)
    exposed = _exposed_starts(collectives, starts) if is_gpu(mesh.device) and hides else set(starts)
    n_bytes: dict[int, float] = defaultdict(float)
    for start, one in zip(starts, collectives, strict=True):
        n_bytes[start] += one.collective.n_bytes
    return [
        (one._replace(collective=dataclasses.replace(one.collective, n_bytes=together)), start not in exposed)
        for start, together in n_bytes.items()
        for one in (collectives[start],)
    ]


def _first_of_start(collectives: Sequence[Communication], mesh: LogicalMesh) -> list[int]:
    """For each collective, the number of the first one that starts with it.

    XLA combines collectives of one group, kind and axes; on GPUs up to `GPU_COMBINED_BYTES`.
    """
    combined, most_bytes = combined_kinds(mesh), GPU_COMBINED_BYTES if is_gpu(mesh.device) else math.inf
    starts: list[int] = []
    last: dict[tuple[object, ...], tuple[int, float]] = {}
    for i, one in enumerate(collectives):
        start = i
        if one.group is not None and one.collective.kind in combined:
            key = (one.loop, one.group, one.times, one.collective.kind, one.collective.axes)
            n_bytes = one.collective.result_bytes(mesh)
            before, before_bytes = last.get(key, (i, 0.0))
            if before_bytes + n_bytes <= most_bytes:
                start, n_bytes = before, before_bytes + n_bytes
            last[key] = start, n_bytes
        starts.append(start)
    return starts


def _exposed_starts(collectives: Sequence[Communication], starts: Sequence[int]) -> set[int]:
    """The starts that no work hides. starts: see `_first_of_start`.

    Collectives that start together wait for the last one, so all are exposed if one is, and also each collective that
    waits for them: gathers of new weights wait for sums of gradients.
    """
    exposed = {start for start, one in zip(starts, collectives, strict=True) if not one.can_hide}
    exposed_bits = sum(1 << i for i, start in enumerate(starts) if start in exposed)  # bit i: collective i is exposed
    exposed.update(start for start, one in zip(starts, collectives, strict=True) if one.after & exposed_bits)
    return exposed
