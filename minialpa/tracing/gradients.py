"""Marks that a training step leaves in its trace: gradients, pipeline boundaries, and values per micro-batch.

While `tracing_step` is open, `value_and_grad`

* evaluates the differentiated function equation by equation, each under a name scope with its number, which autodiff
gives to the backward equations as well;
* binds `gradient_p`, an identity, on the gradients.

`mark_pipeline_boundary` binds `boundary_p`, which has no operands, and `per_micro_batch` binds `per_micro_batch_p`, an
identity.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Primitive

from minialpa.ir.block import Block
from minialpa.ir.equations import is_literal
from minialpa.ir.op import module_path, tag_scope
from minialpa.support.private_jax import (
    argument_names,
    define_batching,
    define_jvp,
    define_linear,
    define_lowering,
    named_for_messages,
)
from minialpa.tracing.evaluation import eval_equation, eval_flat
from minialpa.tracing.flattening import flatten_calls

gradient_p = Primitive("minialpa_gradient")
gradient_p.multiple_results = True
gradient_p.def_impl(lambda *xs, **_: list(xs))
gradient_p.def_abstract_eval(lambda *avals, **_: list(avals))


def _gradient_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    return gradient_p.bind(*primals, **params), list(tangents)


define_jvp(gradient_p, _gradient_jvp)
define_batching(gradient_p, lambda xs, dims, **params: (gradient_p.bind(*xs, **params), dims))
define_lowering(gradient_p, lambda ctx, *xs, **_: list(xs))

boundary_p = Primitive("minialpa_boundary")
boundary_p.multiple_results = True
boundary_p.def_impl(lambda: [])
boundary_p.def_abstract_eval(lambda: [])
define_batching(boundary_p, lambda xs, dims: ([], []))
define_lowering(boundary_p, lambda ctx: [])

per_micro_batch_p = Primitive("minialpa_per_micro_batch")
per_micro_batch_p.def_impl(lambda x, **_: x)
per_micro_batch_p.def_abstract_eval(lambda x, **_: x)
define_batching(per_micro_batch_p, lambda xs, dims, **params: (per_micro_batch_p.bind(*xs, **params), dims[0]))
define_lowering(per_micro_batch_p, lambda ctx, x, **_: [x])


def _per_micro_batch_transpose(cotangent: Any, x: Any, *, number: int, cotangent_of: bool) -> list[Any]:
    # The cotangent belongs to the same micro-batch and has the weight of the value, see `inter/microbatch/forms.py`.
    return [per_micro_batch_p.bind(cotangent, number=number, cotangent_of=not cotangent_of)]


define_linear(per_micro_batch_p, _per_micro_batch_transpose)

# Counters of the calls in the traced step; None outside `tracing_step`.
_tracing: ContextVar[Iterator[int] | None] = ContextVar("minialpa_tracing", default=None)
_per_micro_batch_calls: ContextVar[Iterator[int] | None] = ContextVar("minialpa_per_micro_batch", default=None)


@contextmanager
def tracing_step() -> Iterator[None]:
    """While open, the public functions of this module leave their marks."""
    gradient_token = _tracing.set(itertools.count())
    micro_batch_token = _per_micro_batch_calls.set(itertools.count())
    try:
        yield
    finally:
        _tracing.reset(gradient_token)
        _per_micro_batch_calls.reset(micro_batch_token)


def mark_pipeline_boundary() -> None:
    """End a layer here, for `layer_option="manual"`. The values of the program do not change."""
    if _tracing.get() is not None:
        boundary_p.bind()


def per_micro_batch(x: Any) -> Any:
    """Compute `x`, a reduction over the examples such as a mean, for each micro-batch separately.

    A step over micro-batches equals the full-batch step. A model may need a reduction over the micro-batch instead, for
    a router's balance loss or batch statistics:

        load = minialpa.per_micro_batch(jnp.mean(routed, axis=0))

    A mean becomes the micro-batch's mean; a sum becomes a sum of fewer examples. Results of the step that depend on `x`
    are averaged over the micro-batches, and gradients are gradients of that average. x: a pytree of float arrays.
    Outside `parallelize`, returns `x` unchanged.
    """
    calls = _per_micro_batch_calls.get()
    if calls is None:
        return x
    return jax.tree.map(lambda leaf: per_micro_batch_p.bind(leaf, number=next(calls), cotangent_of=False), x)


def value_and_grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Any
) -> Callable[..., Any]:
    """`jax.value_and_grad`, which also marks where gradients end and the update begins.

    Takes all of jax's parameters. Inside `parallelize`, the marked gradients are accumulated over micro-batches.
    """

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        counter = _tracing.get()
        if counter is None:
            return jax.value_and_grad(fun, argnums, has_aux, **options)(*args, **kwargs)

        call = next(counter)
        tagged = _tag_equations(fun, call)
        value, grads = jax.value_and_grad(tagged, argnums, has_aux, **options)(*args, **kwargs)
        return value, _mark_gradients(grads, call)

    return wrapped


def _mark_gradients(grads: Any, call: int) -> Any:
    """The gradients with marks. Gradients of integers get no mark: their dtype, float0, holds no values."""
    leaves, tree = jax.tree.flatten(grads)
    has_values = [getattr(leaf, "dtype", None) != jax.dtypes.float0 for leaf in leaves]
    marked = iter(gradient_p.bind(*itertools.compress(leaves, has_values), call=call))
    return jax.tree.unflatten(
        tree, [next(marked) if has_value else leaf for leaf, has_value in zip(leaves, has_values, strict=True)]
    )


def grad(
    fun: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Any
) -> Callable[..., Any]:
    """`jax.grad`, with the marks of `value_and_grad`."""
    both = value_and_grad(fun, argnums, has_aux, **options)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if _tracing.get() is None:  # jax.grad's own checks and messages
            return jax.grad(fun, argnums, has_aux, **options)(*args, **kwargs)
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped


def _is_dynamic(leaf: Any) -> bool:
    """Python code may branch on booleans, so they are static."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, float, complex)) or (
        isinstance(leaf, int) and not isinstance(leaf, bool)
    )


