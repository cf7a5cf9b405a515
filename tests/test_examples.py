"""The examples run. The training goes on after a kill as if there had been none; the generation equals plain jax."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("orbax.checkpoint")

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt.py"
N_STEPS, SAVE_EVERY = 9, 2


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(EXAMPLE), "--hidden", "16", "--layers", "2", "--folder", str(folder)]
    command += ["--steps", str(N_STEPS), "--save-every", str(SAVE_EVERY), *flags]
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0, text
    return text


def losses(folder: Path) -> list[str]:
    path = folder / "losses.csv"
    return path.read_text().splitlines()[1:] if path.exists() else []


def kill_after(process: subprocess.Popen[str], folder: Path, n_losses: int, delay_s: float) -> None:
    """kill -9 once so many steps are done, or after the end."""
    while process.poll() is None and len(losses(folder)) < n_losses:
        time.sleep(0.005)
    time.sleep(delay_s)
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(start(folder))
    found = losses(folder)
    assert [line.split(",")[0] for line in found] == [str(i) for i in range(N_STEPS)]
    return found


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed == 0 else pytest.mark.slow) for seed in range(50)]
)
def test_killed_and_started_again_it_ends_as_an_undisturbed_run(
    undisturbed: list[str], tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    # From before the first checkpoint to the middle of the last.
    kill_after(start(tmp_path), tmp_path, rng.randrange(1, N_STEPS + 1), rng.random() * 0.3)
    finish(start(tmp_path))
    assert losses(tmp_path) == undisturbed


@pytest.mark.slow
def test_it_goes_on_under_another_plan(undisturbed: list[str], tmp_path: Path) -> None:
    kill_after(start(tmp_path), tmp_path, 5, 0.1)
    finish(start(tmp_path, "--stages", "2"))
    found = [float(line.split(",")[1]) for line in losses(tmp_path)]
    assert found == pytest.approx([float(line.split(",")[1]) for line in undisturbed], rel=1e-4)


def test_generation_on_the_meshes_of_training_equals_plain_jax() -> None:
    spec = importlib.util.spec_from_file_location("generate", EXAMPLE.with_name("generate.py"))
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    params, at_once, one_by_one = example.main(steps=4)
    prompt = (np.arange(4)[:, None] * 2 + np.arange(6)[None]).astype(np.int32) % example.VOCABULARY
    serial = jax.jit(example.generate)(jax.device_get(params), example.empty_cache(4), prompt)
    np.testing.assert_array_equal(at_once, serial)
    np.testing.assert_array_equal(one_by_one, serial)
