"""The rule of cuDNN's attention, without cuDNN: its jaxpr, and its shapes on shards.

Only this file replaces jax's queries of the machine (the version of cuDNN, the device).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.extend.core import JaxprEqn

import minialpa.rules.table  # noqa: F401 (fills the rule table)
from minialpa.ir.equations import aval_of
from minialpa.rules.known_rules import factors_of
from minialpa.rules.shards import localize
from minialpa.support.private_jax import changed_aval, result_avals
from minialpa.tracing.flattening import trace_flat
from tests.rules.rule_laws import notation

B, T, S, N, K, H = 4, 8, 6, 4, 2, 16


@pytest.fixture(autouse=True)
def _some_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda capability: False)


def _half(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.bfloat16)


def _attention(**options: Any) -> Callable[..., Any]:
    return lambda q, k, v, *bias: jax.nn.dot_product_attention(q, k, v, *bias, implementation="cudnn", **options)


def _both(fun: Callable[..., Any], *arrays: Any) -> list[JaxprEqn]:
    """The equations of attention, forward and backward."""

    def gradients(*arrays: Any) -> Any:
        out, pull = jax.vjp(fun, *arrays)
        return pull(out)

    flat, _ = trace_flat(gradients, *arrays)
    found = [eqn for eqn in flat.eqns if eqn.primitive.name.startswith("dot_product_attention")]
    assert len(found) == 2, flat.eqns
    return found


def _qkv() -> tuple[Any, Any, Any]:
    return _half(B, T, N, H), _half(B, S, K, H, seed=1), _half(B, S, K, H, seed=2)


def test_examples_and_heads_are_split_forward_and_backward() -> None:
    forward, backward = map(notation, _both(_attention(), *_qkv()))
    assert forward.startswith("[a B (c D) E], [a F c E], [a F c G], ")
    assert "-> [a B (c D) G], [a (c D) B]" in forward, forward
    assert "-> [a B (c D) E], [a F c E], [a F c G]" in backward, backward


@pytest.mark.parametrize(
    ("shape", "bias", "how"), [((1, N, T, S), "[1 (c D) B F]", "sum(a)"), ((B, 1, T, S), "[a 1 B F]", "sum(c)")]
)
def test_gradients_of_biases_are_sums_over_what_shares_them(shape: tuple[int, ...], bias: str, how: str) -> None:
    forward, backward = map(notation, _both(_attention(), *_qkv(), _half(*shape, seed=3)))
    assert bias in forward
    assert backward.endswith(f"{bias} {how}")


@pytest.mark.parametrize(
    "options",
    [
        {"local_window_size": (2, 0), "is_causal": True},
        {"query_seq_lengths": np.full(B, 5, np.int32), "key_value_seq_lengths": np.full(B, 3, np.int32)},
    ],
    ids=["window", "lengths"],
)
def test_masks_and_lengths_do_not_stop_it(options: dict[str, Any]) -> None:
    for eqn in _both(_attention(**options), *_qkv()):
        factors = factors_of(eqn)
        assert [factors.sizes[f] for f in factors.splittable] == [B, K]


@pytest.mark.parametrize("change", ["dropout", "packed"])
def test_what_depends_on_the_whole_call_is_not_split(change: str) -> None:
    query, key, value = _half(B, T, N, H), _half(B, S, N, H), _half(B, S, N, H)
    options: dict[str, Any] = {"dropout_rate": 0.1}
    if change == "packed":
        lengths, offsets = np.full((B, 2), 2, np.int32), np.tile(np.array([[0, 2, 4]], np.int32), (B, 1))
        options = {
            "q_seqlen": lengths, "kv_seqlen": lengths, "q_offsets": offsets, "kv_offsets": offsets,
            "mask_type": cudnn.MaskType.PADDING,
        }  # fmt: skip
    for eqn in _both(lambda *qkv: cudnn.dot_product_attention(*qkv, **options), query, key, value):
        assert factors_of(eqn).splittable == ()


def test_shards_of_arrays_with_heads_first_have_the_shapes_of_the_rule() -> None:
    arrays = tuple(jnp.swapaxes(x, 1, 2) for x in _qkv())
    bias = _half(1, N, T, S, seed=3)
    call = lambda q, k, v, bias: cudnn.dot_product_attention(q, k, v, bias, qkv_layout="BNTH")  # noqa: E731
    for eqn in _both(call, *arrays, bias):
        factors = factors_of(eqn)
        for n_splits in [*({f: factors.sizes[f]} for f in factors.splittable), dict.fromkeys(factors.splittable, 2)]:
            local = [
                changed_aval(aval_of(atom), shape=factors.shape(dims, n_splits))
                for atom, dims in zip(eqn.invars, factors.operands, strict=True)
            ]
            made = result_avals(eqn, local, localize(eqn, factors, n_splits))
            assert [own.shape for own in made] == [factors.shape(dims, n_splits) for dims in factors.results]
