"""A staged step and its plan in; a `PlannedStep` out, which binds the plan's specs and meshes to variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Var

from minialpa.cost import is_gpu
from minialpa.inter.microbatch.split_step import SplitStep
from minialpa.inter.staging.last_pass import TaskProgram
from minialpa.inter.staging.leaf_placement import values_of_parts
from minialpa.inter.staging.mesh_problem import ShardedView, task_programs
from minialpa.inter.staging.staged_step import bind_specs, final_specs
from minialpa.inter.staging.tasks import StagedStep, remote_readers
from minialpa.intra.graph.problem import MeshEquations
from minialpa.plan import PlacedValue, Plan
from minialpa.plan.record import device_of
from minialpa.sharding import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """The input of emission.

    Attributes:
        specs: for each mesh, the specs of its variables.
        programs: the programs of the tasks, in the order of `staged.tasks`.
        results: meshes and specs of each result.
        remote_readers: (variable, mesh that makes it) -> other meshes that read it.
        full_of_micro: examples of an argument in one micro-batch -> the whole argument.
        home_of_argument: number of an argument -> mesh on which a step leaves its new value.
    """

    staged: StagedStep
    plan: Plan
    specs: Sequence[Mapping[Var, Spec]]
    programs: Sequence[TaskProgram]
    results: Sequence[PlacedValue]
    remote_readers: Mapping[tuple[Var, int], set[int]]
    full_of_micro: Mapping[Var, Var]
    number_of_argument: Mapping[Var, int]
    constants: Mapping[Var, Any]
    home_of_argument: Mapping[int, int]

    @property
    def split(self) -> SplitStep:
        return self.staged.split

    @property
    def donated_leaves(self) -> frozenset[int]:
        """Numbers of the argument leaves that a step consumes."""
        return frozenset(a for a in self.split.traced.aliases if a is not None)

    def home_of(self, var: Var, mesh: int) -> int:
        """The mesh from which `mesh` gets an argument: the home of a state between steps, or `mesh` itself."""
        number = None if var in self.full_of_micro else self.number_of_argument.get(var)
        return mesh if number is None else self.home_of_argument.get(number, mesh)


def planned_step(staged: StagedStep, problems: Sequence[MeshEquations], plan: Plan) -> PlannedStep:
    """plan: verified for `staged`. problems: the equations of each mesh."""
    traced = staged.split.traced
    bound = [bind_specs(problem, stage) for problem, stage in zip(problems, plan.stages, strict=True)]
    specs = [specs_of_mesh for specs_of_mesh, _ in bound]
    equations = [
        dict(zip(problem.eqns, of_mesh, strict=True)) for problem, (_, of_mesh) in zip(problems, bound, strict=True)
    ]

    def programs_of(mesh: int) -> list[TaskProgram]:
        stage = plan.stages[mesh]
        on_gpus = is_gpu(device_of(plan, mesh))
        view = ShardedView(stage.mesh, stage.forbidden, stage.combined, adds_to_accumulators=on_gpus)
        return task_programs(staged, mesh, specs[mesh], equations[mesh], view, final_specs(staged, plan, mesh))

    program_of = {one.task: one for mesh in range(len(plan.stages)) for one in programs_of(mesh)}
    results = values_of_parts(plan.outputs, traced.out_parts)
    # The next step finds a state where this step leaves it.
    replaced = zip(traced.layouts, results, strict=True)
    return PlannedStep(
        staged=staged,
        plan=plan,
        specs=specs,
        programs=[program_of[task] for task in staged.tasks],
        results=results,
        remote_readers=remote_readers(staged),
        full_of_micro={micro: full for full, micro in staged.split.micro_inputs},
        number_of_argument={v: i for i, v in enumerate(traced.flat.invars)},
        constants=dict(zip(traced.flat.constvars, traced.flat.consts, strict=True)),
        home_of_argument={number: value.mesh_ids[0] for number, value in replaced if number is not None},
    )
