"""Stale plans: a plan and a step in; their differences, or options that repeat the decisions of the plan, out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from minialpa.cluster import LogicalMesh
from minialpa.errors import VerifyError
from minialpa.ir.equations import dtype_name, shape_of, source_line
from minialpa.options import FixedLayerOption, ManualStageOption, PlanOptions
from minialpa.plan import Plan
from minialpa.tracing.fingerprint import first_change
from minialpa.tracing.trace import TracedStep

#: Differences that a message lists; it counts the others.
_MOST_NAMED = 3
_CONVERSION = "convert_element_type"
_ABOUT_WEAK_TYPES = (
    " (so one of {} may be weakly typed, as Python numbers and values computed from them are, in one of the two and an "
    "array of a fixed dtype in the other)"
)


def options_of(plan: Plan) -> PlanOptions:
    """The options under which planning repeats all decisions of `plan` except the shardings."""
    first = plan.stages[0]
    options = PlanOptions(
        n_micro_batches=plan.n_micro_batches,
        schedule=plan.schedule,
        sharding=first.option,
        keep_activations=plan.keeps_activations,
        cast_once=plan.casts_once,
        stack_matrices=plan.stack_matrices,
    )
    # Without layers there is one stage, and no choice of layers to repeat.
    if not plan.layer_of_group:
        return dataclasses.replace(options, logical_shape=first.logical_shape, submesh=first.submesh, remat="none")

    stages = ManualStageOption(
        tuple(stage.layers for stage in plan.stages),
        tuple(stage.submesh for stage in plan.stages),
        tuple(stage.logical_shape for stage in plan.stages),
        tuple(
            {f.name: getattr(stage.option, f.name) for f in dataclasses.fields(stage.option)} for stage in plan.stages
        ),
    )
    layers = FixedLayerOption(plan.layer_of_group, plan.remat, plan.row_blocks)
    return dataclasses.replace(options, layers=layers, stages=stages)


def logical_mesh_of(plan: Plan) -> LogicalMesh | None:
    """The `LogicalMesh` that the user passed in place of a cluster, or None if the plan has the links of its cluster.

    A mesh without a device is recognised by a compute time of 0 s.
    """
    stage = plan.stages[0]
    mesh = plan.cluster.logical_mesh(stage.submesh, stage.logical_shape)
    has_device = stage.compute_s > 0
    if has_device and (mesh.alpha, mesh.beta) == (stage.alpha, stage.beta):
        return None
    return dataclasses.replace(stage.mesh, device=mesh.device if has_device else None)


def difference(traced: TracedStep, plan: Plan) -> str | None:
    """The difference of a step from the step of `plan`, as a sentence; None if they are equal."""
    if traced.fingerprint == plan.fingerprint:
        return None
    return _argument_difference(traced, plan) or "the step itself has changed: " + _step_difference(traced, plan)


class StalePlanError(VerifyError):
    """A plan was made for another step or other shapes."""

    def __init__(self, difference: str) -> None:
        super().__init__(
            f"The plan does not fit this call (`plan.fingerprint` differs), because {difference}. Call the planned "
            'step with the planned shapes, make a new plan, or pass `on_stale="replan"` to `parallelize`, which keeps '
            "the stages of the plan and makes new shardings."
        )
        self.difference = difference


def check_fits(traced: TracedStep, plan: Plan) -> None:
    """Raise StalePlanError unless `plan` was made for this step and these shapes."""
    found = difference(traced, plan)
    if found is not None:
        raise StalePlanError(found)


def _argument_difference(traced: TracedStep, plan: Plan) -> str | None:
    now = {
        path: _type_text(dtype_name(v), shape_of(v))
        for v, path in zip(traced.flat.invars, traced.in_paths, strict=True)
    }
    planned = {value.path: _type_text(value.dtype, value.shape) for value in plan.inputs}
    differences: list[str] = []
    for path, type_ in now.items():
        if path not in planned:
            differences.append(f"argument `{path}` is {type_} and the plan has no such argument")
        elif type_ != planned[path]:
            differences.append(f"argument `{path}` is {type_} and the plan was made for {planned[path]}")
    differences.extend(
        f"argument `{path}` is missing and the plan was made for {planned[path]}" for path in planned if path not in now
    )
    return _abridged_list(differences, "; ") if differences else None


def _abridged_list(differences: Sequence[str], separator: str) -> str:
    more = len(differences) - _MOST_NAMED
    named = separator.join(differences[:_MOST_NAMED])
    return f"{named}{separator}and {more} more" if more > 0 else named


def _type_text(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}{list(shape)}"


def _step_difference(traced: TracedStep, plan: Plan) -> str:
    now, was = dict(traced.fingerprint.primitives), dict(plan.fingerprint.primitives)
    counts = [
        f"{now.get(name, 0)} `{name}` where the plan has {was.get(name, 0)}"
        for name in sorted(now.keys() | was.keys())
        if now.get(name, 0) != was.get(name, 0)
    ]
    text = "it has " + _abridged_list(counts, ", ") if counts else ""
    if now | {_CONVERSION: 0} == was | {_CONVERSION: 0} and _scalar_paths(traced):
        text += _ABOUT_WEAK_TYPES.format(", ".join(f"`{path}`" for path in _scalar_paths(traced)[:_MOST_NAMED]))

    # The fingerprints of prefixes narrow the first difference down to one operation, or to a range of them.
    flat = traced.flat
    change = first_change(plan.fingerprint, (*flat.constvars, *flat.invars), flat.eqns, flat.outvars)
    if change is None:
        return text or "what it returns, or which of its arguments are batches or are donated"

    if not change:
        where = "the arrays that it captures" if not change.start else f"it ends after {change.start} operations"
    elif len(change) == 1:
        where = f"the first difference is {_operation_text(traced, change[0])}"
    else:
        first, last = _operation_text(traced, change[0]), _operation_text(traced, change[-1])
        where = f"the first difference is between {first} and {last}"
    return f"{text}; {where}" if text else where


def _scalar_paths(traced: TracedStep) -> list[str]:
    """The paths of arguments without dimensions, which may be weakly typed."""
    return [path for v, path in zip(traced.flat.invars, traced.in_paths, strict=True) if shape_of(v) == ()]


def _operation_text(traced: TracedStep, i: int) -> str:
    eqn = traced.flat.eqns[i]
    line = source_line(eqn)
    return f"`{eqn.primitive.name}`" + (f" at {line}" if line else "")
