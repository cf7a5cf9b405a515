"""Attentions of the libraries of models are recognised."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.recognition.compared import array, compared, recognised

B, T, N, HIDDEN = 2, 6, 2, 8
X = array(0, B, T, HIDDEN)
SEEN = np.tril(np.ones((T, T), bool))
Case = tuple[Callable[[Any, Any], Any], Any]


def _linen(**options: Any) -> Case:
    from flax import linen as nn

    module = nn.MultiHeadDotProductAttention(num_heads=N, **options)
    mask = nn.make_causal_mask(jnp.ones((B, T)))
    return (lambda params, x: module.apply(params, x, x, mask=mask)), module.init(jax.random.key(0), X, X)


def _linen_padding() -> Case:
    from flax import linen as nn

    module = nn.MultiHeadDotProductAttention(num_heads=N)

    def apply(params: Any, x: Any) -> Any:
        real = x[..., 0] > -1.5
        mask = nn.combine_masks(nn.make_causal_mask(x[..., 0]), nn.make_attention_mask(real, real))
        return module.apply(params, x, x, mask=mask)

    return apply, module.init(jax.random.key(0), X, X)


def _linen_function() -> Case:
    from flax import linen as nn

    def apply(params: Any, x: Any) -> Any:
        q, k, v = (jnp.reshape(x @ params[i], (B, T, N, -1)) for i in range(3))
        return nn.dot_product_attention(q, k, v, bias=params[3][None, None, :T, :T])

    return apply, array(1, 4, HIDDEN, HIDDEN)


def _nnx() -> Case:
    from flax import nnx

    module = nnx.MultiHeadAttention(N, HIDDEN, decode=False, rngs=nnx.Rngs(0))
    graph, params = nnx.split(module)
    return (lambda params, x: nnx.merge(graph, params)(x, mask=SEEN[None, None])), params


def _equinox() -> Case:
    import equinox as eqx

    module = eqx.nn.MultiheadAttention(N, HIDDEN, key=jax.random.key(0))
    params, static = eqx.partition(module, eqx.is_array)

    def apply(params: Any, x: Any) -> Any:
        model = eqx.combine(params, static)
        return jax.vmap(lambda row: model(row, row, row, mask=SEEN))(x)

    return apply, params


def _haiku() -> Case:
    import haiku as hk

    def attention(x: Any) -> Any:
        module = hk.MultiHeadAttention(N, HIDDEN // N, w_init=hk.initializers.VarianceScaling(), model_size=HIDDEN)
        return module(x, x, x, mask=SEEN[None, None])

    model = hk.without_apply_rng(hk.transform(attention))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.apply, model.init(jax.random.key(0), X)


CASES = {
    "flax.linen": _linen,
    "flax.linen, upcast": lambda: _linen(force_fp32_for_softmax=True),
    "flax.linen, padding": _linen_padding,
    "flax.linen, function": _linen_function,
    "flax.nnx": _nnx,
    "equinox": _equinox,
    "haiku": _haiku,
}


#: Cases that write attention as others do.
LONG = ("flax.linen", "flax.linen, upcast", "flax.nnx")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in LONG else ()) for n in CASES])
def test_attentions_of_libraries(name: str) -> None:
    apply, params = CASES[name]()

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(apply(params, x)))

    assert recognised(apply, params, X).counts == (1, 0)
    assert compared(jax.value_and_grad(loss, (0, 1)), params, X, one_scale=True).counts == (1, 1)
