"""Hosts that read their own samples, in real processes of one mesh.

The short relatives are in `test_sample_calls.py` and, with workers in threads, in `tests/test_data.py`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

import minialpa
from minialpa import DataParallel, MeshDriverDataLoader
from minialpa.testing import assert_allclose
from tests.runtime.ray.faults import worker_pid
from tests.runtime.ray.ray_cluster import start_session

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]

BATCH, WIDTH, N_BATCHES = 4096, 64, 4


class Reads:
    """A picklable function that reads samples, and writes down its process and the samples."""

    def __init__(self, folder: Path, pid: int, fault: str = "") -> None:
        self.folder, self.driver, self.fault = folder, pid, fault

    def __call__(self, start: int, end: int, batch_size: int) -> Iterator[Any]:
        if os.getpid() != self.driver:
            if self.fault == "raise":
                raise OSError(f"no disk at {start}")
            if self.fault == "hang" and start >= 2 * BATCH:
                time.sleep(60)
        for i in range(start, end, batch_size):
            with open(self.folder / str(os.getpid()), "a") as file:
                file.write(f"{i - i // BATCH * BATCH}:{i // BATCH} ")
            yield batch(i, min(i + batch_size, end))

    def of_workers(self) -> list[set[str]]:
        """The samples that each worker has read: the first row and the batch."""
        return sorted(
            (set(file.read_text().split()) for file in self.folder.iterdir() if file.name != str(self.driver)), key=min
        )


def batch(start: int, stop: int) -> Any:
    x = np.arange(start * WIDTH, stop * WIDTH, dtype=np.float32).reshape(-1, WIDTH)
    return {"x": np.sin(x), "y": np.cos(x[:, :4])}


def step(params: Any, batch: Any) -> Any:
    def loss(p: Any) -> Any:
        return jnp.mean((jnp.tanh(batch["x"] @ p["w"]) @ p["v"] - batch["y"]) ** 2)

    value, grads = minialpa.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


PARAMS = {"w": np.full((WIDTH, 16), 0.1, np.float32), "v": np.full((16, 4), 0.1, np.float32)}


@pytest.mark.slow
def test_each_host_reads_its_rows_and_a_lost_one_is_a_worker_error(cluster: Cluster, tmp_path: Path) -> None:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

    def reads(name: str, fault: str = "") -> Reads:
        (tmp_path / name).mkdir()
        return Reads(tmp_path / name, os.getpid(), fault)

    def loader(read: Reads, parallel: Any) -> MeshDriverDataLoader:
        return MeshDriverDataLoader(BATCH, N_BATCHES * BATCH, read, parallel, prefetch_size=2)

    start_session(cluster.address, 2, 2)
    for n_micro_batches in (1, 4):
        parallel = minialpa.parallelize(step, method=DataParallel(num_micro_batches=n_micro_batches))
        parallel.get_executable(PARAMS, batch(0, BATCH))
        read = reads(f"{n_micro_batches}")
        params = expected = PARAMS
        with loader(read, parallel) as given:
            for k, found in enumerate(given):
                requested = batch(k * BATCH, (k + 1) * BATCH)
                params, _ = parallel(params, found)
                expected, _ = step(expected, requested)
                assert_allclose(found, requested, rtol=0, atol=0)
        assert_allclose(params, expected, rtol=1e-3, atol=1e-5)

        # Two workers: the rows of each, of all batches except the first, which this process reads and sends.
        rows = BATCH // n_micro_batches
        first = [{m * rows + host * rows // 2 for m in range(n_micro_batches)} for host in range(2)]
        assert read.of_workers() == [{f"{row}:{k}" for row in rows for k in (1, 2, 3)} for rows in first]

    with loader(reads("raise", "raise"), parallel) as given:
        next(given)
        with pytest.raises(minialpa.WorkerError, match=r"no disk at \d+(.|\n)*__call__"):
            next(given)
    parallel(PARAMS, batch(0, BATCH))

    with loader(reads("hang", "hang"), parallel) as given:
        next(given), next(given)
        os.kill(worker_pid(1), signal.SIGKILL)
        with pytest.raises(minialpa.WorkerError, match="its process died"):
            next(given)
