"""Steps with kernels train under all methods, and each device computes a part of them.

The kernels are in pallas_kernels.py. The oracle is the serial run, with the kernels and with plain operations.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec as P

import minialpa
from minialpa import (
    AutoShardingOption,
    DataParallel,
    LogicalMesh,
    ShardParallel,
)
from minialpa.ir.equations import sub_jaxprs
from minialpa.testing import assert_allclose
from tests.pallas_kernels import flash_attention, plain_attention, plain_norm, row_norm

EXAMPLES, LENGTH, HEADS, FEATURES = 8, 4, 4, 2
WIDTH = HEADS * FEATURES
Attention = Callable[..., Any]


def _params(n_layers: int) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    names = ("q", "k", "v", "out")
    start = rng.normal(size=(WIDTH, WIDTH)).astype(np.float32)
    return {"a start": {"start": start}} | {
        f"layer{i}": {name: (rng.normal(size=(WIDTH, WIDTH)) * 0.4).astype(np.float32) for name in names}
        for i in range(n_layers)
    }


def _batch() -> dict[str, Any]:
    rng = np.random.default_rng(8)
    return {name: rng.normal(size=(EXAMPLES, LENGTH, WIDTH)).astype(np.float32) for name in ("x", "y")}


def _model(attention: Attention, norm: Callable[..., Any], params: Any, x: Any) -> Any:
    start, *layers = params.values()
    x = x @ start["start"]
    for layer in layers:
        h = norm(x.reshape(-1, WIDTH)).reshape(x.shape)
        q, k, v = ((h @ layer[name]).reshape(*h.shape[:2], HEADS, FEATURES) for name in ("q", "k", "v"))
        x = x + attention(q, k, v).reshape(h.shape) @ layer["out"]
    return x


def _step(attention: Attention, norm: Callable[..., Any] = row_norm, value_and_grad: Any = jax.value_and_grad) -> Any:
    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((_model(attention, norm, params, batch["x"]) - batch["y"]) ** 2)

        value, grads = value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


@functools.cache
def _serial(n_layers: int) -> Any:
    """The step with kernels on one device, which equals the step of plain operations."""
    args = _params(n_layers), _batch()
    own = jax.jit(_step(flash_attention))(*args)
    assert_allclose(own, jax.jit(_step(plain_attention, plain_norm))(*args), rtol=1e-4, atol=1e-5)
    return own


def _kernels(jaxpr: Any) -> Iterator[JaxprEqn]:
    """The kernels of a program, in the order of its equations."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
        else:
            for body in sub_jaxprs(eqn):
                yield from _kernels(body)


def kernel_shapes(executable: Any) -> dict[str, set[tuple[int, ...]]]:
    """The shapes of the first operand of each kernel in the programs of one device."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for function in executable.program.functions:
        for eqn in _kernels(jax.make_jaxpr(function.fun)(*function.in_avals)):
            found.setdefault(eqn.params["name"], set()).add(eqn.invars[0].aval.shape)
    return found


def _trained(method: Any, attention: Attention = flash_attention, n_layers: int = 1) -> Any:
    """The executable of a training step under a method, which gives the numbers of the serial run, without warnings."""
    step = minialpa.parallelize(
        _step(attention, value_and_grad=minialpa.value_and_grad), method=method, batch_argnums=(1,)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_allclose(step(_params(n_layers), _batch()), _serial(n_layers), rtol=1e-5, atol=1e-6)
    return step.get_executable(_params(n_layers), _batch())


_ATTENTION = ("flash_forward", "flash_query_gradient", "flash_key_gradient")
_ROWS = ("row_norm", "row_norm_gradient")


def _assert_shapes(executable: Any, attention: tuple[int, ...], rows: int) -> None:
    expected = {name: {attention} for name in _ATTENTION} | {name: {(rows, WIDTH)} for name in _ROWS}
    assert kernel_shapes(executable) == expected


def test_micro_batches_are_split_over_devices() -> None:
    executable = _trained(DataParallel(jax.devices()[:4], 2))
    _assert_shapes(executable, (1, LENGTH, HEADS, FEATURES), LENGTH)


@pytest.mark.slow
def test_heads_are_split_where_the_weights_are() -> None:
    specs = {f"*'{name}'*": P(None, "y") for name in "qkv"} | {"*'out'*": P("y", None)}
    method = ShardParallel(LogicalMesh((1, 2)), 2, auto_sharding_option=AutoShardingOption(fixed_specs=specs))
    shapes = kernel_shapes(_trained(method))
    assert all(shapes[name] == {(4, LENGTH, HEADS // 2, FEATURES)} for name in _ATTENTION), shapes
