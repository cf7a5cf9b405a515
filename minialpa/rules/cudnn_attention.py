"""The attention of cuDNN, which `jax.nn.dot_product_attention(implementation="cudnn")` runs, forward and backward.

    q [b t (k g) h], k [b s k h], v [b s k e], bias [b (k g) t s], lengths [b]
        -> out [b t (k g) e], softmax statistics [b (k g) t]

b: examples, k: heads of keys and values, g: heads of queries that share one of these; the layout BNTH has heads before
positions. Examples and heads are split, all else is blocked. The gradient of a bias that all examples or all heads read
is summed over their shards. Dropout draws one mask for a whole call, and packed sequences and pages have offsets into
all of the examples: those are not split.

flops: 4 b t s (k g) h forward, of which the backward pass takes 2.5 times as many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from minialpa.ir.equations import Atom, shape_of
from minialpa.rules.common import Dim, FactorTable
from minialpa.rules.factors import Dims, Factors
from minialpa.rules.known_rules import replicated_factors, rule

#: The number of the layout BNTH in the parameters of the primitives; BTNH is 0.
_HEADS_FIRST = 1


class _Attention:
    """The factors of one call: those of its arrays by their roles."""

    def __init__(self, eqn: JaxprEqn) -> None:
        self.is_heads_first = eqn.params["layout"] == _HEADS_FIRST
        batch, positions, n_heads, features = self._ordered(shape_of(eqn.invars[0]))
        _, key_positions, n_key_heads, _ = self._ordered(shape_of(eqn.invars[1]))
        value_features = shape_of(eqn.invars[2])[3]

        self.table = FactorTable()
        self.examples = self.table.dim(batch)
        self.key_heads = self.table.dim(n_key_heads)
        sharing = self.table.dim(n_heads // n_key_heads, blocked=True)
        self.heads: Dim = (*self.key_heads, *sharing)
        self.positions, self.key_positions, self.features, self.value_features = (
            self.table.dim(size, blocked=True) for size in (positions, key_positions, features, value_features)
        )
        self.lengths = (batch, n_heads, positions, key_positions)

    def _ordered(self, dims: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
        """Examples, positions, heads and features, from the order of the layout or to it."""
        batch, first, second, features = dims
        return (batch, second, first, features) if self.is_heads_first else (batch, first, second, features)

    def queries(self) -> Dims:
        """Queries and their cotangents."""
        return self._ordered((self.examples, self.positions, self.heads, self.features))

    def outputs(self) -> Dims:
        """Results and their cotangents."""
        return self._ordered((self.examples, self.positions, self.heads, self.value_features))

    def keys(self) -> Dims:
        """Keys and their cotangents."""
        return self._ordered((self.examples, self.key_positions, self.key_heads, self.features))

    def values(self) -> Dims:
        """Values and their cotangents."""
        return self._ordered((self.examples, self.key_positions, self.key_heads, self.value_features))

    def other(self, atom: Atom) -> Dims:
        """A bias, softmax statistics or lengths: [b (k g) t s] or the first of these, 1 if all share it. Or nothing."""
        own = (self.examples, self.heads, self.positions, self.key_positions)
        return tuple(
            dim if size == length else self.table.dim(size, blocked=True)
            for dim, size, length in zip(own, shape_of(atom), self.lengths, strict=False)
        )


def _is_whole(eqn: JaxprEqn) -> bool:
    """Whether a call depends on more than each example and head by itself."""
    query, key, _, bias, _, _, offsets, _, pages, _ = (shape_of(atom) for atom in eqn.invars[:10])
    heads = 1 if eqn.params["layout"] == _HEADS_FIRST else 2
    is_packed, is_paged = len(offsets) == 2, len(pages) == 4
    is_odd = query[heads] % key[heads] > 0 or (
        len(bias) == 4 and (bias[0] not in (1, query[0]) or bias[1] not in (1, query[heads]))
    )
    return eqn.params["dropout_rate"] > 0 or is_packed or is_paged or is_odd


def _flops(eqn: JaxprEqn) -> float:
    shape, keys = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    n_keys = keys[2] if eqn.params["layout"] == _HEADS_FIRST else keys[1]
    return 4.0 * math.prod(shape) * n_keys


@rule("dot_product_attention_fwd_wrapper", named=lambda eqn: "cuDNN attention")
def _forward(eqn: JaxprEqn) -> Factors:
    """q, k, v, bias, two lengths, two offsets, two tables of pages -> out, softmax statistics in training."""
    if _is_whole(eqn):
        return replicated_factors(eqn, _flops(eqn))
    of = _Attention(eqn)
    operands = [of.queries(), of.keys(), of.values(), *map(of.other, eqn.invars[3:])]
    results = [of.outputs(), *map(of.other, eqn.outvars[1:])]
    return of.table.build(eqn, operands, results, flops=_flops(eqn))


@rule("dot_product_attention_bwd_wrapper", named=lambda eqn: "derivative of cuDNN attention")
def _backward(eqn: JaxprEqn) -> Factors:
    """The forward pass's operands, statistics and result, and a cotangent -> cotangents of q, k, v, and of a bias."""
    if _is_whole(eqn):
        return replicated_factors(eqn, 2.5 * _flops(eqn))
    of = _Attention(eqn)
    arrays = [of.queries(), of.keys(), of.values()]
    operands = [*arrays, *map(of.other, eqn.invars[3:-2]), of.outputs(), of.outputs()]
    results = [*arrays, *map(of.other, eqn.outvars[3:])]

    # The gradient of a bias that all examples or all heads read.
    for (factor,) in (of.examples, of.key_heads):
        if any(not any(factor in dim for dim in dims) for dims in results):
            of.table.reductions[factor] = "sum"
    return of.table.build(eqn, operands, results, flops=2.5 * _flops(eqn))
