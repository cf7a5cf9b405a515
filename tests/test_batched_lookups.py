"""Gather and scatter at the own position become operations with batch dimensions, and compute the same to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from minialpa.ir.equations import sub_jaxprs
from minialpa.tracing.batched_lookups import with_batched_lookups
from minialpa.tracing.evaluation import eval_flat
from minialpa.tracing.flattening import trace_flat

B, T, H = 4, 6, 3
X = np.round(np.random.default_rng(0).normal(size=(B, T, H)) * 9).astype(np.float32)
#: Some are out of bounds, some negative.
I = np.array([2, 0, 5, -1], np.int32)  # noqa: E741
FAR = np.array([[2, 0, 9], [0, -1, 3], [5, -9, 0], [-1, 1, 1]], np.int32)
V = np.round(np.random.default_rng(1).normal(size=(B, H)) * 9).astype(np.float32)


def _rows() -> Any:
    return jnp.arange(B)


def _kinds(eqns: Any) -> list[tuple[str, tuple[int, ...]]]:
    """The gathers and scatters of a program and of all in it, with the batch dimensions of the operand."""
    found = []
    for eqn in eqns:
        if eqn.primitive.name.startswith(("gather", "scatter")):
            found.append((eqn.primitive.name, eqn.params["dimension_numbers"].operand_batching_dims))
        for inner in sub_jaxprs(eqn):
            found += _kinds(getattr(inner, "jaxpr", inner).eqns)
    return found


def _both(fun: Callable[..., Any], *args: Any) -> tuple[list[Any], list[Any]]:
    """The gathers and scatters, before and after; checks that the results are equal."""
    flat, _ = trace_flat(fun, *args)
    new = with_batched_lookups(flat)
    run = jax.jit(lambda *xs: (eval_flat(flat, xs), eval_flat(new, xs)))
    expected, computed = run(*jax.tree.leaves(args))
    for one, other in zip(expected, computed, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
    return _kinds(flat.eqns), _kinds(new.eqns)


OWN: dict[str, Callable[[Any, Any], Any]] = {
    "one": lambda x, i: x[_rows(), i],
    "several of each example": lambda x, i: x[_rows()[:, None], jnp.stack([i, i, i + 1], 1)],
    "second dimension": lambda x, i: jnp.swapaxes(x, 0, 1)[i, _rows()],
    "int8": lambda x, i: x[jnp.arange(B, dtype=np.int8), i.astype(np.int8)],
    "concatenated": lambda x, i: x[jnp.concatenate([jnp.arange(1), jnp.arange(1, B - 1), jnp.array([B - 1])]), i],
    "vmapped indices": lambda x, i: jax.vmap(lambda j: x[_rows(), j])(jnp.stack([i, i + 1, i - 1])),
    "filled": lambda x, i: x.at[_rows()[:, None], FAR].get(mode="fill", fill_value=7.0),
    "scan": lambda x, i: lax.scan(lambda c, k: (c, x[_rows(), (i + k) % T] + c), 1.0, jnp.arange(3))[1],
    "carried unchanged": lambda x, i: lax.fori_loop(
        0, 3, lambda k, c: (c[0], c[1] + x[c[0], (i + k) % T]), (_rows(), x[:, 0])
    )[1],
    "while": lambda x, i: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + x[_rows(), c[0]]),
                                         (0, x[:, 0]))[1],
    "cond": lambda x, i: lax.cond(i[0] > 0, lambda x: x[_rows(), i], lambda x: x[_rows(), 0], x),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_what_is_looked_up_at_the_own_position_gets_a_batch_dimension(name: str) -> None:
    before, after = _both(OWN[name], X, I)
    assert before
    assert all(not dims for _, dims in before)
    assert all(dims for _, dims in after), after


@pytest.mark.parametrize("name", ["scan", "cond", "filled"])
def test_derivatives_scatter_at_the_own_position(name: str) -> None:
    _, after = _both(lambda x: jax.grad(lambda x: jnp.sum(OWN[name](x, jnp.asarray(I)) ** 2))(x), X)
    assert "scatter-add" in [kind for kind, _ in after]
    assert all(dims for _, dims in after), after


@pytest.mark.parametrize(("update", "mode"), [("set", None), ("max", "clip")])
def test_updates_at_the_own_position(update: str, mode: Any) -> None:
    def fun(x: Any, i: Any, v: Any) -> Any:
        one = getattr(x.at[_rows(), i], update)(v, mode=mode)
        several = getattr(x.at[_rows()[:, None], FAR], update)(jnp.stack([v, v + 1, v], 1), mode=mode)
        swapped = getattr(jnp.swapaxes(x, 0, 1).at[i, _rows()], update)(v, mode=mode)
        part = getattr(x.at[_rows(), :, i % H], update)(x[:, :, 0], mode=mode)
        return one, several, swapped, part, getattr(x.at[_rows()], update)(x + 1, mode=mode)

    before, after = _both(fun, X, I, V)
    assert len(before) == len(after) == 5
    assert all(dims for _, dims in after), after


def test_components_keep_their_order_around_the_own_position() -> None:
    x = np.arange(B * 5 * 6 * 7, dtype=np.float32).reshape(5, B, 6, 7)
    _, after = _both(lambda x, i: x[i % 5, _rows(), :, (2 * i) % 7], x, I)
    assert after == [("gather", (1,))]
    _, after = _both(lambda x: x[_rows()[:, None], jnp.arange(T)[None]], X)
    assert after == [("gather", (0, 1))]
    # The diagonal: both components are the position along one dimension of the indices, which has one of the operand.
    _, after = _both(lambda x: x[_rows(), _rows()], X[:, :B])
    assert after == [("gather", (0,))]


OTHER: dict[str, Callable[[Any, Any], Any]] = {
    "the one behind": lambda x, i: x[(_rows() + 1) % B, i],
    "reversed": lambda x, i: x[B - 1 - _rows(), i],
    "almost": lambda x, i: x[np.array([0, 1, 3, 2]), i],
    "one and itself": lambda x, i: x[_rows()[:, None], :, 0] + x[jnp.zeros((B, 1), np.int32), :, 0],
    "chosen by data": lambda x, i: x[jnp.where(i > 0, _rows(), 0), i],
    "carried and changed": lambda x, i: lax.fori_loop(
        0, 3, lambda k, c: ((c[0] + 1) % B, c[1] + x[c[0], i]), (_rows(), x[:, 0])
    )[1],
    "slices of a scan": lambda x, i: lax.scan(lambda c, r: (c, x[r, i]), 1.0, jnp.stack([_rows(), _rows()[::-1]]))[1],
    "overflowing": lambda x, i: jnp.zeros((300, 2))[jnp.arange(300, dtype=np.uint8), 0],
    "rounded": lambda x, i: x[(_rows().astype(np.float32) * 1.0).astype(np.int32), i],
    "both": lambda x, i: x[jnp.arange(3)[:, None], jnp.arange(3)[:, None], jnp.arange(3)[None]],
    "the later of two": lambda x, i: x[jnp.maximum(_rows()[:, None], _rows()[None]), i[None]],
    "the later of two, chosen": lambda x, i: x[jnp.where((r := _rows()[:, None]) >= _rows()[None], r, 0), i[None]],
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_indices_that_may_pair_examples_stay_as_they_are(name: str) -> None:
    before, after = _both(OTHER[name], X, I)
    if name == "one and itself":
        assert after[0] == ("gather", (0,))
        assert after[1:] == before[1:]
    elif name == "both":
        assert after == [("gather", (2,))], "the other dimension is shorter than the operand's"
    else:
        assert after == before
