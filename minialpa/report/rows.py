"""Rows of the tables of a report: equal layers once, with the numbers that a reader compares."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minialpa.cluster import axis_links
from minialpa.plan import Plan
from minialpa.plan.record import PlacedValue, PlannedCollective, PlannedOperator, StagePlan
from minialpa.plan.text import ranges_text
from minialpa.report.figures import (
    bytes_of_value,
    bytes_on_mesh,
    collective_seconds,
    hidden_part,
    op_seconds,
    other_seconds,
    roofline,
    waiting_seconds,
)
from minialpa.report.findings import array_text, is_path
from minialpa.report.groups import Group, equal_layers, without_root
from minialpa.report.words import hidden_words, operator_name, operator_words, placement_words

PARTS = {"forward": "forward", "backward": "backward", "other": "update"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """Equal operators of equal layers.

    n: their number in the plan, without runs for further micro-batches.
    part: of `PARTS`.
    flops, seconds: per step, of all of them; seconds are of one device.
    share: of the compute of a step.
    intensity, rate, roof: as in `Roofline`.
    """

    module: str
    name: str
    part: str
    split: str
    dtype: str
    shape: tuple[int, ...]
    n: int
    flops: float
    seconds: float
    share: float
    line: str
    stages: str
    intensity: float
    rate: float
    roof: float


def operator_rows(plan: Plan, shown: Callable[[int, PlannedOperator], bool] = lambda k, op: True) -> list[OperatorRow]:
    """In the order of the step. shown: of a stage and an operator."""
    ops = [(k, op) for k, stage in enumerate(plan.stages) for op in stage.operators]
    compute_s = other_seconds(plan) + sum(op_seconds(plan, op) for _, op in ops)
    ops = [item for item in ops if shown(*item)]
    named = [op.module for _, op in ops]
    short = dict(zip(named, without_root(named), strict=True))
    groups = equal_layers(ops, lambda item: short[item[1].module], lambda item: operator_kind(item[1]))
    return [_operator_row(plan, group, compute_s) for group in groups]


def operator_kind(op: PlannedOperator) -> tuple[object, ...]:
    """Equal for operators that differ in their module alone."""
    return op.name, op.part, op.split, op.shape, op.dtype, op.line, op.times


def operator_flops(plan: Plan, op: PlannedOperator) -> float:
    """Per step, each part of an operator once."""
    return (plan.n_micro_batches if op.part != "other" else 1) * op.times * op.flops


def _operator_row(plan: Plan, group: Group[tuple[int, PlannedOperator]], compute_s: float) -> OperatorRow:
    k, op = group.members[0]
    seconds = sum(op_seconds(plan, member) for _, member in group.members)
    place = roofline(plan, k, op)
    return OperatorRow(
        module=group.name,
        name=operator_name(op.name),
        part=PARTS[op.part],
        split=operator_words(op),
        dtype=op.dtype,
        shape=op.shape,
        n=len(group.members),
        flops=sum(operator_flops(plan, member) for _, member in group.members),
        seconds=seconds,
        share=seconds / compute_s if compute_s else 0.0,
        line=op.line,
        stages=ranges_text(k for k, _ in group.members),
        intensity=place.intensity,
        rate=place.rate,
        roof=place.roof,
    )


# ---- arrays ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayRow:
    """Equal arguments of equal layers.

    n_bytes, device_bytes: of one array, whole and on each device.
    """

    name: str
    role: str
    value: PlacedValue
    n: int
    split: str
    n_bytes: float
    device_bytes: float
    stages: str


def array_rows(plan: Plan) -> list[ArrayRow]:
    """The weights first, then the largest, without arrays of one element."""
    order = ("weights", "optimizer", "batch", "other")
    roles = plan.roles or ("other",) * len(plan.inputs)
    pairs = [(value, role) for value, role in zip(plan.inputs, roles, strict=True) if math.prod(value.shape) > 1]
    shapes = [stage.logical_shape for stage in plan.stages]

    def kind(item: tuple[PlacedValue, str]) -> tuple[object, ...]:
        value, role = item
        n_stages = len(set(value.mesh_ids))
        return role, value.shape, value.dtype, placement_words(value, shapes), n_stages, len(value.rows)

    rows = []
    for group in equal_layers(pairs, lambda item: item[0].path, kind):
        value, role = group.members[0]
        on_device = max((bytes_on_mesh(value, k, shapes[k]) for k in value.mesh_ids), default=0.0)
        row = ArrayRow(
            name=group.name,
            role=role,
            value=value,
            n=len(group.members),
            split=placement_words(value, shapes),
            n_bytes=bytes_of_value(value),
            device_bytes=on_device,
            stages=ranges_text(k for member, _ in group.members for k in member.mesh_ids),
        )
        rows.append(row)
    return sorted(rows, key=lambda row: (order.index(row.role), -row.n * row.n_bytes))


# ---- communication ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """Equal collectives of equal layers. Bytes and seconds are per step, of one device, if each collective runs alone.

    sizes: bytes of the smallest and the largest run.
    waiting_s: part of `seconds` for which devices wait.
    hidden: the other part, in words.
    """

    kind: str
    array: str
    module: str
    part: str
    line: str
    link: str
    stages: str
    n: int
    sizes: tuple[float, float]
    seconds: float
    waiting_s: float
    hidden: str


def collective_rows(plan: Plan, shown: Callable[[PlannedCollective], bool] = lambda one: True) -> list[CollectiveRow]:
    """The longest waits first."""
    moves = list(filter(shown, plan.collectives))
    named = [one.module for one in moves]
    short = dict(zip(named, without_root(named), strict=True))

    def kind(one: PlannedCollective) -> tuple[object, ...]:
        return one.kind, one.part, one.can_hide, _link(plan, one), "" if is_path(one) else one.array, one.line

    groups = equal_layers(moves, lambda one: short[one.module], kind)
    return sorted((_collective_row(plan, group) for group in groups), key=lambda row: (-row.waiting_s, -row.seconds))


def _collective_row(plan: Plan, group: Group[PlannedCollective]) -> CollectiveRow:
    one = group.members[0]
    paths = equal_layers(group.members, lambda member: member.array, lambda _: "")
    array = paths[0].name + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
    sizes = [member.n_bytes for member in group.members]
    return CollectiveRow(
        kind=one.kind,
        array=array if is_path(one) else array_text(one).removeprefix("the "),
        module=group.name,
        part=PARTS[one.part],
        line=one.line,
        link=_link(plan, one),
        stages=ranges_text(member.stage for member in group.members),
        n=sum(member.times_per_step for member in group.members),
        sizes=(min(sizes), max(sizes)),
        seconds=sum(collective_seconds(plan, member) for member in group.members),
        waiting_s=sum(waiting_seconds(plan, member) for member in group.members),
        hidden=hidden_words(hidden_part(plan, one)),
    )


def _link(plan: Plan, one: PlannedCollective) -> str:
    return axes_link(plan.stages[one.stage], one.axes)


def axes_link(stage: StagePlan, axes: Sequence[int]) -> str:
    """The slowest link."""
    crosses = any(crosses_hosts(stage, axis) for axis in axes)
    return "between hosts" if crosses else "inside a host"


def crosses_hosts(stage: StagePlan, axis: int) -> bool:
    return axis_links(stage.logical_shape, stage.submesh[1])[axis][0] > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRow:
    """Collectives of one kind over one link, or transfers between stages. Bytes and seconds are per step.

    waiting_s, waiting_bytes: of the parts for which devices wait, in the stage with the most seconds.
    hidden_s, hidden_bytes: of the parts beside compute.
    """

    kind: str
    link: str
    n: int
    waiting_s: float
    waiting_bytes: float
    hidden_s: float
    hidden_bytes: float

    @property
    def seconds(self) -> float:
        return self.waiting_s + self.hidden_s


def link_rows(plan: Plan) -> list[LinkRow]:
    """The longest first."""
    found: dict[tuple[str, str], dict[int, list[PlannedCollective]]] = defaultdict(lambda: defaultdict(list))
    for one in plan.collectives:
        found[one.kind, _link(plan, one)][one.stage].append(one)

    rows = []
    for (kind, link), by_stage in found.items():
        of_stages = [_link_row(plan, kind, link, members) for members in by_stage.values()]
        rows.append(max(of_stages, key=lambda row: row.seconds))
    return sorted(rows, key=lambda row: -row.seconds)


def _link_row(plan: Plan, kind: str, link: str, members: Sequence[PlannedCollective]) -> LinkRow:
    parts = [
        (hidden_part(plan, one), collective_seconds(plan, one), one.times_per_step * one.n_bytes) for one in members
    ]
    return LinkRow(
        kind=kind,
        link=link,
        n=sum(one.times_per_step for one in members),
        waiting_s=sum((1 - hidden) * seconds for hidden, seconds, _ in parts),
        waiting_bytes=sum((1 - hidden) * n_bytes for hidden, _, n_bytes in parts),
        hidden_s=sum(hidden * seconds for hidden, seconds, _ in parts),
        hidden_bytes=sum(hidden * n_bytes for hidden, _, n_bytes in parts),
    )
