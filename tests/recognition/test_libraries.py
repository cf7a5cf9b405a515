"""Attentions of the libraries of models are recognised."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.recognition.compared import array, recognised

B, T, N, HIDDEN = 2, 6, 2, 8
X = array(0, B, T, HIDDEN)
SEEN = np.tril(np.ones((T, T), bool))
Case = tuple[Callable[[Any, Any], Any], Any]


def _linen_padding() -> Case:
    from flax import linen as nn

    module = nn.MultiHeadDotProductAttention(num_heads=N)

    def apply(params: Any, x: Any) -> Any:
        real = x[..., 0] > -1.5
        mask = nn.combine_masks(nn.make_causal_mask(x[..., 0]), nn.make_attention_mask(real, real))
        return module.apply(params, x, x, mask=mask)

    return apply, module.init(jax.random.key(0), X, X)


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


CASES = {"flax.linen": _linen_padding, "equinox": _equinox, "haiku": _haiku}


@pytest.mark.parametrize("name", CASES)
def test_attentions_of_libraries(name: str) -> None:
    apply, params = CASES[name]()

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.sin(apply(params, x)))

    assert recognised(apply, params, X).counts == (1, 0)
    assert recognised(jax.value_and_grad(loss, (0, 1)), params, X).counts == (1, 1)
