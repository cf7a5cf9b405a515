"""The published sizes build models with the published parameter counts."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from minialpa.models import SIZES, build


@pytest.mark.parametrize("name", sorted(SIZES))
def test_published_size_has_its_published_parameter_count(name: str, key: jax.Array) -> None:
    params = jax.eval_shape(build(name).init, key).params
    n_parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    np.testing.assert_allclose(n_parameters, SIZES[name].n_parameters, rtol=0.07)


def test_arguments_override_a_published_size(key: jax.Array) -> None:
    case = build("gpt-125m", n_layers=1, batch_size=8)
    assert case.batch_size == 8
    assert [name for name in jax.eval_shape(case.init, key).params if name.startswith("block")] == ["block_0"]
