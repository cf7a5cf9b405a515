"""One trace for Perfetto: a plan, its compiled programs and a measured step in, equal lanes of each stage out.

Each stage is a process, with lanes for predicted passes, for the seconds of XLA's programs, and for measured functions.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from minialpa.inter.schedule.simulate import simulate
from minialpa.plan import Plan, PlannedPass, StagePlan
from minialpa.plan.check import PlanCheck, StageCheck
from minialpa.runtime.steps.step_trace import TaskTime, task_events
from minialpa.support.perfetto import write_trace

#: A stage has a lane for passes, and one for transfers to each other stage.
_LANES = 1000
#: Compiled functions, such as `backward3.last` or `forward0_loop2`.
_PASS = re.compile(r"(forward|backward|weights|step)(\d+)(?:\.\w+?)?(?:_loop(\d+))?(?:\.last)?")


def write_lanes(
    plan: Plan, path: str | Path, *, check: PlanCheck | None = None, measured: Sequence[TaskTime] = ()
) -> None:
    """check: from `Plan.check`. measured: from `Executable.stage_timeline`."""
    events = simulate(plan).events("predicted")
    if check is not None:
        events += simulate(compiled_plan(plan, check)).events(f"XLA for {check.target}", _LANES)
    write_trace(path, events + task_events(measured, 2 * _LANES))


def compiled_plan(plan: Plan, check: PlanCheck) -> Plan:
    stages = zip(plan.stages, check.stages, strict=True)
    return dataclasses.replace(
        plan, stages=tuple(_compiled_stage(stage, one, plan.n_micro_batches) for stage, one in stages)
    )


def _compiled_stage(stage: StagePlan, check: StageCheck, n_micro_batches: int) -> StagePlan:
    kernels: Counter[tuple[str, int, int]] = Counter()
    total: Counter[tuple[str, int, int]] = Counter()
    update_s = 0.0
    for one in check.functions:
        found = _PASS.fullmatch(one.name)
        if found is None:
            update_s += one.times_per_step * one.total_s
            continue
        key = (found[1], 0 if found[1] == "step" else int(found[2]), int(found[3] or 1))
        kernels[key] += one.times_per_step * one.kernels_s / n_micro_batches  # type: ignore[assignment]
        total[key] += one.times_per_step * one.total_s / n_micro_batches  # type: ignore[assignment]

    def compiled(one: PlannedPass) -> PlannedPass:
        key = (one.kind, 0 if one.kind == "step" else one.chunk, one.loop)
        if key not in total:
            return one
        return dataclasses.replace(one, compute_s=kernels[key], communication_s=total[key] - kernels[key])

    more_bytes = check.compiled_bytes - stage.peak_bytes
    return dataclasses.replace(
        stage,
        passes=tuple(map(compiled, stage.passes)),
        update_s=update_s,
        fixed_bytes=max(0.0, stage.fixed_bytes + more_bytes),
        peak_bytes=float(check.compiled_bytes),
    )
