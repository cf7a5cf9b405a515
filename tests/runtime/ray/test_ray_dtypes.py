"""Every dtype in every place of a step, on a Ray cluster: as `jax.jit` has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from ray.cluster_utils import Cluster

import minialpa
from minialpa import WorkerError
from tests.dtypes import DTYPES, KEYS, N, as_argument, as_result, as_state, described, values
from tests.helpers import METHODS
from tests.runtime.ray.ray_cluster import WORKER_ENV

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,  # tests/test_dtypes.py has the short relatives, in one process
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning"),  # of 64 bits
]

NAMES = (*DTYPES, *KEYS)
X = np.arange(N, dtype=np.float32)


@pytest.fixture(scope="module", autouse=True)
def _session(cluster: Cluster) -> Iterator[None]:
    start(cluster.address)
    yield
    minialpa.shutdown()


def start(address: str) -> None:
    minialpa.init(cluster="ray", address=address, num_hosts=2, devices_per_host=2, worker_env=WORKER_ENV)


@pytest.mark.parametrize("method", ["pipeline", "shard"])
@pytest.mark.parametrize("x64", [False, True])
def test_all_dtypes_at_once(method: str, x64: bool) -> None:
    with jax.enable_x64(x64):
        given = {name: values(name) for name in NAMES}
        turn = minialpa.parallelize(as_state, method=METHODS[method])
        turned, _ = turn(given, X)
        assert described(turned) == described(jax.jit(as_state)(given, X)[0])
        assert described(turn(turned, X)[0]) == described(jax.jit(lambda x: x)(given))  # straight from the workers
        others: list[tuple[Any, tuple[Any, ...]]] = [(as_result(NAMES), (np.uint32(3), X))]
        if method == "shard":  # random numbers of a batch of keys are no matter of micro-batches
            others.append((as_argument, (np.float32(1), given)))
        for step, args in others:
            actual = minialpa.parallelize(step, method=METHODS[method])(*args)
            assert described(actual) == described(jax.jit(step)(*args))


def test_results_of_python_numbers_stay_weak_from_call_to_call() -> None:
    def step(state: Any, x: jax.Array) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return {name: value * 2 for name, value in state.items()}, [x * value for value in state.values()]

    x = np.ones(N, np.int8)
    parallel, reference = minialpa.parallelize(step, method=METHODS["shard"]), jax.jit(step)
    states: list[Any] = [{"i": 1, "f": 1.5, "c": 1j}] * 2
    for _ in range(2):
        results = [fun(state, x) for fun, state in zip((parallel, reference), states, strict=True)]
        assert described(results[0]) == described(results[1])
        states = [result[0] for result in results]
    assert len(parallel._executables) == 1


def test_keys_come_to_the_host_as_keys() -> None:
    step = minialpa.parallelize(lambda keys: keys[::-1], method=METHODS["shard"], batch_argnums=())
    keys = values("threefry2x32")
    turned = step(keys)
    assert np.array_equal(jax.random.key_data(jax.device_get(turned)), jax.random.key_data(keys[::-1]))
    with pytest.raises((TypeError, ValueError)):
        np.asarray(turned)
    with pytest.raises(TypeError, match="key_data"):
        np.asarray(turned, np.uint32)


@pytest.mark.slow
def test_values_that_were_fetched_are_arguments_of_a_session_of_one_process(cluster: Cluster) -> None:
    given = {name: values(name) for name in NAMES}
    turned, _ = minialpa.parallelize(as_state, method=METHODS["shard"])(given, X)
    lost, kept = {"int4": turned.pop("int4")}, turned
    minialpa.prefetch(kept)
    minialpa.shutdown()
    given.pop("int4")
    for method in METHODS.values():
        step = minialpa.parallelize(as_state, method=method)
        assert described(step(kept, X)[0]) == described(jax.jit(lambda x: x)(given))
        with pytest.raises(WorkerError, match="has ended"):
            step(lost, X)
    minialpa.shutdown()
    start(cluster.address)
