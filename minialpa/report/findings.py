"""What a reader of a plan should know first: a plan in, sentences about faults and limits out, the worst first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from minialpa.cost import is_gpu
from minialpa.inter.schedule.simulate import simulate
from minialpa.plan import Plan
from minialpa.plan.record import PlannedCollective
from minialpa.plan.text import count
from minialpa.report.figures import (
    bytes_of_value,
    bytes_on_mesh,
    collective_seconds,
    op_seconds,
    other_seconds,
    roofline,
    stage_memory,
    throughput,
    time_parts,
    waiting_seconds,
)
from minialpa.report.groups import equal_layers
from minialpa.report.words import operator_name, percent_text, place_words
from minialpa.support.sizes import bytes_text

#: Less memory than this part of the limit is little.
_LITTLE_MEMORY = 0.05
#: Over the mean of the others.
_SLOW_STAGE = 1.15
#: Parts of a step that are worth a sentence.
_MUCH_BUBBLE, _MUCH_COMMUNICATION, _MUCH_UPDATE, _MUCH_REPEATED, _MUCH_RESHARDING = 0.15, 0.1, 0.1, 0.02, 0.01
#: An operator is slow if it takes this part of the compute, below this part of its roof, and so many seconds.
_MUCH_COMPUTE, _FAR_BELOW_ROOF, _LONG_S = 0.1, 0.2, 1e-4
#: GPUs with a smaller model FLOP utilisation have little to do.
_LOW_UTILISATION = 0.1
#: Replicated state is worth a sentence above this part of the memory in use.
_MUCH_STATE = 0.05


@dataclass(frozen=True, slots=True)
class Finding:
    """share: part of the step, or of the memory, that it concerns."""

    topic: str
    text: str
    level: Literal["warning", "note"]
    share: float


def findings(plan: Plan) -> list[Finding]:
    found = [
        *_memory_findings(plan),
        *_replicated_state(plan),
        *_slow_stages(plan),
        *_bubble(plan),
        *_communication(plan),
        *_resharding_in_layers(plan),
        *_repeated_work(plan),
        *_slow_operators(plan),
        *_slow_dtypes(plan),
        *_update(plan),
        *_idle_devices(plan),
        *_low_utilisation(plan),
        *_notes(plan),
    ]
    return sorted(found, key=lambda one: (one.level != "warning", -one.share))


# ---- memory ----------------------------------------------------------------------------------------------------------


def _memory_findings(plan: Plan) -> Iterator[Finding]:
    for k in range(len(plan.stages)):
        memory = stage_memory(plan, k)
        if memory.used < 1 - _LITTLE_MEMORY:
            continue
        option = " (`memory_limit_bytes`)" if plan.stages[k].option.memory_limit_bytes else ""
        largest = max(memory.parts, key=lambda kind: memory.parts[kind])
        text = (
            f"Stage {k} needs {bytes_text(memory.peak_bytes)} of {bytes_text(memory.limit_bytes)}{option} on each "
            f"device: {percent_text(1 - memory.used)} is left. The largest part is {largest} "
            f"({bytes_text(memory.parts[largest])}). More micro-batches, rematerialisation or devices give room; "
            "`minialpa check` compiles the plan for the exact bytes."
        )
        yield Finding("memory", text, "warning", memory.used)


def _replicated_state(plan: Plan) -> Iterator[Finding]:
    """Devices of a stage hold it more than once."""
    for role, what in (("optimizer", "optimizer state"), ("weights", "weights")):
        held = split = 0.0
        for value, one in zip(plan.inputs, plan.roles, strict=True):
            is_held = one == role and value.memory_kind == "device"
            for k in dict.fromkeys(value.mesh_ids if is_held else ()):
                shape, n = plan.stages[k].logical_shape, plan.stages[k].n_devices
                on_device = bytes_on_mesh(value, k, shape)
                held += on_device
                split += min(on_device, bytes_of_value(value) / n)
        peak = sum(stage.peak_bytes for stage in plan.stages)
        if peak and held > 1.5 * split and held - split > _MUCH_STATE * peak:
            text = (
                f"Devices hold copies of the {what}: {bytes_text(held / len(plan.stages))} on each device, where a "
                f"full split needs {bytes_text(split / len(plan.stages))}. "
                + (
                    "`Zero2Parallel` or `Zero3Parallel` splits it."
                    if role == "optimizer"
                    else "`Zero3Parallel` splits them."
                )
            )
            level: Literal["warning", "note"] = "warning" if role == "optimizer" else "note"
            yield Finding(f"replicated {what}", text, level, (held - split) / peak)


# ---- time ------------------------------------------------------------------------------------------------------------


def _slow_stages(plan: Plan) -> Iterator[Finding]:
    seconds = [sum(one.seconds for one in stage.passes) for stage in plan.stages]
    if len(seconds) < 2:
        return
    slow = max(range(len(seconds)), key=lambda k: seconds[k])
    others = (sum(seconds) - seconds[slow]) / (len(seconds) - 1)
    if others and seconds[slow] > _SLOW_STAGE * others:
        lost = (seconds[slow] - sum(seconds) / len(seconds)) * plan.n_micro_batches
        text = (
            f"Stage {slow} takes {percent_text(seconds[slow] / others - 1)} longer than the mean of the other stages, "
            f"which wait for it. Equal stages would save up to {percent_text(lost / plan.cost.total_s)} of the step. "
            "Move layers to other stages; `minialpa explain ... stages` prices other stages."
        )
        yield Finding("slow stage", text, "warning", lost / plan.cost.total_s)


def _bubble(plan: Plan) -> Iterator[Finding]:
    share = plan.cost.bubble_s / plan.cost.total_s if plan.cost.total_s else 0.0
    if share > _MUCH_BUBBLE:
        text = (
            f"Devices wait for other stages during {percent_text(share)} of the step: "
            f"{count(plan.n_micro_batches, 'micro-batch')} in {len(plan.stages)} stages. More micro-batches, fewer "
            "stages or an interleaved schedule shorten this."
        )
        yield Finding("bubble", text, "warning", share)


def _communication(plan: Plan) -> Iterator[Finding]:
    share = time_parts(plan)["communication"]
    if share <= _MUCH_COMMUNICATION or not plan.collectives:
        return
    groups = equal_layers(
        plan.collectives, lambda one: one.module, lambda one: (one.kind, "" if is_path(one) else one.array, one.stage)
    )
    longest = max(groups, key=lambda group: sum(waiting_seconds(plan, one) for one in group.members))
    one = longest.members[0]
    text = (
        f"Devices wait for collectives during {percent_text(share)} of the step. The longest are "
        f"{one.kind}s of {'arguments such as ' if is_path(one) else ''}{array_text(one)} in "
        f"{place_words(longest.name, one.part)}{_line_text(one)}."
    )
    yield Finding("communication", text, "warning", share)


def _resharding_in_layers(plan: Plan) -> Iterator[Finding]:
    """Activations change their sharding in several layers."""
    moved = [
        one
        for one in plan.collectives
        if one.kind in ("all-gather", "all-to-all", "collective-permute") and not one.can_hide and one.part != "other"
    ]
    has_experts = any(op.name.startswith("minialpa_routed") for stage in plan.stages for op in stage.operators)
    for group in equal_layers(moved, lambda one: one.module, lambda one: (one.kind, one.array, one.part, one.line)):
        one = group.members[0]
        n_layers = round(sum(each.times_per_step for each in group.members) / plan.n_micro_batches)
        share = sum(collective_seconds(plan, each) for each in group.members) / (plan.cost.total_s or 1.0)
        if n_layers <= 1 or share <= _MUCH_RESHARDING:
            continue

        reason = (
            "Operations before and after it have different splits; a sharding constraint in the model may force this."
        )
        if one.kind == "all-to-all" and has_experts:
            reason = "Rows of tokens travel this way to the devices of their experts, and back."
        text = (
            f"Each {one.part} pass reshards {array_text(one)} {n_layers} times by {one.kind} in "
            f"{group.name or 'the step'}{_line_text(one)}: {bytes_text(one.n_bytes)} each time, "
            f"{percent_text(share)} of the step. {reason}"
        )
        yield Finding("resharding in each layer", text, "warning", share)


def _repeated_work(plan: Plan) -> Iterator[Finding]:
    """All devices of a stage compute an operator in full."""
    for k, stage in enumerate(plan.stages):
        whole = [op for op in stage.operators if not op.split]
        if stage.n_devices == 1 or not whole:
            continue
        share = sum(op_seconds(plan, op) for op in whole) / (plan.cost.total_s or 1.0)
        if share > _MUCH_REPEATED:
            slowest = max(whole, key=lambda op: op_seconds(plan, op))
            text = (
                f"All devices of stage {k} repeat the same work in {len(whole)} of {len(stage.operators)} operators, "
                f"such as {operator_name(slowest.name)} in {slowest.module or 'the update'}: {percent_text(share)} of "
                "the step. "
                + (
                    "`enable_auto_sharding=False` forbids to split it."
                    if not stage.option.enable_auto_sharding
                    else "Sizes that the number of devices divides, or a sharding rule, let devices split it."
                )
            )
            yield Finding("repeated work", text, "warning", share)


def _slow_operators(plan: Plan) -> Iterator[Finding]:
    """Far below the roof of the device."""
    ops = [(k, op) for k, stage in enumerate(plan.stages) for op in stage.operators]
    compute_s = other_seconds(plan) + sum(op_seconds(plan, op) for _, op in ops)
    slow = [(k, op) for k, op in ops if op.seconds > _LONG_S and op.n_bytes]
    groups = equal_layers(slow, lambda item: item[1].module, lambda item: (item[1].name, item[1].part, item[1].line))
    for group in groups:
        k, op = group.members[0]
        share = sum(op_seconds(plan, each) for _, each in group.members) / (compute_s or 1.0)
        place = roofline(plan, k, op)
        if share < _MUCH_COMPUTE or place.rate > _FAR_BELOW_ROOF * place.roof:
            continue
        attention = (
            " It runs in blocks, without the kernel of cuDNN." if op.name.startswith("minialpa_attention") else ""
        )
        text = (
            f"The {op.part} {operator_name(op.name)} in {group.name or 'the step'} ({op.line}) takes "
            f"{percent_text(share)} of the compute, at {percent_text(place.rate / place.roof)} of the roofline of "
            f"{plan.cluster.device.name}.{attention}"
        )
        yield Finding("slow operator", text, "warning", share)


def _slow_dtypes(plan: Plan) -> Iterator[Finding]:
    if not is_gpu(plan.cluster.device):
        return
    ops = [op for stage in plan.stages for op in stage.operators]
    total = sum(op_seconds(plan, op) for op in ops)
    slow = sum(op_seconds(plan, op) for op in ops if op.dtype in ("float32", "float64"))
    if total and slow > 0.2 * total:
        text = (
            f"{percent_text(slow / total)} of the time of products is in float32 or float64. bfloat16 products are "
            "faster on GPUs."
        )
        yield Finding("dtype", text, "note", slow / total)


def _update(plan: Plan) -> Iterator[Finding]:
    share = time_parts(plan)["update"]
    if share > _MUCH_UPDATE:
        text = (
            f"The update takes {percent_text(share)} of the step, with its collectives. A larger batch makes it a "
            "smaller part."
        )
        yield Finding("update", text, "note", share)


def _idle_devices(plan: Plan) -> Iterator[Finding]:
    used, n = sum(stage.n_devices for stage in plan.stages), plan.cluster.n_devices
    if used < n:
        text = (
            f"{n - used} of {n} devices have no stage. Options that fix stages may leave devices out; a search does so "
            "only if more devices do not make the step faster by this cost model."
        )
        yield Finding("idle devices", text, "warning", 1 - used / n)


def _low_utilisation(plan: Plan) -> Iterator[Finding]:
    rates = throughput(plan)
    if not is_gpu(plan.cluster.device) or rates.utilisation is None or rates.utilisation > _LOW_UTILISATION:
        return
    products_s = sum(op_seconds(plan, op) for stage in plan.stages for op in stage.operators)
    part = products_s / (products_s + other_seconds(plan) or 1.0)
    text = (
        f"Model FLOP utilisation is {percent_text(rates.utilisation)}. Products take {percent_text(part)} of the "
        "compute; the rest are other operations, such as the optimizer. A larger batch makes these a smaller part."
    )
    yield Finding("low utilisation", text, "note", 1 - rates.utilisation)


# ---- facts of the plan -----------------------------------------------------------------------------------------------


def _notes(plan: Plan) -> Iterator[Finding]:
    for what in plan.per_micro_batch:
        yield Finding("statistics", f"Each micro-batch has its own {what}.", "note", 0.0)
    gap = max((stage.gap for stage in plan.stages if not stage.optimal), default=0.0)
    if gap > 0.01:
        text = (
            f"The solver stopped before it proved the shardings the cheapest; they cost at most {percent_text(gap)} "
            'more than the cheapest. `planning_effort="proof"` gives it more time.'
        )
        yield Finding("proof", text, "note", gap)
    if len(plan.stages) > 1:
        simulated_s = simulate(plan).total_s
        if simulated_s > 1.05 * plan.cost.total_s:
            text = (
                f"The simulated pipeline takes {percent_text(simulated_s / plan.cost.total_s - 1)} longer than the "
                "formula of the cost, because stages wait for transfers."
            )
            yield Finding("transfers", text, "warning", simulated_s / plan.cost.total_s - 1)


def is_path(one: PlannedCollective) -> bool:
    return "[" in one.array or "." in one.array


def array_text(one: PlannedCollective) -> str:
    """`state.params['w']` in backticks, `gradients`, or `the result of matmul`."""
    if one.array == "gradient":
        return "gradients"
    return f"`{one.array}`" if is_path(one) else f"the result of {operator_name(one.array)}"


def _line_text(one: PlannedCollective) -> str:
    return f" ({one.line})" if one.line else ""
