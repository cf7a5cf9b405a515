"""Settings of jax that change between the calls of one function: planned anew where `jax.jit` traces anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import minialpa
from minialpa import ShardParallel, TraceError
from tests.dtypes import described
from tests.helpers import trace

X = np.arange(32, dtype=np.float32).reshape(8, 4)
W = [np.eye(4, dtype=np.float32)] * 2
#: Each setting, and a value that differs from the tests' value.
SETTINGS: dict[str, Any] = {
    "jax_threefry_partitionable": False,
    "jax_enable_x64": True,
    "jax_default_prng_impl": "rbg",
    "jax_numpy_rank_promotion": "warn",
}


@pytest.fixture(autouse=True)
def _settings_stay() -> Iterator[None]:
    before = {name: getattr(jax.config, name) for name in (*SETTINGS, "jax_disable_jit")}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def step(w: Any, x: jax.Array) -> Any:
    """Random bits on both sides of a boundary, and results of the default dtypes."""

    def loss(w: Any) -> jax.Array:
        h = x @ w[0] + jax.random.normal(jax.random.key(3), (8, 4), jnp.float32)
        minialpa.mark_pipeline_boundary()
        return jnp.mean((h @ w[1] * jax.random.bernoulli(jax.random.key(4), 0.5, (8, 4)).astype(h.dtype)) ** 2)

    value, grads = minialpa.value_and_grad(loss)(w)
    return [w - np.float32(0.1) * g for w, g in zip(w, grads, strict=True)], (value, jnp.arange(3), jax.random.key(0))


def test_a_setting_that_changes_between_calls_counts() -> None:
    parallel = minialpa.parallelize(step, method=ShardParallel(jax.devices()[:1]), donate_argnums=())

    def check() -> None:
        expected = jax.jit(lambda *args: step(*args))(W, X)  # which jax has not traced before
        for _ in range(2):  # the second call takes the fast path
            found = parallel(W, X)
            assert described(found[1][1:]) == described(expected[1][1:])
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, 1e-5),
                (found[0], found[1][0]),
                (expected[0], expected[1][0]),
            )

    check()
    for name in SETTINGS:
        before = getattr(jax.config, name)
        jax.config.update(name, SETTINGS[name])
        check()
        jax.config.update(name, before)
    check()
    assert len(parallel._executables) == 1 + len(SETTINGS)

    with jax.disable_jit(), pytest.raises(TraceError, match="`jax_disable_jit` is on, and step runs as compiled"):
        parallel(W, X)
    check()


def test_steps_that_draw_other_bits_have_other_fingerprints() -> None:
    usual = trace(step, W, X).fingerprint
    with jax.threefry_partitionable(False):
        assert trace(step, W, X).fingerprint != usual
