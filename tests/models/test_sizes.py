"""The published sizes build models with the published parameter counts."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest

from minialpa.models import SIZES, build


def n_parameters(name: str, key: jax.Array, **arguments: Any) -> int:
    params = jax.eval_shape(build(name, **arguments).init, key).params
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def of_all_layers(name: str, key: jax.Array) -> int:
    """The number of parameters of a model. Of a deep one, two and four layers are counted: each further pair of layers
    adds the same number. Layers come in pairs as MoE has experts in every second layer."""
    n_layers = SIZES[name].arguments.get("n_layers", 0)
    if n_layers <= 4:
        return n_parameters(name, key)
    assert n_layers % 2 == 0
    two, four = (n_parameters(name, key, n_layers=n) for n in (2, 4))
    return two + (n_layers - 2) // 2 * (four - two)


#: The smallest size of each model always runs.
SHORT = {
    min((size.n_parameters, name) for name, size in SIZES.items() if size.model == model)[1]
    for model in {size.model for size in SIZES.values()}
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in sorted(SIZES)]
)
def test_published_size_has_its_published_parameter_count(name: str, key: jax.Array) -> None:
    np.testing.assert_allclose(of_all_layers(name, key), SIZES[name].n_parameters, rtol=0.07)


@pytest.mark.parametrize("name", ["gpt-125m", "llama-3-8b", "moe-380m", "t5-small", "vit-b16"])
def test_layers_have_as_many_parameters_each(name: str, key: jax.Array) -> None:
    assert of_all_layers(name, key) == n_parameters(name, key)


def test_arguments_override_a_published_size(key: jax.Array) -> None:
    case = build("gpt-125m", n_layers=1, batch_size=8)
    assert case.batch_size == 8
    assert [name for name in jax.eval_shape(case.init, key).params if name.startswith("block")] == ["block_0"]
