"""The pictures of a report as numbers: a plan in, positions in percent of the width or height of a picture out.

Percentages let text and strokes keep their size on each screen.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from minialpa.inter.schedule.simulate import simulate
from minialpa.inter.schedule.timeline import StageTimeline, Timeline
from minialpa.plan import Plan
from minialpa.plan.check import PlanCheck
from minialpa.plan.record import PlacedValue, limit_bytes
from minialpa.plan.text import ranges_text, seconds_text
from minialpa.report.figures import rate_name
from minialpa.report.rows import OperatorRow
from minialpa.report.trace import compiled_plan
from minialpa.runtime.steps.step_trace import FUNCTIONS, TaskTime
from minialpa.sharding import Spec
from minialpa.support.sizes import bytes_text

#: Most intervals of a picture; shorter ones are joined.
_MOST_INTERVALS = 5000
#: Most points of a curve, hosts, rows and columns of shards, and labels of a roofline.
_MOST_POINTS, _MOST_HOSTS, _MOST_ROWS, _MOST_COLUMNS, _MOST_LABELS = 800, 64, 5, 8, 6


@dataclass(frozen=True, slots=True)
class Mark:
    """A labelled position on an axis."""

    at: float
    text: str


# ---- timeline --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Work on a lane. label: short; empty if the interval is narrow."""

    kind: str
    start: float
    width: float
    title: str
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The work of one stage, or its transfers.

    source: of the times.
    n, busy_s: number and seconds of all intervals, before short ones are joined.
    """

    name: str
    stage: int
    source: Literal["predicted", "XLA:GPU", "measured"]
    is_transfer: bool
    n: int
    busy_s: float
    intervals: tuple[Interval, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePicture:
    lanes: tuple[Lane, ...]
    marks: tuple[Mark, ...]
    total_s: float
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Span:
    kind: str
    title: str
    label: str
    start_s: float
    end_s: float


_Lane = tuple[str, int, Literal["predicted", "XLA:GPU", "measured"], bool, list[_Span]]


def pipeline_picture(
    plan: Plan, timeline: Timeline, check: PlanCheck | None, measured: Sequence[TaskTime]
) -> PipelinePicture:
    lanes: list[_Lane] = list(_timeline_lanes(timeline, "predicted"))
    if check is not None:
        lanes += _timeline_lanes(simulate(compiled_plan(plan, check)), "XLA:GPU")
    lanes += _measured_lanes(measured)
    lanes.sort(key=lambda lane: lane[1])

    total_s = max((span.end_s for *_, spans in lanes for span in spans), default=0.0)
    least_s = total_s / 1500 if sum(len(spans) for *_, spans in lanes) > _MOST_INTERVALS else 0.0
    drawn = tuple(
        Lane(
            name=name,
            stage=k,
            source=source,
            is_transfer=is_transfer,
            n=len(spans),
            busy_s=sum(span.end_s - span.start_s for span in spans),
            intervals=tuple(_intervals(spans, total_s, least_s)),
        )
        for name, k, source, is_transfer, spans in lanes
    )
    kinds = dict.fromkeys(one.kind for lane in drawn for one in lane.intervals)
    return PipelinePicture(lanes=drawn, marks=tuple(time_marks(total_s)), total_s=total_s, kinds=tuple(kinds))


def _timeline_lanes(timeline: Timeline, source: Literal["predicted", "XLA:GPU"]) -> Iterator[_Lane]:
    for k, stage in enumerate(timeline.stages):
        passes = [
            _Span(one.kind, one.name, "" if one.micro_batch is None else str(one.micro_batch), one.start_s, one.end_s)
            for one in stage.passes
            if one.end_s > one.start_s
        ]
        yield f"stage {k}", k, source, False, passes
        sent = [
            _Span("transfer", f"to stage {one.target_stage}, {bytes_text(one.n_bytes)}", "", one.start_s, one.end_s)
            for one in timeline.transfers
            if one.source_stage == k
        ]
        if sent:
            yield f"from stage {k}", k, source, True, sorted(sent, key=lambda span: span.start_s)


def _measured_lanes(tasks: Sequence[TaskTime]) -> Iterator[_Lane]:
    """For the functions of each mesh and host, and for its transfers."""
    for mesh, host in sorted({(task.mesh, task.host) for task in tasks}):
        own = [task for task in tasks if (task.mesh, task.host) == (mesh, host)]
        name = f"stage {mesh}" + (f", host {host}" if len({task.host for task in tasks}) > 1 else "")
        yield name, mesh, "measured", False, [_task_span(task) for task in own if task.track == FUNCTIONS]
        others = [_task_span(task) for task in own if task.track != FUNCTIONS and task.stop_s > task.start_s]
        if others:
            yield f"to {name}", mesh, "measured", True, others


def _task_span(task: TaskTime) -> _Span:
    if task.track != FUNCTIONS:
        return _Span("transfer", f"{task.name} {task.track}", "", task.start_s, task.stop_s)
    kind = re.sub(r"[\d.]+$", "", task.name)
    kind = kind if kind in ("forward", "backward", "weights", "step") else "update"
    return _Span(kind, task.name, "", task.start_s, task.stop_s)


def _intervals(spans: Sequence[_Span], total_s: float, least_s: float) -> Iterator[Interval]:
    """least_s: neighbours are joined up to this length, under the kind of the longest."""
    joined: list[_Span] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is None or span.end_s - last.start_s >= least_s or span.start_s - last.end_s > least_s / 2:
            joined.append(span)
        else:
            longest = max(last, span, key=lambda one: one.end_s - one.start_s)
            joined[-1] = _Span(longest.kind, "several passes", "", last.start_s, max(last.end_s, span.end_s))

    for span in joined:
        width = 100 * (span.end_s - span.start_s) / total_s
        yield Interval(
            kind=span.kind,
            start=100 * span.start_s / total_s,
            width=width,
            title=f"{span.title}: {seconds_text(span.end_s - span.start_s)}",
            label=span.label if width >= 2 else "",
        )


def time_marks(total_s: float) -> Iterator[Mark]:
    """About six round times."""
    if not total_s:
        return
    power = 10.0 ** math.floor(math.log10(total_s / 6))
    step_s = next(power * factor for factor in (1, 2, 5, 10) if total_s / (power * factor) <= 8)
    for i in range(math.floor(total_s / step_s * 0.97) + 1):
        yield Mark(100 * i * step_s / total_s, seconds_text(i * step_s) if i else "0")


# ---- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Bytes of each device of a stage over a step.

    path: of an SVG, 1000 wide and 100 high.
    limit: height of the limit in percent; None if it is far above the picture.
    """

    stage: int
    path: str
    limit: float | None


