"""A plan and its staged step in; a `VerifyError` with the name of a field, or no result, out.

`plan.verify` checks a plan by itself, and `replan.check_fits` that it was made for this step. Plan files can be edited,
so decisions are checked here, and their consequences (meshes of arguments and results, passes of stages) are derived
and compared. Predicted seconds and bytes have no effect and are not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jax.extend.core import Var

from minialpa.errors import MinialpaError, VerifyError
from minialpa.inter.schedule.chunks import check_chunks, plan_chunks, plan_schedule
from minialpa.inter.schedule.schedules import schedule_names
from minialpa.inter.staging.leaf_placement import placed_inputs, placed_outputs
from minialpa.inter.staging.tasks import StagedStep
from minialpa.intra.graph.problem import MeshEquations
from minialpa.intra.verify_specs import SpecsOfMesh, check_resharding, check_spec, verify_specs
from minialpa.ir.equations import is_literal
from minialpa.plan import PlacedValue, Plan
from minialpa.plan.verify import require
from minialpa.sharding import Spec
from minialpa.tracing.trace import TracedStep


def verify_decisions(traced: TracedStep, plan: Plan) -> None:
    """Raise VerifyError, with the name of the field, unless

    - the number of micro-batches divides the examples;
    - the schedule exists, and can run the layers of the stages.
    """
    n, n_examples = plan.n_micro_batches, traced.batch_size or 1
    require(n_examples % n == 0, "n_micro_batches", n, f"a divisor of the {n_examples} examples of a batch")
    names = ", ".join(f"`{name}`" for name in schedule_names())
    require(plan.schedule in schedule_names(), "schedule", plan.schedule, f"one of {names}")
    with blamed("schedule", plan.schedule):
        check_chunks(plan_chunks(plan), plan.schedule)
    if plan.orders:
        n_stages = len(plan.stages)
        require(plan.schedule == "zb", "schedule", plan.schedule, "`zb`, because the plan has `orders`")
        require(len(plan.orders) == n_stages, "orders", f"a list of {len(plan.orders)}", f"one for {n_stages} stages")
        with blamed("orders", "a list"):
            plan_schedule(plan)


def verify_layers(n_groups: int, plan: Plan) -> None:
    """Raise VerifyError unless a plan has the layer of each of `n_groups` forward equations, or no layers."""
    n = len(plan.layer_of_group)
    expected = f"the layers of {n_groups} forward equations, of which the scans of `plan.row_blocks` are a part"
    require(n in (0, n_groups), "layer_of_group", f"a list of {n}", expected)


@contextmanager
def blamed(where: str, found: Any) -> Iterator[None]:
    """Raise errors of the body as VerifyErrors about the field `where` of the plan, whose value is `found`."""
    try:
        yield
    except MinialpaError as error:
        raise VerifyError(f"The plan cannot run, as `plan.{where}` is {found}. {error}") from error


def verify_staged(staged: StagedStep, problems: Sequence[MeshEquations], plan: Plan) -> None:
    """Raise VerifyError, with the name of the field, unless

    - stages have the passes of the step, and the schedule runs them all;
    - the specs of each stage are right, see `verify_specs`;
    - arguments and results are on the meshes of their stages, in specs that can be reached by allowed resharding.
    """
    require(len(plan.stages) == len(problems), "stages", f"a list of {len(plan.stages)}", f"{len(problems)} stages")

    # Stages first: specs of arguments and results are compared with them.
    known: list[dict[Var, Spec]] = []
    for k, (problem, stage) in enumerate(zip(problems, plan.stages, strict=True)):
        _verify_passes(staged, plan, k)
        specs = SpecsOfMesh(
            where=f"stages[{k}]",
            mesh=stage.mesh,
            forbidden=stage.forbidden,
            inputs=stage.input_specs,
            equations=stage.equation_specs,
        )
        known.append(verify_specs(problem, specs))

    _verify_inputs(plan.inputs, placed_inputs(staged, known))
    _verify_outputs(staged, plan, known)


def _verify_passes(staged: StagedStep, plan: Plan, mesh: int) -> None:
    stage, n_loops = plan.stages[mesh], staged.split.n_loops
    between = f"one number for each of {n_loops} loops except the last"
    require(len(stage.between_s) == n_loops - 1, f"stages[{mesh}].between_s", stage.between_s, between)

    n_kept = sum(home == mesh for home in staged.mesh_of_chunk) * (3 if staged.splits_backward else 1)
    require(len(stage.kept_bytes) == n_kept, f"stages[{mesh}].kept_bytes", stage.kept_bytes, f"{n_kept} numbers")

    passes = [(one.kind, one.chunk, one.loop) for one in stage.passes]
    tasks = [(task.kind, task.chunk, task.loop) for task in staged.tasks_of(mesh) if task.per_micro_batch]
    require(passes == tasks, f"stages[{mesh}].passes", passes, f"the kinds, chunks and loops {tasks}")

    # The schedule for inference would leave out the backward passes of the tasks.
    trains = any(kind == "backward" for kind, _, _ in tasks)
    runs = not trains or plan.schedule != "inference"
    require(runs, "schedule", plan.schedule, "a schedule with backward passes, because the step computes gradients")


def _verify_inputs(found: Sequence[PlacedValue], expected: Sequence[PlacedValue]) -> None:
    _verify_homes("inputs", found, expected)
    for i, (value, required) in enumerate(zip(found, expected, strict=True)):
        for j, (spec, used) in enumerate(zip(value.specs, required.specs, strict=True)):
            as_read = f"{used}, the spec in stage {value.mesh_ids[j]}"
            require(spec == used, f"inputs[{i}].specs[{j}]", spec, as_read)


def _verify_homes(name: str, found: Sequence[PlacedValue], expected: Sequence[PlacedValue]) -> None:
    """Check all fields except specs and paths: a step may have other names for its arguments."""
    require(len(found) == len(expected), name, f"a list of {len(found)}", f"the {len(expected)} of the step")
    for i, (value, required) in enumerate(zip(found, expected, strict=True)):
        for field in ("shape", "dtype", "memory_kind", "mesh_ids", "rows"):
            now, then = getattr(value, field), getattr(required, field)
            require(now == then, f"{name}[{i}].{field}", now, f"{then}, as derived from the step and its stages")


def _verify_outputs(staged: StagedStep, plan: Plan, known: Sequence[Mapping[Var, Spec]]) -> None:
    # The spec of a result at the end may differ from its spec in the stage, if the mesh can reshard.
    _verify_homes("outputs", plan.outputs, placed_outputs(staged, [{}] * len(known)))
    for number, atom in enumerate(staged.split.outvars):
        part = staged.split.traced.result(number)
        value = plan.outputs[part.leaf]
        for j, (mesh, spec) in enumerate(zip(value.mesh_ids, value.specs, strict=True)):
            if part.rows is not None and value.rows[j] != part.rows:
                continue
            where, stage = f"outputs[{part.leaf}].specs[{j}]", plan.stages[mesh]
            check_spec(atom, spec, stage.mesh, where)
            made = None if is_literal(atom) else known[mesh].get(atom)
            if made is not None:
                check_resharding(atom, made, spec, stage.mesh, stage.forbidden, where)
