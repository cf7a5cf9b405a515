"""Runs a step before and after recognition, and counts the recognised attentions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from minialpa.ir.equations import sub_jaxprs
from minialpa.recognition.step import recognise
from minialpa.tracing.evaluation import eval_flat
from minialpa.tracing.trace import TracedStep
from tests.helpers import trace


@dataclass(frozen=True)
class Found:
    """A recognised step, and its number of calls of the primitives, also inside bodies."""

    attentions: int
    gradients: int
    step: TracedStep

    @property
    def counts(self) -> tuple[int, int]:
        return self.attentions, self.gradients


def array(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def scores_of(q: Any, k: Any) -> Any:
    return jnp.einsum("bthd,bshd->bhts", q, k)


def mixed(p: Any, v: Any) -> Any:
    return jnp.einsum("bhts,bshd->bthd", p, v)


def softmax(x: Any) -> Any:
    return jax.nn.softmax(x, axis=-1)


def all_equations(eqns: Iterable[Any]) -> Iterable[Any]:
    for eqn in eqns:
        yield eqn
        for body in sub_jaxprs(eqn):
            yield from all_equations(getattr(body, "jaxpr", body).eqns)


def recognised(fun: Callable[..., Any], *args: Any, everywhere: bool = True) -> Found:
    step = recognise(trace(fun, *args, batch=()), everywhere=everywhere)
    names = [eqn.primitive.name for eqn in all_equations(step.flat.eqns)]
    return Found(names.count("minialpa_attention"), names.count("minialpa_attention_gradient"), step)


def compared(fun: Callable[..., Any], *args: Any, tolerance: float = 1e-5) -> Found:
    """The recognised attentions of a function, after a check that its results are equal up to rounding."""
    found = recognised(fun, *args)
    if found.counts == (0, 0):  # the same program
        return found
    leaves = jax.tree.leaves(args)
    new = jax.jit(lambda *xs: eval_flat(found.step.flat, xs))(*leaves)
    old = jax.jit(lambda *xs: jax.tree.leaves(fun(*jax.tree.unflatten(jax.tree.structure(args), xs))))(*leaves)
    assert len(new) == len(old)
    for a, b in zip(new, old, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * float(np.abs(b).max(initial=1e-30)))
    return found


# ---- arrays of special floats ----------------------------------------------------------------------------------------


#: The largest number, as a fraction of the dtype's largest, so that sums of weights that are 1 + eps stay finite.
_LARGEST = 0.9


def floats(dtype: Any) -> st.SearchStrategy[float]:
    """0 of both signs, the smallest and the largest numbers, infinities, NaN, and some ordinary numbers."""
    info = jnp.finfo(dtype)
    special = [0.0, float(info.smallest_subnormal), float(info.tiny), _LARGEST * float(info.max), np.inf]
    return st.sampled_from([sign * x for x in special for sign in (1, -1)] + [np.nan, 1.0, -3.0, 0.25, 2.5])


def arrays(dtype: Any, *shape: int) -> st.SearchStrategy[np.ndarray]:
    """Arrays with at least as many ordinary numbers as special ones."""
    n = int(np.prod(shape))
    ordinary = st.floats(-4, 4, width=16)

    def made(values: list[float]) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.asarray(values, np.float64).reshape(shape).astype(dtype)

    return st.lists(ordinary | floats(dtype), min_size=n, max_size=n).map(made)


def assert_same_floats(x: Any, expected: Any, atol: Any, what: str) -> None:
    """NaN and each infinity at the same places, and all else within `atol`."""
    x, expected = np.asarray(x, np.float64), np.asarray(expected, np.float64)
    with np.errstate(all="ignore"):
        same = (x == expected) | (np.isnan(x) & np.isnan(expected)) | (np.abs(x - expected) <= atol)
    places = ~same
    assert same.all(), f"{what}\n{x[places]}\nin place of\n{expected[places]}"
