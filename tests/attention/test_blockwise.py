"""Attention block by block equals attention with all scores at once, in memory that grows linearly with the lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minialpa.attention import blockwise
from minialpa.attention.operation import AttentionKind, attention_gradient_p, attention_p
from tests.attention.written import Case, assert_same, make_case, with_gradients, written_with_gradients

LOWEST = float(np.finfo(np.float32).min)


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Blocks of four positions, so that short arrays have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "SIDE", 4)
        _forget()
        yield
    _forget()


def _forget() -> None:
    blockwise.attend.clear_cache()
    blockwise.differentiate.clear_cache()


def _sizes(**changes: int) -> tuple[int, int, int, int, int, int, int]:
    sizes = {"b": 2, "t": 10, "s": 11, "g": 2, "r": 2, "d": 3, "e": 5} | changes
    b, t, s, g, r, d, e = sizes.values()
    return b, t, s, g, r, d, e


# ---- what is written -------------------------------------------------------------------------------------------------


@st.composite
def cases(draw: Any) -> Case:
    b, t, s, g, r, d, e = (draw(st.integers(1, most)) for most in (2, 13, 13, 2, 2, 3, 3))
    left, right = (draw(st.none() | st.integers(-3, 8)) for _ in range(2))
    shapes = st.tuples(*(st.sampled_from((1, n)) for n in (b, g, r, t, s)))
    biases, masks = (draw(st.lists(shapes, max_size=2)) for _ in range(2))
    kind = AttentionKind(
        scale=draw(st.sampled_from((0.3, 1.0, -0.5))),
        left=left,
        right=right,
        masked_score=draw(st.sampled_from((-math.inf, LOWEST, -1e30, -1e9, -1e4, -100.0, -1.0, 0.0, 2.0))),
        n_segments=draw(st.integers(0, 2)),
        n_biases=len(biases),
        n_masks=len(masks),
    )
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    positions = rng.permutation(t + 3)[:t], rng.permutation(s + 3)[:s]
    return make_case(
        rng,
        kind,
        sizes=(b, t, s, g, r, d, e),
        bias_shapes=biases,
        mask_shapes=masks,
        seen=draw(st.sampled_from((0.0, 0.3, 0.9))),
        positions=positions if draw(st.booleans()) else None,
    )


@settings(max_examples=3)
@given(cases())
def test_it_is_what_is_written(case: Case) -> None:
    assert_same(case)


@pytest.mark.slow
@settings(max_examples=100)
@given(cases())
def test_it_is_what_is_written_in_many_cases(case: Case) -> None:
    assert_same(case)


def test_queries_that_see_nothing() -> None:
    """The first 12 see no key, whether a block of keys is computed or skipped: their results are NaN."""
    kind = AttentionKind(scale=0.5, right=-12)
    case = make_case(np.random.default_rng(0), kind, sizes=_sizes(t=16, s=12))
    assert_same(case)
    out, _ = with_gradients(case)
    assert np.isnan(out[:, :12]).all() and np.isfinite(out[:, 12:]).all()


def test_masks_that_are_added() -> None:
    """The second example is all padding; its logsumexp, -1e9 + log(n_keys), is rounded to -1e9."""
    kind = AttentionKind(scale=0.5, n_biases=1, right=0, masked_score=-1e9)
    case = make_case(np.random.default_rng(0), kind, sizes=_sizes(), bias_shapes=[(2, 1, 1, 1, 11)])
    bias = jnp.zeros((2, 1, 1, 1, 11)).at[0, ..., 7:].set(LOWEST).at[1].set(LOWEST)
    assert_same(Case(kind=kind, operands=(*case.operands[:-1], bias), out_bar=case.out_bar))


def test_values_whose_sum_is_infinite() -> None:
    """The average is finite."""
    case = make_case(np.random.default_rng(0), AttentionKind(scale=0.5), sizes=_sizes())
    value = jnp.full_like(case.operands[2], 0.9 * float(np.finfo(np.float32).max))
    out, _ = attention_p.bind(*case.operands[:2], value, kind=case.kind)
    np.testing.assert_allclose(out, np.broadcast_to(value[0, 0, 0], out.shape), rtol=1e-5)


def test_a_gradient_whose_terms_differ_by_more_than_the_largest_number() -> None:
    """Of three equal weights: p p_bar - p sum_s p p_bar is finite where p_bar - sum_s p p_bar is not."""
    case = make_case(np.random.default_rng(0), AttentionKind(scale=0.5), sizes=(1, 1, 3, 1, 1, 1, 1))
    query, key, _ = (jnp.zeros_like(x) for x in case.operands)
    value = 0.9 * float(np.finfo(np.float32).max) * jnp.array([1.0, 1.0, -1.0]).reshape(1, 3, 1, 1)
    assert_same(Case(kind=case.kind, operands=(query, key, value), out_bar=jnp.ones_like(case.out_bar)))


def test_sums_of_16_bits_are_in_32() -> None:
    """Only the results, and `out` in the gradient, are rounded."""
    kind = AttentionKind(scale=0.5, right=0, masked_score=-1e9)
    case = make_case(
        np.random.default_rng(0), kind, sizes=_sizes(t=40, s=40), dtypes=(jnp.bfloat16, np.float32, jnp.float16)
    )
    out, bars = with_gradients(case)
    assert [x.dtype for x in bars] == [x.dtype for x in case.operands[:3]]
    expected, expected_bars = written_with_gradients(case)
    np.testing.assert_array_equal(_rounded_apart(out, expected), 0)
    for x, y in zip(bars, expected_bars, strict=True):
        difference = np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max()
        assert difference < 4 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(np.asarray(y, np.float64)).max()


def _rounded_apart(x: Any, expected: Any) -> Any:
    """The difference between results and expected results, beyond one rounding."""
    x, expected = np.asarray(x, np.float64), np.asarray(expected, np.float64)
    bound = float(jnp.finfo(jnp.bfloat16).eps) * np.abs(expected) + 1e-6
    return np.maximum(np.abs(x - expected) - bound, 0)


def test_float64() -> None:
    with jax.enable_x64(True):
        kind = AttentionKind(scale=0.5, right=0, masked_score=-1e9)
        case = make_case(np.random.default_rng(0), kind, sizes=_sizes(), dtypes=(np.float64,) * 3)
        assert_same(case, 1e-13)
        assert attention_p.bind(*case.operands, kind=kind)[1].dtype == np.float64


@pytest.mark.parametrize("sizes", [_sizes(t=0), _sizes(t=1, s=30, r=1)])
def test_lengths(sizes: Any) -> None:
    assert_same(make_case(np.random.default_rng(0), AttentionKind(scale=0.5, right=0, masked_score=-1e9), sizes=sizes))


# ---- where it runs ---------------------------------------------------------------------------------------------------


# ---- memory and work -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, is_seen",
    [
        # Of 6 x 6 blocks, the diagonal and the two before it, which a window of 5 positions back reaches.
        (AttentionKind(scale=0.5, left=5, right=0), lambda i, j: 0 <= i - j <= 2),
        # Documents of 8 positions.
        (AttentionKind(scale=0.5, right=0, n_segments=1), lambda i, j: j <= i and i // 2 == j // 2),
    ],
)
def test_blocks_that_no_query_sees_are_not_computed(
    kind: AttentionKind, is_seen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []
    compute = blockwise._add_scores

    def noted(problem: Any, i: Any, j: Any, state: Any) -> Any:
        jax.debug.callback(lambda i, j: computed.append((int(i), int(j))), i, j)
        return compute(problem, i, j, state)

    monkeypatch.setattr(blockwise, "_add_scores", noted)
    _forget()
    operands = list(make_case(np.random.default_rng(0), kind, sizes=_sizes(t=24, s=24)).operands)
    if kind.n_segments:
        documents = jnp.broadcast_to(jnp.arange(24, dtype=np.int32) // 8, (2, 1, 1, 24))
        operands[5:] = [documents[..., None], documents[..., None, :]]
    jax.block_until_ready(attention_p.bind(*operands, kind=kind))
    jax.effects_barrier()
    _forget()
    assert sorted(computed) == [(i, j) for i in range(6) for j in range(6) if is_seen(i, j)]


def _compiled(t: int, kind: AttentionKind) -> Any:
    shapes = [(1, t, 1, 1, 32), (1, t, 1, 32), (1, t, 1, 32)]
    operands = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    operands += [jax.ShapeDtypeStruct((t,), np.int32)] * kind.n_positions

    def run(operands: Any) -> Any:
        out, logsumexp = attention_p.bind(*operands, kind=kind)
        params = {"kind": kind, "dtypes": ("float32",) * 3, "with_bias_gradient": ()}
        return attention_gradient_p.bind(*operands[:3], out, logsumexp, out, *operands[3:], **params)

    return jax.jit(run).lower(operands).compile()


def test_memory_is_linear_in_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary bytes of both passes grow by the same with each position: by less than 20 vectors of a head."""
    monkeypatch.setattr(blockwise, "SIDE", 256)
    _forget()
    kind = AttentionKind(scale=0.125, right=0, masked_score=-1e9)
    lengths = np.array([16384, 32768, 65536])
    used = np.array([_compiled(t, kind).memory_analysis().temp_size_in_bytes for t in lengths])
    slopes = np.diff(used) / np.diff(lengths)
    assert slopes[1] < 1.05 * slopes[0] and slopes.max() < 32 * 4 * 20, (used, slopes)
    _forget()
