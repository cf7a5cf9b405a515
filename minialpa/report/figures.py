"""Numbers about a plan: throughput, parts of the step, and memory by kind.

model FLOP utilisation = model_flops / (seconds per step * devices of the cluster * peak flop/s of a device)
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import jax.numpy as jnp

from minialpa.cost import Collective
from minialpa.plan.record import PlacedValue, PlannedCollective, PlannedOperator, PlanRecord, device_of, limit_bytes
from minialpa.support.sizes import bytes_text
from minialpa.tracing.arguments import argument_name

#: A smaller part of a step is an error of rounding.
_ROUNDING = 1e-9
#: In the order in which they are shown.
MEMORY_KINDS = (
    "weights",
    "optimizer",
    "gradients",
    "activations",
    "activations and temporary",
    "temporary",
    "batch and others",
)


@dataclass(frozen=True, slots=True)
class Throughput:
    """Per second of a step.

    tokens: None unless an array of examples holds integers [examples, positions, ...].
    utilisation: model FLOP utilisation, of the peak for `dtype`.
    dtype: of most products.
    """

    examples: float | None
    tokens: float | None
    utilisation: float | None
    dtype: str


def throughput(plan: PlanRecord) -> Throughput:
    step_s, n = plan.cost.total_s, plan.n_examples
    if not step_s:
        return Throughput(None, None, None, "")
    dtype = main_dtype(plan)
    peak = plan.cluster.n_devices * plan.cluster.device.flops_per_s(dtype)
    return Throughput(
        examples=None if n is None else n / step_s,
        tokens=None if _n_tokens(plan) is None else (_n_tokens(plan) or 0) / step_s,
        utilisation=plan.model_flops / (step_s * peak) if plan.model_flops else None,
        dtype=dtype,
    )


def _n_tokens(plan: PlanRecord) -> int | None:
    for value in plan.inputs:
        is_batch = argument_name(value.path) in plan.batch and not value.is_key
        if is_batch and value.dtype.startswith(("int", "uint")) and len(value.shape) >= 2 and value.shape[1] > 1:
            return value.shape[0] * value.shape[1]
    return None


def main_dtype(plan: PlanRecord) -> str:
    """Of most flops of products; float32 products count as `tensorfloat32` on GPUs."""
    flops: Counter[str] = Counter()
    for stage in plan.stages:
        for op in stage.operators:
            flops[op.dtype] += int(op.times * op.flops)
    return rate_name(plan, flops.most_common(1)[0][0] if flops else "float32")


def rate_name(plan: PlanRecord, dtype: str) -> str:
    """The dtype whose peak rate products of `dtype` have."""
    rates = dict(plan.cluster.device.peak_flops)
    return "tensorfloat32" if dtype == "float32" and "tensorfloat32" in rates else dtype


def time_parts(plan: PlanRecord) -> dict[str, float]:
    """Of all devices in the predicted step. `idle` devices have no stage."""
    n_devices, step_s = plan.cluster.n_devices, plan.cost.total_s
    parts = dict.fromkeys(("compute", "communication", "bubble", "update", "idle"), 0.0)
    if not step_s:
        return parts
    for stage in plan.stages:
        share = stage.n_devices / n_devices
        seconds = {
            "compute": plan.n_micro_batches * stage.compute_s,
            "communication": plan.n_micro_batches * stage.communication_s,
            "update": stage.update_s + sum(stage.between_s),
        }
        for name, part_s in seconds.items():
            parts[name] += share * part_s / step_s
        waiting = 1.0 - sum(seconds.values()) / step_s
        parts["bubble"] += share * (waiting if waiting > _ROUNDING else 0.0)
    parts["idle"] = 1.0 - sum(stage.n_devices for stage in plan.stages) / n_devices
    total = sum(parts.values())
    return {name: part / total if part > _ROUNDING else 0.0 for name, part in parts.items()}


def other_seconds(plan: PlanRecord) -> float:
    """Compute per step of operations that are no `PlannedOperator`, over all stages."""
    compute = sum(plan.n_micro_batches * stage.compute_s for stage in plan.stages)
    return max(
        0.0, compute - sum(op_seconds(plan, op) for s in plan.stages for op in s.operators if op.part != "other")
    )


def other_share(plan: PlanRecord) -> float:
    other_s = other_seconds(plan)
    total_s = other_s + sum(op_seconds(plan, op) for stage in plan.stages for op in stage.operators)
    return other_s / total_s if total_s else 0.0


# ---- seconds ---------------------------------------------------------------------------------------------------------


def op_seconds(plan: PlanRecord, op: PlannedOperator) -> float:
    """Seconds per step on each device."""
    n = plan.n_micro_batches if op.part != "other" else 1
    return n * op.times * op.seconds


@dataclass(frozen=True, slots=True)
class Roofline:
    """An operator on one device. intensity: flop per byte. rate: flop/s. roof: the largest rate for it."""

    intensity: float
    rate: float
    roof: float


def roofline(plan: PlanRecord, k: int, op: PlannedOperator) -> Roofline:
    device = device_of(plan, k)
    flops = op.flops / math.prod(n for _, n in op.split)
    intensity = flops / op.n_bytes if op.n_bytes else 0.0
    roof = min(device.flops_per_s(rate_name(plan, op.dtype)), intensity * device.memory_bandwidth)
    return Roofline(intensity, flops / op.seconds if op.seconds else 0.0, roof)


def collective_seconds(plan: PlanRecord, one: PlannedCollective) -> float:
    """Seconds per step, if each collective runs alone."""
    mesh = plan.stages[one.stage].mesh
    return one.times_per_step * Collective(one.kind, one.n_bytes, one.axes).seconds(mesh)


def hidden_part(plan: PlanRecord, one: PlannedCollective) -> float:
    """The part beside compute: in a pass, an equal part of all that can."""
    if not one.can_hide or one.part == "other":
        return float(one.can_hide)
    hidden_s = plan.n_micro_batches * sum(each.hidden_s for each in plan.stages[one.stage].passes)
    others = (c for c in plan.collectives if c.stage == one.stage and c.can_hide and c.part != "other")
    hidable_s = sum(collective_seconds(plan, other) for other in others)
    # Collectives that start together take less than alone.
    return 1.0 if hidable_s <= 1.5 * hidden_s else hidden_s / hidable_s


def waiting_seconds(plan: PlanRecord, one: PlannedCollective) -> float:
    """Per step."""
    return (1 - hidden_part(plan, one)) * collective_seconds(plan, one)


# ---- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Peak bytes of each device of a stage.

    parts: bytes of each of `MEMORY_KINDS` that the stage has. A pass that is both forward and backward keeps
        activations among its temporary values.
    """

    parts: dict[str, float]
    peak_bytes: float
    limit_bytes: float
    host_bytes: float = 0.0

    @property
    def texts(self) -> list[str]:
        """The parts, and the bytes in host memory for each device."""
        parts = {**self.parts, "in host memory": self.host_bytes}
        return [f"{kind} {bytes_text(size)}" for kind, size in parts.items() if size >= 1]

    @property
    def used(self) -> float:
        return self.peak_bytes / self.limit_bytes


