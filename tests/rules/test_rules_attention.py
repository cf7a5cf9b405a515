"""The rule of attention beyond the laws of all rules: what reads as written, flops, and how unequal the parts are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import JaxprEqn

import minialpa.rules.table  # noqa: F401 (fills the rule table)
from minialpa.attention.operation import Attention
from minialpa.rules.known_rules import factors_of
from tests.attention_calls import causal, fused
from tests.rules.rule_laws import equations_of, notation, vjp


def _equations(kind: Attention, *, t: int, s: int, d: int = 4, e: int = 2) -> tuple[JaxprEqn, JaxprEqn]:
    """Attention and its gradient, of 2 examples, 3 key/value heads and 5 query heads for each."""
    shapes = ((2, t, 3, 5, d), (2, s, 3, d), (2, s, 3, e))
    closed = jax.make_jaxpr(vjp(lambda q, k, v: fused(kind, q, k, v)))(*(jnp.ones(shape) for shape in shapes))
    eqns = {eqn.primitive.name: eqn for eqn in equations_of(closed.jaxpr)}
    return eqns["minialpa_attention"], eqns["minialpa_attention_gradient"]


def test_factors_are_as_written() -> None:
    forward, backward = map(notation, _equations(Attention(scale=1.0), t=8, s=6, e=7))
    assert forward == "[a b c d E], [a F c E], [a F c G] -> [a b c d G], [a b c d]"
    assert backward == (
        "[a b c d E], [a F c E], [a F c G], [a b c d G], [a b c d], [a b c d G] -> "
        "[a b c d E], [a F c E], [a F c G] sum(d) sum(b)"
    )


_KINDS = [
    Attention(scale=1.0),
    causal(4),
    causal(4, left=5),
    causal(4, left=100),
    causal(4, left=0, right=None),
    causal(4, left=0, right=3),
]


def _visible(kind: Attention, t: int, s: int) -> np.ndarray:
    """Which query position, dimension 0, sees which key position."""
    ahead = np.arange(s)[None] - np.arange(t)[:, None]
    left, right = (s + t if n is None else n for n in (kind.left, kind.right))
    return (ahead >= -left) & (ahead <= right)


@pytest.mark.parametrize("kind", [*_KINDS, causal(4, left=2, right=1)], ids=str)
def test_flops_count_the_scores_in_the_window(kind: Attention) -> None:
    n_scores = 2 * 3 * 5 * int(np.sum(_visible(kind, 8, 12)))
    forward, backward = (factors_of(eqn).flops for eqn in _equations(kind, t=8, s=12))
    assert forward == n_scores * 2 * (4 + 2)
    assert backward == n_scores * 2 * (3 * 4 + 2 * 2)


@pytest.mark.parametrize("kind", _KINDS, ids=str)
@pytest.mark.parametrize("n", [2, 24])
def test_price_of_a_split_is_the_work_of_the_busiest_part(kind: Attention, n: int) -> None:
    visible = _visible(kind, 24, 24)
    forward, backward = (factors_of(eqn) for eqn in _equations(kind, t=24, s=24))
    _check_busiest(visible.reshape(n, -1), forward.n_shares(_factor(forward, operand=0, dim=1), n))
    _check_busiest(visible.reshape(n, -1), backward.n_shares(_factor(backward, operand=0, dim=1), n))


def _factor(factors: Any, *, operand: int, dim: int) -> int:
    return int(factors.operands[operand][dim][0])


def _check_busiest(parts: np.ndarray, n_shares: float) -> None:
    assert n_shares == pytest.approx(parts.sum() / parts.sum(1).max())


def test_examples_and_heads_have_equal_work() -> None:
    for eqn in _equations(causal(4), t=8, s=8):
        factors = factors_of(eqn)
        assert [factors.n_shares(_factor(factors, operand=0, dim=dim), 2) for dim in (0, 2, 3)] == [2, 2, 2]
