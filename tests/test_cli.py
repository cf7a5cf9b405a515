"""The command line: models and clusters as users name them, results as text and JSON, errors, and Ctrl-C."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import jax
import pytest

import minialpa
from minialpa.cli import arguments, main
from minialpa.cluster import ClusterSpec, PresetName
from minialpa.inter.phases import PHASES
from minialpa.options import PlanningEffort
from minialpa.plan import Plan
from minialpa.support.machine_code import cache_folder
from tests.plans import pipeline_plan, shard_plan
from tests.skips import skip

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder. Modules of it are forgotten later."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("mistakes", "no_syntax", "script", "a_model_of_mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


# ---- saved plans -----------------------------------------------------------------------------------------------------


def test_a_saved_plan_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, path = pipeline_plan(), tmp_path / "plan.json"
    plan.save(path)
    for options, text in (
        ([], plan.summary()),
        (["--full"], plan.summary(full=True)),
        (["--explain", "params['w']"], plan.explain("params['w']")),
        (["--python"], plan.to_python(0) + "\n" + plan.to_python(1)),
        (["--json"], plan.to_json()),
    ):
        assert main(["report", str(path), *options]) == 0
        assert capsys.readouterr().out == text + "\n"
    assert main(["report", str(path), "--explain", "parms"]) == 2
    assert "No part of the plan is called `parms`" in capsys.readouterr().err


def test_saved_plans_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / f"{name}.json") for name in ("a", "b")]
    for path, plan in zip(paths, (pipeline_plan(), shard_plan()), strict=True):
        plan.save(path)
    assert main(["diff", *paths]) == 1
    assert "stages: 2 -> 1" in capsys.readouterr().out
    assert main(["diff", *paths, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert_documented("diff", found)
    assert not found["equal"] and "stages: 2 -> 1" in found["differences"]
    assert main(["diff", paths[0], paths[0]]) == 0
    assert capsys.readouterr().out == "The plans are equal.\n"


def test_a_saved_plan_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, path, trace = pipeline_plan(), tmp_path / "plan.json", tmp_path / "trace.json"
    plan.save(path)
    timeline = minialpa.simulate(plan)
    assert main(["simulate", str(path), "--trace", str(trace)]) == 0
    assert capsys.readouterr().out == f"{timeline.summary()}\nWritten to {trace}.\n"
    assert json.loads(trace.read_text())
    assert main(["simulate", str(path), "--json", str(tmp_path / "found.json")]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert_documented("simulate", found)
    assert found["total_s"] == timeline.total_s and len(found["stages"]) == 2


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_phases_are_printed_compared_and_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "mlp", "--cluster", "a100-80gb:2", "--micro-batches", "2"]
    assert main([*command, "--dump", "microbatch", "--diff", "trace", "layers"]) == 0
    out = capsys.readouterr().out
    assert "for each of 2 micro-batches:" in out
    assert "--- trace\n+++ layers\n" in out
    assert main([*command, "--dump"]) == 0
    names = [path.name for path in sorted(Path("phases").iterdir())]
    assert names[0] == "0-trace.txt" and names[-1] == "6-instructions.txt"
    assert all(Path("phases", name).read_text() for name in names)
    assert main([*command, "--dump", "tracing"]) == 2
    assert "There is no phase `tracing`. Do you mean `trace`?" in capsys.readouterr().err


def test_a_method_is_chosen_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "plan.json")
    options = ["--devices-per-host", "4", "--micro-batches", "2", "--save", path]
    assert main(["plan", "mlp", "--method", "PipeshardParallel", "--layers", "2", *options]) == 0
    printed = capsys.readouterr().out
    assert "2 stages, 2 micro-batches" in printed and f"Written to {path}." in printed
    assert main(["plan", "mlp", "--method", "zero3", "--memory", "39.5GB", *options]) == 0
    plan = Plan.load(Path(path))
    assert (len(plan.stages), plan.n_micro_batches, plan.cluster) == (
        1,
        2,
        ClusterSpec.preset("a100-80gb", devices_per_host=4),
    )
    option = plan.stages[0].option
    assert option.force_zero_stage_3 and option.memory_limit_bytes == 39.5e9

    capsys.readouterr()
    assert main(["check", path, "bert"]) == 2
    error = capsys.readouterr().err
    assert "was made for another model or batch than `bert`: argument" in error and "on_stale" not in error
    assert main(["plan", "mlp", "--cluster", path]) == 2
    assert "plan.json`: This is a plan, not a cluster description" in capsys.readouterr().err


def test_a_plan_that_does_not_fit_has_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "mlp", "--cluster", "h100:2", "--method", "data", "--memory", "9kB"]) == 1
    printed = capsys.readouterr()
    assert not printed.out and printed.err.startswith("minialpa: ")


def test_a_choice_of_a_new_or_a_saved_plan_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "plan.json")
    options = ["--cluster", "h100:2", "--method", "data"]
    assert main(["plan", "mlp", *options, "--save", path]) == 0
    capsys.readouterr()
    assert main(["explain", "mlp", "micro-batches", *options]) == 0
    text = capsys.readouterr().out
    assert "2 micro-batches" in text
    assert main(["explain", "mlp", "micro-batches", "--plan", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert_documented("explain", found)
    assert found == {"what": "micro-batches", "lines": text.splitlines()}
    for arguments_, message in (
        (["micro-batchs", "--plan", path], "`micro-batches`"),
        (["stages", "--plan", path, "--method", "data"], "has its own choices. Leave out --method, or"),
    ):
        assert main(["explain", "mlp", *arguments_]) == 2
        assert message in capsys.readouterr().err


def test_clusters_are_presets_with_sizes_or_files(tmp_path: Path) -> None:
    def cluster(text: str | None, hosts: int | None = None, devices: int | None = None) -> ClusterSpec:
        return arguments.cluster_of(argparse.Namespace(cluster=text, num_hosts=hosts, devices_per_host=devices))

    h100 = ClusterSpec.preset("h100", num_hosts=2, devices_per_host=4)
    (tmp_path / "cluster.json").write_text(h100.to_json())
    assert cluster("h100:2x4") == cluster("H100:2X4") == cluster("h100", 2, 4) == h100
    assert cluster(str(tmp_path / "cluster.json")) == h100
    assert cluster("h100:16") == ClusterSpec.preset("h100", devices_per_host=16)
    assert cluster(None) == cluster("a100-80gb") == ClusterSpec.preset("a100-80gb")
    for name, message in (
        ("a100", "Do you mean `a100-40gb` or `a100-80gb`?"),
        ("nothing", "Choose one of v100"),
        ("h100:0x8", "Write hosts x devices per host, such as `h100:2x8`"),
        ("h100:", "Write hosts x devices per host"),
        ("none.json", "There is no file `none.json`. `minialpa calibrate --out none.json` writes it."),
    ):
        with pytest.raises(minialpa.MinialpaError, match=re.escape(message)):
            cluster(name)
    with pytest.raises(minialpa.MinialpaError, match="`h100:8` has its own hosts"):
        cluster("h100:8", 2)


@pytest.mark.parametrize(
    ("text", "value"),
    [("40GB", 40e9), ("38.5 GiB", 38.5 * 2**30), (".5tb", 5e11), ("9kB", 9000), ("12B", 12), ("1MiB", 2**20)],
)
def test_sizes_of_memory_have_units(text: str, value: float) -> None:
    assert arguments.n_bytes(text) == value


def test_names_on_the_command_line_are_names_of_the_package() -> None:
    assert get_args(PresetName) == arguments.PRESETS
    assert get_args(PlanningEffort) == arguments.EFFORTS
    assert tuple(phase.name for phase in PHASES) == arguments.PHASES
    assert all(hasattr(minialpa, name) for name in arguments.METHODS)


@pytest.mark.usefixtures("folder")
def test_clusters_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["what-if", "mlp", "--gpus", "1", "--memory", "80GB,1GB", "--method", "data", "--processes", "1"]
    assert main([*command, "--csv", "cases.csv", "--html", "page.html", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert_documented("what-if", found)
    assert len(found["cases"]) == 2 and Path("page.html").read_text()
    assert len(Path("cases.csv").read_text().splitlines()) == 3
    for options, message in ((["--gpus", "8.."], "`8..`"), (["--cluster", "h101"], "Do you mean `h100`")):
        assert main(["what-if", "mlp", *options]) == 2
        assert message in capsys.readouterr().err


# ---- models ----------------------------------------------------------------------------------------------------------


_MODEL = """
import jax, jax.numpy as jnp

