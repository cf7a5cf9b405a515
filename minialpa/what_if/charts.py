"""The outcomes of a view in, lines over numbers of GPUs out, one for each cluster.

Horizontal places are percent, vertical ones are pixels from the top.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minialpa.report.drawings import si_text
from minialpa.what_if.outcomes import CaseOutcome

#: Pixels of a chart, and of its plot.
HEIGHT = 250
_TOP, _BOTTOM = 14.0, 218.0
#: Percent.
_LEFT, _RIGHT = 14.0, 94.0
#: Marks of the axes.
_MOST_TICKS, _MOST_NUMBERS = 6, 10


@dataclass(frozen=True, slots=True)
class ChartPoint:
    x: float
    y: float
    title: str


@dataclass(frozen=True, slots=True)
class ChartLine:
    """The cases of a cluster.

    number: of the cluster, for its colour.
    ideal: height of the last point at the first point's rate on each GPU; None in other charts.
    missing: horizontal places of cases without a plan, with reasons.
    """

    number: int
    name: str
    points: tuple[ChartPoint, ...]
    ideal: float | None
    missing: tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """marks: (place, text) of each axis."""

    title: str
    x_marks: tuple[tuple[float, str], ...]
    y_marks: tuple[tuple[float, str], ...]
    lines: tuple[ChartLine, ...]


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    start: float
    stop: float
    is_log: bool

    def place(self, value: float) -> float:
        low, high, at = (math.log(x) if self.is_log else x for x in (self.low, self.high, value))
        return self.start + (self.stop - self.start) * ((at - low) / (high - low) if high > low else 0.5)

    def marks(self) -> list[float]:
        if not self.is_log:
            step = _round_above((self.high - self.low) / _MOST_TICKS)
            return [i * step for i in range(int(self.high / step * (1 + 1e-9)) + 1)]
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
        inside = [x for x in found if self.low <= x <= self.high]
        return inside[:: -(-len(inside) // _MOST_TICKS)]


def _round_above(value: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9))


def rate_chart(outcomes: Sequence[CaseOutcome], clusters: Sequence[str], unit: str) -> Chart | None:
    """Per second, on logarithmic axes: equal rates on each GPU are a line parallel to the ideal one.

    None if fewer than two numbers of GPUs have a plan.
    """
    title = f"{unit.capitalize()} per second"
    return _chart(_all_series(outcomes, clusters, lambda one: one.per_second, ideal=True), title, si_mark, is_log=True)


def cost_chart(outcomes: Sequence[CaseOutcome], clusters: Sequence[str], unit: str, *, dollars: bool) -> Chart | None:
    if dollars:
        found = _all_series(outcomes, clusters, lambda one: one.cost)
        return _chart(found, f"Cost per million {unit}", "${:.3g}".format)
    found = _all_series(outcomes, clusters, lambda one: one.gpu_hours)
    return _chart(found, f"GPU-hours per million {unit}", "{:.3g}".format)


def si_mark(value: float) -> str:
    """`500k`, `1.2M`."""
    return f"{value / 1000:.3g}k" if 1000 <= value < 1e6 else si_text(value, "").replace(" ", "")


@dataclass(frozen=True, slots=True)
class _Series:
    """values: (GPUs, value). ideal: the last value at the first value for each GPU. missing: (GPUs, reason)."""

    cluster: str
    values: tuple[tuple[int, float], ...]
    ideal: float | None
    missing: tuple[tuple[int, str], ...]


def _all_series(
    outcomes: Sequence[CaseOutcome],
    clusters: Sequence[str],
    of: Callable[[CaseOutcome], float | None],
    *,
    ideal: bool = False,
) -> list[_Series]:
    found = []
    for cluster in clusters:
        own = sorted((one for one in outcomes if one.case.cluster == cluster), key=lambda one: one.case.gpus)
        values = tuple((one.case.gpus, value) for one in own if (value := of(one)) is not None)
        missing = tuple((one.case.gpus, one.reason) for one in own if not one.fits)
        last = values[0][1] / values[0][0] * values[-1][0] if ideal and len(values) > 1 else None
        found.append(_Series(cluster, values, last, missing))
    return found


def _chart(found: Sequence[_Series], title: str, text: Callable[[float], str], *, is_log: bool = False) -> Chart | None:
    gpus = sorted({n for one in found for n, _ in (*one.values, *one.missing)})
    values = [value for one in found for _, value in one.values]
    if len({n for one in found for n, _ in one.values}) < 2:
        return None
    high = 1.1 * max([*values, *(one.ideal for one in found if one.ideal is not None)])
    xs = _Scale(gpus[0], gpus[-1], _LEFT, _RIGHT, True)
    ys = _Scale(min(values) / 1.15 if is_log else 0.0, high, _BOTTOM, _TOP, is_log)

    def point(one: _Series, n: int, value: float) -> ChartPoint:
        return ChartPoint(xs.place(n), ys.place(value), f"{n:,} × {one.cluster}: {text(value)}")

    return Chart(
        title=title,
        x_marks=tuple((xs.place(n), f"{n:,}") for n in gpus[:: -(-len(gpus) // _MOST_NUMBERS)]),
        y_marks=tuple((ys.place(value), text(value) if value else "0") for value in ys.marks()),
        lines=tuple(
            ChartLine(
                number=number,
                name=one.cluster,
                points=tuple(point(one, n, value) for n, value in one.values),
                ideal=None if one.ideal is None else ys.place(one.ideal),
                missing=tuple((xs.place(n), f"{n:,} × {one.cluster}: {reason}") for n, reason in one.missing),
            )
            for number, one in enumerate(found)
        ),
    )
