"""Calls of a known form use the same program on their own values, and every new form is detected."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import minialpa
from minialpa.api.call_patterns import CallPattern
from minialpa.errors import DeletedArrayError, MinialpaError, TraceError


class Calls:
    """The calls of a step, and the number of calls with the form of the call before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_known = 0
        original = CallPattern.match

        def counted(pattern: CallPattern, args: Any, kwargs: Any) -> Any:
            match = original(pattern, args, kwargs)
            self.n_known += match is not None
            return match

        monkeypatch.setattr(CallPattern, "match", counted)

    def is_known(self, call: Any) -> bool:
        """Whether this call has the form of the last one."""
        before = self.n_known
        jax.block_until_ready(call())
        return self.n_known > before


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def step(state: Any, batch: Any) -> Any:
    def loss_of(params: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ params["w"] + params["b"][None]) ** 2)

    loss, grads = minialpa.value_and_grad(loss_of)(state["params"])
    params = jax.tree.map(lambda p, g: p - jnp.asarray(0.1, p.dtype) * g, state["params"], grads)
    return {**state, "params": params, "n": state["n"] + 1}, loss


def make_state() -> Any:
    return {"params": {"w": jnp.eye(8), "b": jnp.zeros(8)}, "n": jnp.int32(0), "frozen": jnp.arange(3.0)}


def make_batch(n: int = 16, value: float = 1.0) -> Any:
    return {"x": np.full((n, 8), value, np.float32)}


def parallel(n_devices: int = 1, fun: Any = step, **options: Any) -> Any:
    method = minialpa.ShardParallel(devices=jax.devices()[:n_devices])
    return minialpa.parallelize(fun, method=method, **options)


def check(results: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), results, expected)


def trained(train: Any, n: int = 3) -> Any:
    """The state after some steps, with which the next call is known."""
    state = make_state()
    for _ in range(n):
        state, _ = train(state, make_batch())
    return state


@pytest.mark.parametrize(
    ("n_micro_batches", "n_devices", "where"),
    [
        *((1, 1, "NumPy"), (1, 1, "the last device"), (1, 8, "NumPy"), (1, 8, "one device"), (1, 8, "placed")),
        *((2, 1, "NumPy"), (2, 8, "one device"), (2, 8, "placed"), (2, 8, "split")),
    ],
)
def test_calls_of_a_training_loop_are_known_and_compute_what_they_should(
    calls: Calls, n_micro_batches: int, n_devices: int, where: str
) -> None:
    devices = jax.devices()[:n_devices]
    train = minialpa.parallelize(step, method=minialpa.ShardParallel(devices, num_micro_batches=n_micro_batches))
    place: dict[str, Any] = {
        "NumPy": dict,
        "one device": jax.device_put,
        "the last device": lambda batch: jax.device_put(batch, jax.devices()[-1]),
        "placed": lambda batch: train.place_batch(batch),
        "split": lambda batch: jax.device_put(
            batch, NamedSharding(Mesh(np.array(devices), ("i",)), PartitionSpec("i"))
        ),
    }
    state, expected = make_state(), make_state()
    for i in range(6):
        batch: Any = {"x": np.arange(128, dtype=np.float32).reshape(16, 8) / (64 + i)}
        expected, loss = jax.jit(step)(expected, batch)
        given = place[where](batch)
        got = train(state, given)
        check(got, (expected, loss))
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given) if isinstance(leaf, jax.Array))
        old, state = state, got[0]
        if where == "NumPy":  # as a loader does that reuses its memory
            given["x"][...] = 7.0
    assert calls.n_known >= 3
    with pytest.raises(DeletedArrayError, match=r"`state\['n'\]` has been deleted"):
        train(old, batch)


def test_another_number_of_examples_is_noticed_and_both_sizes_stay_known(calls: Calls) -> None:
    train = parallel()
    state = trained(train)
    for n in (8, 16, 8, 16):
        _, expected = jax.jit(step)(jax.tree.map(np.asarray, state), make_batch(n, 3.0))
        state, loss = train(state, make_batch(n, 3.0))
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert len(train._executables) == 2
    assert calls.is_known(lambda: train(state, make_batch()))


