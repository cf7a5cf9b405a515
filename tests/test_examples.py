"""The examples train as the serial loop, go on under another method, and after a kill as if there had been none."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from tests.xla_flags import FLAGS

FOLDER = Path(__file__).parents[1] / "examples"
#: Each example, as small as it can be.
SMALL = {
    "train_equinox": ["--hidden", "8"],
    "train_gpt": ["--hidden", "16", "--layers", "1", "--evaluate-every", "10"],
    "train_haiku": ["--hidden", "8"],
    "train_nnx": ["--hidden", "8"],
    "train_resnet": ["--width", "4", "--blocks", "1"],
}
#: Those that always run.
SHORT = ("train_gpt",)
Main = Callable[[list[str]], None]


@pytest.fixture
def main_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Main]]:
    """The `main` of an example, for a session of two devices, in jax as users have it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    minialpa.shutdown()
    minialpa.init(num_hosts=1, devices_per_host=2)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield lambda name: importlib.import_module(name).main
    minialpa.shutdown()


def column(path: Path, name: str = "loss") -> dict[int, float]:
    """A column of a file of metrics, by step."""
    header, *lines = (line.split(",") for line in path.read_text().splitlines())
    return {int(line[0]): float(line[header.index(name)]) for line in lines}


def serial_losses(main: Main, flags: list[str]) -> dict[int, float]:
    """What an example computes if `train` is a plain loop on one device."""
    losses = {}

    def train(step: Any, create_state: Any, batches: Any, *, n_steps: int, **_: Any) -> None:
        # A number would be a constant of the compiled step, which would be compiled anew for each count of steps.
        state = jax.tree.map(lambda x: jnp.asarray(x) if eqx.is_array_like(x) else x, eqx.filter_jit(create_state)())
        plain_step = eqx.filter_jit(step.__wrapped__)
        for i, batch in enumerate(itertools.islice(batches(), n_steps), start=1):
            state, metrics = plain_step(state, batch)
            losses[i] = float(metrics["loss"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minialpa, "train", train)
        main(flags)
    return losses


def test_no_example_is_left_out() -> None:
    assert {path.stem for path in FOLDER.glob("train_*.py")} == set(SMALL)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in SMALL]
)
def test_an_example_trains_as_the_serial_loop_and_goes_on_as_a_pipeline(
    main_of: Callable[[str], Main], tmp_path: Path, name: str
) -> None:
    main, n_steps, n_first = main_of(name), 24, 12
    serial = serial_losses(main, [*SMALL[name], "--steps", str(n_steps)])

    flags = [*SMALL[name], "--folder", str(tmp_path), "--save-every", "8"]
    main([*flags, "--steps", str(n_first)])
    main([*flags, "--steps", str(n_steps), "--stages", "2", "--profile"])
    losses = column(tmp_path / "metrics.csv")

    # Micro-batches have batch statistics of their own.
    n_equal = n_first if name == "train_resnet" else n_steps
    assert list(losses) == list(serial)
    assert list(losses.values())[:n_equal] == pytest.approx(list(serial.values())[:n_equal], rel=1e-3)
    values = np.array(list(losses.values()))
    assert values[-8:].mean() < values[:8].mean()
    assert json.loads((tmp_path / "trace.json").read_text())
    if name == "train_gpt":
        assert list(column(tmp_path / "evaluation.csv")) == [10, 12, 20, 24]


def test_a_model_of_transformers_is_fine_tuned(main_of: Callable[[str], Main], tmp_path: Path) -> None:
    needs = 'needs Flax models, which transformers 5 has not: python -m pip install "transformers<5"'
    transformers = pytest.importorskip("transformers", reason=needs)
    if not hasattr(transformers, "FlaxGPT2LMHeadModel"):
        pytest.skip(needs)
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    transformers.FlaxGPT2LMHeadModel(config).save_pretrained(tmp_path / "pretrained")

    main = main_of("finetune")
    flags = ["--model", str(tmp_path / "pretrained"), "--folder", str(tmp_path / "run"), "--save-every", "20"]
    main([*flags, "--steps", "20"])
    main([*flags, "--steps", "40", "--stages", "2"])
    losses = list(column(tmp_path / "run" / "metrics.csv").values())
    assert len(losses) == 40 and np.mean(losses[-10:]) < np.mean(losses[:10])

    model = transformers.FlaxAutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    state = minialpa.CheckpointManager(tmp_path / "run" / "checkpoints", read_only=True)
    assert state.all_steps() == (0, 20, 40)
    assert model.params.keys() == transformers.FlaxGPT2LMHeadModel(config).params.keys()


