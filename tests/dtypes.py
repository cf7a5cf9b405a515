"""Every dtype of jax in the three places of a step: as an argument, as state, and as a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

#: The dtypes that `jax.jit` takes on CPUs. Without `jax_enable_x64`, 64 bits become 32.
DTYPES = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (2, 4, 8, 16, 32, 64)),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float4_e2m1fn"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
KEYS = ("threefry2x32", "rbg", "unsafe_rbg")
N = 16


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def values(name: str) -> Any:
    """Different values of a dtype, or typed keys."""
    if name in KEYS:
        return jax.random.split(jax.random.key(7, impl=name), N)
    return np.array([1, 0, 1, 1, 0, 1, 1, 0] * (N // 8)).astype(numpy_dtype(name))


def as_float(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(x)
    return (x.real if jnp.iscomplexobj(x) else x).astype(jnp.float32)


def as_argument(scale: jax.Array, x: Any) -> jax.Array:
    return scale + sum(jnp.sum(as_float(leaf)) for leaf in jax.tree.leaves(x))


def as_state(state: Any, x: jax.Array) -> Any:
    """Returns the state reversed; in a pipeline, the second stage has it."""
    total = jnp.sum(x)
    return jax.tree.map(lambda leaf: leaf[::-1], state), total


def as_result(dtypes: tuple[str, ...]) -> Callable[[jax.Array, jax.Array], Any]:
    def step(seed: jax.Array, x: jax.Array) -> Any:
        made = {name: (x > 2).astype(numpy_dtype(name)) for name in dtypes if name not in KEYS}
        keys = {name: jax.random.split(jax.random.key(seed, impl=name), N) for name in dtypes if name in KEYS}
        return made | keys, jnp.sum(x)

    return step


def described(tree: Any) -> Any:
    """Dtype, shape, weak type and bytes of each leaf."""

    def describe(leaf: Any) -> tuple[Any, ...]:
        value = jax.device_get(leaf)
        data = jax.random.key_data(value) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else value
        return str(leaf.dtype), leaf.shape, str(value.dtype), np.asarray(data).tobytes()

    return jax.tree.map(describe, tree, is_leaf=lambda leaf: hasattr(leaf, "dtype"))
