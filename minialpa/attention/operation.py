"""The primitives of attention: `attention_p`, and its derivative `attention_gradient_p`.

For example b, key/value head g, query head r of that group, query position t and key position s:

    score[b g r t s]  = scale * sum_d query[b t g r d] key[b s g d] + sum of biases[b g r t s]
    score             = masked_score where a mask is False, where segments of query and key differ, or where position s
                        is outside the window of position t
    p[b g r t s]      = exp(score) / sum_s exp(score)                      softmax, in float32 or wider
    out[b t g r e]    = sum_s p[b g r t s] value[b s g e]
    logsumexp[b t g r] = log sum_s exp(score)

and, with out_bar the cotangent of `out`:

    value_bar[b s g e]   = sum_(r t) p out_bar
    p_bar                = sum_e out_bar value
    score_bar            = p (p_bar - sum_e out_bar out), 0 where the score is masked
    query_bar, key_bar   = scale * sum_s score_bar key, scale * sum_(r t) score_bar query
    bias_bar             = score_bar, summed over the dimensions in which the bias has length 1

Query position i sees key position j if i - left <= j <= i + right; a causal mask is right = 0. Positions are operands,
so a device with a part of the queries has their positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Primitive

from minialpa.attention import blockwise, cudnn, ring
from minialpa.attention.kind import AttentionKind as AttentionKind
from minialpa.support.private_jax import define_function, new_aval

#: Operands: query [b t g r d], key [b s g d], value [b s g e]; with a window, positions of queries [t] and keys [s],
#: int32; `n_segments` pairs of integers or bools [b g r t 1] and [b g r 1 s]; `n_biases` arrays and `n_masks` boolean
#: arrays [b g r t s]. Any other dimension of the last three may be 1, too.
#: Results: out [b t g r e] of the value's dtype, logsumexp [b t g r] of float32 (float64 for a query of float64).
attention_p = Primitive("minialpa_attention")

#: Operands: query, key, value, out, logsumexp, out_bar [b t g r e], then positions and all others as above.
#: Results: query_bar, key_bar, value_bar, and cotangents of the biases that `with_bias_gradient` selects, in `dtypes`.
attention_gradient_p = Primitive("minialpa_attention_gradient")


def _attention_avals(*operands: Any, kind: AttentionKind) -> list[Any]:
    query, _, value, *_ = operands
    b, t, g, r, _ = query.shape
    statistics = np.promote_types(query.dtype, np.float32)
    return [
        new_aval((b, t, g, r, value.shape[-1]), value.dtype, operands),
        new_aval((b, t, g, r), statistics, operands),
    ]


def _gradient_avals(
    *operands: Any, kind: AttentionKind, dtypes: Sequence[str], with_bias_gradient: Sequence[bool]
) -> list[Any]:
    biases = operands[6 + kind.n_positions + 2 * kind.n_segments :][: kind.n_biases]
    requested = [bias for bias, is_requested in zip(biases, with_bias_gradient, strict=True) if is_requested]
    like = zip((*operands[:3], *requested), dtypes, strict=True)
    return [new_aval(x.shape, np.dtype(dtype), operands) for x, dtype in like]


for primitive, avals, fun, fun_on_gpus in (
    (attention_p, _attention_avals, blockwise.attend, cudnn.attend),
    (attention_gradient_p, _gradient_avals, blockwise.differentiate, cudnn.differentiate),
):
    primitive.multiple_results = True
    primitive.def_abstract_eval(avals)
    primitive.def_impl(fun)
    define_function(primitive, fun)
    define_function(primitive, fun_on_gpus, "cuda")


def in_ring(primitive: Primitive) -> Callable[..., list[Any]]:
    """The function of a device in a ring: of the `Ring`, then operands and parameters of the primitive."""
    return ring.attend if primitive is attention_p else ring.differentiate
