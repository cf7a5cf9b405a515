"""`offload_optimizer` keeps the state of the optimizer in host memory, and the step computes the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import minialpa
from minialpa import (
    AutoLayerOption,
    AutoParallel,
    AutoShardingOption,
    ClusterSpec,
    CreateStateParallel,
    FollowParallel,
    InfeasibleError,
    PipeshardParallel,
    Plan,
    ShardParallel,
    Zero2Parallel,
    Zero3Parallel,
)

OFFLOAD = AutoShardingOption(offload_optimizer=True)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.scale_by_rms(eps=1e-2), optax.sgd(1e-2, momentum=0.9))


def _loss(params: Any, batch: Any) -> Any:
    x = batch["x"]
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - batch["y"]) ** 2)


def _step(optimizer: Any = OPTIMIZER) -> Any:
    def step(state: Any, batch: Any) -> Any:
        params, memory = state
        value, gradients = minialpa.value_and_grad(_loss)(params, batch)
        updates, memory = optimizer.update(gradients, memory, params)
        return (optax.apply_updates(params, updates), memory), value

    return step


def _state(key: jax.Array, width: int = 16, optimizer: Any = OPTIMIZER) -> Any:
    params = [jax.random.normal(k, (width, width)) / 4 for k in jax.random.split(key, 4)]
    return params, optimizer.init(params)


def _batch(width: int = 16) -> Any:
    x, y = jax.random.normal(jax.random.key(7), (2, 32, width))
    return {"x": x, "y": y}


def _kinds(tree: Any) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


@pytest.mark.parametrize(
    "method",
    [
        ShardParallel(auto_sharding_option=OFFLOAD),
        Zero2Parallel(auto_sharding_option=OFFLOAD),
        Zero3Parallel(num_micro_batches=4, auto_sharding_option=OFFLOAD),
        AutoParallel(auto_sharding_option=OFFLOAD),
        PipeshardParallel(
            num_micro_batches=4,
            layer_option=AutoLayerOption(2, remat="full"),
            default_auto_sharding_option=OFFLOAD,
        ),
    ],
)
def test_the_step_computes_the_same(method: Any, key: jax.Array) -> None:
    planned, batch = minialpa.parallelize(_step(), method=method), _batch()
    found, expected = _state(key), _state(key)
    for _ in range(2):
        (found, value), (expected, same) = planned(found, batch), jax.jit(_step())(expected, batch)
        np.testing.assert_allclose(value, same, rtol=1e-5)
    assert _kinds(found[0]) == {"device"} and _kinds(found[1]) == {"pinned_host"}
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5, rtol=1e-4)


def test_a_saved_plan_a_new_function_and_a_created_state_take_the_state_from_either_memory(key: jax.Array) -> None:
    batch = _batch()
    planned = minialpa.parallelize(_step(), method=Zero2Parallel(auto_sharding_option=OFFLOAD), donate_argnums=())
    create = minialpa.parallelize(lambda: _state(key), method=CreateStateParallel(planned, batch))
    state = create()
    assert _kinds(state[1]) == {"pinned_host"}
    expected = jax.jit(_step())(_state(key), batch)[1]
    saved = Plan.from_json(planned.plan(state, batch).to_json())
    for method in (saved, Zero2Parallel(auto_sharding_option=OFFLOAD)):
        fresh = minialpa.parallelize(_step(), method=method, donate_argnums=())
        for given in (state, _state(key)):
            np.testing.assert_allclose(fresh(given, batch)[1], expected, rtol=1e-5)
    evaluate = minialpa.parallelize(lambda state, batch: _loss(state[0], batch), method=FollowParallel(planned))
    np.testing.assert_allclose(evaluate(state, batch), expected, rtol=1e-5)


def test_the_state_takes_no_device_memory_in_the_passes() -> None:
    """The oracle: XLA for GPUs. Each of two devices has half of the state in host memory."""
    momentum, width = optax.sgd(0.1, momentum=0.9), 1024
    gpus = ClusterSpec.preset("h100", devices_per_host=2)
    state = jax.eval_shape(lambda: _state(jax.random.key(0), width, momentum))
    batch = {name: jax.ShapeDtypeStruct((4096, width), jnp.float32) for name in "xy"}
    found = []
    for offloads in (False, True):
        method = Zero3Parallel(auto_sharding_option=AutoShardingOption(offload_optimizer=offloads))
        plan = minialpa.plan(_step(momentum), (state, batch), cluster=gpus, method=method)
        found += plan.check(_step(momentum), (state, batch)).stages
    on_device, in_host = found
    n_bytes = 4 * 4 * width**2 / 2
    assert plan.stages[0].host_bytes == n_bytes
    assert in_host.compiled_bytes <= on_device.compiled_bytes - 0.99 * n_bytes
    assert in_host.planned_bytes == pytest.approx(in_host.compiled_bytes, rel=0.05)


def test_an_update_has_little_of_the_state_in_device_memory() -> None:
    """The oracle: XLA for GPUs. Each update reads the norm of all gradients, and so follows the last pass."""
    n_layers, width = 12, 512

    def state() -> Any:
        params = [jnp.zeros((width, width)) for _ in range(n_layers)]
        return params, OPTIMIZER.init(params)

    gpu = ClusterSpec.preset("h100", devices_per_host=1)
    arguments = jax.eval_shape(state), {name: jax.ShapeDtypeStruct((32, width), jnp.float32) for name in "xy"}
    plan = minialpa.plan(_step(), arguments, cluster=gpu, method=ShardParallel(auto_sharding_option=OFFLOAD))
    (found,) = plan.check(_step(), arguments).stages
    n_bytes = 4 * width**2
    # Weights, gradients, and the two arrays of state of three of twelve layers, old and new.
    assert found.compiled_bytes < 1.1 * (2 * n_layers + 3 * 4) * n_bytes
    assert found.planned_bytes == pytest.approx(found.compiled_bytes, rel=0.03)
    assert plan.stages[0].host_bytes == 2 * n_layers * n_bytes


def test_state_moves_to_host_memory_if_no_plan_fits_otherwise(key: jax.Array) -> None:
    """Also for the shapes of later calls, and with results of earlier ones."""
    gpus = ClusterSpec.preset("h100", devices_per_host=2)
    most = Zero3Parallel(gpus, auto_sharding_option=AutoShardingOption(memory_limit_bytes=2.5e6))
    planned = minialpa.parallelize(_step(), method=most, donate_argnums=())
    state, batch = _state(key, 256), _batch(256)
    expected = jax.jit(_step())(state, batch)
    with pytest.warns(UserWarning, match="state of its optimizer in host memory"):
        found = planned(state, batch)
    assert _kinds(found[0][0]) == {"device"} and _kinds(found[0][1]) == {"pinned_host"}
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)
    assert planned.plan(state, batch).stages[0].option.offload_optimizer

    few = jax.tree.map(lambda x: x[:16], batch)
    np.testing.assert_allclose(planned(found[0], few)[1], jax.jit(_step())(expected[0], few)[1], rtol=1e-5)
    evaluate = minialpa.parallelize(lambda state, batch: _loss(state[0], batch), method=FollowParallel(planned))
    np.testing.assert_allclose(evaluate(found[0], few), _loss(expected[0][0], few), rtol=1e-5)


@pytest.mark.parametrize("method", [ShardParallel(), Zero3Parallel(num_micro_batches=2)])
def test_the_users_barriers_wait_for_earlier_state_with_any_operands(method: Any, key: jax.Array) -> None:
    """A literal, and the same array twice."""
    host, device = jax.memory.Space.Host, jax.memory.Space.Device

    def step(state: Any, batch: Any) -> Any:
        params, momenta = state
        value, gradients = minialpa.value_and_grad(_loss)(params, batch)
        new = []
        for momentum, gradient in zip(momenta, gradients, strict=True):
            momentum, _, waited, _ = jax.lax.optimization_barrier((momentum, momentum, gradient, 0.0))
            new.append(0.9 * jax.device_put(momentum, device) + waited)
        params = [w - 0.1 * v for w, v in zip(params, new, strict=True)]
        return (params, [jax.device_put(v, host) for v in new]), value

    params = [jax.random.normal(k, (16, 16)) / 4 for k in jax.random.split(key, 6)]
    found = expected = params, [jax.device_put(jnp.zeros_like(w), host) for w in params]
    planned = minialpa.parallelize(step, method=method, donate_argnums=())
    for _ in range(2):
        (found, value), (expected, same) = planned(found, _batch()), jax.jit(step)(expected, _batch())
        np.testing.assert_allclose(value, same, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5, rtol=1e-4)


def test_an_error_tells_that_host_memory_would_not_be_enough(key: jax.Array) -> None:
    gpus = ClusterSpec.preset("h100", devices_per_host=2)
    least = ShardParallel(gpus, auto_sharding_option=AutoShardingOption(memory_limit_bytes=1e5))
    step = minialpa.parallelize(_step(), method=least)
    with pytest.raises(InfeasibleError) as found:
        step.plan(_state(key, 256), _batch(256))
    assert any("offload_optimizer" in note for note in found.value.__notes__)
    assert not step.plan(_state(key, 8), _batch(8)).stages[0].option.offload_optimizer


def test_state_that_the_loss_reads_stays_on_the_devices(key: jax.Array) -> None:
    """An average of the parameters of which the loss is a function."""

    def step(state: Any, batch: Any) -> Any:
        params, average = state
        value, gradients = minialpa.value_and_grad(lambda p: _loss(p, batch) + _loss(average, batch))(params)
        params = [w - 0.1 * g for w, g in zip(params, gradients, strict=True)]
        return (params, [0.9 * a + 0.1 * w for a, w in zip(average, params, strict=True)]), value

    params = _state(key)[0]
    planned = minialpa.parallelize(step, method=ShardParallel(auto_sharding_option=OFFLOAD), donate_argnums=())
    state, value = planned((params, params), _batch())
    assert _kinds(state) == {"device"}
    np.testing.assert_allclose(value, jax.jit(step)((params, params), _batch())[1], rtol=1e-5)
