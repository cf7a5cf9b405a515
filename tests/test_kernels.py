"""Steps with kernels train under all methods, and each device computes a part of them.

The kernels are in pallas_kernels.py. The oracle is the serial run, with the kernels and with plain operations.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

import minialpa
from minialpa import (
    DataParallel,
)
from minialpa.ir.equations import sub_jaxprs
from minialpa.testing import assert_allclose
from tests.pallas_kernels import flash_attention, plain_attention, plain_norm, row_norm

EXAMPLES, LENGTH, HEADS, FEATURES = 8, 4, 4, 2
WIDTH = HEADS * FEATURES
Attention = Callable[..., Any]


def _params() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    names = ("start", "q", "k", "v", "out")
    return {name: (rng.normal(size=(WIDTH, WIDTH)) * 0.4).astype(np.float32) for name in names}


def _batch() -> dict[str, Any]:
    rng = np.random.default_rng(8)
    return {name: rng.normal(size=(EXAMPLES, LENGTH, WIDTH)).astype(np.float32) for name in ("x", "y")}


def _model(attention: Attention, norm: Callable[..., Any], params: Any, x: Any) -> Any:
    x = x @ params["start"]
    h = norm(x.reshape(-1, WIDTH)).reshape(x.shape)
    q, k, v = ((h @ params[name]).reshape(*h.shape[:2], HEADS, FEATURES) for name in ("q", "k", "v"))
    return x + attention(q, k, v).reshape(h.shape) @ params["out"]


def _step(attention: Attention, norm: Callable[..., Any] = row_norm, value_and_grad: Any = jax.value_and_grad) -> Any:
    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((_model(attention, norm, params, batch["x"]) - batch["y"]) ** 2)

        value, grads = value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


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


def test_micro_batches_are_split_over_devices() -> None:
    args = _params(), _batch()
    expected = jax.jit(_step(flash_attention))(*args)
    assert_allclose(expected, jax.jit(_step(plain_attention, plain_norm))(*args), rtol=1e-4, atol=1e-5)

    trained = _step(flash_attention, value_and_grad=minialpa.value_and_grad)
    step = minialpa.parallelize(trained, method=DataParallel(jax.devices()[:4], 2), batch_argnums=(1,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_allclose(step(*args), expected, rtol=1e-5, atol=1e-6)

    attention = ("flash_forward", "flash_query_gradient", "flash_key_gradient")
    shapes = {name: {(1, LENGTH, HEADS, FEATURES)} for name in attention}
    shapes |= {name: {(LENGTH, WIDTH)} for name in ("row_norm", "row_norm_gradient")}
    assert kernel_shapes(step.get_executable(*args)) == shapes
