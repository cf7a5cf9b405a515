"""Predicted, compiled and measured lanes in one trace, each with the seconds of its source."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from minialpa import simulate
from minialpa.plan import Plan
from minialpa.plan.check import FunctionCheck, PlanCheck, StageCheck
from minialpa.report.trace import compiled_plan
from minialpa.runtime.steps.step_trace import FUNCTIONS, TaskTime
from tests.plans import pipeline_plan, shard_plan


def function(name: str, times: int, kernels_s: float, total_s: float) -> FunctionCheck:
    return FunctionCheck(
        name=name,
        times_per_step=times,
        peak_bytes=0,
        kernels_s=kernels_s,
        total_s=total_s,
        exposed_bytes=0.0,
        hidden_bytes=0.0,
    )


def check_of(plan: Plan, *functions: list[FunctionCheck]) -> PlanCheck:
    stages = []
    for stage, of_stage in zip(plan.stages, functions, strict=True):
        stages.append(
            StageCheck(
                limit_bytes=1e9,
                planned_bytes=stage.peak_bytes,
                compiled_bytes=int(stage.peak_bytes) + 1000,
                fullest="",
                planned_collectives={},
                compiled_collectives={},
                planned_s=0.0,
                compiled_s=sum(one.times_per_step * one.total_s for one in of_stage),
                functions=tuple(of_stage),
            )
        )
    return PlanCheck("h100", tuple(stages))


def test_compiled_lanes_have_the_seconds_of_compiled_functions() -> None:
    plan = pipeline_plan()
    first = [
        function("forward0", 4, 2.0, 3.0),
        function("backward0", 3, 4.0, 5.0),
        function("backward0.last", 1, 4.0, 9.0),
    ]
    last = [function("forward1", 4, 1.0, 1.0), function("backward1", 4, 2.0, 2.0), function("update1", 1, 7.0, 8.0)]
    check = check_of(plan, first, last)
    compiled = compiled_plan(plan, check)
    assert [[(one.kind, one.compute_s, one.seconds) for one in stage.passes] for stage in compiled.stages] == [
        [("forward", 2.0, 3.0), ("backward", 4.0, 6.0)],
        [("forward", 1.0, 1.0), ("backward", 2.0, 2.0)],
    ]
    assert [stage.update_s for stage in compiled.stages] == [0.0, 8.0]
    # A stage is busy for the seconds of its functions.
    busy = [stage.busy_s for stage in simulate(compiled).stages]
    assert busy == pytest.approx([stage.compiled_s for stage in check.stages])


def test_a_step_in_one_pass_and_later_loops_are_recognised() -> None:
    plan = shard_plan()
    compiled = compiled_plan(plan, check_of(plan, [function("step0", 1, 1.5, 2.0)]))
    assert [(one.kind, one.seconds) for one in compiled.stages[0].passes] == [("step", 2.0)]
    assert simulate(compiled).total_s == 2.0


def test_the_trace_has_one_process_for_each_stage_with_all_lanes(tmp_path: Path) -> None:
    plan = pipeline_plan()
    check = check_of(plan, [function("forward0", 4, 1.0, 1.0)], [function("forward1", 4, 1.0, 1.0)])
    measured = [
        TaskTime(mesh=k, host=0, track=FUNCTIONS, name=f"forward{k}", start_s=0.1 * k, stop_s=0.2, instruction=k)
        for k in range(2)
    ]
    plan.to_trace(tmp_path / "trace.json", check=check, measured=measured)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = Counter((e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name")
    for k in range(2):
        assert {name for stage, name in lanes if stage == k} >= {
            "predicted",
            "XLA for h100",
            "measured, host 0, functions",
        }
    # Each event belongs to a named lane of a named process, and ends after its start.
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X"]
    assert {(e["pid"], e["tid"]) for e in slices} == named and all(e["dur"] >= 0 for e in slices)
    assert {e["pid"] for e in slices} == {e["pid"] for e in events if e["name"] == "process_name"} == {0, 1}
