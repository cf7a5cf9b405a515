"""Resources that a session on Ray holds, step after step: memory, arrays, descriptors, threads and Ray objects.

Every step takes a new batch, and its metrics are fetched. In between, results are dropped unread, and some calls fail.
Batches and results are large, so that one leak per step is visible. As a reference, bare Ray actors make the same
number of calls with the same bytes, without minialpa or jax: this is the memory that Ray itself holds.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

import minialpa
from benchmarks.ray_session import ray_session
from benchmarks.registry import Rows, Size, benchmark
from minialpa.errors import MinialpaError

N_MESHES = 2
WARM_UP = 50
_STORE = "object_store_memory"
#: Bytes of the batch of a step, 256 KiB of which go to each mesh; and of each array of the state.
BATCH_BYTES, STATE_BYTES = 512 << 10, 64 << 10


@benchmark("ray_leaks")
def ray_leaks(size: Size) -> Rows:
    """1,000 steps on two meshes: resources of driver and workers after 50 steps, and later."""
    import ray

    n_steps = 1000 if size == "full" else 10
    found: dict[tuple[str, str], dict[str, Any]] = {}
    with ray_session(N_MESHES) as runtime:
        bare, n_bare = _bare_driver(), 1
        ray.get(bare.run.remote(1))  # connects the driver and the actors
        for step, held in steps(runtime, WARM_UP if size == "full" else 5, n_steps, every=250):
            pids, n_bare = ray.get(bare.run.remote(step - n_bare)), step
            for process, counts in (held | {name: process_usage(pid) for name, pid in pids.items()}).items():
                for what, value in counts.items():
                    row = found.setdefault((process, what), {"process": process, "what": what, "growth": -value})
                    row[f"after {step}"] = value
    for row in found.values():
        row["growth"] += row[f"after {n_steps}"]
    return list(found.values())


def steps(runtime: Any, warm_up: int, n_steps: int, every: int) -> Iterator[tuple[int, dict[str, dict[str, int]]]]:
    """Train for `n_steps` steps; yields (step, resources of all processes) from `warm_up` on, `every` steps."""
    step = minialpa.parallelize(
        _train_step,
        method=minialpa.PipeshardParallel(
            num_micro_batches=2,
            layer_option="manual",
            stage_option=minialpa.UniformStageOption(num_stages=N_MESHES),
        ),
        donate_argnums=(0,),
    )
    width = 128
    rows = BATCH_BYTES // 2 // (4 * width)
    params = {name: np.eye(width, dtype=np.float32) for name in "uv"}
    for i in range(1, n_steps + 1):
        batch = {name: np.full((rows, width), i, np.float32) for name in "xy"}
        used = params
        params, metrics = step(params, batch)
        float(metrics["loss"])  # the other metric stays unread
        if i % 10 == 5:
            for bad in ((used, batch), (params, {**batch, "y": batch["y"][:, :3]})):  # used up; of a wrong shape
                _fail(step, *bad)
        if i % 10 == 7:
            params = jax.tree.map(np.asarray, params)  # through this process
        if i == n_steps or (i >= warm_up and (i - warm_up) % every == 0):
            yield i, usage_of_all(runtime)


def _train_step(params: Any, batch: Any) -> Any:
    def loss(p: Any) -> Any:
        h = jax.numpy.tanh(batch["x"] @ p["u"])
        minialpa.mark_pipeline_boundary()
        out = h @ p["v"]
        return jax.numpy.mean((out - batch["y"]) ** 2), out

    (value, out), grads = minialpa.value_and_grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 1e-6 * g, params, grads), {"loss": value, "out": out}


def _fail(step: Any, *args: Any) -> None:
    try:
        step(*args)
    except (MinialpaError, TypeError, ValueError):
        return
    raise AssertionError("the call was to fail")


def _bare_driver() -> Any:
    """An actor that calls others as the driver calls its workers; `run` makes a number of steps and returns pids."""
    import ray

    # Ray pickles local classes by value, so these processes do not import minialpa.
    class Worker:
        def step(self, batch: Any) -> int:
            return os.getpid()

        def fetch(self) -> float:
            return 0.0

    class Driver:
        def __init__(self) -> None:
            self.workers: list[Any] = [ray.remote(num_cpus=0)(Worker).remote() for _ in range(N_MESHES)]

        def run(self, n_steps: int) -> dict[str, int]:
            for i in range(n_steps):
                batch = np.full(BATCH_BYTES // N_MESHES, i % 256, np.uint8)
                pids = ray.get([worker.step.remote(batch) for worker in self.workers])
                ray.get(self.workers[0].fetch.remote())
            return {"bare driver": os.getpid()} | {f"bare worker {k}": pid for k, pid in enumerate(pids)}

    return ray.remote(num_cpus=0)(Driver).remote()


def usage_of_all(runtime: Any) -> dict[str, dict[str, int]]:
    """Resources of this process and each worker, by name; for this process also the Ray objects that it refers to."""
    import ray
    from ray._private.worker import global_worker

    runtime.sync()
    time.sleep(1.0)  # the object store is counted a few times a second
    gc.collect()
    held = {"driver": {"live_arrays": len(jax.live_arrays())} | process_usage(os.getpid())}
    core_worker: Any = global_worker.core_worker  # type: ignore[attr-defined]
    held["driver"] |= {
        "ray_objects": len(core_worker.get_all_reference_counts()),
        "ray_bytes": int(ray.cluster_resources()[_STORE] - ray.available_resources().get(_STORE, 0)),
    }
    workers = [worker for mesh in runtime._meshes.values() for worker in mesh.workers]
    pids = [status.pid for status in runtime.ask(workers, "status")]
    for worker, pid, counts in zip(workers, pids, runtime.ask(workers, "counts"), strict=True):
        held[f"worker {worker.number}"] = counts | process_usage(pid)
    return held


def process_usage(pid: int) -> dict[str, int]:
    """Memory, descriptors and threads of a process of this machine (Linux).

    - private_bytes: resident memory of this process alone, without mapped files.
    - shmem_bytes: the touched part of the shared memory of Ray's object store. Ray puts each object at a new place in
      its store until it has used the whole store. So this number grows for hundreds of steps, although the machine uses
      no more memory.
    - threads: without the pool of Ray's gRPC, which grows and shrinks by itself.
    """
    root = Path(f"/proc/{pid}")
    fields = dict(line.split(":", 1) for line in (root / "status").read_text(encoding="utf-8").splitlines())
    return {
        "private_bytes": int(fields["RssAnon"].split()[0]) << 10,
        "shmem_bytes": int(fields["RssShmem"].split()[0]) << 10,
        "descriptors": len(os.listdir(root / "fd")),
        "threads": sum(_is_counted(task) for task in (root / "task").iterdir()),
    }


def _is_counted(task: Path) -> bool:
    """Whether the thread of this folder in /proc still runs and does not belong to gRPC."""
    try:
        return (task / "comm").read_text(encoding="utf-8").strip() != "event_engine"
    except OSError:  # It has just ended.
        return False
