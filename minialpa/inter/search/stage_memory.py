"""The tasks of one mesh and their shardings in, bytes per device over a step out.

    peak = fixed + max over moments (sum_c live[c] * kept[c]) + temp

    fixed     parameters, optimizer state, accumulators, values for later loops
    kept[c]   per micro-batch, values that chunk c of the mesh keeps for later passes
    live[c]   live micro-batches of chunk c at a moment, see `schedules.live_counts` (also for split backward passes)
    temp      most further bytes of any task, by `intra/memory/liveness.py`

`mesh_memory` measures a solution. `mesh_usages` lists the same bytes by variable before a solve, for the memory limit
of the cost graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from jax.extend.core import Var
from numpy.typing import NDArray

from minialpa.inter.staging.accumulators import added_inside, only_added
from minialpa.inter.staging.last_pass import TaskProgram
from minialpa.inter.staging.mesh_problem import ShardedView
from minialpa.inter.staging.tasks import StagedStep, Task
from minialpa.intra.graph.memory_constraints import Usage
from minialpa.intra.graph.problem import MeshSharding
from minialpa.intra.memory.compiler import Compiler
from minialpa.intra.memory.liveness import LargeTensor, Lifetimes, donated_pairs, lifetimes, peak_bytes
from minialpa.intra.spmd import ShardedEquations
from minialpa.intra.strategies.loops import scan_body
from minialpa.ir.equations import Atom, bytes_of, device_bytes_of, host_bytes_of, is_literal, operand_vars
from minialpa.rules.expensive import has_contraction

Moments = Sequence[Sequence[int]]

#: Temporaries are predicted: this fraction of them stays free, and these bytes for the many small buffers of a program.
_RESERVE, _RESERVE_BYTES = 0.05, 32_768

Bytes = TypeVar("Bytes", float, NDArray[np.float64])


def needed_bytes(kept: Bytes, temp: Bytes) -> Bytes:
    """With the reserve. kept: exact. temp: predicted temporaries."""
    return kept + (1 + _RESERVE) * temp + _RESERVE_BYTES


def most_kept(kept_bytes: Sequence[float], moments: Moments) -> float:
    """Of micro-batches in flight."""
    return max(sum(n * size for n, size in zip(live, kept_bytes, strict=True)) for live in moments)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshMemory:
    """Bytes per device, as in the formula of the module.

    kept_bytes: for each count of `schedules.live_counts`, per live micro-batch.
    pass_temp_bytes, update_temp_bytes: `temp` of the passes and of the update.
    left_bytes: part of `pass_temp_bytes` that remains at the end of a pass, such as gradients before accumulation.
    largest: tensors at the peak of the task with the largest `temp`.
    """

    fixed_bytes: float
    kept_bytes: tuple[float, ...]
    pass_temp_bytes: float
    update_temp_bytes: float
    left_bytes: float
    largest: tuple[LargeTensor, ...]
    host_fixed_bytes: float = 0.0
    host_kept_bytes: tuple[float, ...] = ()
    host_temp_bytes: float = 0.0

    @property
    def temp_bytes(self) -> float:
        return max(self.pass_temp_bytes, self.update_temp_bytes)

    @property
    def in_flight_bytes(self) -> float:
        return sum(self.kept_bytes)

    def peak_bytes(self, moments: Moments) -> float:
        return self.fixed_bytes + most_kept(self.kept_bytes, moments) + self.temp_bytes

    def host_bytes(self, moments: Moments) -> float:
        """`peak_bytes` of the arrays in host memory."""
        kept = most_kept(self.host_kept_bytes, moments) if self.host_kept_bytes else 0.0
        return self.host_fixed_bytes + kept + self.host_temp_bytes


@dataclass(frozen=True, slots=True)
class _KeptVariables:
    """Variables of a mesh that outlive its tasks.

    fixed: values that stay for a whole loop -> number of copies.
    residuals: values for later passes of the loop -> the number of their count in `schedules.live_counts`.
    """

    fixed: dict[Var, int]
    residuals: dict[Var, int]
    n_counts: int


def mesh_memory(
    staged: StagedStep,
    mesh: int,
    programs: Sequence[TaskProgram],
    sharding: MeshSharding,
    view: ShardedView,
    *,
    compiler: Compiler,
) -> MeshMemory:
    kept, n_of, specs = _kept_variables(staged, mesh), staged.repeats.n_variables, sharding.specs
    temps, left = {True: 0.0, False: 0.0}, 0.0  # by `per_micro_batch`
    host_temp = 0.0
    largest: tuple[LargeTensor, ...] = ()

    def local_bytes(v: Var, size: _Size) -> float:
        return n_of(v) * size(v) / specs[v].n_shards(view.mesh.shape) if v in specs else 0.0

    def kept_bytes(size: _Size) -> tuple[float, tuple[float, ...]]:
        """Fixed, and for each count."""
        by_count = [0.0] * kept.n_counts
        for v, count in kept.residuals.items():
            by_count[count] += local_bytes(v, size)
        return sum(n * local_bytes(v, size) for v, n in kept.fixed.items()), tuple(by_count)

    # Tasks run one after the other, so the largest counts.
    for one, program in _distinct_programs(programs):
        task = one.task
        accumulators = range(len(task.invars), len(program.invars))
        donated = (*donations(staged, task), *accumulators)
        memory = peak_bytes(program, donated, compiler=compiler)
        outputs = _output_bytes(program, donated, kept)
        gone = sum(local_bytes(v, device_bytes_of) for v in one.summed_before)
        extra = memory.temp_bytes + outputs + _argument_bytes(program, kept) - gone
        passing = _output_bytes(program, donated, kept, host_bytes_of) + _argument_bytes(program, kept, host_bytes_of)
        host_temp = max(host_temp, memory.host_temp_bytes + passing)
        if task.per_micro_batch and extra >= temps[True]:
            left = outputs
        if extra >= max(temps.values()):
            largest = memory.largest
        temps[task.per_micro_batch] = max(temps[task.per_micro_batch], extra)

    fixed, by_count = kept_bytes(device_bytes_of)
    host_fixed, host_by_count = kept_bytes(host_bytes_of)
    return MeshMemory(
        fixed_bytes=fixed,
        kept_bytes=by_count,
        pass_temp_bytes=temps[True],
        update_temp_bytes=temps[False],
        left_bytes=left,
        largest=largest,
        host_fixed_bytes=host_fixed,
        host_kept_bytes=host_by_count,
        host_temp_bytes=host_temp,
    )


def _distinct_programs(tasks: Sequence[TaskProgram]) -> Iterator[tuple[TaskProgram, ShardedEquations]]:
    """The run of the last micro-batch may have its own program."""
    for one in tasks:
        yield one, one.program
        if one.last is not None:
            yield one, one.last.program


def mesh_usages(
    staged: StagedStep,
    mesh: int,
    moments: Moments,
    view: ShardedView,
    *,
    compiler: Compiler,
    gathered: bool = False,
) -> tuple[Usage, ...]:
    """The variables in memory over time, without parameters and optimizer state. Tasks run one after the other.

    Residuals count at the moment of `moments` with most unsharded bytes.
    gathered: also count arguments as products read them, and operands as loops read them. Arrays in one sharding then
    count twice.
    """
    kept, n_of = _kept_variables(staged, mesh), staged.repeats.n_variables
    live = max(moments, key=lambda counts: sum(n_of(v) * bytes_of(v) * counts[c] for v, c in kept.residuals.items()))
    inputs = set(staged.inputs)
    usages: list[Usage] = []

    now = 0
    for task in staged.tasks_of(mesh):
        found = _lifetimes_in(staged, task, compiler)
        end = now + max(1, found.n_times)
        made = {v: now + start for v, start, _, _ in found.intervals}
        usages += _made_usages(staged, task, found, kept, view, now)
        usages += _loop_usages(task, made, gathered=gathered)
        if gathered:
            usages += (
                replace(one, n_copies=n_of(one.var)) for one in _gathered_usages(task, made, staged.live_on_entry, now)
            )

        # Other arguments are received for this task and stay until its end.
        usages += (Usage(v, n_of(v), now, end) for v in task.invars if v not in kept.fixed and v not in kept.residuals)
        now = end

    usages += (Usage(v, n * n_of(v), 0, now) for v, n in kept.fixed.items() if v not in inputs)
    usages += (Usage(v, n_of(v) * live[chunk], 0, now) for v, chunk in kept.residuals.items() if live[chunk])
    return tuple(usages)


def _lifetimes_in(staged: StagedStep, task: Task, compiler: Compiler) -> Lifetimes:
    given = set(donations(staged, task))
    pairs = _replacing_pairs(staged, task, [v for i, v in enumerate(task.invars) if i in given])
    return lifetimes(task.eqns, task.invars, task.outvars, pairs, compiler=compiler, repeats=staged.repeats)


def _made_usages(
    staged: StagedStep, task: Task, found: Lifetimes, kept: _KeptVariables, view: ShardedView, now: int
) -> Iterator[Usage]:
    """now: the first time of the task."""
    added = only_added(staged, added_inside(staged, task)) if view.adds_to_accumulators else set()
    for v, start, end, n in found.intervals:
        if v not in kept.residuals and v not in kept.fixed:
            # A value that is added to its accumulator at once is gone before the task ends.
            yield Usage(v, n, now + start, now + (start + 1 if v in added else end))


def _loop_usages(task: Task, made: Mapping[Var, int], *, gathered: bool) -> Iterator[Usage]:
    """Operands while the loops run, such as weights that are gathered before a loop over layers."""
    for eqn in task.eqns:
        body = scan_body(eqn)
        time = min((made[v] for v in eqn.outvars if v in made), default=None)
        if body is None or time is None:
            continue
        for k, (operand, inner) in enumerate(zip(eqn.invars, body.flat.invars, strict=True)):
            if not is_literal(operand):
                n_slices = 1 if k < body.n_lead else body.length
                yield Usage(inner, n_slices, time, time + 1, None if gathered else operand, if_gathered=gathered)


def _gathered_usages(
    task: Task, made: Mapping[Var, int], live_on_entry: Collection[Var], start: int
) -> Iterator[Usage]:
    """`live_on_entry` values as products and look-ups read them, from the start of the task: gathers need not wait."""
    now, free_at = start, defaultdict[Var, int](lambda: start)
    for eqn in task.eqns:
        now = max(now, min((made[v] for v in eqn.outvars if v in made), default=now))
        if not has_contraction(eqn) and eqn.primitive.name != "gather":
            continue
        for v in dict.fromkeys(operand_vars(eqn)):
            # The next reader in the same spec reads the same copy.
            if v in live_on_entry and now + 1 > free_at[v]:
                yield Usage(v, 1, free_at[v], now + 1, reader=eqn.outvars[0], if_gathered=True)
                free_at[v] = now + 1


def kept_usages(staged: StagedStep, mesh: int, n_live: int) -> tuple[Usage, ...]:
    """Variables that outlive the tasks of a mesh, with `n_live` live micro-batches."""
    kept = _kept_variables(staged, mesh)
    stays = [Usage(v, n, 0, 1) for v, n in kept.fixed.items()]
    return (*stays, *(Usage(v, n_live, 0, 1) for v in kept.residuals))


def donations(staged: StagedStep, task: Task) -> tuple[int, ...]:
    """Positions of the inputs of a task whose buffers its outputs may take over: without an owner or a later reader."""
    split = staged.split
    traced = split.traced
    given = {traced.flat.invars[a] for a in traced.aliases if a is not None}
    foreign = set(staged.inputs) - given
    results = {v for v in split.outvars if not is_literal(v)}
    tasks = staged.tasks_of(task.mesh)
    later = {v for t in tasks[tasks.index(task) + 1 :] for v in t.invars}
    kept = foreign | results | later
    if task.per_micro_batch and split.n_micro_batches > 1:
        # The next micro-batch reads what is computed once.
        kept |= {v for t in staged.tasks if not t.per_micro_batch for v in t.outvars} | set(staged.inputs)
    return tuple(i for i, v in enumerate(task.invars) if v not in kept)


def _kept_variables(staged: StagedStep, mesh: int) -> _KeptVariables:
    n_chunks = sum(home == mesh for home in staged.mesh_of_chunk)
    fixed = _fixed_variables(staged, mesh)
    residuals = _residuals(staged, mesh, fixed)
    if not staged.splits_backward:
        return _KeptVariables(fixed, residuals, n_chunks)

    # As `live_counts` has them: kept until the backward pass, until the weights pass, or only between these two.
    loop = [task for task in staged.tasks_of(mesh) if task.per_micro_batch]
    of_weights = {v for task in loop if task.kind == "weights" for v in task.invars}
    of_forward = {v for task in loop if task.kind == "forward" for v in (*task.invars, *task.outvars)}
    counts = {
        v: chunk if v not in of_weights else n_chunks + chunk if v in of_forward else 2 * n_chunks + chunk
        for v, chunk in residuals.items()
    }
    return _KeptVariables(fixed, counts, 3 * n_chunks)


def _fixed_variables(staged: StagedStep, mesh: int) -> dict[Var, int]:
    """Arguments, accumulators, and values that loops over the micro-batches leave for later segments."""
    n = staged.split.n_micro_batches
    fixed = {v: 1 for v, meshes in zip(staged.inputs, staged.input_meshes, strict=True) if mesh in meshes}
    tasks = staged.tasks_of(mesh)
    made = {v for task in tasks for v in task.outvars}
    fixed.update((a.complete, 1) for a in staged.split.accumulators if a.loop in made)
    # A per-example value of a micro-batch waits until all micro-batches have it.
    for joined in staged.split.concatenations:
        if joined.loop in made:
            fixed.update({joined.loop: n, joined.complete: 1})

    computed_once = {v for task in staged.tasks if not task.per_micro_batch for v in task.outvars}
    loop_of = {v: task.loop for task in staged.tasks if task.per_micro_batch for v in task.outvars}
    for task in tasks:
        if task.per_micro_batch:
            # Values of earlier segments stay for the whole loop.
            fixed.update((v, 1) for v in task.invars if v in computed_once)
            fixed.update((v, n) for v in task.invars if loop_of.get(v, task.loop) < task.loop)
    return fixed


def _residuals(staged: StagedStep, mesh: int, fixed: Mapping[Var, int]) -> dict[Var, int]:
    """Values that a pass reads and an earlier pass of the same micro-batch and loop made or received."""
    tasks = staged.tasks_of(mesh)
    loop = [task for task in tasks if task.per_micro_batch]
    chunks = [c for c, home in enumerate(staged.mesh_of_chunk) if home == mesh]
    never = {*fixed, *(part for _, part in staged.split.micro_inputs), staged.split.micro_index}
    never.update(v for task in tasks if not task.per_micro_batch for v in task.outvars)

    seen: set[Var] = set()
    residuals: dict[Var, int] = {}
    for task in loop:
        residuals.update((v, len(chunks)) for v in task.invars if v in seen)
        seen.update(v for v in (*task.invars, *task.outvars) if v not in never)

    for task in loop:
        # The first chunk keeps it, because its backward pass is the last of the mesh.
        for v in (*task.invars, *task.outvars):
            if v in residuals:
                residuals[v] = min(residuals[v], chunks.index(task.chunk))
    return residuals


_Size = Callable[[Atom], float]


def _output_bytes(
    program: ShardedEquations, donated: tuple[int, ...], kept: _KeptVariables, size: _Size = device_bytes_of
) -> float:
    """Of results that neither outlive the task nor take over an argument."""
    aliased, n_of = {o for _, o in donated_pairs(program, donated)}, program.repeats.n_variables
    return sum(
        n_of(v) * size(v) / spec.n_shards(program.mesh.shape)
        for o, (v, spec) in enumerate(zip(program.outvars, program.out_specs, strict=True))
        if o not in aliased and v not in kept.residuals and v not in kept.fixed
    )


def _argument_bytes(program: ShardedEquations, kept: _KeptVariables, size: _Size = device_bytes_of) -> float:
    """Of arguments that are received for this task alone."""
    n_of = program.repeats.n_variables
    return sum(
        n_of(v) * size(v) / program.specs[v].n_shards(program.mesh.shape)
        for v in program.invars
        if v not in kept.fixed and v not in kept.residuals
    )


def _replacing_pairs(staged: StagedStep, task: Task, given: list[Var]) -> list[tuple[Var, Var]]:
    """(donated argument of the step, result of this task that replaces it)."""
    traced = staged.split.traced
    made = set(task.outvars)
    return [
        (traced.flat.invars[alias], atom)
        for atom, alias in zip(staged.split.outvars, traced.aliases, strict=True)
        if alias is not None and not is_literal(atom) and atom in made and traced.flat.invars[alias] in given
    ]
