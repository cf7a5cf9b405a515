"""Each rewrite rule holds for every float, and does not apply where its condition is violated."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minialpa.recognition.rewrites import REWRITES, Rewrite
from minialpa.recognition.terms import Kind
from minialpa.tracing.evaluation import eval_flat
from tests.attention_calls import blocks_of
from tests.recognition.compared import array, arrays, assert_same_floats, floats, recognised

DTYPES = [jnp.bfloat16, np.float16, np.float32, np.float64]
AttentionKind = Callable[[Any, Any, Any], Any]


# ---- rows on arrays of special floats -------------------------------------------------------------------------------


def meanings(score: np.ndarray, p_bar: np.ndarray) -> dict[Kind, np.ndarray]:
    """The value of the terms of each kind, by their formulas; the last one as the primitive computes it."""
    of = {Kind.SCORE: score, Kind.PRODUCT: p_bar, Kind.MAXIMUM: score.max(-1, keepdims=True)}
    of[Kind.SHIFTED] = score - of[Kind.MAXIMUM]
    weight = of[Kind.WEIGHT] = np.exp(of[Kind.SHIFTED])
    total = of[Kind.TOTAL] = _sum(weight)
    p = of[Kind.PROBABILITY] = weight / total
    of[Kind.TOTAL_SQUARED] = (1 / (total * total)).astype(score.dtype)
    of[Kind.DIVIDED], of[Kind.DIVIDED_TWICE] = p_bar / total, p_bar * of[Kind.TOTAL_SQUARED]
    of[Kind.WEIGHTED] = of[Kind.DIVIDED_TWICE] * weight
    of[Kind.MEAN] = _sum(of[Kind.WEIGHTED])
    of[Kind.MINUS_MEAN] = -of[Kind.MEAN]
    of[Kind.CENTRED] = of[Kind.DIVIDED] + of[Kind.MINUS_MEAN]
    of[Kind.SCORE_BAR] = p * p_bar - p * _sum(p * p_bar)
    return of


def _sum(x: np.ndarray) -> np.ndarray:
    """The sum over keys, in 32 bits or more, as jax sums."""
    wide = np.float64 if x.dtype == np.float64 else np.float32
    return np.asarray(x.astype(wide).sum(-1, keepdims=True)).astype(x.dtype)


#: The function of each equation, of arrays and, in rows with a number, of the only number that the row admits.
APPLY: dict[str, Callable[..., np.ndarray]] = {
    "add": lambda x, _: x + x.dtype.type(0),
    "add_any": np.add,
    "div": np.divide,
    "dot_general": np.multiply,
    "exp": np.exp,
    "integer_pow": lambda x: (1 / (x * x)).astype(x.dtype),
    "max": lambda _, x: np.maximum(x, x.dtype.type(-np.inf)),
    "mul": np.multiply,
    "neg": np.negative,
    "reduce_max": lambda x: x.max(-1, keepdims=True),
    "reduce_sum": _sum,
    "sub": np.subtract,
}
#: Rows without operands of kind `LEAF`, whose role in an attention is a definition.
ROWS = [rule for rule in REWRITES if Kind.LEAF not in rule.operands and rule.primitive in APPLY]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@settings(max_examples=10)
@given(data=st.data())
def test_each_row_holds_for_every_float(dtype: Any, data: st.DataObject) -> None:
    score, p_bar = (data.draw(arrays(dtype, 2, 4)) for _ in range(2))
    # Differences of the cotangents of weights are finite where these are: the primitive adds in another order.
    p_bar = p_bar / p_bar.dtype.type(4)
    info = jnp.finfo(dtype)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        of = meanings(score, p_bar)
        terms = np.abs(of[Kind.PROBABILITY] * p_bar).astype(np.float64)
        size = np.where(np.isfinite(terms), terms, 0).sum(-1, keepdims=True)
        for rule in ROWS:
            if rule.primitive == "reduce_sum" and rule.result in rule.operands:
                continue  # a gradient, summed: a sum by definition
            operands = [_operand(rule, kind, of) for kind in rule.operands]
            same = [x for x, kind in zip(operands, rule.operands, strict=True) if kind is not Kind.NUMBER]
            expected = same[0] if Kind.NUMBER in rule.operands else of[rule.result]
            atol = 8 * float(info.eps) * (size + np.where(np.isfinite(expected), np.abs(expected), 0)) + float(
                info.tiny
            )
            assert_same_floats(APPLY[rule.primitive](*operands), expected, atol, str(rule))


def _operand(rule: Rewrite, kind: Kind, of: Mapping[Kind, np.ndarray]) -> Any:
    if kind is Kind.NUMBER:
        return of[Kind.SCORE].dtype.type(1)
    # A product is p_bar, or scores without scale, bias and mask.
    is_score = rule.result in (Kind.SCORE, Kind.MAXIMUM, Kind.SHIFTED)
    return of[Kind.SCORE if kind is Kind.PRODUCT and is_score else kind]


# ---- attentions on arrays of special floats -------------------------------------------------------------------------

B, T, N, D = 2, 7, 1, 2
CAUSAL = (np.arange(T)[:, None] >= np.arange(T))[None, None]
#: The first query sees no key. No query sees key 2 or, in the second example, any key from 4 on.
SEEN = (
    (np.arange(T)[:, None] > np.arange(T))
    & (np.arange(T) != 2)
    & (np.arange(T) < np.array([T, 4])[:, None, None, None])
)
SHORT_WINDOW = CAUSAL & (np.arange(T)[:, None] < np.arange(T) + 2)


def _scores(q: Any, k: Any) -> Any:
    return jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=np.promote_types(q.dtype, np.float32))


def _mixed(x: Any, v: Any) -> Any:
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(x).astype(v.dtype), v)


def _masked(mask: np.ndarray, masked_score: float) -> AttentionKind:
    return lambda q, k, v: _mixed(jnp.where(mask, _scores(q, k) * 0.5, masked_score), v)


def _added(q: Any, k: Any, v: Any) -> Any:
    x = _scores(q, k)
    return _mixed(x + (1 - SEEN.astype(x.dtype)) * -1e4, v)


ATTENTIONS: dict[str, AttentionKind] = {
    "causal": _masked(CAUSAL, -np.inf),
    "seen": _masked(SEEN, -1e9),
    "window": _masked(SHORT_WINDOW, -5.0),
    "added": _added,
}


@pytest.fixture
def _blocks_of_three() -> Iterator[None]:
    with blocks_of(3):
        yield


LONG = [(name, dtype) for name in ATTENTIONS for dtype in DTYPES if (name, dtype) != ("causal", np.float32)]


@pytest.mark.parametrize(
    ("name", "dtype"), [("causal", np.float32), *(pytest.param(*one, marks=pytest.mark.slow) for one in LONG)]
)
@pytest.mark.usefixtures("_blocks_of_three")
def test_attentions_are_the_same_for_every_float(name: str, dtype: Any) -> None:
    with jax.enable_x64(dtype == np.float64):
        _check_floats(ATTENTIONS[name], dtype)


def _check_floats(fun: AttentionKind, dtype: Any) -> None:
    # Small, so that the largest values times this are finite: the primitive adds them up in another order.
    weight = (0.1 * array(9, B, T, N, D)).astype(dtype)

    def with_gradients(*args: Any) -> Any:
        out, pull = jax.vjp(fun, *args)
        return out, *pull(jnp.asarray(weight))

    ordinary = [array(i, B, T, N, D).astype(dtype) for i in range(3)]
    found = recognised(with_gradients, *ordinary)
    assert found.attentions == 1
    new, old = jax.jit(lambda *xs: eval_flat(found.step.flat, xs)), jax.jit(with_gradients)
    places = st.tuples(st.integers(0, 2), st.integers(0, B - 1), st.integers(0, T - 1), st.integers(0, D - 1))

    @settings(max_examples=40)
    @given(edits=st.lists(st.tuples(places, floats(dtype)), max_size=3))
    def check(edits: list[tuple[tuple[int, int, int, int], float]]) -> None:
        args = [x.copy() for x in ordinary]
        with np.errstate(all="ignore"):
            for (i, b, t, d), value in edits:
                args[i][b, t, 0, d] = value
            sizes = [np.abs(x[np.isfinite(x)].astype(np.float64)).max() + 1 for x in args]
            atol = 64 * float(jnp.finfo(dtype).eps) * float(np.prod(sizes))
        for x, expected in zip(new(*args), old(*args), strict=True):
            assert_same_floats(x, expected, atol, str(edits))

    check()
