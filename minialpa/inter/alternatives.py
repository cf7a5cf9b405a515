"""What each decision of a plan is worth: a plan in, tables of alternative plans with their costs out.

An alternative forces one choice, keeps the other decisions, and solves the shardings anew. So a difference in seconds
is the price of the forced choice alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from minialpa.errors import InfeasibleError, MinialpaError
from minialpa.inter.pipeline import plan_step
from minialpa.inter.search.submeshes import candidates
from minialpa.inter.staging.replan import logical_mesh_of, options_of
from minialpa.options import (
    AutoLayerOption,
    AutoStageOption,
    FixedLayerOption,
    ManualStageOption,
    PlanOptions,
    Remat,
    UniformStageOption,
)
from minialpa.plan import PlacedValue, Plan
from minialpa.plan.text import count, seconds_text
from minialpa.report.explain import explain, is_topic, operation_lines, unknown_text
from minialpa.sharding import Spec, specs_of
from minialpa.support.sizes import bytes_text
from minialpa.tracing.trace import TracedStep

#: Most arguments and results, and specs of each, that are explained: each alternative is a plan.
_MOST_VALUES, _MOST_SPECS = 4, 25


@dataclass(frozen=True, slots=True)
class Alternative:
    """One choice with its plan or, without a plan, the reason."""

    name: str
    plan: Plan | None
    reason: str = ""


def explain_step(traced: TracedStep, plan: Plan, what: str) -> str:
    """Tables of the alternatives to the decisions of `plan` on `what`.

    what: "stages", "micro-batches", "remat", a part of the path of an argument or result, or a name of `Plan.explain`.
    """
    of_plan: dict[str, Callable[[TracedStep, Plan], Iterator[Alternative]]] = {
        "micro-batches": _other_micro_batches,
        "remat": _other_remats,
        "stages": _other_stages,
    }
    if what in of_plan:
        found = list(of_plan[what](traced, plan))
        note = "" if found else "\nNo other choice is possible. Rematerialisation, for example, needs gradients."
        return _table_text(plan, [Alternative(_plan_name(plan), plan), *found]) + note

    if is_topic(plan, what):
        return explain(plan, what)

    # Other texts are names. Plans with other specs take long for many values.
    values = named_values(traced, plan, what)
    parts = [_explain_value(traced, plan, value, k) for value, k in values[:_MOST_VALUES]]
    if len(values) > _MOST_VALUES:
        parts.append(f"{len(values) - _MOST_VALUES} more values match. Give the full name of one value.")

    parts.extend(operation_lines(plan, what))
    return "\n".join(parts) or unknown_text(plan, what, tuple(of_plan))


# ---- specs ----------------------------------------------------------------------------------------------------------


def forced_spec(traced: TracedStep, plan: Plan, value: PlacedValue, stage: int, spec: Spec) -> Alternative:
    """The plan in which the argument or result `value` has `spec` on the mesh of `stage`."""
    found = _alternative_by(str(spec.partition_spec()), traced, plan, _options_with_spec(plan, value.path, spec, stage))
    if found.plan is None or _spec_in_plan(found.plan, value.path, stage) == spec:
        return found
    return dataclasses.replace(found, plan=None, reason="not possible: the options do not allow it")


def _options_with_spec(plan: Plan, path: str, spec: Spec, stage: int) -> PlanOptions:
    """The options of `plan`, with one spec fixed."""
    options = options_of(plan)
    option = plan.stages[stage].option
    names = option.names_on(plan.stages[stage].logical_shape)
    fixed = ((path, spec.partition_spec(names)), *option.fixed_pairs)
    if not isinstance(options.stages, ManualStageOption):
        return dataclasses.replace(options, sharding=dataclasses.replace(options.sharding, fixed_specs=fixed))
    dicts = list(options.stages.submesh_autosharding_option_dicts)
    dicts[stage] = {**dicts[stage], "fixed_specs": fixed}
    return dataclasses.replace(
        options, stages=dataclasses.replace(options.stages, submesh_autosharding_option_dicts=tuple(dicts))
    )


def _spec_in_plan(plan: Plan, path: str, stage: int) -> Spec | None:
    for value in (*plan.inputs, *plan.outputs):
        if value.path == path and stage in value.mesh_ids:
            return value.specs[value.mesh_ids.index(stage)]
    return None


def named_values(traced: TracedStep, plan: Plan, what: str) -> list[tuple[PlacedValue, int]]:
    """(value, mesh) of arguments and results whose path contains `what`, except results with the spec of an
    argument.
    """
    own = (value for value, alias in zip(plan.outputs, traced.layouts, strict=True) if alias is None)
    return [(value, k) for value in (*plan.inputs, *own) if what in value.path for k in dict.fromkeys(value.mesh_ids)]


def _explain_value(traced: TracedStep, plan: Plan, value: PlacedValue, stage: int) -> str:
    """Table of all specs of one leaf on one mesh."""
    shape = plan.stages[stage].logical_shape
    chosen = value.specs[value.mesh_ids.index(stage)]

    others = [spec for spec in specs_of(value.shape, shape) if spec != chosen]
    found = [forced_spec(traced, plan, value, stage, spec) for spec in others[:_MOST_SPECS]]
    lines = [
        f"{value.path} {value.dtype}{list(value.shape)} on mesh {stage} of shape {shape}",
        _table_text(plan, [Alternative(str(chosen.partition_spec()), plan), *found]),
    ]
    if len(others) > _MOST_SPECS:
        lines.append(f"  and {len(others) - _MOST_SPECS} more")

    # Specs that no plan can have.
    uneven = [
        f"dimension {d} of size {size} over axis {axis} of length {n}"
        for d, size in enumerate(value.shape)
        for axis, n in enumerate(shape)
        if n > 1 and size % n
    ]
    return "\n".join([*lines, f"  no such sharding: {', '.join(uneven)}"] if uneven else lines)


# ---- the whole plan -------------------------------------------------------------------------------------------------


def _other_micro_batches(traced: TracedStep, plan: Plan) -> Iterator[Alternative]:
    """Half, twice and four times as many, and one, if they divide the batch."""
    n, size = plan.n_micro_batches, traced.batch_size or 1
    for other in sorted({1, n // 2, 2 * n, 4 * n} - {0, n}):
        if size % other == 0:
            options = dataclasses.replace(options_of(plan), n_micro_batches=other)
            yield _alternative_by(count(other, "micro-batch"), traced, plan, options)


def _other_remats(traced: TracedStep, plan: Plan) -> Iterator[Alternative]:
    """The same in all layers of the plan; in a plan without layers, `ShardParallel(remat=...)`."""
    choices: tuple[Remat, ...] = ("none", "dots", "full")
    if plan.cluster.device.host_bytes is not None:
        choices = (*choices, "offload", "offload_inputs")
    if not plan.layer_of_group:
        for remat in choices[1:] if traced.n_groups else ():
            yield _alternative_by(f"remat {remat}", traced, plan, dataclasses.replace(options_of(plan), remat=remat))
        return

    for remat in choices:
        layers = FixedLayerOption(plan.layer_of_group, (remat,) * len(plan.remat), plan.row_blocks)
        if layers.remat != plan.remat:
            yield _alternative_by(f"remat {remat}", traced, plan, dataclasses.replace(options_of(plan), layers=layers))


def _other_stages(traced: TracedStep, plan: Plan) -> Iterator[Alternative]:
    """One stage on a mesh of each shape, and equal stages of each number that divides the devices."""
    options, n = options_of(plan), plan.cluster.n_devices
    for shape in dict.fromkeys(c.logical_shape for c in candidates(plan.cluster, AutoStageOption())):
        if math.prod(shape) == n and (plan.layer_of_group or shape != plan.stages[0].logical_shape):
            one_stage = PlanOptions(
                n_micro_batches=plan.n_micro_batches,
                schedule=plan.schedule,
                sharding=options.sharding,
                logical_shape=shape,
            )
            yield _alternative_by(f"no pipeline, shape {shape}", traced, plan, one_stage)
    most = len(plan.remat) or min(n, traced.n_groups)
    for k in range(2, most + 1):
        if n % k == 0:
            layers = options.layers or AutoLayerOption(layer_num=k)
            equal = dataclasses.replace(options, layers=layers, stages=UniformStageOption(k), logical_shape=None)
            yield _alternative_by(f"{k} equal stages", traced, plan, equal)


def _plan_name(plan: Plan) -> str:
    kept = "/".join(sorted(set(plan.remat)))
    remat = f", remat {kept}" if kept else ""
    return f"{count(len(plan.stages), 'stage')}, {count(plan.n_micro_batches, 'micro-batch')}{remat}"


# ---- planning and printing ------------------------------------------------------------------------------------------


def _alternative_by(name: str, traced: TracedStep, plan: Plan, options: PlanOptions) -> Alternative:
    try:
        return Alternative(name, plan_step(traced, plan.cluster, options, logical_mesh=logical_mesh_of(plan)))
    except InfeasibleError as error:
        return Alternative(name, None, f"does not fit: {_first_sentence(error)}")
    except MinialpaError as error:
        return Alternative(name, None, f"not possible: {_first_sentence(error)}")


def _first_sentence(error: Exception) -> str:
    return str(error).splitlines()[0].split(". ")[0].rstrip(".")


def _table_text(plan: Plan, found: Sequence[Alternative]) -> str:
    """Plans by seconds; then the reasons of impossible ones."""
    possible = [(a.name, a.plan) for a in found if a.plan is not None]
    rows = [["", "per step", "against the plan", "compute", "communication", "bubble", "update", "peak memory"]]
    for name, other in (possible[0], *sorted(possible[1:], key=lambda pair: pair[1].cost.total_s)):
        cost = other.cost
        change = "chosen" if other is plan else _change_text(plan.cost.total_s, cost.total_s)
        times = (cost.total_s, cost.compute_s, cost.communication_s, cost.bubble_s, cost.update_s)
        total, *parts = map(seconds_text, times)
        rows.append([name, total, change, *parts, bytes_text(max(cost.peak_bytes))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines += [f"{a.name.ljust(widths[0])}  {a.reason}" for a in found if a.plan is None]
    return "\n".join(f"  {line}".rstrip() for line in lines)


def _change_text(old: float, new: float) -> str:
    if abs(new - old) <= 1e-9 * old:
        return "same"
    share = f" ({(new - old) / old:+.1%})" if 0 < new < 10 * old else ""
    return f"{'+' if new > old else '-'}{seconds_text(abs(new - old))}{share}"
