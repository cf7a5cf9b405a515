"""The primitives of attention: `attention_p`, and `attention_gradient_p`, its derivative.

For example b, key/value head g, query head r of that group, query position t and key position s:

    score[b g r t s]  = scale * sum_d query[b t g r d] key[b s g d] + sum of biases[b g r t s]
    score             = masked_score where a mask is False, or where position s is outside of the window of position t
    p[b g r t s]      = exp(score) / sum_s exp(score)                      softmax, in float32 or wider
    out[b t g r e]    = sum_s p[b g r t s] value[b s g e]
    logsumexp[b t g r] = log sum_s exp(score)

and, with out_bar the cotangent of `out`:

    value_bar[b s g e]   = sum_(r t) p out_bar
    p_bar                = sum_e out_bar value
    score_bar            = p (p_bar - sum_e out_bar out), 0 where the score is masked
    query_bar, key_bar   = scale * sum_s score_bar key, scale * sum_(r t) score_bar query
    bias_bar             = score_bar, summed over the dimensions in which the bias has length 1

If the kind is a `Float16Attention`, some of these steps are rounded to float16.

Neither computes all scores at once. Query position i sees key position j if i - left <= j <= i + right, in terms of
`query_positions` and `key_positions`; a causal mask is right = 0. Positions are operands, so that devices which hold a
part of the queries know which.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from minialpa.attention import blockwise, cudnn
from minialpa.attention.kind import Attention as Attention
from minialpa.support.private_jax import define_batching, define_function, new_aval

#: Operands: query [b t g r d], key [b s g d], value [b s g e]; if there is a window, positions of queries [t] and of
#: keys [s], int32; `n_biases` arrays and `n_masks` boolean arrays of [b g r t s], any dimension of which may be 1.
#: Results: out [b t g r e] of the value's dtype, logsumexp [b t g r] of float32 (float64 for a query of float64).
#: Parameter: kind, an `Attention`.
attention_p = Primitive("minialpa_attention")

#: Operands: query, key, value, out, logsumexp, out_bar [b t g r e], then positions, biases and masks as above.
#: Results: query_bar, key_bar, value_bar, and the cotangents of the biases that `wants_bias` names, in this order.
#: Parameters: kind; dtypes, the names of the dtypes of the results; wants_bias, a bool for each bias.
attention_gradient_p = Primitive("minialpa_attention_gradient")


def _attention_avals(*operands: Any, kind: Attention) -> list[Any]:
    query, _, value, *_ = operands
    b, t, g, r, _ = query.shape
    statistics = np.promote_types(query.dtype, np.float32)
    return [
        new_aval((b, t, g, r, value.shape[-1]), value.dtype, operands),
        new_aval((b, t, g, r), statistics, operands),
    ]


def _gradient_avals(*operands: Any, kind: Attention, dtypes: Sequence[str], wants_bias: Sequence[bool]) -> list[Any]:
    biases = operands[6 + kind.n_positions :][: kind.n_biases]
    wanted = [bias for bias, is_wanted in zip(biases, wants_bias, strict=True) if is_wanted]
    like = zip((*operands[:3], *wanted), dtypes, strict=True)
    return [new_aval(x.shape, np.dtype(dtype), operands) for x, dtype in like]


def _batched_attention(operands: Sequence[Any], dims: Sequence[int | None], *, kind: Attention) -> tuple[Any, Any]:
    """`vmap`: what is mapped becomes a part of the examples b."""
    if _maps_positions(dims, kind, 3):
        return _one_by_one(attention_p, operands, dims, {"kind": kind})
    n = _mapped_length(operands, dims)
    folded = _fold(operands, dims, n, range(3), range(3, 3 + kind.n_positions))
    return _unfold(attention_p.bind(*folded, kind=kind), n, _n_examples(operands, dims))


def _batched_gradient(
    operands: Sequence[Any],
    dims: Sequence[int | None],
    *,
    kind: Attention,
    dtypes: Sequence[str],
    wants_bias: Sequence[bool],
) -> tuple[Any, Any]:
    params = {"kind": kind, "dtypes": dtypes, "wants_bias": wants_bias}
    if _maps_positions(dims, kind, 6):
        return _one_by_one(attention_gradient_p, operands, dims, params)

    # A bias has a cotangent for each of what is mapped, so it is folded even if it is the same for all.
    first_bias = 6 + kind.n_positions
    wanted = [first_bias + i for i, is_wanted in enumerate(wants_bias) if is_wanted]
    n = _mapped_length(operands, dims)
    folded = _fold(operands, dims, n, (*range(6), *wanted), range(6, first_bias))
    results, result_dims = _unfold(attention_gradient_p.bind(*folded, **params), n, _n_examples(operands, dims))

    for place, i in enumerate(wanted, start=3):
        if _n_examples(operands, dims, i) < results[place].shape[1]:
            results[place] = results[place].sum(axis=1, keepdims=True)
    return results, result_dims


def _maps_positions(dims: Sequence[int | None], kind: Attention, first: int) -> bool:
    return any(dim is not None for dim in dims[first : first + kind.n_positions])


def _one_by_one(
    primitive: Primitive, operands: Sequence[Any], dims: Sequence[int | None], params: Mapping[str, Any]
) -> tuple[Any, Any]:
    mapped = [jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims, strict=True) if dim is not None]

    def run(parts: Sequence[Any]) -> Any:
        rest = iter(parts)
        one = [x if dim is None else next(rest) for x, dim in zip(operands, dims, strict=True)]
        return primitive.bind(*one, **params)

    results = lax.map(run, mapped)
    return results, [0] * len(results)


def _mapped_length(operands: Sequence[Any], dims: Sequence[int | None]) -> int:
    return next(int(x.shape[dim]) for x, dim in zip(operands, dims, strict=True) if dim is not None)


def _fold(
    operands: Sequence[Any], dims: Sequence[int | None], n: int, always: Collection[int], positions: Collection[int]
) -> list[Any]:
    """Operands [b ...], of which some have one more dimension of length n, as [n*b ...].

    Positions remain what they are, and so does what is the same for all n and all b, except the operands in `always`.
    """
    b = _n_examples(operands, dims)
    folded = []
    for i, (x, dim) in enumerate(zip(operands, dims, strict=True)):
        if i not in positions and (dim is not None or i in always or x.shape[0] > 1):
            moved = x[None] if dim is None else jnp.moveaxis(x, dim, 0)
            x = jnp.broadcast_to(moved, (n, b, *moved.shape[2:])).reshape(n * b, *moved.shape[2:])
        folded.append(x)
    return folded


def _unfold(results: Sequence[Any], n: int, b: int) -> tuple[list[Any], list[int]]:
    return [x.reshape(n, b, *x.shape[1:]) for x in results], [0] * len(results)


def _n_examples(operands: Sequence[Any], dims: Sequence[int | None], i: int = 0) -> int:
    """The length b of an operand [b ...] that may have one more dimension."""
    return int(operands[i].shape[0 if dims[i] != 0 else 1])


@functools.partial(jax.jit, static_argnames=("primitive", "params"))
def _run(*operands: Any, primitive: Primitive, params: Sequence[tuple[str, Any]]) -> Any:
    return primitive.bind(*operands, **dict(params))


def _implementation(primitive: Primitive) -> Callable[..., list[Any]]:
    """What computes the primitive outside of `jax.jit`: the same that it is lowered to."""
    return lambda *operands, **params: _run(*operands, primitive=primitive, params=tuple(sorted(params.items())))


for primitive, avals, batched, fun, fun_on_gpus in (
    (attention_p, _attention_avals, _batched_attention, blockwise.attend, cudnn.attend),
    (attention_gradient_p, _gradient_avals, _batched_gradient, blockwise.differentiate, cudnn.differentiate),
):
    primitive.multiple_results = True
    primitive.def_abstract_eval(avals)
    primitive.def_impl(_implementation(primitive))
    define_batching(primitive, batched)
    define_function(primitive, fun)
    define_function(primitive, fun_on_gpus, "cuda")