def memory_curves(plan: Plan, timeline: Timeline) -> list[MemoryCurve]:
    top = 1.12 * memory_scale(plan)
    return [
        MemoryCurve(
            stage=k,
            path=_area(_curve_points(stage, timeline.total_s, top)),
            limit=100 * limit_bytes(plan, k) / top if limit_bytes(plan, k) <= top else None,
        )
        for k, stage in enumerate(timeline.stages)
    ]


def memory_scale(plan: Plan) -> float:
    """The limit, unless all stages are far below."""
    peak = max(1.0, *(stage.peak_bytes for stage in plan.stages))
    limit = max(limit_bytes(plan, k) for k in range(len(plan.stages)))
    return limit if peak <= limit <= 4 * peak else peak


def _curve_points(stage: StageTimeline, total_s: float, top: float) -> list[tuple[int, float]]:
    """The most bytes in each column: (position in thousandths, height in percent)."""
    heights: dict[int, float] = {}
    for i, (at_s, n_bytes) in enumerate(stage.memory):
        end_s = stage.memory[i + 1][0] if i + 1 < len(stage.memory) else total_s
        height = 100 * n_bytes / top
        first, last = (int(_MOST_POINTS * seconds / total_s) if total_s else 0 for seconds in (at_s, end_s))
        for column in range(first, max(first, last - 1) + 1):
            heights[column] = max(heights.get(column, 0.0), height)

    points: list[tuple[int, float]] = []
    for column in sorted(heights):
        if not points or round(points[-1][1], 1) != round(heights[column], 1):
            points.append((round(1000 * column / _MOST_POINTS), heights[column]))
    return points


def _area(points: Sequence[tuple[int, float]]) -> str:
    steps = "".join(f"H{x}V{100 - height:.1f}" for x, height in points)
    return f"M0 100{steps}H1000V100Z"


# ---- shards of an array ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """A shard in the grid, and the devices that hold it; empty for shards that are left out."""

    row: int
    column: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPicture:
    """Along two dimensions of an array, on one stage."""

    stage: int
    n_rows: int
    n_columns: int
    cells: tuple[Cell, ...]
    title: str