@pytest.mark.parametrize("name", ["dtype", "weak type", "shape", "structure"])
def test_leaves_of_another_type_are_noticed(calls: Calls, name: str) -> None:
    def doubled(x: Any, y: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf * 2, y), jnp.sum(x)

    other = {
        "dtype": jnp.ones(8, jnp.float16),
        "weak type": jax.lax.full((8,), 1.0),
        "shape": jnp.ones((8, 1)),
        "structure": [jnp.ones(8)],
    }[name]
    x = jnp.ones(8)
    run = parallel(1, doubled, donate_argnums=(), batch_argnums=())
    for _ in range(3):
        run(x, jnp.ones(8))
    assert calls.is_known(lambda: run(x, jnp.ones(8)))
    assert not calls.is_known(lambda: run(x, other))
    got, expected = run(x, other), jax.jit(doubled)(x, other)
    check(got, expected)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    types = [[(a.dtype, a.weak_type, a.shape) for a in jax.tree.leaves(tree)] for tree in (got, expected)]
    assert types[0] == types[1]


def test_arrays_with_another_sharding_are_laid_out_and_stay_the_callers(calls: Calls) -> None:
    train = parallel(8)
    state = trained(train)
    foreign = jax.tree.map(lambda x: jax.device_put(np.asarray(x), jax.devices()[3]), state)
    expected, loss = jax.jit(step)(jax.tree.map(np.asarray, state), make_batch())
    check(train(foreign, make_batch()), (expected, loss))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((foreign, state)))


def test_a_batch_split_otherwise_is_not_read_as_if_it_were_split_as_planned(calls: Calls) -> None:
    """It has as many shards as the function expects, of other rows."""
    train = parallel(8)
    state = trained(train)
    planned = train.get_executable(state, make_batch()).get_input_targets()[1]["x"].sharding
    x = np.arange(128, dtype=np.float32).reshape(16, 8)
    for spec in (PartitionSpec(None, planned.mesh.axis_names), PartitionSpec(planned.mesh.axis_names), PartitionSpec()):
        for _ in range(3):
            _, expected = jax.jit(step)(jax.tree.map(np.asarray, state), {"x": x})
            state, loss = train(state, {"x": jax.device_put(x, NamedSharding(planned.mesh, spec))})
            np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize(("n_devices", "n_before"), [(1, 1), (8, 3)])
def test_an_array_in_two_places_of_the_arguments_is_copied(calls: Calls, n_devices: int, n_before: int) -> None:
    def added(state: Any, x: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf + 1, state), jnp.sum(x * 2)

    train = parallel(n_devices, added, donate_argnums=0, batch_argnums=())
    state, x = {"a": jnp.zeros((8, 8)), "b": jnp.ones((8, 8))}, jnp.ones((8, 8))
    for _ in range(n_before):
        state, _ = train(state, x)
    state, _ = train({"a": state["a"], "b": state["a"]}, x)
    got, total = train(state, state["a"])
    for leaf in got.values():
        np.testing.assert_array_equal(leaf, n_before + 2.0)
    np.testing.assert_array_equal(total, 2 * 64 * (n_before + 1.0))


def test_a_python_number_an_array_and_a_number_of_numpy_keep_their_types(calls: Calls) -> None:
    run = parallel(1, lambda x, a: (x * a, jnp.sum(x)), donate_argnums=(), batch_argnums=())
    x = jnp.ones(8, jnp.float16)
    values = [2.0, jnp.asarray(3.0, jnp.float16), np.float16(4.0), 5, np.array(6.0, np.float16)]
    for _ in range(3):
        for value in values:
            for _ in range(2):
                got, _ = run(x, value)
                assert got.dtype == jnp.float16
                np.testing.assert_array_equal(got, np.full(8, float(value)))
    with pytest.raises(OverflowError):
        run(x, 2**40)