def _tag_equations(fun: Callable[..., Any], call: int) -> Callable[..., Any]:
    """`fun` as equations, each under a name scope with its number. call: number of the gradient call."""

    def tagged(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        dynamic = [i for i, leaf in enumerate(leaves) if _is_dynamic(leaf)]

        def on_arrays(*arrays: Any) -> Any:
            filled = list(leaves)
            for i, array in zip(dynamic, arrays, strict=True):
                filled[i] = array
            new_args, new_kwargs = jax.tree.unflatten(tree, filled)
            return fun(*new_args, **new_kwargs)

        names = argument_names(fun, args, kwargs)
        traced = named_for_messages(on_arrays, fun, [names[i] for i in dynamic])
        closed, out = jax.make_jaxpr(traced, return_shape=True)(*[leaves[i] for i in dynamic])
        flat = flatten_calls(closed.jaxpr, tuple(closed.consts), only_jit=True)
        values = _eval_tagged(flat, [leaves[i] for i in dynamic], call)
        return jax.tree.unflatten(jax.tree.structure(out), values)

    return functools.wraps(fun)(tagged)


def _eval_tagged(flat: Block, args: Sequence[Any], call: int) -> list[Any]:
    """Run each equation under the names of its modules and its tag; boundaries only count layers."""
    ops, layer = enumerate(flat.ops), 0

    def evaluate(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        nonlocal layer
        i, op = next(ops)
        if eqn.primitive is boundary_p:
            layer += 1
            return []
        with jax.named_scope(tag_scope(module_path(op.scope), call, layer, i)):
            return eval_equation(eqn, operands)

    results = eval_flat(flat, args, evaluate)
    return [jnp.asarray(x) if is_literal(atom) else x for x, atom in zip(results, flat.outvars, strict=True)]