def make(batch_size):
    state, batch = (jax.ShapeDtypeStruct((n, 8), jnp.float32) for n in (8, batch_size))
    return lambda state, batch: {"größe": state["größe"] * jnp.sum(batch)}, {"größe": state}, batch
"""


def test_a_model_of_this_folder_with_names_in_any_letters_is_planned_and_reported_in_any_locale(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("a_model_of_mine.py").write_text(_MODEL, encoding="utf-8")
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", ascii_only)
        assert main(["plan", "a_model_of_mine:make", "--batch-size", "12", "--save", "plän.json"]) == 0
        assert main(["report", "plän.json", "--explain", "größe"]) == 0
    assert b"gr\\xf6\\xdfe" in ascii_only.buffer.getvalue()
    assert Plan.load("plän.json").n_examples == 12


_SCRIPT = """
import argparse, dataclasses
import jax, jax.numpy as jnp, minialpa

options = argparse.ArgumentParser().parse_args()
print("a line of the script")

@dataclasses.dataclass
class Sizes:
    width: "int" = 4

def loss(w, batch): return jnp.mean((batch @ w) ** 2)

def step(state, batch):
    print("a line of the step")
    value, grads = minialpa.value_and_grad(loss)(state, batch)
    return state - 0.1 * grads, value

state, batch = jnp.eye(Sizes().width), jnp.ones((8, 4))
parallel = minialpa.parallelize(step)
compiled = jax.jit(step)