def stage_memory(plan: PlanRecord, k: int) -> MemoryUse:
    stage = plan.stages[k]
    roles = plan.roles or ("other",) * len(plan.inputs)
    held: Counter[str] = Counter()
    for value, role in zip(plan.inputs, roles, strict=True):
        if value.memory_kind == "device":
            held[role] += int(bytes_on_mesh(value, k, stage.logical_shape))

    arguments = sum(held.values())
    rest = max(0.0, stage.fixed_bytes - stage.temp_bytes - arguments)
    temporary = "activations and temporary" if any(one.kind == "step" for one in stage.passes) else "temporary"
    parts = {
        "weights": float(held["weights"]),
        "optimizer": float(held["optimizer"]),
        "gradients": rest,
        "activations": max(0.0, stage.peak_bytes - stage.fixed_bytes),
        temporary: stage.temp_bytes,
        "batch and others": float(held["batch"] + held["other"]),
    }
    sizes = {kind: size for kind, size in parts.items() if size}
    return MemoryUse(sizes, stage.peak_bytes, limit_bytes(plan, k), stage.host_bytes)


def bytes_on_mesh(value: PlacedValue, k: int, shape: tuple[int, ...]) -> float:
    """On each device of mesh `k`."""
    blocks = value.rows or ((0, value.shape[0] if value.shape else 1),) * len(value.mesh_ids)
    total = 0.0
    for mesh, spec, (start, stop) in zip(value.mesh_ids, value.specs, blocks, strict=True):
        if mesh == k:
            share = (stop - start) / value.shape[0] if value.shape and value.shape[0] else 1.0
            total += share * bytes_of_value(value) / spec.n_shards(shape)
    return total


def bytes_of_value(value: PlacedValue) -> float:
    size = 8 if value.dtype.startswith("key<") else jnp.dtype(value.dtype).itemsize
    return float(size * math.prod(value.shape))
