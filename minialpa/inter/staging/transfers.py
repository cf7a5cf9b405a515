"""What the meshes of a staged step send each other: which variables, and the bytes that a plan predicts for them."""

from __future__ import annotations

from collections import defaultdict

from jax.extend.core import Var

from minialpa.inter.staging.split_values import combined_values
from minialpa.inter.staging.tasks import StagedStep, Task
from minialpa.ir.equations import bytes_of
from minialpa.plan import PassName, PlannedTransfer


def remote_readers(staged: StagedStep) -> dict[tuple[Var, int], set[int]]:
    """(variable, first mesh that makes it) -> other meshes that read it and do not make it."""
    makers: dict[Var, set[int]] = defaultdict(set)
    for task in staged.tasks:
        for v in task.outvars:
            makers[v].add(task.mesh)
    for value, total in combined_values(staged.split):
        makers[total] |= makers[value]

    # A mesh that makes a variable itself needs no copy; of several makers, the first one sends.
    readers: dict[tuple[Var, int], set[int]] = defaultdict(set)
    for task in staged.tasks:
        for v in task.invars:
            if v in makers and task.mesh not in makers[v]:
                readers[v, min(makers[v])].add(task.mesh)
    return readers


def planned_transfers(staged: StagedStep) -> tuple[PlannedTransfer, ...]:
    """Bytes that passes send to those of other meshes. A mesh gets a value once, for its first reader."""
    maker = {(v, task.mesh): task for task in staged.tasks for v in task.outvars}
    loop_of = {v: task.loop for task in staged.tasks for v in task.outvars}
    loop_of.update({total: loop_of[value] for value, total in combined_values(staged.split) if value in loop_of})

    n_bytes: dict[tuple[PassName, PassName], float] = defaultdict(float)
    for (v, mesh), readers in remote_readers(staged).items():
        task = maker.get((v, mesh))
        # No task makes a total: it is sent behind the loop, as the first update of its mesh would be.
        source = _pass_of(task) if task else PassName("update", mesh, loop_of[v])
        for reader in sorted(readers):
            # Tasks are in the order of one micro-batch, so this is the first that needs the value.
            first = next(task for task in staged.tasks if task.mesh == reader and v in task.invars)
            n_bytes[source, _pass_of(first)] += bytes_of(v)
    return tuple(PlannedTransfer(source, target, size) for (source, target), size in sorted(n_bytes.items()))


def _pass_of(task: Task) -> PassName:
    if task.kind == "forward" or task.kind == "backward":
        return PassName(task.kind, task.chunk, task.loop)
    # Every mesh computes the prologue that it reads, and `step` is for a single mesh.
    assert task.kind == "update", task.kind
    return PassName("update", task.mesh, task.loop)