# ---- what the examples share ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_repeated_steps_leave_the_file_of_an_undisturbed_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    csv_file, rng = importlib.import_module("common").CsvFile, random.Random(seed)
    whole, disturbed = csv_file(tmp_path / "whole.csv"), csv_file(tmp_path / "disturbed.csv")
    for n in range(1, 31):
        whole.write(n, {"loss": 1 / n})

    # Some go on from a checkpoint in the same process, some in another one.
    n = 0
    while n < 30:
        n += 1
        disturbed.write(n, {"loss": 1 / n})
        if rng.random() < 0.2:
            n = rng.randrange(n + 1)
            disturbed = rng.choice((disturbed, csv_file(tmp_path / "disturbed.csv")))
    assert (tmp_path / "disturbed.csv").read_text() == (tmp_path / "whole.csv").read_text()


def test_the_flags_of_a_cluster_start_a_session_on_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    common, calls = importlib.import_module("common"), []
    monkeypatch.setattr(minialpa, "init", lambda **arguments: calls.append(arguments))
    common.start(common.flag_parser(None), ["--ray", "--hosts", "2"])
    assert calls == [{"cluster": "ray", "num_hosts": 2}]
    for wrong, message in ((["--hosts", "2"], "add --ray"), (["--profile"], "add --folder")):
        with pytest.raises(SystemExit):
            common.start(common.flag_parser(None), wrong)
        assert message in capsys.readouterr().err


def test_tensorboard_is_asked_for_by_name_where_it_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(SystemExit, match="pip install tensorboardX"):
        importlib.import_module("common").TensorBoard(tmp_path)


# ---- processes that are killed --------------------------------------------------------------------------------------

N_STEPS, SAVE_EVERY = 9, 2


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    # The example that is compiled soonest.
    command = [sys.executable, str(FOLDER / "train_haiku.py"), *SMALL["train_haiku"], "--folder", str(folder)]
    command += ["--steps", str(N_STEPS), "--save-every", str(SAVE_EVERY), *flags]
    xla_flags = " ".join(("--xla_force_host_platform_device_count=2", *FLAGS))
    env = {**os.environ, "XLA_FLAGS": xla_flags, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0, text
    return text


def n_lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def kill_after(process: subprocess.Popen[str], folder: Path, n_steps: int, delay_s: float) -> None:
    """kill -9 once so many steps are done, or after the end."""
    while process.poll() is None and n_lines(folder / "metrics.csv") <= n_steps:
        time.sleep(0.005)
    time.sleep(delay_s)
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(start(folder))
    assert list(column(folder / "metrics.csv")) == list(range(1, N_STEPS + 1))
    return (folder / "metrics.csv").read_text()


@pytest.mark.slow  # test_repeated_steps_leave_the_file_of_an_undisturbed_run is the short relative
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed == 0 else pytest.mark.slow) for seed in range(50)]
)
def test_killed_and_started_again_it_ends_as_an_undisturbed_run(undisturbed: str, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    # From before the first checkpoint to the middle of the last.
    kill_after(start(tmp_path), tmp_path, rng.randrange(1, N_STEPS + 1), rng.random() * 0.3)
    finish(start(tmp_path))
    assert (tmp_path / "metrics.csv").read_text() == undisturbed


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_it_goes_on_on_a_cluster(tmp_path: Path) -> None:
    finish(start(tmp_path, "--steps", "5"))
    finish(start(tmp_path, "--ray", "--profile"))
    assert list(column(tmp_path / "metrics.csv")) == list(range(1, N_STEPS + 1))
    assert (tmp_path / "trace.json").exists()


def test_generation_on_the_meshes_of_training_equals_plain_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    example = importlib.import_module("generate")
    params, at_once, one_by_one = example.main(steps=4)
    prompt = (np.arange(4)[:, None] * 2 + np.arange(6)[None]).astype(np.int32) % example.VOCABULARY
    serial = jax.jit(example.generate)(jax.device_get(params), example.empty_cache(4), prompt)
    np.testing.assert_array_equal(at_once, serial)
    np.testing.assert_array_equal(one_by_one, serial)
