"""Step after step, a session holds no more than before, and sends no more than it has to."""

from __future__ import annotations

import gc
import pickle
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

import minialpa
from benchmarks.ray_leaks import BATCH_BYTES, N_MESHES, steps
from minialpa.runtime.workers.numpy_wire import from_plain, to_plain
from minialpa.session import current_session
from minialpa.testing import assert_allclose
from tests.runtime.ray.ray_cluster import WORKER_ENV

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def runtime(cluster: Cluster) -> Any:
    start(cluster, WORKER_ENV)
    return current_session().runtime


def start(cluster: Cluster, env: dict[str, str]) -> None:
    part = {"num_hosts": 1, "devices_per_host": N_MESHES}
    minialpa.init(cluster="ray", address=cluster.address, worker_env={**env, "NPROC": "1"}, **part)


@pytest.mark.slow  # test_programs_that_nobody_uses_leave_nothing_behind is the short relative
def test_nothing_grows_after_the_first_steps(runtime: Any) -> None:
    warm_up, n_steps = 50, 250
    (_, before), (_, after) = steps(runtime, warm_up, n_steps, every=n_steps)
    for process, counts in after.items():
        grown = {what: value - before[process][what] for what, value in counts.items()}
        # Allocators still settle a little; a batch or a result that stays behind in every step would be far more.
        assert grown.pop("private_bytes") < (n_steps - warm_up) * BATCH_BYTES / 16, process
        # Ray's object store comes round. What stays behind there, or in a transport, is counted below as well.
        assert grown.pop("shmem_bytes") < (n_steps - warm_up) * BATCH_BYTES / 4, process
        assert grown.pop("threads", 0) <= 2, process  # pools start their threads one by one
        assert not {what: n for what, n in grown.items() if n > 0}, process


def test_programs_that_nobody_uses_leave_nothing_behind(runtime: Any) -> None:
    held: list[list[dict[str, int]]] = []
    for i in range(6):
        step, params, batch = _small_step(n_rows=8 + i)  # other shapes, other programs
        float(step(params, batch)[1])
        del step, params, batch
        gc.collect()
        workers = [worker for mesh in runtime._meshes.values() for worker in mesh.workers]
        held.append(runtime.ask(workers, "counts"))
    for before, after in zip(held[2], held[5], strict=True):
        growth = {what: after[what] - before[what] for what in after if what not in ("private_bytes", "shmem_bytes")}
        assert not {what: n for what, n in growth.items() if n > 0}


def test_step_is_one_call_for_each_worker_and_a_fetch_one_more(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step, params, batch = _small_step()
    params, loss = step(params, batch)
    assert np.isfinite(float(loss))
    calls: Counter[str] = Counter()
    invoke = ray.actor.ActorHandle._actor_method_call

    def counted(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if method != "status":  # A wait of more than a second, on a busy machine, asks the workers for their status.
            calls[method] += 1
        return invoke(self, method, *args, **kwargs)

    monkeypatch.setattr(ray.actor.ActorHandle, "_actor_method_call", counted)
    for _ in range(3):
        params, loss = step(params, batch)
    assert calls == {"step": 3 * N_MESHES}
    float(loss)
    float(loss)  # it is here now
    assert calls == {"step": 3 * N_MESHES, "fetch": 1}


@pytest.mark.parametrize("n_rows", [8, 8192], ids=["small", "large"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_that_both_meshes_read_arrive_at_both(runtime: Any, n_rows: int, dtype: str, seed: int) -> None:
    step, params, _ = _small_step(dtype=dtype)
    batch = {"x": np.random.default_rng(seed).standard_normal((n_rows, 64), np.float32).astype(dtype)}
    expected = jax.jit(_train_step_with(jax.value_and_grad))(params, batch)
    for placed in (False, True):
        args = step.preshard_dynamic_args(params, batch) if placed else (params, batch)
        assert_allclose(step(*args), expected, rtol=1e-5 if dtype == "float32" else 0.05, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "float8_e4m3fn", "complex64"])
def test_bytes_of_arrays_go_beside_the_pickle(dtype: str) -> None:
    array = np.ones((64, 64), dtype)
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(to_plain(array), protocol=5, buffer_callback=buffers.append)
    assert len(text) < array.nbytes / 8
    back = from_plain(pickle.loads(text, buffers=buffers), dtype)
    assert back.dtype == array.dtype and back.tobytes() == array.tobytes()


@pytest.mark.slow
def test_second_session_finds_what_the_first_one_compiled(cluster: Cluster, tmp_path: Any) -> None:
    minialpa.shutdown()
    files = []
    for _ in range(2):
        env = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        start(cluster, env)
        step, params, batch = _small_step()
        float(step(params, batch)[1])
        minialpa.shutdown()
        files.append({path.name for path in tmp_path.iterdir() if path.name.endswith("-cache")})
    assert files[0] and files[0] == files[1]


def _train_step_with(value_and_grad: Any) -> Any:
    def train_step(params: Any, batch: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            h = jnp.tanh(batch["x"] @ p["u"])
            minialpa.mark_pipeline_boundary()
            return jnp.mean((h @ p["v"] - batch["x"]) ** 2)

        value, grads = value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g / 8, params, grads), value

    return train_step


def _small_step(n_rows: int = 8, dtype: str = "float32") -> tuple[Any, Any, Any]:
    method = minialpa.PipeshardParallel(
        num_micro_batches=1, layer_option="manual", stage_option=minialpa.UniformStageOption(num_stages=N_MESHES)
    )
    step = minialpa.parallelize(_train_step_with(minialpa.value_and_grad), method=method)
    return step, {name: np.eye(64, dtype=dtype) for name in "uv"}, {"x": np.ones((n_rows, 64), dtype)}
