"""`parallelize` takes the calls that `jax.jit` takes, with the same results, or refuses them by name.

Covers functions, methods and options.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from minialpa import MinialpaError, PipeshardParallel, ShardingError, ShardParallel, TraceError
from minialpa.testing import assert_allclose

W, X = jnp.eye(4), jnp.arange(32.0).reshape(8, 4) / 10


pytestmark = pytest.mark.usefixtures("fresh_session")


def descend(w: jax.Array, x: jax.Array, rate: float = 0.1) -> tuple[jax.Array, jax.Array]:
    loss, grad = minialpa.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - jnp.asarray(rate, w.dtype) * grad, loss


def same_as_jit(step: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    expected = jax.jit(step)(*args, **kwargs)
    parallel = minialpa.parallelize(step, donate_argnums=(), method=ShardParallel())
    for _ in range(2):
        result = parallel(*args, **kwargs)
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_values_that_jax_forbids_are_errors_as_of_jit() -> None:
    parallel = minialpa.parallelize(descend, method=PipeshardParallel(num_micro_batches=2), donate_argnums=())
    nan = X.at[0, 0].set(jnp.nan)  # which jax would forbid below
    parallel(W, X)
    with jax.debug_nans(True):
        parallel(W, X)
        for step in (jax.jit(descend), parallel, parallel.get_executable(W, X)):
            with pytest.raises(FloatingPointError, match=r"invalid value \(nan\) encountered in"):
                step(W, nan)
    large = minialpa.parallelize(lambda x: [jnp.exp(x * 1e3)], method=ShardParallel())
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match=r"\(inf\) encountered in `result\[0\]`"):
        large(X)


def test_a_forbidden_value_leaves_the_donated_state_alive() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        return w - 0.1 * jnp.sum(x @ w), jnp.sum(x)

    parallel = minialpa.parallelize(step, donate_argnums=0, method=ShardParallel())
    with jax.debug_nans(True):
        w, _ = parallel(*parallel.preshard_dynamic_args(W, X))
        with pytest.raises(FloatingPointError):
            parallel(w, np.full(X.shape, np.nan, np.float32))
        assert np.isfinite(np.asarray(w)).all()
        parallel(w, X)


def test_values_between_stages_are_no_results() -> None:
    def masked(w: jax.Array, x: jax.Array) -> jax.Array:
        logits = jnp.where(x @ w > 1, -jnp.inf, x)
        minialpa.mark_pipeline_boundary()
        return jnp.exp(logits @ jnp.eye(4)).sum()

    stages = PipeshardParallel(pipeline_schedule="inference", layer_option="manual")
    with jax.debug_infs(True):
        same = minialpa.parallelize(masked, method=stages)(W, X)
        assert_allclose(same, jax.jit(masked)(W, X), rtol=1e-5)


# ---- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("result", [None, (None, {}), 3.0])
def test_steps_may_return_no_arrays(result: Any) -> None:
    same_as_jit(lambda w, x: result, W, X)


def test_what_a_step_without_results_calls_is_called_once_per_call() -> None:
    seen: list[float] = []

    def report(w: jax.Array, x: jax.Array) -> None:
        jax.debug.callback(lambda mean: seen.append(float(mean)), jnp.mean(x @ w))

    # On one device: a program for several of them calls once for each, as jax.jit does.
    parallel = minialpa.parallelize(report, method=ShardParallel(devices=jax.devices()[:1]), batch_argnums=(1,))
    for _ in range(3):
        parallel(W, X)
    jax.effects_barrier()
    assert_allclose(seen, [float(jnp.mean(X))] * 3)


# ---- pytrees whose attributes raise ---------------------------------------------------------------------------------


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class State:
    w: Any

    @property
    def opt_state(self) -> Any:
        raise RuntimeError("no optimizer yet")

    params = opt_state

    def apply_gradients(self) -> None: ...

    def tree_flatten(self) -> Any:
        return (self.w,), None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> State:
        return cls(*children)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def test_attributes_of_pytrees_may_raise() -> None:
    def step(state: Any, batch: Any) -> Any:
        w, loss = descend(state["w"], batch["w"])
        return State(w=w), loss

    same_as_jit(step, State(w=W), State(w=X))


class Model:
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)

    def __call__(self, w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(x @ w)


def test_attributes_of_other_arguments_and_of_functions_may_raise() -> None:
    parallel = minialpa.parallelize(lambda model, w, x: model(w, x), method=ShardParallel())
    assert_allclose(parallel(Model(), W, X), jnp.mean(X))
    assert_allclose(minialpa.parallelize(Model(), method=ShardParallel())(W, X), jnp.mean(X))


# ---- methods of classes ---------------------------------------------------------------------------------------------


class Trainer:
    def __init__(self, rate: float) -> None:
        self.rate = rate

    @functools.partial(minialpa.parallelize, method=ShardParallel(num_micro_batches=2))
    def unannounced(self, w: jax.Array, x: jax.Array) -> Any:
        return descend(w, x, self.rate)

    @functools.partial(minialpa.parallelize, static_argnums=0, method=ShardParallel(num_micro_batches=2))
    def step(self, w: jax.Array, x: jax.Array) -> Any:
        return descend(w, x, self.rate)

    # As written for `jax.jit`: the object is argument 0.
    @functools.partial(minialpa.parallelize, static_argnums=(0,), donate_argnums=(1,), method=ShardParallel())
    def numbered(self, w: jax.Array, x: jax.Array) -> Any:
        return descend(w, x, self.rate)

    @staticmethod
    @functools.partial(minialpa.parallelize, method=ShardParallel())
    def static(w: jax.Array, x: jax.Array) -> Any:
        return descend(w, x)

    @classmethod
    @functools.partial(minialpa.parallelize, method=ShardParallel())
    def of_class(cls, w: jax.Array, x: jax.Array) -> Any:
        return descend(w, x)


@pytest.mark.parametrize("name", ["step", "numbered", "static", "of_class"])
def test_methods_bind(name: str) -> None:
    slow, fast = Trainer(0.1), Trainer(0.5)
    for trainer in (slow, fast, slow):
        rate = trainer.rate if name in ("step", "numbered") else 0.1
        assert_allclose(getattr(trainer, name)(W + 0, X), jax.jit(descend)(W, X, rate), rtol=1e-5, atol=1e-6)


def test_attributes_that_a_program_keeps_are_warned_of() -> None:
    trainer = Trainer(0.1)
    with pytest.warns(UserWarning, match="keeps the attributes that the object has now"):
        found = trainer.unannounced(W + 0, X)
    assert_allclose(found, jax.jit(descend)(W, X, 0.1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [staticmethod(descend), classmethod(descend), ShardParallel()])
def test_what_is_no_function_is_refused(value: Any) -> None:
    with pytest.raises(
        TraceError,
        match=r"`parallelize` takes no (static|class)method|Pass a function as the first argument of `parallelize`",
    ):
        minialpa.parallelize(value)


# ---- options of jax.jit ---------------------------------------------------------------------------------------------


def scaled(w: jax.Array, x: jax.Array, *, kind: str = "once", n: int = 2) -> jax.Array:
    return jnp.mean(x @ w) * (n if kind == "often" else 1)


def test_static_arguments_are_given_by_name() -> None:
    parallel = minialpa.parallelize(scaled, static_argnames=("kind", "n"), method=ShardParallel())
    for options in ({"kind": "often", "n": 5}, {"kind": "often"}):
        expected = jax.jit(scaled, static_argnames=("kind", "n"))(W, X, **options)  # type: ignore[arg-type]
        assert_allclose(parallel(W, X, **options), expected)
    assert_allclose(minialpa.parallelize(static_argnames="kind")(scaled)(W, X, kind="often", n=3), 3 * jnp.mean(X))


def test_donated_arguments_are_given_by_name() -> None:
    step = minialpa.parallelize(lambda state, x: (state * 2, jnp.sum(x)), donate_argnames="state")
    state, _ = step(W + 0, X)
    step(state, X)
    assert state.is_deleted()


def test_names_that_are_not_there_and_other_options_of_jit_are_refused() -> None:
    for option in ("static_argnames", "donate_argnames"):
        with pytest.raises(TraceError, match=f"`{option}` has 'kid', .* Name one of w, x, kind, n"):
            minialpa.parallelize(scaled, **{option: ["w", "kid"]})
    with pytest.raises(ShardingError, match=r"`device` is an option of `jax.jit`, not of `parallelize`"):
        minialpa.parallelize(scaled, device=None)


def test_static_arguments_of_an_inner_jit_have_to_be_static_here() -> None:
    jitted = jax.jit(scaled, static_argnames=("kind", "n"))

    def inner(*args: Any, **kwargs: Any) -> Any:
        return jitted(*args, **kwargs)

    with pytest.raises(MinialpaError, match="static, with `static_argnums`"):
        minialpa.parallelize(inner)(W, X, kind="often", n=5)
    parallel = minialpa.parallelize(inner, static_argnames=("kind", "n"))
    assert_allclose(parallel(W, X, kind="often", n=5), 5 * jnp.mean(X))
