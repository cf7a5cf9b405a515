"""A staged step and a mesh in, the sharding problem of the mesh out; its solution in, the programs of its tasks out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import LogicalMesh
from minialpa.cost import CollectiveKind, is_gpu
from minialpa.inter.microbatch.split_step import is_loop
from minialpa.inter.staging.last_pass import TaskProgram, with_hidden_sums
from minialpa.inter.staging.tasks import StagedStep, Task
from minialpa.intra.graph.problem import MeshEquations, MeshSharding, Role
from minialpa.intra.narrow_moves import with_narrow_moves
from minialpa.intra.spmd import Communication, ShardedEquations
from minialpa.intra.strategies.combining import combined_sums
from minialpa.intra.strategies.compared import compared_values
from minialpa.ir.equations import is_literal, operand_vars
from minialpa.options import AutoShardingOption
from minialpa.sharding import EquationSpecs, Spec


def mesh_equations(staged: StagedStep, mesh: int) -> MeshEquations:
    """The equations of `mesh`, each once even if several tasks run it, and the roles of its inputs."""
    split = staged.split
    tasks = staged.tasks_of(mesh)
    times = _equation_runs(staged, tasks)
    # If the whole step is one task, the update is a part of that task.
    updates = {op.eqn for op in split.ops if op.segment > 0 and not is_loop(op.segment)}

    made = {v for eqn, _ in times for v in eqn.outvars}
    accumulator_of = {value: accumulator for value, accumulator in split.combined if value in made}
    made.update(accumulator_of.values())
    inputs = tuple((v, role) for v, role in _input_roles(staged, tasks, mesh) if v not in made)

    return MeshEquations(
        eqns=tuple(eqn for eqn, _ in times),
        times=tuple(n for _, n in times),
        in_update=tuple(eqn in updates for eqn, _ in times),
        inputs=inputs,
        aliases=_aliases(staged, mesh, made),
        equal=accumulator_of,
        added=frozenset(a.loop for a in split.accumulators if a.reduction == "sum" and a.loop in made),
        batch_dims=split.batch_dims,
        not_partial=_not_partial(staged, mesh) | compared_values([eqn for eqn, _ in times]),
        paths=_input_paths(staged),
        results=_results_on(staged, made.union(v for v, _ in inputs)),
        repeats=staged.repeats,
    )


def _results_on(staged: StagedStep, known: AbstractSet[Var]) -> tuple[tuple[Var, str], ...]:
    """The results of the step among the variables `known` on a mesh, with their paths."""
    results = zip(staged.split.outvars, staged.split.traced.out_paths, strict=True)
    return tuple((atom, path) for atom, path in results if not is_literal(atom) and atom in known)


def _equation_runs(staged: StagedStep, tasks: Sequence[Task]) -> list[tuple[JaxprEqn, int]]:
    found: dict[JaxprEqn, tuple[JaxprEqn, int]] = {}
    for task in tasks:
        n_runs = staged.split.n_micro_batches if task.per_micro_batch else 1
        for eqn in task.eqns:
            found.setdefault(eqn, (eqn, n_runs * staged.repeats.n_equations(eqn)))
    return list(found.values())


def _aliases(staged: StagedStep, mesh: int, made: AbstractSet[Var]) -> tuple[tuple[Var, Var], ...]:
    traced = staged.split.traced
    meshes_of_argument = staged.input_meshes[len(traced.flat.constvars) :]
    return tuple(
        (traced.flat.invars[replaced], atom)
        for atom, replaced in zip(staged.split.outvars, traced.layouts, strict=True)
        if replaced is not None and not is_literal(atom) and atom in made and mesh in meshes_of_argument[replaced]
    )


def _input_paths(staged: StagedStep) -> dict[Var, str]:
    traced = staged.split.traced
    paths = dict(zip(traced.flat.invars, traced.in_paths, strict=True))
    return {**paths, **{micro: paths[full] for full, micro in staged.split.micro_inputs}}


def _not_partial(staged: StagedStep, mesh: int) -> frozenset[Var]:
    """Variables that other meshes, results or micro-batches need complete: the step returns them, other meshes read
    them, or micro-batches combine them by anything but a sum.
    """
    split = staged.split
    complete = set(split.results)
    complete.update(joined.loop for joined in split.concatenations)
    complete.update(a.loop for a in split.accumulators if a.reduction != "sum" or a.complete in complete)

    for task in staged.tasks:
        if task.mesh != mesh:
            read = set(task.invars)
            complete |= read
            complete.update(a.loop for a in split.accumulators if a.complete in read)
    return frozenset(complete)


def _input_roles(staged: StagedStep, tasks: Sequence[Task], mesh: int) -> list[tuple[Var, Role]]:
    in_loop = _read_in_loops(staged, tasks)
    batch = staged.split.traced.examples.union(micro for _, micro in staged.split.micro_inputs)

    roles: dict[Var, Role] = {}
    for var, meshes in zip(staged.inputs, staged.input_meshes, strict=True):
        if mesh in meshes:
            roles[var] = "batch" if var in batch else "parameter" if var in in_loop else "state"

    for task in tasks:
        for var in task.invars:
            roles.setdefault(var, "batch" if var in batch else "received")
    return list(roles.items())


def _read_in_loops(staged: StagedStep, tasks: Sequence[Task]) -> set[Var]:
    """Variables that `tasks` of a mesh read before the update."""
    if all(task.kind == "step" for task in tasks) and staged.split.n_micro_batches == 1:
        # The update is a part of the only task; the segments still tell the two apart.
        return {v for op in staged.split.ops if is_loop(op.segment) for v in operand_vars(op.eqn)}
    return {v for task in tasks if task.kind != "update" for eqn in task.eqns for v in operand_vars(eqn)}


def mesh_programs(
    staged: StagedStep, mesh: int, problem: MeshEquations, sharding: MeshSharding, view: ShardedView
) -> list[TaskProgram]:
    """The tasks of a mesh, in order, with their programs under the solution `sharding` of `problem`."""
    equations = {eqn: specs for eqn, specs in zip(problem.eqns, sharding.equations, strict=True)}
    return task_programs(staged, mesh, sharding.specs, equations, view, sharding.results)


def task_programs(
    staged: StagedStep,
    mesh: int,
    specs: Mapping[Var, Spec],
    equations: Mapping[JaxprEqn, EquationSpecs],
    view: ShardedView,
    results: Mapping[Var, Spec],
) -> list[TaskProgram]:
    """The tasks of a mesh, in order, with their programs.

    specs, equations: the specs of the variables and equations of the mesh.
    results: specs of the results of the step on the mesh at the end.
    """
    tasks = staged.tasks_of(mesh)
    plain = [(task, with_narrow_moves(task_program(staged, task, specs, equations, view, results))) for task in tasks]
    if view.adds_to_accumulators:
        return with_hidden_sums(staged, plain)
    return [TaskProgram(task, program) for task, program in plain]


def mesh_collectives(programs: Sequence[TaskProgram]) -> list[TaskCollectives]:
    return [
        TaskCollectives(
            task=one.task,
            collectives=one.collectives(),
            accumulator_bytes=one.accumulator_bytes,
            last=None if one.last is None else one.last.collectives(),
        )
        for one in programs
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCollectives:
    """The collectives of each run of a task.

    Attributes:
        accumulator_bytes: per device, of the accumulators to which the task adds.
        last: the collectives of the last run in its loop; None if it is like the others.
    """

    task: Task
    collectives: tuple[Communication, ...]
    accumulator_bytes: float = 0.0
    last: tuple[Communication, ...] | None = None


@dataclass(frozen=True, slots=True)
class ShardedView:
    """The logical mesh of a stage and the rules for its collectives.

    Attributes:
        forbidden: kinds of collectives that may not reshard.
        combined: kinds of sums over devices that start together.
        adds_to_accumulators: whether passes add to accumulators (`accumulators.py`) and sum gradients while they
            compute (`last_pass.py`): on GPUs.
    """

    mesh: LogicalMesh
    forbidden: tuple[str, ...] = ()
    combined: tuple[CollectiveKind, ...] = ()
    adds_to_accumulators: bool = False

    @staticmethod
    def of(mesh: LogicalMesh, option: AutoShardingOption) -> ShardedView:
        combined = combined_sums(mesh, option)
        return ShardedView(mesh, option.forbidden_collectives, combined, adds_to_accumulators=is_gpu(mesh.device))


def task_program(
    staged: StagedStep,
    task: Task,
    specs: Mapping[Var, Spec],
    equations: Mapping[JaxprEqn, EquationSpecs],
    view: ShardedView,
    results: Mapping[Var, Spec],
) -> ShardedEquations:
    """The equations of a task with their specs, without accumulators. Arguments are as in `task_programs`."""
    # A result that another task reads is resharded only when the step ends.
    is_last = task.kind == "update" or (task.kind == "step" and staged.split.n_micro_batches == 1)
    read = {v for other in staged.tasks for v in other.invars}
    final = {v: spec for v, spec in results.items() if is_last and v not in read}

    # Other passes of the same micro-batch wait for a pass's values.
    of_passes = {v for other in staged.tasks if other.per_micro_batch for v in other.invars}
    live_on_entry = staged.live_on_entry.difference(staged.split.batch_dims)

    return ShardedEquations(
        eqns=task.eqns,
        invars=task.invars,
        outvars=task.outvars,
        specs=specs,
        equations=equations,
        out_specs=tuple(final.get(v, specs[v]) for v in task.outvars),
        mesh=view.mesh,
        forbidden=view.forbidden,
        combined=view.combined,
        live_on_entry=live_on_entry.intersection(task.invars),
        required_outputs=frozenset(v for v in task.outvars if v in of_passes),
        repeats=staged.repeats,
    )
