"""Arrays in host memory: equal to plain jax, in their memory after steps and in checkpoints, with planned bytes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import minialpa
from minialpa import (
    AutoLayerOption,
    ClusterSpec,
    PipeshardParallel,
    Plan,
    ShardParallel,
    TraceError,
    VerifyError,
    Zero3Parallel,
)
from minialpa.methods import Method
from minialpa.testing import assert_allclose
from tests.runtime.cluster.in_process_session import in_process_session

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
WIDTH = 16
W = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) / 4
X = jax.random.normal(jax.random.key(1), (32, WIDTH))
STACK = jnp.stack([W, W + 0.1, W - 0.1, W])
ADAM = optax.adamw(1e-2)

METHODS: dict[str, Callable[[], Method]] = {
    "shard": lambda: ShardParallel(jax.devices()[:4]),
    "zero3": lambda: Zero3Parallel(jax.devices()[:4]),
    "accumulate": lambda: ShardParallel(jax.devices()[:2], num_micro_batches=2),
    "pipeline": lambda: PipeshardParallel(
        jax.devices()[:2], num_micro_batches=2, layer_option=AutoLayerOption(2), stage_option="uniform"
    ),
}

pytestmark = pytest.mark.usefixtures("fresh_session")

Params = Any


def params() -> Params:
    return {"in": W + 0, "out": W + 0.1}


def loss_of(p: Params, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ p["in"]) @ p["out"]) ** 2)


def descend(p: Params, grads: Params) -> Params:
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)


# ---- steps, with their state -----------------------------------------------------------------------------------------


def optimizer_in_host(state: Any, x: jax.Array) -> Any:
    p, optimizer = state
    loss, grads = minialpa.value_and_grad(loss_of)(p, x)
    with jax.numpy_dtype_promotion("standard"):
        updates, optimizer = ADAM.update(grads, jax.device_put(optimizer, DEVICE), p)
    return (optax.apply_updates(p, updates), jax.device_put(optimizer, HOST)), loss


def weights_in_host(p: Params, x: jax.Array) -> Any:
    """Gradients of weights in host memory are in host memory, too."""
    loss, grads = minialpa.value_and_grad(lambda p: loss_of(jax.device_put(p, DEVICE), x))(p)
    return jax.device_put(descend(jax.device_put(p, DEVICE), jax.device_put(grads, DEVICE)), HOST), loss


def stack_in_host(stack: jax.Array, x: jax.Array) -> Any:
    """Each iteration of a scan fetches its layer."""

    def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(h @ jax.device_put(w, DEVICE)), None

    loss, grad = minialpa.value_and_grad(lambda s: jnp.mean(jax.lax.scan(layer, x, s)[0] ** 2))(stack)
    return jax.device_put(jax.device_put(stack, DEVICE) - 0.1 * jax.device_put(grad, DEVICE), HOST), loss


def moves_in_bodies(w: jax.Array, x: jax.Array) -> Any:
    loss, grad = minialpa.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    place = NamedSharding(mesh(), P(), memory_kind="pinned_host")
    there_and_back = lambda w: jax.device_put(jax.device_put(w * 0.9, place), place.with_memory_kind("device"))  # noqa: E731
    w = jax.lax.cond(loss > 0, there_and_back, lambda w: w, w - 0.1 * grad)
    return jax.lax.fori_loop(0, 2, lambda _, w: jax.device_put(jax.device_put(w * 0.9, HOST), DEVICE), w), loss


def mixed(state: Any, x: jax.Array) -> Any:
    """An array that passes, one that no equation reads, one on which the step computes in host memory, and a key."""
    w, passes, unread, key = state
    key, _ = jax.random.split(jax.device_put(key, DEVICE))
    loss, grad = minialpa.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    new = (w - 0.1 * grad, passes * 2 + jax.device_put(grad, HOST), unread, jax.device_put(key, HOST))
    return new, loss + jnp.sum(jax.device_put(passes, DEVICE))


def offloading(policy: Any, *, scans: bool) -> Callable[..., Any]:
    def step(w: jax.Array, x: jax.Array) -> Any:
        @functools.partial(jax.checkpoint, policy=policy)
        def layer(h: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.sin(checkpoint_name(jnp.sin(h @ w), "kept")), None

        def loss_of(w: jax.Array) -> jax.Array:
            if scans:
                return jnp.mean(jax.lax.scan(layer, x @ w, None, length=3)[0] ** 2)
            h = x @ w
            for _ in range(3):
                h, _ = layer(h, None)
            return jnp.mean(h**2)

        loss, grad = minialpa.value_and_grad(loss_of)(w)
        return w - 0.1 * grad, loss

    return step


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])


NAMES = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["kept"], offload_src="device", offload_dst="pinned_host"
)
DOTS = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")

STEPS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    "optimizer": (optimizer_in_host, lambda: (params(), jax.device_put(ADAM.init(params()), HOST))),
    "weights": (weights_in_host, lambda: jax.device_put(params(), HOST)),
    "stack": (stack_in_host, lambda: jax.device_put(STACK, HOST)),
    "bodies": (moves_in_bodies, lambda: W + 0),
    "mixed": (mixed, lambda: (W + 0, *jax.device_put((W + 1, W + 2, jax.random.key(0)), HOST))),
    "names in a scan": (offloading(NAMES, scans=True), lambda: W + 0),
    "names in a loop": (offloading(NAMES, scans=False), lambda: W + 0),
    "products in a scan": (offloading(DOTS, scans=True), lambda: W + 0),
    "products in a loop": (offloading(DOTS, scans=False), lambda: W + 0),
}


def kinds(tree: Any) -> list[str]:
    """The memory kind of each leaf, also on workers."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, minialpa.arrays.RemoteArray))
    return [
        ("pinned_host" if x.in_host else "device")
        if isinstance(x, minialpa.arrays.RemoteArray)
        else x.sharding.memory_kind
        for x in leaves
    ]