def make_batch(batch_size=8): return jax.ShapeDtypeStruct((batch_size, 4), jnp.float32)
def make_args(batch_size=8): return state, make_batch(batch_size)
def make(batch_size=8): return step, state, make_batch(batch_size)
def pair(batch_size=8): return step, make_args(batch_size)
def listed(batch_size=8): return parallel, list(make_args(batch_size))
def any_names(**names): return step, state, batch

class Trainer:
    @minialpa.parallelize
    def step(self, state, batch): return step(state, batch)

trainer = Trainer()

if __name__ == "__main__":
    raise SystemExit("it trains")
"""


def test_all_forms_of_a_model_give_one_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("script.py").write_text(_SCRIPT, encoding="utf-8")
    options = ["--cluster", "cpu:2", "--method", "data", "--json"]
    forms = (
        ["script.py:make"],
        [str(folder / "script.py") + ":pair"],
        ["script:listed"],
        ["script.py:step", "--args", "state,batch"],
        ["script.py:parallel", "--args", "make_args"],
        ["script.py:trainer.step", "--args", "state, make_batch"],
        ["script:step", "--args", "state,make_batch", "--batch", "8"],
    )
    plans = []
    for form in forms:
        assert main(["plan", *form, *options]) == 0, form
        plans.append(Plan.from_json(capsys.readouterr().out))
    assert [plan.input_specs for plan in plans] == [plans[0].input_specs] * len(forms)
    assert [plan.cost for plan in plans] == [plans[0].cost] * len(forms)
    assert main(["plan", "script.py:compiled", "--args", "make_args", *options]) == 0


@pytest.mark.parametrize(
    "form",
    [
        ["mlp"],
        ["script.py:make"],
        ["script.py:listed"],
        ["script.py:step", "--args", "make_args"],
        ["script.py:step", "--args", "state,make_batch"],
    ],
    ids=" ".join,
)
def test_a_batch_size_is_used(form: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("script.py").write_text(_SCRIPT, encoding="utf-8")
    assert main(["plan", *form, "--batch", "6", "--cluster", "cpu:2", "--method", "data", "--json"]) == 0
    assert Plan.from_json(capsys.readouterr().out).n_examples == 6


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama-8b", "Do you mean `llama-3-8b`"),
        ("gpt-1.3", "Do you mean `gpt-1.3b`"),
        ("nothing", "There is no model `nothing`. `minialpa --models` lists all models."),
        ("script", "Name a function of script.py, as in `script.py:FUNCTION`"),
    ],
)
def test_few_near_names_are_offered_for_an_unknown_model(
    name: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("script.py").write_text(_SCRIPT, encoding="utf-8")
    assert main(["plan", name]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and len(re.findall(r"`[\w.-]+`", error)) <= 7


def test_all_models_are_listed_and_known_in_any_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--models"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert {"mlp", "gpt-1.3b", "llama-3-405b"} <= set(listed)
    assert main(["plan", "MLP", "--cluster", "h100:1"]) == 0


# ---- errors ----------------------------------------------------------------------------------------------------------


_MISTAKES = """
import sys
import jax.numpy as jnp, minialpa

