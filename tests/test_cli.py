"""Saved plans on the command line."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from minialpa.cli import main
from minialpa.support.machine_code import cache_folder
from minialpa.support.progress import ProgressBar
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


def test_the_doctor_goes_on_where_there_are_no_devices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> Any:
        raise RuntimeError("no such platform")

    monkeypatch.setattr(jax, "local_devices", refuse)
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "devices        do not work: no such platform" in lines and "TCP            works" in lines


_MODEL = """
import jax, jax.numpy as jnp

def make():
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    return lambda state, batch: {"größe": state["größe"] * jnp.sum(batch)}, {"größe": shape}, shape
"""


def test_a_model_of_this_folder_with_names_in_any_letters_is_planned_and_reported_in_any_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("a_model_of_mine.py").write_text(_MODEL, encoding="utf-8")
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", ascii_only)
        assert main(["plan", "a_model_of_mine:make", "--save", "plän.json"]) == 0
        assert main(["report", "plän.json", "--explain", "größe"]) == 0
    assert b"gr\\xf6\\xdfe" in ascii_only.buffer.getvalue()  # type: ignore[attr-defined]
    for name, message in (("a_model_of_mine:run", "has no attribute 'run'"), ("not_mine:make", "no module `not_mine`")):
        assert main(["plan", name]) == 1
        assert message in capsys.readouterr().err


def test_a_reader_who_has_seen_enough_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline_plan().save(tmp_path / "plan.json")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as output, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        assert main(["report", str(tmp_path / "plan.json")]) == 1


def test_what_cannot_be_written_is_told_before_planning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("minialpa.plan", None)
    assert main(["plan", "mlp", "--save", "nowhere/plan.json"]) == 1
    assert capsys.readouterr().err == "minialpa: There is no folder `nowhere` to write `plan.json` to.\n"


def test_a_file_that_is_no_cluster_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in (b"{", b"[]", b"\xff"):
        (tmp_path / "cluster.json").write_bytes(text)
        assert main(["plan", "mlp", "--cluster", str(tmp_path / "cluster.json")]) == 1
        assert "minialpa: Not a cluster description" in capsys.readouterr().err


def test_numbers_are_positive(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["demo", "--devices", "0"], ["plan", "mlp", "--batch-size", "-3"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert "is not positive" in capsys.readouterr().err


@pytest.mark.parametrize("stream", ["none", "closed"])
def test_programs_without_a_console_plan_too(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", None if stream == "none" else closed)
    with ProgressBar() as bar:
        bar.report("Planning", 0, 1)