def numbers(tree: Any) -> Any:
    def of(x: Any) -> Any:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(jnp.asarray(x)) if is_key else x)

    return jax.tree.map(of, tree)


def check_training(step: Callable[..., Any], init: Callable[[], Any], method: Method) -> tuple[Any, Any]:
    """Three steps agree with plain jax, also in memory kinds. Returns the parallelized step and its state."""
    parallel = minialpa.parallelize(step, method=method, batch_argnums=(1,), donate_argnums=(0,))
    state, expected = init(), init()
    plain = jax.jit(step)
    for _ in range(3):
        given = state
        state, loss = parallel(state, X)
        expected, expected_loss = plain(expected, X)
        assert_allclose(loss, expected_loss, rtol=1e-5, atol=1e-6)
    assert_allclose(numbers(state), numbers(expected), rtol=1e-4, atol=1e-5)
    assert kinds(state) == kinds(expected)
    assert jax.tree.leaves(given)[0].is_deleted()
    return parallel, state


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", STEPS)
def test_steps_equal_plain_jax_in_numbers_and_memory(name: str, method: str) -> None:
    check_training(*STEPS[name], METHODS[method]())


@pytest.mark.parametrize("name", ["optimizer", "stack", "names in a loop"])
def test_workers_keep_arrays_in_their_memory(tmp_path: Path, name: str) -> None:
    two_stages = PipeshardParallel(num_micro_batches=2, layer_option=AutoLayerOption(2), stage_option="uniform")
    with in_process_session(1, 4):
        for k, method in enumerate((ShardParallel(), two_stages)):
            step, state = check_training(*STEPS[name], method)
            check_restored(tmp_path / str(k), step, state)


@pytest.mark.parametrize("method", ["shard", "pipeline"])
def test_checkpoints_keep_the_memory(tmp_path: Path, method: str) -> None:
    for name in ("optimizer", "stack"):
        step, state = check_training(*STEPS[name], METHODS[method]())
        check_restored(tmp_path / name, step, state)


def check_restored(folder: Path, step: Any, state: Any) -> None:
    minialpa.save_checkpoint(folder, state, step=3)
    for like in (step.get_executable(state, X), state):
        restored = minialpa.restore_checkpoint(folder, like)
        assert kinds(restored) == kinds(state)
        assert_allclose(numbers(restored), numbers(state), rtol=0, atol=0)


def test_a_batch_in_host_memory_is_cut_there() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        return loss_of({"in": w, "out": w}, jax.device_put(x, DEVICE))

    found = minialpa.parallelize(step, method=METHODS["accumulate"](), batch_argnums=(1,))(W, jax.device_put(X, HOST))
    assert_allclose(found, jax.jit(step)(W, jax.device_put(X, HOST)), rtol=1e-5, atol=1e-6)


def test_another_memory_is_another_plan() -> None:
    step = minialpa.parallelize(optimizer_in_host, method=METHODS["shard"](), batch_argnums=(1,), donate_argnums=())
    init = params(), ADAM.init(params())
    from_device, _ = step(init, X)
    from_host, _ = step((init[0], jax.device_put(init[1], HOST)), X)
    assert kinds(from_device) == kinds(from_host) == ["device"] * 2 + ["pinned_host"] * 5
    assert_allclose(numbers(from_device), numbers(from_host), rtol=1e-6, atol=1e-7)