def step(state, batch):
    return state * jnp.sum(batch @ state)

def make(): return step, jnp.eye(4), jnp.ones((8, 4))
def sized(batch_size=8): return step, jnp.eye(4), jnp.ones((batch_size, 4))
def unsized(batch_size): return sized(batch_size)
def needs(width, depth=2): return make()
def turned(): return jnp.eye(4), jnp.ones((8, 4)), step
def fails(): return undefined
def parallel(): return minialpa.parallelize(step), jnp.eye(4), jnp.ones((8, 4))
def number(): return 42
def alone(): return (step,)
def leaves(): sys.exit("enough")
def branches(): return (lambda x, y: x if y.sum() > 0 else y), jnp.eye(4), jnp.ones((8, 4))
def texts(): return step, "a text", "another"
def ignores(batch_size=8): return make()
def any_names(**names): return make()
state, batch = jnp.eye(4), jnp.ones((8, 4))
parallel_step = minialpa.parallelize(step)
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mistakes:make", "--batch-size", "7"], "`mistakes:make` has no parameter `batch_size`"),
        (["mistakes:unsized"], "`mistakes:unsized` needs a batch size. Give one with `--batch`."),
        (["mistakes:ignores", "--batch", "7"], "no argument of its step has a dimension of this size"),
        (["mistakes:ignores", "--batch", "4"], "its batch has 8 examples"),
        (["mistakes:any_names", "--batch", "7"], "no argument of its step has a dimension of this size"),
        (["mistakes:step", "--args", "state,batch", "--batch", "7"], "No function in `--args state,batch`"),
        (["mistakes:needs"], "and it needs width. Give each a default value."),
        (["mistakes:step"], "it needs state, batch. Give each a default value. If this is the training step itself"),
        (["mistakes:parallel_step"], "`mistakes:parallel_step` is a training step. Name its arguments"),
        (["mistakes:step", "--args", "state,bach"], "`mistakes` has no `bach`. Do you mean `batch`"),
        (["mistakes:step", "--args", "state"], "mistakes:step` failed"),
        (["mistakes:turned"], "returned (ArrayImpl, ArrayImpl, function), and it must return the step"),
        (["mistakes:number"], "`mistakes:number` returned int, and it must return the step"),
        (["mistakes:alone"], "`mistakes:alone` returned (function)"),
        (["mistakes:leaves"], "mistakes.py:17 with SystemExit: enough"),
        (["mistakes:branches"], "mistakes.py:18 with TracerBoolConversionError"),
        (["mistakes:texts"], "The step of `mistakes:texts` failed"),
        (["mistakes.py:fails"], "mistakes.py:13 with NameError: name 'undefined' is not defined"),
        (["mistakes:state"], "`mistakes:state` is a ArrayImpl, not a function"),
        (["mistakes:mak"], "`mistakes` has no `mak`. Do you mean `make`"),
        (["mistaks.py:make"], "There is no file `mistaks.py`. Do you mean `mistakes.py`?"),
        (["mistakes:make", "--micro-batches", "16"], "8 examples cannot be split into 16 equal micro-batches"),
        (["mistakes:make", "--method", "DataParallel", "--layers", "2"], "--layers is for pipelines, and DataParallel"),
        ([":make"], "`:make` is no `FILE.py:FUNCTION` or `MODULE:FUNCTION`"),
        (["mistakes:"], "`mistakes:` is no `FILE.py:FUNCTION` or `MODULE:FUNCTION`"),
        (["not_mine:make"], "There is no module `not_mine`"),
        (["no_syntax:make"], "no_syntax.py:1 with SyntaxError"),
        (["no_syntax.py:make"], "no_syntax.py:1 with SyntaxError"),
        (["mistakes:make", "--cluster", "cpu.json", "--num-hosts", "2"], "`cpu.json` has its own hosts"),
        (["mistakes:make", "--save", "."], "`.` is a folder"),
        (["mistakes:make", "--save", "nowhere/plan.json"], "There is no folder `nowhere` to write `plan.json` to"),
        (["mistakes:make", "--json", "nowhere/plan.json"], "make it with `mkdir -p nowhere`"),
        (["mistakes:make", "--method", "zero"], "no method `zero`. Do you mean `Zero2Parallel` or `Zero3Parallel`?"),
        (["mistakes:make", "--effort", "all"], "There is no effort `all`. Choose one of fast, balanced, proof."),
        (["mistakes:make", "--memroy", "40GB"], "There is no option `--memroy`. Do you mean `--memory`"),
        (["mistakes:make", "--memory", "40"], "`40` is no size"),
        (["mistakes:make", "--memory", "0GB"], "`0GB` is no size"),
        (["mistakes:make", "more"], "`more` is one argument too many"),
        (["mistakes:make", "--batch", "-3"], "-3 is not positive"),
        (["mistakes:make", "--batch", "0"], "0 is not positive"),
        (["mistakes:make", "--batch", "many"], "many is not a whole number"),
        (["mlp", "--args", "state"], "--args names arguments of a step of yours, and `mlp` is no"),
        ([], "the following arguments are required: MODEL. `minialpa plan --help`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_reported_in_a_line(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("mistakes", _MISTAKES), ("no_syntax", "def f(:")):
        Path(f"{name}.py").write_text(text, encoding="utf-8")
    Path("cpu.json").write_text(ClusterSpec.preset("cpu").to_json(), encoding="utf-8")
    assert main(["plan", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.startswith("minialpa") and printed.err.count("\n") == 1
    assert not printed.out


def test_a_reader_who_has_seen_enough_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline_plan().save(tmp_path / "plan.json")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as output, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        assert main(["report", str(tmp_path / "plan.json")]) == 1


def test_files_that_are_no_plan_or_cluster_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "none.json")]) == 2
    assert "none.json` cannot be read: No such file" in capsys.readouterr().err
    (tmp_path / "cluster.json").write_text("[]")
    assert main(["report", str(tmp_path / "cluster.json")]) == 2
    assert "cluster.json`: Not a plan" in capsys.readouterr().err
    assert main(["plan", "mlp", "--cluster", str(tmp_path / "cluster.json")]) == 2
    assert "cluster.json`: This is no cluster description" in capsys.readouterr().err


# ---- this machine ----------------------------------------------------------------------------------------------------


def test_the_doctor_lists_packages_and_devices_and_tries_the_transports(capsys: pytest.CaptureFixture[str]) -> None:
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
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert_documented("doctor", found | found["devices"])
    assert found["devices"] == {"count": 0, "error": "no such platform"}


@pytest.mark.usefixtures("fresh_session")
def test_a_benchmark_runs_the_planned_step_on_the_devices(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("script.py").write_text(_SCRIPT, encoding="utf-8")
    model = ["script.py:parallel", "--args", "make_args", "--batch", "16"]
    assert main(["bench", *model, "--steps", "3", "--method", "data", "--json", "bench.json"]) == 0
    found = json.loads(Path("bench.json").read_text())
    assert_documented("bench", found)
    assert found["n_examples"] == 16 and len(found["steps_s"]) == 3 and found["predicted_s"] > 0
    assert found["measured_s"] == sorted(found["steps_s"])[1]
    assert found["examples_per_s"] == pytest.approx(16 / found["measured_s"])
    printed = capsys.readouterr().out
    assert "1 x 8 cpu devices" in printed and "examples per second, 16 in a batch" in printed


# ---- the process -----------------------------------------------------------------------------------------------------


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_package_runs_as_the_command() -> None:
    assert run("-m", "minialpa", "--version").stdout == f"minialpa {minialpa.__version__}\n"


def test_importing_and_help_need_no_jax() -> None:
    done = run("-X", "importtime", "-m", "minialpa", "plan", "--help")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and "minialpa.cli.arguments" in imported
    assert not imported & {"jax", "numpy", "minialpa.plan", "minialpa.api"}


def test_the_lazy_package_has_the_names_that_type_checkers_see() -> None:
    tree = ast.parse(Path(minialpa.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in ast.walk(block) if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: node.module for node in imports for alias in node.names if alias.asname}
    assert {*seen, "__version__"} == set(minialpa.__all__)
    for name, module in seen.items():
        if module != "minialpa":
            assert getattr(minialpa, name) is getattr(importlib.import_module(str(module)), name)


def test_an_unknown_name_of_the_package_has_near_names() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'ClusterSpc'. Do you mean `ClusterSpec`\?"):
        minialpa.ClusterSpc  # type: ignore[attr-defined]  # noqa: B018
    assert minialpa.errors.MinialpaError is minialpa.MinialpaError
    assert {"plan", "MinialpaError"} <= set(dir(minialpa)) and callable(minialpa.plan)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("minialpa pl", {"plan"}),
        ("minialpa plan gpt-1", {"gpt-125m", "gpt-1.3b", "gpt-15b"}),
        ("minialpa plan scr", {"script.py"}),
        ("minialpa plan mlp --method Z", {"Zero2Parallel", "Zero3Parallel"}),
    ],
)
def test_shells_complete_words(line: str, words: set[str], folder: Path) -> None:
    if importlib.util.find_spec("argcomplete") is None:
        skip("argcomplete is not installed")
    Path("script.py").write_text(_SCRIPT)
    shell = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
    run("-m", "minialpa", _ARGCOMPLETE="1", _ARGCOMPLETE_STDOUT_FILENAME=str(folder / "words"), **shell)
    assert {word.strip() for word in (folder / "words").read_text().split("\n")} == words


_LARGE = """
import sys, time
{on_import}
import jax, minialpa
from minialpa import models

def make():
    case = models.build("gpt-1.3b")
    state = jax.eval_shape(case.init, jax.random.key(0))
    print("begun", flush=True)
    return case.train_step(minialpa.value_and_grad), state, case.make_batch(0, 1024)
"""


@pytest.mark.parametrize(("on_import", "wait_s"), [("print('begun', flush=True)", 0.1), ("", 2.0)])
def test_an_interrupt_ends_the_process_with_one_line(on_import: str, wait_s: float, folder: Path) -> None:
    """In imports of compiled modules, and while a large model is planned."""
    Path("large.py").write_text(_LARGE.format(on_import=on_import))
    process = subprocess.Popen(
        [sys.executable, "-m", "minialpa", "plan", "large.py:make", "--cluster", "h100"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None and process.stderr.readline() == "begun\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(wait_s)
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() in ("minialpa: interrupted\n", "begun\nminialpa: interrupted\n")
    assert process.returncode == 130


# ---- documentation ---------------------------------------------------------------------------------------------------


def test_the_page_lists_the_commands() -> None:
    commands = re.search(r"COMMAND: invalid choice: 'x' \(choose from (.*)\)", run("-m", "minialpa", "x").stderr)
    table = PAGE.partition("## Commands")[2].partition("##")[0]
    assert commands is not None
    assert set(re.findall(r"[\w-]+", commands[1])) == set(re.findall(r"^\| `([\w-]+)", table, re.MULTILINE))


def assert_documented(command: str, found: dict[str, Any]) -> None:
    """The page names all fields of the JSON of a command."""
    (row,) = re.findall(rf"^\| (?:`\w+`, )?`{command}`.*", PAGE.partition("## JSON")[2], re.MULTILINE)
    assert found.keys() <= set(re.findall(r"`(\w+)`", row))
