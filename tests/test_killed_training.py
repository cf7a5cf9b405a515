"""`train` in processes that are killed at random moments, from their start on, ends like an undisturbed run."""

from __future__ import annotations

import math
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.ray.ray_cluster import ray_nodes
from tests.training_driver import command, environment, losses_in, reports_in

#: A run of two seconds or more of steps after several seconds of start-up.
N_STEPS, SAVE_EVERY = 60, 7
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)

pytestmark = pytest.mark.slow  # tests/test_training.py has the short relative


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=[pytest.mark.ray])])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "local":
        yield "local"
    else:
        with ray_nodes(2, 1) as cluster:
            yield cluster.address


@pytest.fixture(scope="module")
def undisturbed(address: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The folder of an undisturbed run, and the seconds that it took."""
    folder, start_s = tmp_path_factory.mktemp("undisturbed"), time.monotonic()
    assert run(address, folder).wait(300) == 0, (folder / "log").read_text()[-3000:]
    return folder, time.monotonic() - start_s


def run(address: str, folder: Path) -> subprocess.Popen[bytes]:
    words = command(address, folder, N_STEPS, SAVE_EVERY, 2, batch_s=0.05)
    with (folder / "log").open("a") as log:
        return subprocess.Popen(words, env=environment(), stdout=log, stderr=subprocess.STDOUT)


@pytest.mark.parametrize("seed", range(20))
def test_a_run_that_is_killed_and_started_again_is_the_undisturbed_one(
    address: str, undisturbed: tuple[Path, float], seed: int, tmp_path: Path
) -> None:
    (expected, seconds), rng = undisturbed, random.Random(f"{address == 'local'}{seed}")
    told: list[Any] = []
    while not (tmp_path / "events.json").exists():
        process = run(address, tmp_path)
        try:
            if len(told) == 1 + seed % 2:
                assert process.wait(300) == 0, (tmp_path / "log").read_text()[-3000:]
                break
            # Half of the moments are anywhere in a run, which mostly starts up, and half while it steps.
            start_s, n_before = time.monotonic(), len(reports_in(tmp_path))
            n_more, end_s = rng.randrange(1, N_STEPS // 2), math.inf
            if rng.random() < 0.5:
                n_more, end_s = N_STEPS, start_s + rng.uniform(0.0, seconds)
            while process.poll() is None and time.monotonic() < end_s and len(reports_in(tmp_path)) < n_before + n_more:
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 0.2))
            number = rng.choice(SIGNALS)
            process.send_signal(number)
            seconds_s = f"{time.monotonic() - start_s:.1f} s"
            told.append((number.name, seconds_s, len(losses_in(tmp_path)), process.wait(60)))
        finally:
            process.kill()
            process.wait()
    print(told)

    wanted = losses_in(expected)
    assert {(n, loss) for n, loss, _ in reports_in(tmp_path)} == set(wanted.items())
    assert (tmp_path / "state").read_bytes() == (expected / "state").read_bytes()
