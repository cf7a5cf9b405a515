"""The strategy cache returns the strategies of an empty cache, for any sizes and meshes before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import JaxprEqn

from minialpa import LogicalMesh
from minialpa.cluster import ClusterSpec
from minialpa.intra.strategies.combining import ALONE
from minialpa.intra.strategies.reshard import partial_specs_of, reshard_table
from minialpa.intra.strategies.strategies import StrategySet
from minialpa.intra.strategies.strategy_cache import StrategyCache
from minialpa.ir.equations import bytes_of, shape_of
from minialpa.rules import table as _rules  # noqa: F401  (registers the rules)
from minialpa.sharding import Spec

DEVICE = ClusterSpec.preset("a100-80gb").device
MESHES = [
    LogicalMesh((4,), device=DEVICE),
    LogicalMesh((2, 2), device=DEVICE),
    LogicalMesh((2, 4), device=DEVICE),
    LogicalMesh((2, 4), (1e-3, 1e-6), (1e-9, 1e-11), DEVICE),
    LogicalMesh((2, 4)),
]
PROGRAMS: dict[str, Callable[..., Any]] = {
    "add_itself": lambda x, y: x + x,
    "dot": lambda x, y: x @ y.T,
    "max": lambda x, y: jnp.max(x, axis=1),
    "reshape": lambda x, y: x.reshape(-1),
    "scale": lambda x, y: x * 2.0,
    "sum": lambda x, y: jnp.sum(x, axis=0),
}
SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24])


def equation(name: str, shape: tuple[int, int]) -> JaxprEqn:
    array = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.make_jaxpr(PROGRAMS[name])(array, array).jaxpr.eqns[-1]


def assert_same(a: StrategySet, b: StrategySet) -> None:
    assert (a.operands, a.made, a.results) == (b.operands, b.made, b.results)
    np.testing.assert_array_equal(a.compute_s, b.compute_s)
    np.testing.assert_array_equal(a.communication_s, b.communication_s)


def strategy_sets(cache: StrategyCache, eqn: JaxprEqn, mesh: LogicalMesh, specs: tuple[Spec, ...]) -> list[StrategySet]:
    """All strategies, and the strategies that follow operand 0, with and without partial sums."""
    strategies, kind, given = cache.of(mesh, (), ALONE), cache.kind_of(eqn), {0: cache.same(specs)}
    found = strategies.enumerate(eqn, kind, {}, {0: 2}, scatter=True)
    return [
        found, *(strategies.follow(eqn, kind, given, len(specs), allow_partial=allow) for allow in (True, False))
    ]  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
@given(st.lists(st.tuples(st.sampled_from(MESHES), SIZES, SIZES), min_size=2, max_size=4))
@settings(deadline=None, max_examples=10)
def test_the_cache_gives_what_a_new_one_gives(name: str, asked: list[tuple[LogicalMesh, int, int]]) -> None:
    cache = StrategyCache()
    for mesh, a, b in asked:
        eqn = equation(name, (a, b))
        specs = tuple(partial_specs_of(shape_of(eqn.invars[0]), mesh.shape))
        strategies = cache.of(mesh, (), ALONE)
        found, *followed = strategy_sets(cache, eqn, mesh, specs)
        for one, new in zip((found, *followed), strategy_sets(StrategyCache(), eqn, mesh, specs), strict=True):
            assert_same(one, new)
        out = eqn.outvars[0]
        table = reshard_table(shape_of(out), bytes_of(out), mesh)
        seconds = strategies.reshard_s(out, found.results[0], followed[1].results[0])
        expected = [[table.cost(made, wanted) for wanted in followed[1].results[0]] for made in found.results[0]]
        np.testing.assert_array_equal(seconds, np.reshape(expected, seconds.shape))


def test_equations_that_are_divided_alike_have_the_very_same_specs() -> None:
    cache = StrategyCache()
    strategies = cache.of(MESHES[1], (), ALONE)
    small, large = (equation("dot", (n, n)) for n in (8, 24))
    sets = [strategies.enumerate(eqn, cache.kind_of(eqn), {}, {}, scatter=True) for eqn in (small, large)]
    assert all(a is b for a, b in zip(sets[0].results, sets[1].results, strict=True))
    assert sets[0].seconds.max() < sets[1].seconds.max()
