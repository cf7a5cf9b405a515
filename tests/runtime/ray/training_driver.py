"""A process that trains on a Ray cluster with `train`, and can be killed and started again.

`python -m tests.runtime.ray.training_driver ADDRESS FOLDER N_STEPS SAVE_EVERY N_HOSTS`, in the network of the cluster's
head. FOLDER gets `losses`, a line for each report; `workers`, the processes of the workers; `events.json` at the end.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import minialpa
from minialpa import StepReport
from minialpa.session import current_session
from tests.runtime.ray.ray_cluster import WORKER_ENV
from tests.training_runs import batches, create_state, parallelized


def main(address: str, folder: Path, n_steps: int, save_every: int, n_hosts: int) -> None:
    minialpa.init(cluster="ray", address=address, num_hosts=n_hosts, worker_env=WORKER_ENV)

    with (folder / "losses").open("a", buffering=1) as losses:

        def report(done: StepReport) -> None:
            losses.write(json.dumps([done.n_steps, done.metrics["loss"], time.time()]) + "\n")

        result = minialpa.train(
            parallelized(), create_state, batches, n_steps=n_steps, folder=folder / "run", save_every=save_every,
            report=report,
        )  # fmt: skip
    events: list[Any] = [dataclasses.asdict(event) for event in result.events]
    (folder / "events.json").write_text(json.dumps([*events, {"n_hosts": current_session().cluster.num_hosts}]))
    minialpa.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
