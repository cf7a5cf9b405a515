"""A process that trains with `train`, and can be killed and restarted.

`python -m tests.training_driver ADDRESS FOLDER N_STEPS SAVE_EVERY N_HOSTS BATCH_S`, in the network of the head of the
Ray cluster at ADDRESS; "local" is this process alone. Each batch takes BATCH_S seconds. FOLDER gets `losses`, a line
for each report, and at the end `events.json` and `state`, the bits of the final state.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import minialpa
from minialpa import StepReport
from minialpa.session import current_session
from tests.checkpoint_cases import bits
from tests.runtime.ray.ray_cluster import WORKER_ENV
from tests.training_runs import batches, create_state, parallelized


def main(address: str, folder: Path, n_steps: int, save_every: int, n_hosts: int, batch_s: float) -> None:
    if address != "local":
        minialpa.init(cluster="ray", address=address, num_hosts=n_hosts, worker_env=WORKER_ENV)

    def source() -> Iterator[Any]:
        for batch in batches():
            time.sleep(batch_s)
            yield batch

    with (folder / "losses").open("a", buffering=1) as losses:
        losses.write("\n")  # a process that was killed may have left a part of a line

        def report(done: StepReport) -> None:
            losses.write(json.dumps([done.n_steps, done.metrics["loss"], time.time()]) + "\n")

        result = minialpa.train(
            parallelized(),
            create_state,
            source,
            n_steps=n_steps,
            folder=folder / "run",
            save_every=save_every,
            report=report,
        )
    events: list[Any] = [dataclasses.asdict(event) for event in result.events]
    (folder / "state").write_bytes(pickle.dumps(bits(result.state)))
    (folder / "events.json").write_text(json.dumps([*events, {"n_hosts": current_session().cluster.num_hosts}]))
    minialpa.shutdown()


def losses_in(folder: Path) -> dict[int, float]:
    """The last reported loss of each step."""
    return {n: loss for n, loss, _ in reports_in(folder)}


def reports_in(folder: Path) -> list[tuple[int, float, float]]:
    """(steps, loss, time in seconds) of the reports, without lines that were not written to their end."""
    path = folder / "losses"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("]")]


def command(address: str, folder: Path, n_steps: int, save_every: int, n_hosts: int, batch_s: float = 0.0) -> list[str]:
    """How to start this program."""
    words = (address, str(folder), n_steps, save_every, n_hosts, batch_s)
    return [sys.executable, "-m", "tests.training_driver", *map(str, words)]


def environment() -> dict[str, str]:
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}


if __name__ == "__main__":
    address, folder, n_steps, save_every, n_hosts, batch_s = sys.argv[1:]
    main(address, Path(folder), int(n_steps), int(save_every), int(n_hosts), float(batch_s))