def test_a_state_is_created_in_its_memory_and_evaluated_there() -> None:
    step = minialpa.parallelize(weights_in_host, method=METHODS["zero3"](), batch_argnums=(1,))
    create = minialpa.parallelize(
        lambda scale: jax.device_put(jax.tree.map(lambda p: p * scale, params()), HOST),
        method=minialpa.CreateStateParallel(step, X),
    )
    evaluate = minialpa.parallelize(
        lambda p, x: loss_of(jax.device_put(p, DEVICE), x), method=minialpa.FollowParallel(step)
    )
    state = create(1.0)
    assert kinds(state) == ["pinned_host"] * 2
    assert_allclose(evaluate(state, X), loss_of(params(), X), rtol=1e-5, atol=1e-6)
    state, _ = step(state, X)
    assert kinds(state) == ["pinned_host"] * 2


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_records_memory_kinds_and_host_bytes(tmp_path: Path) -> None:
    step, init = STEPS["optimizer"]
    state = init()
    plan = minialpa.parallelize(step, method=METHODS["zero3"](), batch_argnums=(1,)).plan(state, X)
    moments = [v for v in plan.inputs if v.memory_kind == "pinned_host"]
    assert moments[0].path == "state[1][0].count" and len(moments) == 5
    split = sum(4 * v.specs[0].n_shards((4,)) ** -1 * np.prod(v.shape) for v in moments)
    assert plan.stages[0].host_bytes == split
    assert "in host memory" in plan.summary() and "in host memory" in plan.explain("mu")

    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    data = json.loads(path.read_text())
    data["plan"]["inputs"][2]["memory_kind"] = "device"
    path.write_text(json.dumps(data))
    with pytest.raises(VerifyError, match="memory_kind"):
        minialpa.parallelize(step, method=Plan.load(path), batch_argnums=(1,))(state, X)


def test_exported_shardings_have_memory_kinds() -> None:
    state = STEPS["optimizer"][1]()
    plan = minialpa.parallelize(optimizer_in_host, method=METHODS["shard"](), batch_argnums=(1,)).plan(state, X)
    found: dict[str, Any] = {}
    exec(plan.to_python(), found)
    place = found["shardings"](found["in_specs"], "state", state), found["shardings"](found["in_specs"], "x", X)
    out = found["shardings"](found["out_specs"], "result", jax.eval_shape(optimizer_in_host, state, X))
    new, _ = jax.jit(optimizer_in_host, in_shardings=place, out_shardings=out)(jax.device_put(state, place[0]), X)
    assert kinds(new) == kinds(state)


def test_planned_bytes_of_both_memories_are_near_those_of_xla_for_gpus() -> None:
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra `gpu-compile`")
    pinned = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    weights = {name: jax.ShapeDtypeStruct((1024, 1024), jnp.float32) for name in ("in", "out")}
    optimizer = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=pinned), jax.eval_shape(ADAM.init, weights)
    )
    arguments = (weights, optimizer), jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
    cluster = ClusterSpec.preset("h100", devices_per_host=4)
    plan = minialpa.plan(optimizer_in_host, arguments, cluster=cluster, method=ShardParallel(), batch_argnums=(1,))
    check = plan.check(optimizer_in_host, arguments)
    (stage,) = check.stages
    assert stage.planned_host_bytes == pytest.approx(stage.compiled_host_bytes, rel=0.05)
    assert stage.compiled_host_bytes >= 4 * 1024 * 1024
    assert stage.planned_bytes == pytest.approx(stage.compiled_bytes, rel=0.05)
    assert "host memory" in check.summary()


@pytest.mark.parametrize("scans", [False, True])
def test_offloaded_activations_are_in_host_memory_on_gpus(scans: bool) -> None:
    pytest.importorskip("jax_plugins.xla_cuda13", reason="needs the extra `gpu-compile`")
    step = offloading(NAMES, scans=scans)
    arguments = W, X
    cluster = ClusterSpec.preset("h100", devices_per_host=1)
    plan = minialpa.plan(step, arguments, cluster=cluster, method=ShardParallel(), batch_argnums=(1,))
    (stage,) = plan.check(step, arguments).stages
    # Outside of scans, XLA copies to the host as late as it can.
    assert stage.planned_host_bytes == stage.compiled_host_bytes == (3 if scans else 2) * X.nbytes


def test_arrays_in_host_memory_that_a_step_captures_are_refused() -> None:
    captured = jax.device_put(W, HOST)
    with pytest.raises(TraceError, match="reads an array in host memory that is not one of its arguments"):
        minialpa.parallelize(lambda w, x: x @ w @ jax.device_put(captured, DEVICE)).plan(W, X)
