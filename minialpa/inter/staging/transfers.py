"""What meshes send each other in a step: its tasks in, values with the meshes that want them out."""

from __future__ import annotations

from collections import defaultdict

from jax.extend.core import Var

from minialpa.inter.staging.split_values import combined_values
from minialpa.inter.staging.tasks import StagedStep, Task
from minialpa.plan import PassName, PlannedTransfer
from minialpa.tracing.jaxprs import bytes_of


def remote_readers(staged: StagedStep) -> dict[tuple[Var, int], set[int]]:
    """(variable, mesh that makes it) -> other meshes that read it and do not make it."""
    made: dict[Var, set[int]] = defaultdict(set)
    for task in staged.tasks:
        for v in task.outvars:
            made[v].add(task.mesh)
    for part, total in combined_values(staged.split):
        made[total] |= made[part]
    out: dict[tuple[Var, int], set[int]] = defaultdict(set)
    for task in staged.tasks:
        for v in task.invars:
            if v in made and task.mesh not in made[v]:
                out[v, min(made[v])].add(task.mesh)
    return out


def planned_transfers(staged: StagedStep) -> tuple[PlannedTransfer, ...]:
    """What tasks send to those of other meshes, added up. A mesh gets a value once, for its first reader."""
    maker = {(v, task.mesh): task for task in staged.tasks for v in task.outvars}
    loop_of = {v: task.loop for task in staged.tasks for v in task.outvars}
    loop_of.update({total: loop_of[part] for part, total in combined_values(staged.split) if part in loop_of})
    n_bytes: dict[tuple[PassName, PassName], float] = defaultdict(float)
    for (v, mesh), readers in remote_readers(staged).items():
        made = maker.get((v, mesh))
        for reader in sorted(readers):
            # Tasks are in the order of one micro-batch.
            first = next(task for task in staged.tasks if task.mesh == reader and v in task.invars)
            source = _name(made) if made else PassName("update", mesh, loop_of[v])
            n_bytes[source, _name(first)] += bytes_of(v)
    return tuple(PlannedTransfer(source, target, size) for (source, target), size in sorted(n_bytes.items()))


def _name(task: Task) -> PassName:
    if task.kind == "forward" or task.kind == "backward":
        return PassName(task.kind, task.chunk, task.loop)
    # Every mesh computes the prologue that it reads, and `step` is for a single mesh.
    assert task.kind == "update", task.kind
    return PassName("update", task.mesh, task.loop)
