"""Saved plans on the command line."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from minialpa.cli import main
from minialpa.machine_code import cache_folder
from tests.plans import pipeline_plan, shard_plan


def test_a_saved_plan_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, path = pipeline_plan(), tmp_path / "plan.json"
    plan.save(path)
    assert main(["report", str(path)]) == 0
    assert capsys.readouterr().out == plan.summary() + "\n"
    assert main(["report", str(path), "--explain", "params['w']"]) == 0
    assert capsys.readouterr().out == plan.explain("params['w']") + "\n"
    assert main(["report", str(path), "--python"]) == 0
    assert capsys.readouterr().out == plan.to_python(0) + "\n" + plan.to_python(1) + "\n"


def test_saved_plans_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / f"{name}.json") for name in ("a", "b")]
    for path, plan in zip(paths, (pipeline_plan(), shard_plan()), strict=True):
        plan.save(path)
    assert main(["diff", *paths]) == 1
    assert "stages: 2 -> 1" in capsys.readouterr().out
    assert main(["diff", paths[0], paths[0]]) == 0
    assert capsys.readouterr().out == "The plans are equal.\n"


def test_files_that_are_no_plans_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text("{}")
    assert main(["report", str(tmp_path / "plan.json")]) == 1
    assert "minialpa: Not a plan" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none.json")]) == 1
    assert "none.json` cannot be read: No such file" in capsys.readouterr().err


def test_a_planned_model_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", "mlp", "--devices-per-host", "4", "--save", str(path)]) == 0
    assert f"Written to {path}." in capsys.readouterr().out
    assert main(["report", str(path)]) == 0
    assert "1 x 4 a100-80gb devices" in capsys.readouterr().out


def test_the_doctor_says_what_is_here_and_tries_the_transports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["jax", jax.__version__] for line in lines)
    assert "devices        8 x cpu (cpu)" in lines
    assert f"machine code   {cache_folder()}" in lines
    assert lines[-3:] == [
        "shared memory  works",
        "TCP            works",
        "NCCL           does not work: jax sees no GPU here",
    ]
