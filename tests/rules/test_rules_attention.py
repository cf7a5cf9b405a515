"""The rule of attention beyond the laws of all rules: its notation, flops, and the imbalance of the parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import JaxprEqn

import minialpa.rules.table  # noqa: F401 (fills the rule table)
from minialpa.attention.operation import AttentionKind
from minialpa.rules.known_rules import factors_of
from tests.attention_calls import causal, fused
from tests.rules.rule_laws import equations_of, notation, vjp


def _equations(kind: AttentionKind, *, t: int, s: int, d: int = 4, e: int = 2) -> tuple[JaxprEqn, JaxprEqn]:
    """Attention and its gradient, of 2 examples, 3 key/value heads and 5 query heads for each."""
    shapes = ((2, t, 3, 5, d), (2, s, 3, d), (2, s, 3, e))
    closed = jax.make_jaxpr(vjp(lambda q, k, v: fused(kind, q, k, v)))(*(jnp.ones(shape) for shape in shapes))
    eqns = {eqn.primitive.name: eqn for eqn in equations_of(closed.jaxpr)}
    return eqns["minialpa_attention"], eqns["minialpa_attention_gradient"]


def test_factors_are_as_written() -> None:
    forward, backward = map(notation, _equations(AttentionKind(scale=1.0), t=8, s=6, e=7))
    assert forward == "[a b c d E], [a F c E], [a F c G] -> [a b c d G], [a b c d]"
    assert backward == (
        "[a b c d E], [a F c E], [a F c G], [a b c d G], [a b c d], [a b c d G] -> "
        "[a b c d E], [a F c E], [a F c G] sum(d) sum(b)"
    )


_KINDS = [
    AttentionKind(scale=1.0),
    causal(4),
    causal(4, left=5),
    causal(4, left=0, right=None),
]


def _visible(kind: AttentionKind, t: int, s: int) -> np.ndarray:
    """Which query position, dimension 0, sees which key position."""
    ahead = np.arange(s)[None] - np.arange(t)[:, None]
    left, right = (s + t if n is None else n for n in (kind.left, kind.right))
    return (ahead >= -left) & (ahead <= right)


@pytest.mark.parametrize("kind", [*_KINDS, causal(4, left=2, right=1)], ids=str)
def test_flops_count_the_scores_in_the_window(kind: AttentionKind) -> None:
    n_scores = 2 * 3 * 5 * int(np.sum(_visible(kind, 8, 12)))
    forward, backward = (factors_of(eqn).flops for eqn in _equations(kind, t=8, s=12))
    assert forward == n_scores * 2 * (4 + 2)
    assert backward == n_scores * 2 * (3 * 4 + 2 * 2)


@pytest.mark.parametrize("kind", _KINDS, ids=str)
def test_the_price_of_a_split_is_the_work_of_the_busiest_part(kind: AttentionKind) -> None:
    for factors in map(factors_of, _equations(kind, t=24, s=24)):
        (positions,) = factors.operands[0][1]
        for n in (2, 24):
            parts = _visible(kind, 24, 24).reshape(n, -1).sum(1)
            assert factors.n_shares(positions, n) == pytest.approx(parts.sum() / parts.max())


def test_examples_and_heads_have_equal_work() -> None:
    for factors in map(factors_of, _equations(causal(4), t=8, s=8)):
        assert [factors.n_shares(factors.operands[0][dim][0], 2) for dim in (0, 2, 3)] == [2, 2, 2]
