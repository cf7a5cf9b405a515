"""Saved plans on the command line."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import minialpa
from minialpa.cli import main
from minialpa.cluster import ClusterSpec
from minialpa.plan import Plan
from minialpa.support.machine_code import cache_folder
from minialpa.support.progress import ProgressBar
from tests.plans import pipeline_plan, shard_plan


def test_a_saved_plan_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, path = pipeline_plan(), tmp_path / "plan.json"
    plan.save(path)
    assert main(["report", str(path)]) == 0
    assert capsys.readouterr().out == plan.summary() + "\n" == f"{plan}\n"
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


def test_phases_are_printed_compared_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["plan", "mlp", "--devices-per-host", "2", "--micro-batches", "2"]
    assert main([*command, "--dump", "microbatch", "--diff", "trace", "layers"]) == 0
    out = capsys.readouterr().out
    assert "for each of 2 micro-batches:" in out
    assert "--- trace\n+++ layers\n" in out
    assert main([*command, "--dump"]) == 0
    names = [path.name for path in sorted(Path("phases").iterdir())]
    assert names[0] == "0-trace.txt" and names[-1] == "6-instructions.txt"
    assert all(Path("phases", name).read_text() for name in names)
    with pytest.raises(SystemExit):
        main([*command, "--dump", "tracing"])
    assert "rematerialise" in capsys.readouterr().err


def test_the_doctor_says_what_is_here_and_tries_the_transports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:2] == ["jax", jax.__version__] for line in lines)
    assert "devices        8 x cpu (cpu)" in lines
    assert f"machine code   {cache_folder()}" in lines
    assert lines[-2:] == [
        "TCP            works",
        "NCCL           does not work: jax sees no GPU here. For an NVIDIA GPU, install `minialpa[gpu]`",
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

def make(batch_size):
    state, batch = (jax.ShapeDtypeStruct((n, 8), jnp.float32) for n in (8, batch_size))
    return lambda state, batch: {"größe": state["größe"] * jnp.sum(batch)}, {"größe": state}, batch
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
        assert main(["plan", "a_model_of_mine:make", "--batch-size", "12", "--save", "plän.json"]) == 0
        assert main(["report", "plän.json", "--explain", "größe"]) == 0
    assert b"gr\\xf6\\xdfe" in ascii_only.buffer.getvalue()  # type: ignore[attr-defined]
    assert Plan.load("plän.json").n_examples == 12


_MISTAKES = """
import jax.numpy as jnp, minialpa

def step(state, batch):
    return state * jnp.sum(batch @ state)

def make(): return step, jnp.eye(4), jnp.ones((8, 4))
def sized(batch_size=8): return step, jnp.eye(4), jnp.ones((batch_size, 4))
def unsized(batch_size): return sized(batch_size)
def needs(width): return make()
def turned(): return jnp.eye(4), jnp.ones((8, 4)), step
def fails(): return undefined
def parallel(): return minialpa.parallelize(step), jnp.eye(4), jnp.ones((8, 4))
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mistakes:make", "--batch-size", "7"], "`mistakes:make` has no parameter `batch_size`"),
        (["mistakes:unsized"], "`mistakes:unsized` needs a batch size"),
        (["mistakes:needs"], "and it needs width. Give each a default value."),
        (["mistakes:turned"], "returned (ArrayImpl, ArrayImpl, function), and it must return the step"),
        (["mistakes:fails"], "mistakes.py:12 with NameError: name 'undefined' is not defined"),
        (["mistakes:parallel"], "Return the step itself, `step.__wrapped__`"),
        (["mistakes:run"], "because `mistakes` has no `run`"),
        (["mistakes:make", "--micro-batches", "16"], "8 examples cannot be split into 16 equal micro-batches"),
        (["mistakes:make", "--method", "DataParallel", "--layers", "2"], "--layers is for pipelines, and DataParallel"),
        ([":make"], "`:make` is no `module:function`"),
        (["not_mine:make"], "There is no module `not_mine`"),
        (["no_syntax:make"], "no_syntax.py:1 with SyntaxError"),
        (["mistakes:make", "--cluster", "cpu.json", "--num-hosts", "2"], "`cpu.json` has its own hosts"),
        (["mistakes:make", "--save", "."], "`.` is a folder"),
        (
            ["mistakes:make", "--save", "nowhere/plan.json"],
            "There is no folder `nowhere` to write `plan.json` to. Make it with",
        ),
    ],
)
def test_mistakes_in_the_model_that_is_to_be_planned_are_reported_in_a_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, text in (("mistakes", _MISTAKES), ("no_syntax", "def f(:")):
        monkeypatch.delitem(sys.modules, name, raising=False)
        Path(f"{name}.py").write_text(text, encoding="utf-8")
    Path("cpu.json").write_text(ClusterSpec.preset("cpu").to_json(), encoding="utf-8")
    assert main(["plan", *arguments]) == 1
    printed = capsys.readouterr().err
    assert message in printed and printed.startswith("minialpa: ") and printed.count("\n") == 1


def test_a_method_is_chosen_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "plan.json")
    options = ["--devices-per-host", "4", "--micro-batches", "2", "--save", path]
    assert main(["plan", "mlp", "--method", "PipeshardParallel", "--layers", "2", *options]) == 0
    printed = capsys.readouterr().out
    assert "2 stages, 2 micro-batches" in printed and f"Written to {path}." in printed
    assert main(["plan", "mlp", "--method", "Zero3Parallel", *options]) == 0
    printed = capsys.readouterr().out
    assert "1 stage, 2 micro-batches" in printed and "1 x 4 a100-80gb devices" in printed
    assert Plan.load(Path(path)).stages[0].option.force_zero_stage_3

    assert main(["check", path, "bert"]) == 1
    error = capsys.readouterr().err
    assert "was made for another model or batch than `bert`: argument" in error and "on_stale" not in error
    assert main(["plan", "mlp", "--cluster", path]) == 1
    assert "plan.json`: This is a plan, not a cluster description" in capsys.readouterr().err


def test_a_reader_who_has_seen_enough_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline_plan().save(tmp_path / "plan.json")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as output, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        assert main(["report", str(tmp_path / "plan.json")]) == 1


def test_files_that_are_no_plan_or_cluster_and_numbers_that_are_not_positive_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / "none.json")]) == 1
    assert "none.json` cannot be read: No such file" in capsys.readouterr().err
    (tmp_path / "cluster.json").write_text("[]")
    assert main(["report", str(tmp_path / "cluster.json")]) == 1
    assert "cluster.json`: Not a plan" in capsys.readouterr().err
    assert main(["plan", "mlp", "--cluster", str(tmp_path / "cluster.json")]) == 1
    assert "cluster.json`: This is no cluster description" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "mlp", "--batch-size", "-3"])
    assert "is not positive" in capsys.readouterr().err


def test_programs_without_a_console_plan_too(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stderr", stream)
        with ProgressBar() as bar:
            bar.report("Planning", 0, 1)


def test_the_package_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "minialpa", "--version"], capture_output=True, text=True, check=True)
    assert minialpa.__version__ in done.stdout