def shard_pictures(plan: Plan, value: PlacedValue) -> list[ShardPicture]:
    """One for each sharding, on the first stage that has it."""
    firsts: dict[tuple[Spec, tuple[int, ...]], int] = {}
    for k, spec in zip(value.mesh_ids, value.specs, strict=True):
        firsts.setdefault((spec, plan.stages[k].logical_shape), k)
    return [
        shard_picture(shape, spec, range(plan.stages[k].first_device, plan.cluster.n_devices), k)
        for (spec, shape), k in firsts.items()
    ]


def shard_picture(shape: tuple[int, ...], spec: Spec, devices: Sequence[int], k: int = 0) -> ShardPicture:
    """On the first of `devices`, in row-major order of a mesh of this shape: of stage `k`."""
    split = [d for d, axes in enumerate(spec.dims) if math.prod(shape[a] for a in axes) > 1]
    rest = [d for d in reversed(range(len(spec.dims))) if d not in split]
    dims = sorted((split + rest)[:2])
    row_dim, column_dim = (dims[0], dims[1]) if len(dims) == 2 else (None, dims[0] if dims else None)
    n_rows, n_columns = (_n_parts(spec, dim, shape) for dim in (row_dim, column_dim))

    holders: dict[tuple[int, int], list[int]] = {}
    for i in range(math.prod(shape)):
        # Neighbours differ along the last axis.
        at = tuple(i // math.prod(shape[axis + 1 :]) % n for axis, n in enumerate(shape))
        place = tuple(_part(spec, dim, at, shape) for dim in (row_dim, column_dim))
        holders.setdefault((place[0], place[1]), []).append(devices[i])

    rows, columns = _shown(n_rows, _MOST_ROWS), _shown(n_columns, _MOST_COLUMNS)
    cells = tuple(
        Cell(r, c, "" if None in (row, column) else ranges_text(holders[row or 0, column or 0]))
        for r, row in enumerate(rows)
        for c, column in enumerate(columns)
    )
    first = cells[0].text
    title = f"{n_rows} by {n_columns} shards; the first is on {'device' if first.isdigit() else 'devices'} {first}"
    return ShardPicture(stage=k, n_rows=len(rows), n_columns=len(columns), cells=cells, title=title)


def _n_parts(spec: Spec, dim: int | None, shape: tuple[int, ...]) -> int:
    return 1 if dim is None else math.prod(shape[axis] for axis in spec.dims[dim])


def _part(spec: Spec, dim: int | None, at: tuple[int, ...], shape: tuple[int, ...]) -> int:
    part = 0
    for axis in () if dim is None else spec.dims[dim]:
        part = part * shape[axis] + at[axis]
    return part


def _shown(n: int, most: int) -> list[int | None]:
    """None stands for parts that are left out."""
    return list(range(n)) if n <= most else [*range(most - 2), None, n - 1]


# ---- cluster ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostPicture:
    """devices: number and stage of each; None for an idle device."""

    host: int
    devices: tuple[tuple[int, int | None], ...]

    @property
    def title(self) -> str:
        first, last = self.devices[0][0], self.devices[-1][0]
        stages = sorted({k for _, k in self.devices if k is not None})
        idle = [device for device, k in self.devices if k is None]
        words = f"stage {ranges_text(stages)}" if stages else "idle"
        if stages and idle:
            words += f"; {ranges_text(idle)} idle"
        return f"Host {self.host}, devices {first}-{last}: {words}"


def host_pictures(plan: Plan) -> list[HostPicture]:
    """The first hosts."""
    stage_of = {
        device: k
        for k, stage in enumerate(plan.stages)
        for device in range(stage.first_device, stage.first_device + stage.n_devices)
    }
    n = plan.cluster.devices_per_host
    return [
        HostPicture(host, tuple((device, stage_of.get(device)) for device in range(host * n, (host + 1) * n)))
        for host in range(min(_MOST_HOSTS, plan.cluster.num_hosts))
    ]


# ---- roofline --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """Operators of one row.

    radius: in pixels, by the share of the compute.
    label: of the longest operators; at the left of the dot, or at the right.
    """

    x: float
    y: float
    radius: float
    part: str
    title: str
    label: str = ""
    at_left: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """For a dtype: a slope from (start_x, start_y) to (ridge, top), then a level."""

    dtype: str
    rate: float
    start_x: float
    start_y: float
    ridge: float
    top: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflinePicture:
    dots: tuple[Dot, ...]
    roofs: tuple[Roof, ...]
    x_marks: tuple[Mark, ...]
    y_marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class _LogAxis:
    low: float
    high: float

    def at(self, value: float) -> float:
        """In percent."""
        return 100 * math.log(value / self.low) / math.log(self.high / self.low)

    def marks(self, unit: str) -> Iterator[Mark]:
        n_decades = math.log10(self.high / self.low)
        factors = (1, 2, 5) if n_decades < 2.5 else (1,)
        for power in range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1):
            for value in (factor * 10.0**power for factor in factors):
                if 0.999 * self.low <= value <= 1.001 * self.high:
                    yield Mark(self.at(value), si_text(value, unit))


def _axis_around(values: Iterable[float]) -> _LogAxis:
    """Ends are round numbers."""
    found = list(values)
    return _LogAxis(_round_below(min(found) / 1.1), 1 / _round_below(1 / (1.4 * max(found))))


def _round_below(value: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (5, 2, 1) if factor * power <= value * (1 + 1e-9))


def roofline_picture(plan: Plan, rows: Sequence[OperatorRow]) -> RooflinePicture | None:
    """Flop per byte to the right, flop/s of a device upwards."""
    rows = sorted((row for row in rows if row.intensity and row.rate), key=lambda row: -row.seconds)
    if not rows:
        return None
    device = plan.cluster.device
    rates = {rate_name(plan, row.dtype): device.flops_per_s(rate_name(plan, row.dtype)) for row in rows}
    ridges = [rate / device.memory_bandwidth for rate in rates.values()]
    x_axis = _axis_around([*(row.intensity for row in rows), *ridges])
    y_axis = _axis_around([*(row.rate for row in rows), *rates.values()])

    roofs = []
    for dtype, rate in sorted(rates.items(), key=lambda item: -item[1]):
        start = max(x_axis.low, y_axis.low / device.memory_bandwidth)
        roof = Roof(
            dtype=dtype,
            rate=rate,
            start_x=x_axis.at(start),
            start_y=100 - y_axis.at(start * device.memory_bandwidth),
            ridge=x_axis.at(rate / device.memory_bandwidth),
            top=100 - y_axis.at(rate),
        )
        roofs.append(roof)
    dots = [_dot(row, x_axis.at(row.intensity), 100 - y_axis.at(row.rate), rows[0].share) for row in rows]
    return RooflinePicture(
        dots=tuple(_labelled(dots, rows)),
        roofs=tuple(roofs),
        x_marks=tuple(x_axis.marks("")),
        y_marks=tuple(y_axis.marks("flop/s")),
    )


def _dot(row: OperatorRow, x: float, y: float, most: float) -> Dot:
    title = f"{row.module or row.name}, {row.part} {row.name}: {row.rate / row.roof:.0%} of the roof"
    radius = 4 + 12 * math.sqrt(row.share / most) if most else 8.0
    return Dot(x=x, y=y, radius=radius, part=row.part, title=title)


def _labelled(dots: Sequence[Dot], rows: Sequence[OperatorRow]) -> Iterator[Dot]:
    """The first dots whose labels cover no other dot or label. A letter is about 0.65 % of the width."""
    taken = [(dot.x - 1.0, dot.x + 1.0, dot.y) for dot in dots]
    n_labels = 0
    for dot, row in zip(dots, rows, strict=True):
        width = 0.65 * len(row.module)
        for at_left, start in ((True, dot.x - 2 - width), (False, dot.x + 2)):
            is_free = all(start + width < a or b < start or abs(y - dot.y) > 5 for a, b, y in taken)
            if row.module and is_free and 0 < start < 100 - width and n_labels < _MOST_LABELS:
                taken.append((start, start + width, dot.y))
                n_labels += 1
                dot = dataclasses.replace(dot, label=row.module, at_left=at_left)
                break
        yield dot


def si_text(value: float, unit: str) -> str:
    """Three digits and a prefix: `1.25 Tflop/s`."""
    for power, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if value >= 0.9995 * 10.0**power:
            return f"{value / 10.0**power:.3g} {prefix}{unit}"
    return f"{value:,.3g} {unit}".strip() if value < 999.5 else f"{value:,.0f} {unit}".strip()
