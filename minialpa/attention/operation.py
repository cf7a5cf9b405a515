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

Neither computes all scores at once. Query position i sees key position j if i - left <= j <= i + right, in terms of
`query_positions` and `key_positions`; a causal mask is right = 0. Positions are operands, so that devices which hold a
part of the queries know which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import Primitive

from minialpa.attention.blockwise import attend, differentiate
from minialpa.support.private_jax import define_function, new_aval


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """What the operands of an attention are, and how scores are made of them.

    Attributes:
        scale: factor of the products of queries and keys.
        left: how many positions back a query sees; None for all.
        right: how many positions ahead a query sees; None for all, 0 for a causal mask.
        masked_score: the score of what is masked; -inf, or a finite number, at which a query that sees nothing averages
            over all keys.
        n_biases: number of arrays that are added to the scores.
        n_masks: number of boolean arrays; a score is masked where one of them is False.
    """

    scale: float
    left: int | None = None
    right: int | None = None
    masked_score: float = float("-inf")
    n_biases: int = 0
    n_masks: int = 0

    @property
    def has_window(self) -> bool:
        """Whether positions decide on what is seen, so that they are operands."""
        return self.left is not None or self.right is not None

    @property
    def n_positions(self) -> int:
        """Number of operands that are positions: those of the queries and those of the keys, or none."""
        return 2 if self.has_window else 0


#: Operands: query [b t g r d], key [b s g d], value [b s g e]; if there is a window, positions of queries [t] and of
#: keys [s], int32; `n_biases` arrays and `n_masks` boolean arrays of [b g r t s], where any dimension may be of length 1.
#: Results: out [b t g r e] of the value's dtype, logsumexp [b t g r] of float32 (float64 for float64).
#: Parameter: kind, an `Attention`.
attention_p = Primitive("minialpa_attention")

#: Operands: query, key, value, out, logsumexp, out_bar [b t g r e], then positions, biases and masks as above.
#: Results: query_bar, key_bar, value_bar, and the cotangents of the biases that `wants_bias` names, in this order.
#: Parameters: kind; dtypes, the names of the dtypes of the results; wants_bias, a bool for each bias.
attention_gradient_p = Primitive("minialpa_attention_gradient")


def _attention_avals(query: Any, key: Any, value: Any, *_: Any, kind: Attention) -> list[Any]:
    b, t, g, r, _ = query.shape
    statistics = np.promote_types(query.dtype, np.float32)
    return [new_aval((b, t, g, r, value.shape[-1]), value.dtype), new_aval((b, t, g, r), statistics)]


def _gradient_avals(
    query: Any,
    key: Any,
    value: Any,
    *others: Any,
    kind: Attention,
    dtypes: Sequence[str],
    wants_bias: Sequence[bool],
) -> list[Any]:
    biases = others[3 + kind.n_positions :][: kind.n_biases]
    wanted = [bias for bias, is_wanted in zip(biases, wants_bias, strict=True) if is_wanted]
    return [new_aval(x.shape, np.dtype(dtype)) for x, dtype in zip((query, key, value, *wanted), dtypes, strict=True)]


for primitive, avals, fun in (
    (attention_p, _attention_avals, attend),
    (attention_gradient_p, _gradient_avals, differentiate),
):
    primitive.multiple_results = True
    primitive.def_abstract_eval(avals)
    primitive.def_impl(fun)
    define_function(primitive, fun)
