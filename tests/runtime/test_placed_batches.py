"""Batches that were placed before the call: the step reads them in place, cut into micro-batches or not."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from minialpa import AutoLayerOption, PipeshardParallel, ShardParallel
from minialpa.programs.mesh_program import overwritten_rows
from minialpa.runtime.arrays import MicroBatchedArray, cover_all_rows
from minialpa.runtime.cluster.cluster_program import HostValues
from minialpa.runtime.cluster.distributed_array import DistributedArray
from minialpa.testing import assert_allclose
from tests.runtime.cluster.in_process_session import in_process_session
from tests.two_layers import make_batch, make_params, train_step

METHODS = {
    "shard": ShardParallel(num_micro_batches=4),
    "pipeline": PipeshardParallel(
        num_micro_batches=2, layer_option=AutoLayerOption(layer_num=2), stage_option="uniform"
    ),
}
#: The number of hosts of an in-process cluster; 0 is this process without one.
N_HOSTS = [0, 2]


def session(n_hosts: int) -> AbstractContextManager[Any]:
    return in_process_session(n_hosts, 4 // n_hosts) if n_hosts else nullcontext()


def n_put(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the NumPy arrays that this process puts on devices, or sends to workers, from here on."""
    counts = [0]
    device_put, given = jax.device_put, HostValues.given

    def counted_put(x: Any, *args: Any, **kwargs: Any) -> Any:
        counts[0] += sum(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(x))
        return device_put(x, *args, **kwargs)

    def counted_given(self: HostValues, *args: Any) -> Any:
        counts[0] += 1
        return given(self, *args)

    monkeypatch.setattr(jax, "device_put", counted_put)
    monkeypatch.setattr(HostValues, "given", counted_given)
    return counts


@pytest.mark.parametrize(("name", "n_hosts"), [("shard", 0), ("pipeline", 0), ("pipeline", 2)])
def test_each_row_is_put_once(name: str, n_hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with session(n_hosts):
        step = minialpa.parallelize(train_step, method=METHODS[name], donate_argnums=())
        params, _ = step(make_params(), make_batch(1))
        placed = step.place_batch(make_batch())
        assert all(isinstance(leaf, MicroBatchedArray) for leaf in jax.tree.leaves(placed))

        with monkeypatch.context() as patch:
            counts = n_put(patch)
            again = step.place_batch(placed)
            result = step(params, placed)
            result = step(params, again)
            jax.block_until_ready(result)
            # On workers in threads of this process, transfers between stages are puts of NumPy arrays, too.
            assert counts == [0] or n_hosts
            assert all(a is b for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(again), strict=True))
        assert_allclose(result, train_step(jax.device_get(params), make_batch()), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("n_hosts", N_HOSTS)
def test_a_user_reads_a_placed_batch_as_an_array_until_it_is_deleted(n_hosts: int) -> None:
    batch = {"x": np.arange(128, dtype=np.float64).reshape(16, 8), "y": make_batch()["y"]}
    with session(n_hosts):
        step = minialpa.parallelize(train_step, method=METHODS["pipeline"])
        step(make_params(), make_batch())
        placed = step.place_batch(batch)
        x = placed["x"]
        assert (x.shape, x.dtype, x.ndim, x.nbytes, len(x)) == ((16, 8), np.float32, 2, 512, 16)
        assert not x.is_deleted() and x.block_until_ready() is x
        np.testing.assert_array_equal(np.asarray(x), batch["x"])
        np.testing.assert_array_equal(x[3], batch["x"][3])
        np.testing.assert_array_equal(jnp.asarray(x) + 1, batch["x"] + 1)
        np.testing.assert_array_equal(jax.device_get({"x": x})["x"], batch["x"])

        x.delete()
        assert x.is_deleted() and not placed["y"].is_deleted()
        with pytest.raises(minialpa.WorkerError, match="delete"):
            step(make_params(), placed)
        lost = step.place_batch(batch)["x"]
    if n_hosts:
        assert all(isinstance(part, DistributedArray) for part in lost.stored_as)
        with pytest.raises(minialpa.WorkerError, match="ended"):
            np.asarray(lost)


@pytest.mark.parametrize("n_hosts", N_HOSTS)
def test_any_step_reads_a_placed_batch_which_stays_usable(n_hosts: int) -> None:
    """Steps in other micro-batches read its value; a step that writes over rows copies them."""
    with session(min(n_hosts, 1)):
        step = minialpa.parallelize(train_step, method=METHODS["shard"])
        step(make_params(), make_batch())
        placed = step.place_batch(make_batch(3))
        wanted = train_step(make_params(), make_batch(3))
        pipeline = minialpa.parallelize(train_step, method=METHODS["pipeline"], donate_argnums=(0, 1))
        for other in (minialpa.parallelize(train_step, method=ShardParallel(num_micro_batches=2)), pipeline):
            assert_allclose(other(make_params(), placed), wanted, rtol=1e-4, atol=1e-6)
            assert_allclose(other(make_params(), other.place_batch(placed)), wanted, rtol=1e-4, atol=1e-6)

        assert overwritten_rows(pipeline.get_last_executable().program)
        given = jax.tree.map(jnp.asarray, make_batch(3))
        again = pipeline.place_batch(given)
        for _ in range(3):
            assert_allclose(pipeline(make_params(), again), wanted, rtol=1e-4, atol=1e-6)
        assert_allclose((given, placed, again), (make_batch(3),) * 3, rtol=0, atol=0)


def test_a_batch_of_keys_is_placed() -> None:
    def noisy(params: Any, keys: Any) -> Any:
        def loss(p: Any) -> Any:
            return jnp.mean((jax.vmap(lambda key: jax.random.normal(key, (8,)))(keys) @ p) ** 2)

        value, grad = minialpa.value_and_grad(loss)(params)
        return params - grad, value

    keys, params = jax.random.split(jax.random.key(0), 8), np.ones((8,), np.float32)
    step = minialpa.parallelize(noisy, method=ShardParallel(num_micro_batches=2), batch_argnums=(1,))
    wanted = step(params, keys)
    placed = step.place_batch(keys)
    assert isinstance(placed, MicroBatchedArray) and placed.dtype == keys.dtype
    assert_allclose(step(params, placed), wanted, rtol=0, atol=0)
    assert (jax.random.key_data(jax.device_get(placed)) == jax.random.key_data(keys)).all()


def test_rows_cover_an_array_if_they_leave_no_gap() -> None:
    assert cover_all_rows([(0, 2, 0), (2, 4, 0)], (4, 3)) and cover_all_rows([None], (4,))
    assert not cover_all_rows([(0, 2, 0)], (4, 3))
    assert not cover_all_rows([(0, 2, 0), (3, 4, 0)], (4, 3))
    assert not cover_all_rows([], (4, 3))
