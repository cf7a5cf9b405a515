"""Between the tasks of a staged step and the intra-operator problem of one mesh: the problem, the programs of its
tasks once it is solved, and what these communicate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import LogicalMesh
from minialpa.inter.microbatch.split_step import is_loop
from minialpa.inter.staging.tasks import StagedStep, Task
from minialpa.intra.graph.problem import MeshEquations, MeshSharding, Role
from minialpa.intra.spmd import Communication, ShardedEquations, collectives_of
from minialpa.sharding import EquationSpecs, Spec
from minialpa.tracing.jaxprs import is_literal, operand_vars


def mesh_equations(staged: StagedStep, mesh: int) -> MeshEquations:
    """The equations that run on `mesh`, each once even if several tasks run it, and the roles of its inputs."""
    n = staged.split.n_micro_batches
    tasks = [task for task in staged.tasks if task.mesh == mesh]
    # Where all of a step is one task, the update is a part of it.
    updates = {id(op.eqn) for op in staged.split.ops if op.segment > 0 and not is_loop(op.segment)}
    eqns: dict[int, tuple[JaxprEqn, int, bool]] = {}
    for task in tasks:
        for eqn in task.eqns:
            eqns.setdefault(id(eqn), (eqn, n if task.per_micro_batch else 1, id(eqn) in updates))
    made = {v for eqn, _, _ in eqns.values() for v in eqn.outvars}
    equal = {a.loop: a.total for a in staged.split.accumulators if a.loop in made}
    equal.update({s.loop: s.total for s in staged.split.stacks if s.loop in made})
    made.update(equal.values())
    traced = staged.split.traced
    offset = len(traced.flat.constvars)
    aliases = tuple(
        (traced.flat.invars[alias], atom)
        for atom, alias in zip(staged.split.outvars, traced.layouts, strict=True)
        if alias is not None and not is_literal(atom) and atom in made and mesh in staged.input_meshes[offset + alias]
    )
    inputs = tuple((v, role) for v, role in _inputs(staged, tasks, mesh) if v not in made)
    made_or_read = made | {v for v, _ in inputs}
    return MeshEquations(
        eqns=tuple(e for e, _, _ in eqns.values()),
        times=tuple(t for _, t, _ in eqns.values()),
        in_update=tuple(u for _, _, u in eqns.values()),
        inputs=inputs,
        aliases=aliases,
        equal=equal,
        batch_dims=staged.split.batch_dims,
        whole=_whole(staged, mesh),
        paths=_input_paths(staged),
        results=tuple(
            (v, path)
            for v, path in zip(staged.split.outvars, traced.out_paths, strict=True)
            if not is_literal(v) and v in made_or_read
        ),
    )


def _input_paths(staged: StagedStep) -> dict[Var, str]:
    """Names of arguments, and of their parts for a micro-batch."""
    traced = staged.split.traced
    paths = dict(zip(traced.flat.invars, traced.in_paths, strict=True))
    return {**paths, **{micro: paths[full] for full, micro in staged.split.micro_inputs}}


def _whole(staged: StagedStep, mesh: int) -> frozenset[Var]:
    """What is a result of the step, goes to another mesh, or is put together over micro-batches other than by a sum."""
    split = staged.split
    whole = {v for v in split.outvars if not is_literal(v)}
    whole.update(stack.loop for stack in split.stacks)
    whole.update(a.loop for a in split.accumulators if a.reduction != "sum" or a.total in whole)
    for task in staged.tasks:
        if task.mesh != mesh:
            read = set(task.invars)
            whole |= read
            whole.update(a.loop for a in split.accumulators if a.total in read)
    return frozenset(whole)


def mesh_programs(
    staged: StagedStep, mesh: int, problem: MeshEquations, sharding: MeshSharding, view: ShardedView
) -> list[TaskProgram]:
    """The tasks of a mesh, in order, and their programs as the solution has them."""
    equations = {id(eqn): specs for eqn, specs in zip(problem.eqns, sharding.equations, strict=True)}
    return [
        TaskProgram(task, task_program(staged, task, sharding.specs, equations, view, sharding.results))
        for task in staged.tasks
        if task.mesh == mesh
    ]


def mesh_collectives(programs: Sequence[TaskProgram]) -> list[TaskCollectives]:
    """What each task of a mesh communicates."""
    return [TaskCollectives(p.task, tuple(collectives_of(p.program))) for p in programs]


@dataclass(frozen=True, slots=True)
class TaskCollectives:
    """The collectives of a task, each with how often one run of the task has it."""

    task: Task
    collectives: tuple[Communication, ...]


@dataclass(frozen=True, slots=True)
class TaskProgram:
    """A task and its program."""

    task: Task
    program: ShardedEquations


@dataclass(frozen=True, slots=True)
class ShardedView:
    """The logical mesh of a stage, and the kinds of collectives that may not reshard anything on it."""

    mesh: LogicalMesh
    forbidden: tuple[str, ...] = ()


def task_program(
    staged: StagedStep,
    task: Task,
    specs: Mapping[Var, Spec],
    equations: Mapping[int, EquationSpecs],
    view: ShardedView,
    results: Mapping[Var, Spec],
) -> ShardedEquations:
    """The equations of a task with their specs. `results`: in which specs results of the step are left in the end."""
    last = task.kind == "update" or (task.kind == "step" and staged.split.n_micro_batches == 1)
    read = {v for t in staged.tasks for v in t.invars}
    final = {v: spec for v, spec in results.items() if last and v not in read}
    out_specs = tuple(final.get(v, specs[v]) for v in task.outvars)
    return ShardedEquations(
        task.eqns, task.invars, task.outvars, specs, equations, out_specs, view.mesh, view.forbidden
    )


def _inputs(staged: StagedStep, tasks: list[Task], mesh: int) -> list[tuple[Var, Role]]:
    """Inputs of the step on this mesh in order, then what other meshes send."""
    traced = staged.split.traced
    in_loop = {v for task in tasks if task.kind != "update" for eqn in task.eqns for v in operand_vars(eqn)}
    if all(task.kind == "step" for task in tasks) and staged.split.n_micro_batches == 1:
        in_loop = {v for op in staged.split.ops if is_loop(op.segment) for v in operand_vars(op.eqn)}
    batch = {v for v, dim in zip(traced.flat.invars, traced.batch_dims, strict=True) if dim is not None}
    out: dict[Var, Role] = {}
    for var, meshes in zip(staged.inputs, staged.input_meshes, strict=True):
        if mesh in meshes:
            out[var] = "batch" if var in batch else "parameter" if var in in_loop else "state"
    micro = {v for _, v in staged.split.micro_inputs}
    for task in tasks:
        for v in task.invars:
            if v not in out:
                out[v] = "batch" if v in micro else "received"
    return list(out.items())
