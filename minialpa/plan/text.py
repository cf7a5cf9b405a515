"""A plan in, text for people out: `Plan.summary` and `Plan.explain`; the texts of seconds, bytes and layers."""

from __future__ import annotations

from collections.abc import Sequence

from minialpa.plan.record import Certificate, PlannedOperator, PlanRecord
from minialpa.support.sizes import bytes_text
from minialpa.tracing.ragged_products import RaggedProduct


def summary(plan: PlanRecord) -> str:
    cost = plan.cost
    lines = [
        f"Plan for {header(plan)}",
        f"Predicted {seconds_text(cost.total_s)} per step: compute {seconds_text(cost.compute_s)}, "
        f"communication {seconds_text(cost.communication_s)}, bubble {seconds_text(cost.bubble_s)}, "
        f"update {seconds_text(cost.update_s)}{_once_text(plan, cost.update_s)}",
    ]
    if plan.batch:
        names = ", ".join(f"`{name}`" for name in plan.batch)
        lines.append(
            f"Batch: {'argument' if len(plan.batch) == 1 else 'arguments'} {names} ({plan.n_examples} examples)"
        )
    if plan.certificate is not None:
        lines.append(certificate_text(plan.certificate))
    lines.extend(f"Each micro-batch has its own {what}" for what in plan.per_micro_batch)
    lines.extend(map(_ragged_text, plan.ragged_products))
    for k in range(len(plan.stages)):
        lines.extend(_stage_lines(plan, k))
    return "\n".join(lines)


def _stage_lines(plan: PlanRecord, k: int) -> list[str]:
    stage = plan.stages[k]
    forward = tuple(op for op in stage.operators if op.part == "forward")
    collectives = (c for c in plan.collectives if c.stage == k)
    hidden_s = sum(one.hidden_s for one in stage.passes)
    hidden = f" ({seconds_text(hidden_s)} more beside the compute)" if hidden_s else ""
    return [
        f"Stage {k}: {stage_text(plan, k)}",
        f"  {seconds_text(stage.compute_s)} compute + {seconds_text(stage.communication_s)} communication{hidden} per "
        f"micro-batch, {seconds_text(stage.update_s)} update{_once_text(plan, stage.update_s)}, "
        f"{bytes_text(stage.peak_bytes)} per device"
        + ("" if stage.optimal else f"; shardings proven to within {stage.gap:.1%}"),
        *(f"  {line}" for line in operator_lines(plan, forward)),
        *(
            f"  {c.kind} over {axes_text(c.axes)}: {bytes_text(c.n_bytes)}, {c.times_per_step} per step"
            for c in collectives
        ),
    ]


def _once_text(plan: PlanRecord, update_s: float) -> str:
    """Marks the seconds of an update: they include the collectives that run once per step."""
    return " (with collectives)" if update_s and plan.collectives else ""


def _ragged_text(product: RaggedProduct) -> str:
    return (
        f"`ragged_dot` at {product.line} is compiled as a dense product over {count(product.n_groups, 'group')}: "
        f"{product.n_groups} times the arithmetic of the routed rows. A grouped product with a rule by "
        "`register_sharding_rule` avoids this."
    )


def certificate_text(found: Certificate) -> str:
    numbers = ", ".join(map(str, found.n_micro_batches))
    return (
        f"Best possible pipeline by the costs of sublayers: {seconds_text(found.bound_s)}, with {numbers} "
        f"micro-batches ({count(found.n_costs, 'cost')} solved)"
    )


def header(plan: PlanRecord) -> str:
    kept = sorted(set(plan.remat))
    return (
        f"{plan.cluster.num_hosts} x {plan.cluster.devices_per_host} {plan.cluster.device.name} devices: "
        f"{count(len(plan.stages), 'stage')}, {count(plan.n_micro_batches, 'micro-batch')}"
        + (f" in {plan.n_loops} loops" if plan.n_loops > 1 else "")
        + (" that keep per-example values" if plan.keeps_activations else "")
        + (", weights cast once" if plan.casts_once else "")
        + (f", schedule {plan.schedule}" if len(plan.stages) > 1 else "")
        + (f", rematerialisation {'/'.join(kept)}" if kept not in ([], ["none"]) else "")
    )


def stage_text(plan: PlanRecord, k: int) -> str:
    stage = plan.stages[k]
    last = stage.first_device + stage.n_devices - 1
    devices = f"device {last}" if stage.n_devices == 1 else f"devices {stage.first_device}-{last}"
    return (
        f"{layers_text(stage.layers)}, submesh {stage.submesh[0]}x{stage.submesh[1]} ({devices}), "
        f"logical shape {stage.logical_shape}"
    )


def explain(plan: PlanRecord, what: str) -> str:
    lines = [str(v) for v in (*plan.input_specs, *plan.output_specs) if what in v.path]
    for k, stage in enumerate(plan.stages):
        lines.extend(f"stage {k}: {line}" for line in operator_lines(plan, stage.operators) if what in line)
    return "\n".join(lines) or f"The plan has no argument, result or operator `{what}`."


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
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"layer {text}" if len(layers) == 1 else f"layers {text}"
