"""Every benchmark runs at its tiny size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import plan_cases
from benchmarks.registry import Rows, Size, all_benchmarks, benchmark
from benchmarks.run import main, table
from minialpa import Plan

#: They take longest; the others are their short relatives.
LONG = (
    "call",
    "checkpoint",
    "gpu_fidelity",
    "gpu_overlap",
    "input_pipeline",
    "inter_plans",
    "iopddl",
    "long_context",
    "overhead",
    "plan_memory",
    "plan_quality",
    "plan_scaling",
    "several_loops",
)
RAY = (pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.slow)


@pytest.mark.parametrize(
    "name",
    # Those of the models are in tests/test_models_table.py.
    [
        pytest.param(name, marks=RAY if name.startswith("ray_") else pytest.mark.slow if name in LONG else ())
        for name in all_benchmarks()
        if name != "models"
    ],
)
def test_benchmark_gives_rows_of_numbers_and_text(name: str) -> None:
    rows = all_benchmarks()[name]("tiny")
    assert rows
    for row in rows:
        assert all(isinstance(value, str | bool | int | float) for value in row.values()), row


def test_every_benchmark_says_in_a_line_what_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(all_benchmarks())
    assert all(len(line.split()) > 3 for line in lines)


def test_two_benchmarks_of_one_name_are_refused() -> None:
    name = next(iter(all_benchmarks()))

    def other(size: Size) -> Rows:
        return []

    with pytest.raises(ValueError, match=f"two benchmarks `{name}`"):
        benchmark(name)(other)


def test_table_lines_up_columns_that_only_some_rows_have() -> None:
    rows = [{"case": "a", "us": 1.23456}, {"case": "long", "n": 2}]
    assert table(rows) == "  case  us     n\n  a     1.235\n  long         2"


def test_results_are_written_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.config.update", lambda *_: None)  # the devices of the test run are there already
    assert main(["plan_time", "--size", "tiny", "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["plan_time"][0]["model"] == "mlp"


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
