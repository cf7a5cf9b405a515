"""Parts of a plan in, text for people out: operators, stages, layers, seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minialpa.options import DATA_PARALLEL_METHODS
from minialpa.plan.record import Certificate, PlannedOperator, PlanRecord, SearchNotMade, UserSharding


def certificate_text(found: Certificate) -> str:
    numbers = ", ".join(map(str, found.n_micro_batches))
    return (
        f"No pipeline takes less than {seconds_text(found.bound_s)} by this cost model, with {numbers} micro-batches "
        f"({count(found.n_costs, 'cost')} of parts solved)"
    )


def no_search_text(found: SearchNotMade) -> str:
    return (
        f"No search of stages, which would take {seconds_text(found.search_s)}: no pipeline saves more than "
        f"{seconds_text(found.saved_s)} per step, {seconds_text(found.saved_s * found.n_steps)} in "
        f"{found.n_steps:,.0f} steps. Ask for more steps with `AutoStageOption(planned_steps=...)`"
    )


def _changed_text(one: UserSharding) -> str:
    line = Path(one.line.partition(" (")[0]).name
    price = "for another mesh" if one.added_s is None else f"would add at most {seconds_text(one.added_s)}"
    kept = f", {one.n_kept} of {one.n} kept" if one.n_kept else ""
    return f"{line} {one.wanted} ({price}{kept})"


def user_shardings_text(found: Sequence[UserSharding], *, most: int) -> str:
    """Number of lines whose shardings the plan has, and the other lines."""
    changed = [one for one in found if one.n_kept < one.n]
    n_pinned = sum(one.is_pinned for one in found)
    n_kept = len(found) - len(changed) - n_pinned
    more = f" and {len(changed) - most} more" if len(changed) > most else ""
    parts = [
        *([f"{n_pinned} pinned"] if n_pinned else []),
        *([f"{n_kept} kept"] if n_kept else []),
        *([f"{len(changed)} changed: {', '.join(map(_changed_text, changed[:most]))}{more}"] if changed else []),
    ]
    return f"Shardings in the step: {', '.join(parts)}"


def header(plan: PlanRecord) -> str:
    kept = sorted(set(plan.remat))
    return (
        f"{plan.cluster.num_hosts} x {plan.cluster.devices_per_host} {plan.cluster.device.name} devices: "
        f"{count(len(plan.stages), 'stage')}, {count(plan.n_micro_batches, 'micro-batch')}"
        + (f" in {plan.n_loops} loops" if plan.n_loops > 1 else "")
        + (" that keep per-example values" if plan.keeps_activations else "")
        + (", weights cast once" if plan.casts_once else "")
        + (", matrices updated in stacks" if plan.stack_matrices else "")
        + (f", schedule {plan.schedule}" if len(plan.stages) > 1 else "")
        + (f", rematerialisation {'/'.join(kept)}" if kept not in ([], ["none"]) else "")
    )


def variant_text(plan: PlanRecord, *, micro_batches: bool = True) -> str:
    """Names a kind of plan: `4 stages of 1x4, 8 micro-batches, rematerialisation full`."""
    shapes = dict.fromkeys("x".join(map(str, stage.logical_shape)) for stage in plan.stages)
    method = next((name for name, fields in DATA_PARALLEL_METHODS.items() if _has(plan, fields)), None)
    kept = [remat for remat in sorted(set(plan.remat)) if remat != "none"]
    return (
        f"{count(len(plan.stages), 'stage')} of {' and '.join(shapes)}"
        + (f", {count(plan.n_micro_batches, 'micro-batch')}" if micro_batches else "")
        + (f", {method}" if method else "")
        + (f", rematerialisation {'/'.join(kept)}" if kept else "")
    )


def _has(plan: PlanRecord, fields: Mapping[str, Any]) -> bool:
    return all(getattr(stage.option, name) == value for stage in plan.stages for name, value in fields.items())


def stage_text(plan: PlanRecord, k: int) -> str:
    stage = plan.stages[k]
    last = stage.first_device + stage.n_devices - 1
    devices = f"device {last}" if stage.n_devices == 1 else f"devices {stage.first_device}-{last}"
    return (
        f"{layers_text(stage.layers)}, submesh {stage.submesh[0]}x{stage.submesh[1]} ({devices}), "
        f"logical shape {stage.logical_shape}"
    )


def operator_lines(plan: PlanRecord, operators: Sequence[PlannedOperator]) -> list[str]:
    """`layer 1 forward: dot_general [8, 16] S0,R = S0,R x R,R  (2 times)`"""
    counts: dict[str, int] = {}
    for op in operators:
        layer = f"layer {op.layer} " if plan.layer_of_group and op.layer is not None else ""
        part = "update" if op.part == "other" else op.part
        text = f"{layer}{part}: {op.name} {list(op.shape)} {op.result} = " + " x ".join(map(str, op.operands))
        counts[text] = counts.get(text, 0) + 1
    return [text if n == 1 else f"{text}  ({n} times)" for text, n in counts.items()]


def seconds_text(value: float) -> str:
    """Three digits and a unit: `1.25 ms`."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e9:.3g} ns" if value > 1e-15 else "0 s"


def count(n: int, noun: str) -> str:
    """`1 stage`, `2 stages`, `4 micro-batches`."""
    return f"{n} {noun}" + ("" if n == 1 else "es" if noun.endswith("h") else "s")


def axes_text(axes: Sequence[int]) -> str:
    return ("axis " if len(axes) == 1 else "axes ") + ", ".join(map(str, axes))


def layers_text(layers: Sequence[int]) -> str:
    """`layer 3`, `layers 0-3`, `layers 0-1, 4-5`; `all layers` without a pipeline."""
    if not layers:
        return "all layers"
    return f"layer{'s' if len(layers) > 1 else ''} {ranges_text(layers)}"


def ranges_text(numbers: Iterable[int]) -> str:
    """`0-2, 5`."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