def test_bools_of_numpy_and_python_are_static_next_to_arrays_of_bools(calls: Calls) -> None:
    def chosen(x: Any, flag: Any) -> Any:
        return jnp.where(flag, x, -x) if isinstance(flag, jax.Array) else (x * 10 if flag else x * 20)

    run = parallel(1, chosen, donate_argnums=(), batch_argnums=())
    for kind, expected in ((np.array, (-1, 1)), (np.bool_, (20, 10)), (bool, (20, 10)), (jnp.array, (-1, 1))) * 3:
        for flag in (True, True, False, False):
            np.testing.assert_array_equal(run(jnp.ones(8), kind(flag)), np.full(8, expected[flag]))


def test_the_precision_of_products_is_noticed(calls: Calls) -> None:
    train = parallel()
    state = trained(train)
    assert calls.is_known(lambda: train(jax.tree.map(jnp.copy, state), make_batch()))
    is_highest = []
    for precision in (None, "highest", None, "highest"):
        with jax.default_matmul_precision(precision):
            for _ in range(3):
                state, _ = train(state, make_batch())
        is_highest.append("operand_precision={highest" in "".join(train.get_last_executable().get_hlo_text()))
    assert is_highest == [False, True, False, True]
    assert len(train._executables) == 2

    # A step is kept for the settings that it was lowered under.
    with jax.default_matmul_precision("highest"):
        lowered = (train := parallel()).lower(make_state(), make_batch())
    lowered.compile()
    train(make_state(), make_batch())
    assert "operand_precision={highest" not in "".join(train.get_last_executable().get_hlo_text())


def test_what_the_first_call_refuses_is_refused_after_known_calls(calls: Calls) -> None:
    run = parallel(1, lambda x, unread: (x * 2, jnp.sum(x)), donate_argnums=(), batch_argnums=())
    x, gone = jnp.ones(8), jnp.ones(8)
    for _ in range(3):
        run(x, x)
    assert calls.n_known
    gone.delete()
    for args, name in (((gone, x), "x"), ((x, gone), "unread")):
        with pytest.raises(DeletedArrayError, match=f"`{name}` has been deleted"):
            run(*args)
    with pytest.raises(TraceError, match="traced value"):
        jax.jit(run)(x, x)
    with pytest.raises(TraceError, match="is a `ShapeDtypeStruct`, a shape without values"):
        run(jax.ShapeDtypeStruct((8,), jnp.float32), x)
    with pytest.raises(MinialpaError):
        run({"x": "text"}, x)

    # The order of an array's bytes is not in its shape and kind.
    for unreadable in (np.arange(8, dtype=">f4"), np.array(["abcd"] * 8), np.array([None] * 8), np.zeros(8, "V4")):
        run(np.arange(8, dtype="<f4"), x)
        with pytest.raises(TraceError, match="The argument `x` is a NumPy array"):
            run(unreadable, x)
    strided = np.arange(32, dtype=np.float32)[::4]
    np.testing.assert_array_equal(run(strided, x)[0], strided * 2)
    assert run(np.arange(8, dtype=np.int32), x)[0].dtype == jnp.int32


def test_the_shape_of_an_array_that_the_step_does_not_read_is_noticed(calls: Calls) -> None:
    run = parallel(1, lambda x, y: x * y.shape[0], donate_argnums=(), batch_argnums=())
    for n in (3, 3, 3, 4, 4, 3):
        np.testing.assert_array_equal(run(jnp.ones(8), jnp.ones(n)), np.full(8, float(n)))


def test_keyword_arguments_and_arguments_in_another_order_are_known(calls: Calls) -> None:
    train = parallel(1, lambda batch, state: step(state, batch))
    state = plain = make_state()
    for _ in range(4):
        plain, loss = jax.jit(step)(plain, make_batch())
        state, got = train(state=state, batch=make_batch())
        check((state, got), (plain, loss))
    assert calls.is_known(lambda: train(make_batch(), state=state))


