"""Runs a step as it was written and as it is recognised, and counts the attentions that were found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from minialpa.ir.equations import sub_jaxprs
from minialpa.recognition.step import recognise
from minialpa.tracing.evaluation import eval_flat
from minialpa.tracing.trace import TracedStep
from tests.helpers import trace


@dataclass(frozen=True)
class Found:
    """How many calls of the primitives a recognised step has, in its bodies too, and the step."""

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


def compared(fun: Callable[..., Any], *args: Any, tolerance: float = 1e-5, one_scale: bool = False) -> Found:
    """What is recognised in a function, whose results are the same as before, up to rounding.

    one_scale: errors are compared with the largest of all results. The gradient of a bias on keys is zero, so that its
        own size is that of its rounding error.
    """
    found = recognised(fun, *args)
    if found.counts == (0, 0):  # the same program
        return found
    leaves = jax.tree.leaves(args)
    new = jax.jit(lambda *xs: eval_flat(found.step.flat, xs))(*leaves)
    old = jax.jit(lambda *xs: jax.tree.leaves(fun(*jax.tree.unflatten(jax.tree.structure(args), xs))))(*leaves)
    assert len(new) == len(old)
    largest = max(float(np.abs(np.asarray(x, np.float64)).max(initial=1e-30)) for x in old)
    for a, b in zip(new, old, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        own = float(np.abs(b).max(initial=1e-30))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * (largest if one_scale else own))
    return found
