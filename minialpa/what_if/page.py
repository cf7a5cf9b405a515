"""Outcomes in, one HTML file out, which needs no other file.

A *view* fixes all but cluster and number of GPUs. The script of the file chooses a view.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from minialpa.cluster import ClusterSpec
from minialpa.plan.text import count
from minialpa.report.figures import MEMORY_KINDS
from minialpa.report.page import environment
from minialpa.support.sizes import bytes_text
from minialpa.what_if.charts import HEIGHT, cost_chart, rate_chart
from minialpa.what_if.grid import Case
from minialpa.what_if.outcomes import TIME_PARTS, CaseOutcome, unit_of

#: The number of a case's option, for each of `_CHOICES`.
Key = tuple[int, ...]

_SECTIONS = (
    ("answers", "Best plans"),
    ("one", "One case"),
    ("grid", "Grid"),
    ("charts", "Charts"),
    ("all", "All cases"),
    ("words", "Words"),
)
_WORDS = {
    "tokens": "examples times the positions of each example; models without tokens have examples in their place",
    "memory": "bytes of one device of the fullest stage, and the bytes that a device has",
    "model FLOP utilisation": "the part of the peak of all GPUs that the products of the model need, without "
    "recomputation",
    "binds": "the largest part of the step; memory if less than 5 % is left, or if the plan recomputes values",
    "cost": "GPU-hours of all GPUs, idle ones too, times the price",
    "speed of links": "a factor on the bytes per second of all links, inside and between hosts",
    "mesh": "the devices of a stage as a row or a grid; arrays are split over its axes",
    "micro-batch": "an equal part of the examples of a step; all devices of a stage work on one at a time",
}


@dataclass(frozen=True, slots=True)
class _Choice:
    """owner: the number that may decide this one, as a preset decides the memory."""

    name: str
    label: str
    of: Callable[[Case], Any]
    text: Callable[[Any], str] = str
    owner: Callable[[Case], Any] | None = None


_CHOICES = (
    _Choice("model", "Model", lambda case: case.model),
    _Choice("cluster", "Cluster", lambda case: case.cluster),
    _Choice("gpus", "GPUs", lambda case: case.gpus, "{:,}".format),
    _Choice("batch", "Batch", lambda case: case.batch or 0, "{:,}".format, lambda case: case.model),
    _Choice("sequence", "Sequence", lambda case: case.sequence or 0, "{:,}".format, lambda case: case.model),
    _Choice("memory", "Memory of a GPU", lambda case: case.memory_bytes, bytes_text, lambda case: case.cluster),
    _Choice("links", "Speed of links", lambda case: case.link_speed, "× {:g}".format),
)
#: Below this part of the best rate on a GPU, the grid has no colour.
_LEAST_SHARE = 0.3
_MODEL, _CLUSTER, _GPUS, _BATCH, _SEQUENCE, _MEMORY, _LINKS = range(len(_CHOICES))


@dataclass(frozen=True)
class _Grid:
    outcomes: Sequence[CaseOutcome]

    @cached_property
    def options(self) -> tuple[tuple[Any, ...], ...]:
        """`(None,)` if the owner of a choice decides."""
        return tuple(map(self._options_of, _CHOICES))

    def _options_of(self, choice: _Choice) -> tuple[Any, ...]:
        found = [one.case for one in self.outcomes]
        values = dict.fromkeys(map(choice.of, found))
        if choice.owner is not None and len(values) > 1:
            pairs = {(choice.owner(case), choice.of(case)) for case in found}
            if len(pairs) == len(set(map(choice.owner, found))):
                return (None,)
        return tuple(values) if choice.name in ("model", "cluster") else tuple(sorted(values))

    def key(self, case: Case) -> Key:
        pairs = zip(_CHOICES, self.options, strict=True)
        return tuple(0 if options == (None,) else options.index(choice.of(case)) for choice, options in pairs)

    @cached_property
    def by_key(self) -> dict[Key, CaseOutcome]:
        return {self.key(one.case): one for one in self.outcomes}

    @cached_property
    def numbers(self) -> dict[Key, int]:
        return {key: i for i, key in enumerate(self.by_key)}

    def views(self) -> Iterator[tuple[Key, list[CaseOutcome]]]:
        """Keys have 0 for cluster and GPUs."""
        found: dict[Key, list[CaseOutcome]] = {}
        for key, one in self.by_key.items():
            found.setdefault((key[_MODEL], 0, 0, *key[_BATCH:]), []).append(one)
        yield from found.items()

    def first(self) -> Key:
        """The first case on the page."""
        _, outcomes = min(self.views(), key=lambda view: (view[0][:_MEMORY], _strangeness(view[1][0].case)))
        best = answers(outcomes)
        return self.key(best[0][1].case if best else outcomes[0].case)


def _strangeness(case: Case) -> float:
    own_bytes = ClusterSpec.preset(case.cluster).device.memory_bytes
    return abs(math.log(case.link_speed)) + abs(math.log(case.memory_bytes / own_bytes))


def answers(outcomes: Iterable[CaseOutcome]) -> list[tuple[str, CaseOutcome]]:
    """(question, best case), the cheapest first; empty if no case fits."""
    found = [one for one in outcomes if one.step_s is not None]
    if not found:
        return []
    costs = [one for one in found if one.cost is not None]
    rates = [one for one in found if one.per_gpu is not None]
    best = [("Fewest GPUs", min(found, key=lambda one: (one.case.gpus, one.step_s)))]
    best.insert(0, ("Fastest", min(found, key=lambda one: one.step_s or 0.0)))
    if costs:
        best.insert(0, ("Cheapest", min(costs, key=lambda one: one.cost or 0.0)))
    elif rates:
        best.insert(0, ("Most per GPU", max(rates, key=lambda one: one.per_gpu or 0.0)))
    return best


def remedies(grid: _Grid, key: Key) -> list[str]:
    """Changes of one number with which a case fits."""

    def fits(choice: int, option: int) -> bool:
        other = grid.by_key.get((*key[:choice], option, *key[choice + 1 :]))
        return other is not None and other.fits

    texts = {_GPUS: "{} GPUs", _MEMORY: "{} of memory", _CLUSTER: "{}"}
    found = []
    for choice, text in texts.items():
        options = grid.options[choice]
        start = 0 if choice == _CLUSTER else key[choice] + 1
        fitting = [option for option in range(start, len(options)) if fits(choice, option)]
        found += [text.format(_CHOICES[choice].text(options[option])) for option in fitting[:1]]
    return found


# ---- the page --------------------------------------------------------------------------------------------------------


def page(outcomes: Sequence[CaseOutcome], *, method: str, effort: str, csv: str) -> str:
    """csv: text."""
    grid = _Grid(outcomes)
    first = grid.first()
    cost = any(one.cost is not None for one in outcomes)
    return (
        environment()
        .get_template("what_if.html.jinja")
        .render(
            title=f"What if: {', '.join(grid.options[_MODEL])}",
            lead=_lead(grid, method, effort),
            sections=[(name, label) for name, label in _SECTIONS if name != "charts" or len(grid.options[_GPUS]) > 1],
            choices=list(_choices(grid)),
            first=first,
            rows=[_row(grid, key, cost=cost) for key in grid.by_key],
            views=[_view(grid, view, outcomes, first, cost=cost) for view, outcomes in grid.views()],
            heats=list(_heats(grid, first)),
            unit=unit_of(outcomes),
            cost=cost,
            height=HEIGHT,
            parts=TIME_PARTS,
            kinds=_kinds(outcomes),
            words=_WORDS.items(),
            csv="data:text/csv;base64," + base64.b64encode(csv.encode()).decode(),
        )
    )


def _lead(grid: _Grid, method: str, effort: str) -> str:
    n_fit, n = sum(one.fits for one in grid.outcomes), len(grid.outcomes)
    counts = [count(len(options), name) for name, options in zip(("model", "cluster"), grid.options, strict=False)]
    gpus = grid.options[_GPUS]
    span = f"{gpus[0]:,} GPUs" if len(gpus) == 1 else f"{gpus[0]:,} to {gpus[-1]:,} GPUs"
    return (
        f"{count(n, 'case')}: {counts[0]} on {span} of {counts[1]}. {'All fit' if n_fit == n else f'{n_fit} fit'} in "
        f"memory. The numbers are predictions for plans of `{method}`, with effort `{effort}`."
    )


def _choices(grid: _Grid) -> Iterator[dict[str, Any]]:
    for number, (choice, options) in enumerate(zip(_CHOICES, grid.options, strict=True)):
        if len(options) > 1:
            texts = list(map(choice.text, options))
            yield {"number": number, "name": choice.name, "label": choice.label, "texts": texts}


def _kinds(outcomes: Iterable[CaseOutcome]) -> list[str]:
    found = {kind for one in outcomes for kind in one.memory}
    return [kind for kind in MEMORY_KINDS if kind in found]


def _row(grid: _Grid, key: Key, *, cost: bool) -> dict[str, Any]:
    one = grid.by_key[key]
    kinds = _kinds(grid.outcomes)
    bars = [*(one.parts.get(part, 0.0) for part in TIME_PARTS)]
    bars += [one.memory.get(kind, 0.0) / one.case.memory_bytes for kind in kinds]
    limits = remedies(grid, key) if not one.fits else []
    return {
        "id": grid.numbers[key],
        "key": key,
        "one": one,
        "case": one.case,
        "name": f"{one.case.gpus:,} × {one.case.cluster}",
        "cost": money(one.cost) if cost else None,
        "bars": " ".join(f"{100 * part:.1f}" for part in bars) if one.fits else "",
        "reason": one.reason + (f" Fits with {' or '.join(limits)}." if limits else ""),
    }


def money(dollars: float | None) -> str:
    """`$0.0123`, `$1.23`, `$1,230`: three digits; empty for None."""
    if dollars is None:
        return ""
    if dollars >= 100:
        return f"${dollars:,.0f}"
    digits = 2 - math.floor(math.log10(dollars)) if dollars > 0 else 2
    return f"${dollars:.{max(digits, 0)}f}"


def _view(grid: _Grid, view: Key, outcomes: Sequence[CaseOutcome], first: Key, *, cost: bool) -> dict[str, Any]:
    unit, clusters = unit_of(outcomes), grid.options[_CLUSTER]
    charts = [rate_chart(outcomes, clusters, unit), cost_chart(outcomes, clusters, unit, dollars=cost)]
    return {
        "pattern": "-".join("*" if i in (_CLUSTER, _GPUS) else str(option) for i, option in enumerate(view)),
        "is_first": all(view[i] == first[i] for i in range(len(view)) if i not in (_CLUSTER, _GPUS)),
        "name": ", ".join([outcomes[0].case.model, *_situation(grid, view)]),
        "answers": [(what, _row(grid, grid.key(one.case), cost=cost)) for what, one in answers(outcomes)],
        "unit": unit,
        "charts": [chart for chart in charts if chart is not None],
    }


def _situation(grid: _Grid, key: Key) -> Iterator[str]:
    """`batch 1,024`, `80 GB`: the choices of a view with several options."""
    for i, prefix in ((_BATCH, "batch "), (_SEQUENCE, "sequence "), (_MEMORY, ""), (_LINKS, "links ")):
        if len(grid.options[i]) > 1:
            yield prefix + _CHOICES[i].text(grid.options[i][key[i]])


def _heats(grid: _Grid, first: Key) -> Iterator[dict[str, Any]]:
    """For each batch, sequence, memory and links: GPUs by models and clusters."""
    best: dict[tuple[int, int], float] = {}
    for key, one in grid.by_key.items():
        place = key[_MODEL], key[_SEQUENCE]
        best[place] = max(best.get(place, 0.0), one.per_gpu or 0.0)

    models, clusters = grid.options[_MODEL], grid.options[_CLUSTER]
    for situation in dict.fromkeys(key[_BATCH:] for key in grid.by_key):

        def cell(model: int, cluster: int, gpus: int, situation: Key = situation) -> dict[str, Any] | None:
            key = (model, cluster, gpus, *situation)
            one = grid.by_key.get(key)
            if one is None:
                return None
            share = (one.per_gpu or 0.0) / (best[model, key[_SEQUENCE]] or 1.0)
            depth = max(0.0, (share - _LEAST_SHARE) / (1 - _LEAST_SHARE))
            return {"id": grid.numbers[key], "key": key, "one": one, "depth": depth}

        yield {
            "pattern": "-".join(("*", "*", "*", *map(str, situation))),
            "is_first": situation == first[_BATCH:],
            "name": ", ".join(_situation(grid, (0, 0, 0, *situation))),
            "models": models,
            "clusters": clusters,
            "rows": [
                (n, [cell(model, cluster, gpus) for model in range(len(models)) for cluster in range(len(clusters))])
                for gpus, n in enumerate(grid.options[_GPUS])
            ],
        }