def test_static_arguments_are_compared_by_value_and_type(calls: Calls) -> None:
    """1, 1.0 and True are equal, and results have other types with each."""

    def scaled(x: Any, factor: Any, *, mode: str = "up", shift: Any = 0.0) -> Any:
        return (x * float(factor) if mode == "up" else x / float(factor)) + shift, x.astype(jnp.asarray(factor).dtype)

    run = parallel(1, scaled, static_argnums=(1, 2), donate_argnums=(), batch_argnums=())
    x = jnp.arange(8.0)
    for factor in (1, True, 1.0):
        for keywords in ({}, {"mode": "down"}, {"mode": "up", "shift": np.float32(4)}):
            got, expected = run(x, factor, **keywords), scaled(x, factor, **keywords)
            check(got, expected)
            assert got[1].dtype == expected[1].dtype
    for _ in range(3):
        run(x, 2, mode="up", shift=jnp.float32(1))
    assert calls.is_known(lambda: run(x, 2, shift=jnp.float32(5), mode="up"))
    assert not calls.is_known(lambda: run(x, 2.0, shift=jnp.float32(5), mode="up"))


def test_functions_among_leaves_are_known_and_another_one_is_noticed(calls: Calls) -> None:
    def activated(state: Any, x: Any) -> Any:
        return {**state, "w": state["w"] + 1}, state["act"](x @ state["w"])

    run = parallel(1, activated, donate_argnums=0, batch_argnums=())
    state, w, x = {"act": jnp.tanh, "w": jnp.eye(8)}, np.eye(8, dtype=np.float32), np.full((8, 8), 0.1, np.float32)
    for i, act in enumerate([jnp.tanh] * 4 + [jnp.sin] * 4):
        n_known = calls.n_known
        state, out = run({**state, "act": act}, x)
        np.testing.assert_allclose(out, act(x @ w), rtol=1e-5)
        assert state["act"] is act
        # The first call returns a state on the mesh of the program, which is part of the type of its arrays.
        assert calls.n_known == n_known + (i not in (0, 1, 4))
        w = w + 1


class Pair(nnx.Module):
    """Two layers, which may be one."""

    def __init__(self, rngs: nnx.Rngs, tied: bool = False) -> None:
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.last = self.first if tied else nnx.Linear(8, 8, rngs=rngs)
        self.scale = 1.0

    def __call__(self, x: Any) -> Any:
        return self.last(jnp.tanh(self.first(x))) * self.scale


def make_pair(tied: bool) -> Any:
    model = Pair(nnx.Rngs(0), tied)
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)


def pair_step(model: Pair, optimizer: Any, batch: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(batch["x"]) - 1) ** 2))(model)
    optimizer.update(model, grads)
    return loss


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.skipif(not hasattr(nnx, "Pytree"), reason="modules of this flax are no pytrees")
def test_modules_of_nnx_are_known_until_they_change(calls: Calls, tied: bool) -> None:
    with jax.numpy_rank_promotion("allow"):
        mine, other = make_pair(tied), make_pair(tied)
        run, serial = parallel(1, pair_step), nnx.jit(pair_step)

        def are_known(n_calls: int = 3) -> list[bool]:
            """Which of some calls were known, each of which did what it does in flax."""
            known = []
            for _ in range(n_calls):
                n_known = calls.n_known
                np.testing.assert_allclose(run(*mine, make_batch()), serial(*other, make_batch()), rtol=1e-5)
                known.append(calls.n_known > n_known)
                for one, two in zip(*map(jax.tree.leaves, (nnx.state(mine), nnx.state(other))), strict=True):
                    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)
            return known

        assert are_known()[-1]
        for pair in (mine, other):  # a value
            pair[0].first.kernel[...] = pair[0].first.kernel[...] * 2
        assert are_known()[-1]
        for pair in (mine, other):  # an attribute that is no array
            pair[0].scale = 2.0
        first, *_, last = are_known()
        assert not first and last
        for pair in (mine, other):  # what modules share
            pair[0].last.bias = nnx.Param(jnp.ones(8)) if tied else pair[0].first.bias
            pair[1].__init__(pair[0], optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
        first, *_, last = are_known()
        assert not first and last


def test_a_session_that_has_ended_is_not_known(calls: Calls) -> None:
    train = parallel(1)
    state = trained(train)
    minialpa.shutdown()
    assert not calls.is_known(lambda: train(state, make_batch()))
