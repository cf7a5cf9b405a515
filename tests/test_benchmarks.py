"""Benchmarks run at their tiny sizes, and their parts work."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import jax
import pytest

from benchmarks import plan_cases
from benchmarks.alpa_plans import STORED, StoredPlan
from benchmarks.climbing import Outcome, climb, outcome
from benchmarks.gpu_all import PARTS, Setting, run_parts
from benchmarks.registry import all_benchmarks
from benchmarks.run import main, table
from minialpa import InfeasibleError, Plan
from minialpa.models import SIZES
from minialpa.plan import bytes_text
from minialpa.session import describe_devices

#: All others take longer.
SHORT = ("attention", "models", "plan_fidelity", "plan_time", "xmesh")
LONG_PARTS = ("compiled", "numeric", "rates")
RAY = (pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.slow)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=RAY if name.startswith("ray_") else () if name in SHORT else pytest.mark.slow)
        for name in all_benchmarks()
    ],
)
def test_benchmark_gives_rows_of_numbers_and_text(name: str) -> None:
    rows = all_benchmarks()[name]("tiny")
    assert rows
    for row in rows:
        assert all(isinstance(value, str | bool | int | float) for value in row.values()), row
        assert name != "models" or row["outcome"] == "equal"


def test_every_benchmark_says_in_a_line_what_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(all_benchmarks())
    assert all(len(line.split()) > 3 for line in lines)
    rows = [{"case": "a", "us": 1.23456}, {"case": "long", "n": 2}]
    assert table(rows) == "  case  us     n\n  a     1.235\n  long         2"


def test_plans_of_two_folders_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        plan_cases.write(folder, ["mlp, data"])
    assert plan_cases.compare(old, new)

    plan_cases.write(new, ["tower, inference"])
    (file,) = old.glob("*.json")
    Plan.load(new / "tower, inference.json").save(new / file.name)
    capsys.readouterr()
    assert not plan_cases.compare(old, new)
    printed = capsys.readouterr().out
    assert "schedule: gpipe -> inference" in printed or "stages: 1 -> 2" in printed
    assert f"tower, inference.json: only in {new}" in printed
    assert "0 of 2 plans are the same." in printed


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG_PARTS)) for name in PARTS]
)
def test_a_part_for_gpus_gives_rows_of_numbers_and_text(name: str) -> None:
    device = jax.devices()[0]
    setting = Setting(device, describe_devices([device]), is_tiny=True, end=time.monotonic() + 60)
    rows = list(PARTS[name].rows(setting))
    assert rows
    for row in json.loads(json.dumps(rows)):
        assert all(isinstance(value, str | float | int) for value in row.values()), row


def test_a_part_without_time_is_cut_off_and_the_page_has_the_others(tmp_path: Path) -> None:
    (tmp_path / "rates.jsonl").write_text(json.dumps({"what": "measured before"}) + "\n")
    run_parts(["numeric"], tmp_path, minutes=0.01, cpu=True)
    page = (tmp_path / "gpu.md").read_text()
    assert "measured before" in page
    assert "cut off when its time was over" in page


@pytest.mark.parametrize("stored", STORED, ids=lambda stored: stored.model)
def test_stored_plans_use_every_device_and_cut_the_batch_into_whole_parts(stored: StoredPlan) -> None:
    assert stored.model in SIZES
    assert sum(math.prod(stage.submesh) for stage in stored.stages) == stored.n_devices
    assert all(math.prod(stage.submesh) == math.prod(stage.logical_shape) for stage in stored.stages)
    assert stored.batch_size % stored.n_micro_batches == 0


def test_a_climb_goes_to_what_needs_least_where_nothing_fits() -> None:
    def needs(n_bytes: int) -> Outcome:
        def fail() -> Plan:
            raise InfeasibleError(f"Stage 0: The step needs at least {bytes_text(n_bytes)} per device, ...")

        return outcome("choice", fail)

    found = climb([9], lambda n: [n - 1, n + 1], lambda n: needs(abs(n - 4) * 10**9 + 10**9), most=100)
    assert found.best.failure == "does not fit: needs 1.0 GB"
