"""A grid in, its outcomes as text, CSV, JSON and a page out."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from minialpa.api.plan_folder import PlanCache
from minialpa.cluster import PresetName
from minialpa.options import PlanningEffort
from minialpa.plan.text import seconds_text
from minialpa.report.tables import table
from minialpa.report.words import number_text, percent_text
from minialpa.support.files import write_text
from minialpa.support.private_jax import api_boundary
from minialpa.support.sizes import bytes_text
from minialpa.what_if.grid import cases
from minialpa.what_if.outcomes import CaseOutcome, unit_of
from minialpa.what_if.planning import METHODS, run

_WIDEST = 48


@dataclass(frozen=True, slots=True)
class WhatIf:
    """seconds: of planning."""

    outcomes: tuple[CaseOutcome, ...]
    method: str
    planning_effort: PlanningEffort
    seconds: float

    def text(self) -> str:
        has_price = any(one.cost is not None for one in self.outcomes)
        head = ["case", "step", f"{unit_of(self.outcomes)}/s", "MFU"]
        head += ["$ per million"] * has_price + ["memory", "binds", "plan"]
        return "\n".join(table([head, *(_cells(one, has_price) for one in self.outcomes)]))

    def to_csv(self) -> str:
        file = io.StringIO()
        records = [one.record() for one in self.outcomes]
        writer = csv.DictWriter(file, list(records[0]) if records else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return file.getvalue()

    def to_json(self) -> str:
        found = {
            "version": 1,
            "method": self.method,
            "planning_effort": self.planning_effort,
            "cases": [one.record() for one in self.outcomes],
        }
        return json.dumps(found, indent=1)

    def save_csv(self, path: str | Path) -> None:
        write_text(path, self.to_csv())

    def to_html(self) -> str:
        """One page, which needs no other file."""
        from minialpa.what_if.page import page

        return page(self.outcomes, method=self.method, effort=self.planning_effort, csv=self.to_csv())

    def save_html(self, path: str | Path) -> None:
        write_text(path, self.to_html())


def _cells(one: CaseOutcome, has_price: bool) -> list[str]:
    if one.step_s is None or one.peak_bytes is None:
        return [str(one.case), "-", "-", "-", *["-"] * has_price, "-", one.binds, f"{one.verdict}: {one.reason}"]
    return [
        str(one.case),
        seconds_text(one.step_s),
        "-" if one.per_second is None else number_text(one.per_second),
        "-" if one.utilisation is None else percent_text(one.utilisation),
        *["-" if one.cost is None else f"{one.cost:.3g}"] * has_price,
        bytes_text(one.peak_bytes),
        one.binds,
        one.plan,
    ]


@api_boundary
def what_if(
    models: Sequence[str],
    *,
    gpus: Sequence[int] = (8,),
    clusters: Sequence[PresetName] = ("h100",),
    batches: Sequence[int | None] = (None,),
    memory: Sequence[float | None] = (None,),
    sequences: Sequence[int | None] = (None,),
    link_speeds: Sequence[float] = (1.0,),
    devices_per_host: int = 8,
    prices: Mapping[str, float] | None = None,
    method: str = METHODS[0],
    planning_effort: PlanningEffort = "fast",
    processes: int | None = None,
    plan_cache: PlanCache = "auto",
) -> WhatIf:
    """Plan all combinations of the values. The arguments are as in `cases` and `run`."""
    grid = cases(
        models,
        gpus=gpus,
        clusters=clusters,
        batches=batches,
        memory=memory,
        sequences=sequences,
        link_speeds=link_speeds,
        devices_per_host=devices_per_host,
    )
    start_s = time.monotonic()
    outcomes = run(
        grid,
        processes=processes,
        method=method,
        planning_effort=planning_effort,
        plan_cache=plan_cache,
        prices=prices,
    )
    return WhatIf(outcomes, method, planning_effort, time.monotonic() - start_s)
