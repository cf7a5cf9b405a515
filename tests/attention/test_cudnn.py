"""On GPUs, cuDNN computes the attentions on which it agrees with the plain program, which runs without a GPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minialpa.attention import blockwise, cudnn
from minialpa.attention.operation import AttentionKind, attention_gradient_p, attention_p
from minialpa.support.private_jax import CudnnAttention, unused_parameters
from tests.attention.written import Case, make_case

CAUSAL = AttentionKind(scale=0.5, right=0, masked_score=-1e9)
SIZES = (1, 64, 64, 1, 2, 8, 8)
HALVES = (jnp.bfloat16,) * 3


@pytest.fixture(autouse=True)
def new_version(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cudnn, "cudnn_version", lambda: 91000)
    _forget()
    yield
    _forget()


def _forget() -> None:
    cudnn.attend.clear_cache()
    cudnn.differentiate.clear_cache()


def _case(kind: AttentionKind, sizes: Any = SIZES, dtypes: Any = HALVES, **options: Any) -> Case:
    return make_case(np.random.default_rng(0), kind, sizes=sizes, dtypes=dtypes, **options)


# ---- which program ---------------------------------------------------------------------------------------------------


def _lowered(case: Case) -> str:
    """Text of both primitives, lowered for GPUs."""

    def run(operands: Any, out_bar: Any) -> Any:
        out, logsumexp = attention_p.bind(*operands, kind=case.kind)
        dtypes = tuple(x.dtype.name for x in (*operands[:3], *case.biases))
        return attention_gradient_p.bind(
            *operands[:3],
            out,
            logsumexp,
            out_bar,
            *operands[3:],
            kind=case.kind,
            dtypes=dtypes,
            with_bias_gradient=(True,) * case.kind.n_biases,
        )

    return jax.jit(run).trace(case.operands, case.out_bar).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("kind", [AttentionKind(scale=0.5), CAUSAL, dataclasses.replace(CAUSAL, left=7)], ids=str)
def test_cudnn_is_called(kind: AttentionKind) -> None:
    text = _lowered(_case(kind))
    assert "fmhaSoftmax(" in text and "fmhaSoftmaxBackward(" in text
    if kind.has_window:
        window = 0 if kind.left is None else kind.left + 1
        assert "CAUSAL" in text and f"sliding_window_length\\22: {window}," in text


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (AttentionKind(scale=0.5), {"dtypes": (np.float32,) * 3}),
        (AttentionKind(scale=0.5), {"dtypes": (jnp.bfloat16, jnp.bfloat16, jnp.float16)}),
        (AttentionKind(scale=0.5), {"sizes": (1, 64, 64, 1, 2, 8, 16)}),
        (AttentionKind(scale=0.5), {"sizes": (1, 64, 64, 1, 2, 256, 256)}),
        (AttentionKind(scale=0.5, float16=("product",)), {"dtypes": (jnp.float16,) * 3}),
        (AttentionKind(scale=-0.5), {}),
        (AttentionKind(scale=0.5, right=1), {}),
        (AttentionKind(scale=0.5, left=3), {}),
        (AttentionKind(scale=0.5, n_masks=1), {"mask_shapes": [(1, 1, 1, 64, 64)]}),
        (AttentionKind(scale=0.5, n_biases=1), {"bias_shapes": [(1, 1, 1, 64, 64)]}),
    ],
    ids=str,
)
def test_cudnn_is_not_called(kind: AttentionKind, options: Any) -> None:
    assert not cudnn.takes(*_case(kind, **options).operands[:3], kind)


def test_programs_without_a_kernel_and_old_or_absent_cudnn_call_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "fmha" not in _lowered(_case(AttentionKind(scale=0.5), dtypes=(np.float32,) * 3))
    for version in (None, 90600):
        monkeypatch.setattr(cudnn, "cudnn_version", lambda version=version: version)
        _forget()
        assert "fmha" not in _lowered(_case(AttentionKind(scale=0.5)))


def test_parameters_of_other_versions_of_jax_are_not_used_or_nothing_is_called() -> None:
    assert unused_parameters(lambda query, scale: None) == {}
    assert unused_parameters(lambda query, score_mod_args, score_mod: None) == {"score_mod": None, "score_mod_args": ()}
    assert unused_parameters(lambda query, of_the_future: None) is None


# ---- which numbers ---------------------------------------------------------------------------------------------------


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces cuDNN by its documented formulas, with all arrays doubled so that tests can detect it."""

    def kind_of(known: CudnnAttention) -> AttentionKind:
        left = None if known.window is None else known.window - 1
        return AttentionKind(scale=known.scale, left=left, right=0 if known.is_causal else None)

    def operands(query: Any, key: Any, value: Any, kind: AttentionKind) -> Any:
        b, t, _, d = query.shape
        positions = [jnp.arange(n, dtype=np.int32) for n in (t, key.shape[1])][: kind.n_positions]
        return query.reshape(b, t, key.shape[2], -1, d), key, value, *positions

    def forward(query: Any, key: Any, value: Any, known: CudnnAttention) -> Any:
        kind = kind_of(known)
        arrays = operands(query, key, value, kind)
        out, logsumexp = blockwise.attend(*arrays, kind=kind)
        return out.reshape(query.shape) * 2, logsumexp.reshape(*query.shape[:-1]).transpose(0, 2, 1)

    def backward(given: Any, out: Any, logsumexp: Any, out_bar: Any, known: CudnnAttention) -> Any:
        kind = kind_of(known)
        arrays = operands(*given, kind)
        shape = arrays[0].shape
        bars = blockwise.differentiate(
            *arrays[:3],
            out.reshape(shape),
            logsumexp.transpose(0, 2, 1).reshape(shape[:-1]),
            out_bar.reshape(shape),
            *arrays[3:],
            kind=kind,
            dtypes=(out.dtype.name,) * 3,
            with_bias_gradient=(),
        )
        return [(x * 2).reshape(y.shape) for x, y in zip(bars, given, strict=True)]

    monkeypatch.setattr(cudnn, "cudnn_attention", forward)
    monkeypatch.setattr(cudnn, "cudnn_attention_gradient", backward)


