"""Equal equations share a node of the cost graph, whose cost counts for all of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from minialpa.intra.graph.folding import Folding, fold
from minialpa.ir.equations import dtype_name, shape_of
from minialpa.tracing.flattening import trace_flat


def folded(sizes: list[int], alike: dict[int, int], times: list[int]) -> tuple[Any, Folding]:
    """A chain of products and tanh, and its folding."""

    def chain(params: Any, x: jax.Array) -> jax.Array:
        for w in params:
            x = jnp.tanh(x @ w)
        return x

    weights = [jnp.ones(shape) for shape in zip([8, *sizes], sizes, strict=False)]
    flat, _ = trace_flat(chain, weights, jnp.ones((4, 8)))

    def kind(i: int) -> Any:
        eqn = flat.eqns[i]
        return eqn.primitive.name, *((shape_of(v), dtype_name(v)) for v in (*eqn.invars, *eqn.outvars))

    return flat, fold(flat.eqns, flat.invars, alike, kind, shape_of, times)


def test_equations_that_are_alike_have_one_leader_and_so_have_their_weights() -> None:
    flat, folding = folded([8, 8, 8], {4: 2, 5: 3}, [1, 1, 1, 1, 5, 5])
    assert folding.leaders == (0, 1, 2, 3, 2, 3)
    assert folding.times == {0: 1, 1: 1, 2: 6, 3: 6}
    first, second, third, x = flat.invars
    assert folding.inputs == {first: first, second: second, third: second, x: x}


def test_a_leader_reads_the_operands_of_all_by_their_parts() -> None:
    flat, folding = folded([8, 8, 8], {4: 2, 5: 3}, [1, 1, 1, 1, 5, 5])
    before, own = flat.eqns[1].outvars[0], flat.eqns[3].outvars[0]
    ((k, parts),) = folding.varied[2].items()
    assert k == 0 and dict(parts) == {before: pytest.approx(1 / 6), own: pytest.approx(5 / 6)}


def test_equations_of_other_shapes_stay_apart() -> None:
    _, folding = folded([8, 8, 16], {4: 2, 5: 3}, [1] * 6)
    assert folding.leaders == (0, 1, 2, 3, 4, 5)