def _check(case: Case, by_cudnn: bool) -> None:
    """Results are equal to the plain program's, doubled if cuDNN computed them."""
    factor = 2.0 if by_cudnn else 1.0
    out, logsumexp = blockwise.attend(*case.operands, kind=case.kind)
    arrays = (*case.operands[:3], out, logsumexp, case.out_bar, *case.operands[3:])
    params: Any = {"kind": case.kind, "dtypes": ("bfloat16",) * 3, "with_bias_gradient": ()}
    expected = (out, *blockwise.differentiate(*arrays, **params))

    found_out, found_logsumexp = cudnn.attend(*case.operands, kind=case.kind)
    found = (found_out, *cudnn.differentiate(*arrays, **params))
    np.testing.assert_allclose(found_logsumexp, logsumexp, rtol=1e-5, atol=1e-5)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x.astype(np.float32), factor * y.astype(np.float32), rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("pretended")
def test_positions_decide() -> None:
    first = np.arange(64)
    for queries, keys in ((first, first), (first + 64, first + 64), (first + 64, first)):
        _check(_case(CAUSAL, positions=(queries, keys)), True)
    for queries, keys in ((first + 1, first), (2 * first, 2 * first)):
        _check(_case(CAUSAL, positions=(queries, keys)), False)

    # The last 64 of 128 positions are not a diagonal that cuDNN counts from 0.
    more_keys = (1, 64, 128, 1, 2, 8, 8)
    _check(_case(CAUSAL, sizes=more_keys), False)
    _check(_case(CAUSAL, sizes=more_keys, positions=(first + 128, np.arange(128))), True)


@pytest.mark.usefixtures("pretended")
def test_masked_scores_that_have_weight_and_windows() -> None:
    _check(_case(dataclasses.replace(CAUSAL, masked_score=-math.inf)), True)
    _check(_case(dataclasses.replace(CAUSAL, masked_score=-50.0)), False)

    windowed = dataclasses.replace(CAUSAL, left=5)
    _check(_case(windowed), True)
    _check(_case(windowed, positions=(np.arange(64) + 64, np.arange(64))), False)
