"""Rules of attention: the primitives of `minialpa.attention.operation`, and jax's attention of cuDNN.

The primitives have dimensions b example, g key/value head, r query head of the group, t query, s key, d and e features
of keys and values. b, g, r and t may be split, the others may not:

    s      the softmax runs over it. Without biases, masks and steps in float16, an axis may split t and s together, as
           a ring (`minialpa.attention.ring`). Each device has the positions of all keys.
    d, e   each shard would need whole scores: of d before the exponential, of e to weigh its values.

flops = 2 b g r t s (d + e) forward and 2 b g r t s (3 d + 2 e) backward, which recomputes the scores. Only scores in
the window count.

`jax.nn.dot_product_attention(implementation="cudnn")` has k heads of keys and values, and g heads of queries for each:

    q [b t (k g) h], k [b s k h], v [b s k e], bias [b (k g) t s], lengths [b]
        -> out [b t (k g) e], softmax statistics [b (k g) t]

b and k may be split. The gradient of a bias that examples or heads share is summed over shards. Calls with dropout (one
mask for the call), packed sequences or pages (offsets into all examples) are replicated. flops = 4 b t s (k g) h
forward, and 2.5 times as many backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.attention.blockwise import SIDE
from minialpa.ir.equations import Atom, shape_of
from minialpa.rules.common import Dim, FactorTable
from minialpa.rules.factors import Dims, Factors, Ramp
from minialpa.rules.known_rules import replicated_factors, rule

#: Dimensions of the scores.
_SCORES = "bgrts"
_BLOCKED = "sde"
_QUERY, _KEY, _VALUE, _OUT, _STATISTICS = "btgrd", "bsgd", "bsge", "btgre", "btgr"


@rule("minialpa_attention", "minialpa_attention_gradient")
def _attention(eqn: JaxprEqn) -> Factors:
    """A result of the gradient is summed over factors that it lacks."""
    table, named = _letters(eqn)
    kind, is_gradient = eqn.params["kind"], eqn.primitive.name == "minialpa_attention_gradient"
    arrays = [_dims(named, letters) for letters in (_QUERY, _KEY, _VALUE)]
    d, e = (_size(table, named, letter) for letter in "de")

    if is_gradient:
        others = _others(table, named, eqn, 6)
        biases = zip(others[kind.n_positions + 2 * kind.n_segments :], eqn.params["with_bias_gradient"], strict=False)
        results = [*arrays, *(dims for dims, is_requested in biases if is_requested)]
        arrays += [_dims(named, letters) for letters in (_OUT, _STATISTICS, _OUT)]
        for letter in "bgrt":
            if any(named[letter] not in dims for dims in results):
                table.reductions[named[letter][0]] = "sum"
    else:
        others = _others(table, named, eqn, 3)
        results = [_dims(named, _OUT), _dims(named, _STATISTICS)]

    return table.build(
        eqn,
        [*arrays, *others],
        results,
        linear="each",
        linear_operands=(5,) if is_gradient else (),
        flops=_n_scores(table, named, kind) * 2 * (3 * d + 2 * e if is_gradient else d + e),
        ramps=_ramps(table, named, kind),
        rings=_rings(named, kind),
    )


def _letters(eqn: JaxprEqn) -> tuple[FactorTable, dict[str, Dim]]:
    b, t, g, r, d = shape_of(eqn.invars[0])
    s, e = shape_of(eqn.invars[1])[1], shape_of(eqn.invars[2])[-1]
    table = FactorTable()
    sizes = zip("bgrtsde", (b, g, r, t, s, d, e), strict=True)
    return table, {letter: table.dim(size, blocked=letter in _BLOCKED) for letter, size in sizes}


def _dims(named: Mapping[str, Dim], letters: str) -> Dims:
    return tuple(named[letter] for letter in letters)


def _others(table: FactorTable, named: Mapping[str, Dim], eqn: JaxprEqn, n_arrays: int) -> list[Dims]:
    """Each device has the positions and segments of all keys."""
    kind = eqn.params["kind"]
    atoms = eqn.invars[n_arrays + kind.n_positions :]
    all_keys = {**named, "s": table.dim(_size(table, named, "s"), blocked=True)}
    positions = [(named["t"],), (all_keys["s"],)] if kind.has_window else []
    segments = [_scores_like(all_keys, shape_of(atom)) for atom in atoms[: 2 * kind.n_segments]]
    return [*positions, *segments, *(_scores_like(named, shape_of(atom)) for atom in atoms[2 * kind.n_segments :])]


def _rings(named: Mapping[str, Dim], kind: Any) -> dict[int, int]:
    is_plain = not kind.n_biases and not kind.n_masks and not kind.float16
    return {named["t"][0]: named["s"][0]} if is_plain else {}


def _scores_like(named: Mapping[str, Dim], shape: Sequence[int]) -> Dims:
    """A bias or mask is broadcast to the scores."""
    return tuple(() if size == 1 else named[letter] for letter, size in zip(_SCORES, shape, strict=True))


def _size(table: FactorTable, named: Mapping[str, Dim], letters: str) -> int:
    return math.prod(table.sizes[named[letter][0]] for letter in letters)


def _n_scores(table: FactorTable, named: Mapping[str, Dim], kind: Any) -> float:
    """In the window, for positions that count from 0."""
    t, s = _size(table, named, "t"), _size(table, named, "s")
    queries = np.arange(t, dtype=np.float64)
    first = np.zeros(t) if kind.left is None else np.clip(queries - kind.left, 0, s)
    end = np.full(t, s) if kind.right is None else np.clip(queries + kind.right + 1, 0, s)
    return _size(table, named, "bgr") * float(np.sum(np.maximum(end - first, 0)))


def _ramps(table: FactorTable, named: Mapping[str, Dim], kind: Any) -> dict[int, Ramp]:
    """A causal query has work for each earlier position in the window."""
    t, s = _size(table, named, "t"), _size(table, named, "s")
    reach = [side for side in (kind.left, kind.right) if side != 0]
    if t != s or len(reach) != 1:
        return {}
    most = t if reach[0] is None else min(t, reach[0] + 1)
    return {named["t"][0]: Ramp(most, SIDE)}


# ---- cuDNN -----------------------------------------------------------------------------------------------------------


#: The layout BNTH; BTNH is 0.
_HEADS_FIRST = 1


class _AttentionFactors:
    """Cotangents have the factors of their arrays."""

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
        """To (examples, positions, heads, features) from the order of the layout, or back."""
        batch, first, second, features = dims
        return (batch, second, first, features) if self.is_heads_first else (batch, first, second, features)

    def arrays(self) -> list[Dims]:
        return [
            self._ordered((self.examples, self.positions, self.heads, self.features)),
            self._ordered((self.examples, self.key_positions, self.key_heads, self.features)),
            self._ordered((self.examples, self.key_positions, self.key_heads, self.value_features)),
        ]

    def output(self) -> Dims:
        return self._ordered((self.examples, self.positions, self.heads, self.value_features))

    def other(self, atom: Atom) -> Dims:
        """Dims of a bias, statistics or lengths: the first of [b (k g) t s], or 1 where examples or heads share it."""
        letters = (self.examples, self.heads, self.positions, self.key_positions)
        return tuple(
            dim if size == length else self.table.dim(size, blocked=True)
            for dim, size, length in zip(letters, shape_of(atom), self.lengths, strict=False)
        )


def _is_whole(eqn: JaxprEqn) -> bool:
    """Whether examples or heads depend on each other."""
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
    of = _AttentionFactors(eqn)
    operands = [*of.arrays(), *map(of.other, eqn.invars[3:])]
    results = [of.output(), *map(of.other, eqn.outvars[1:])]
    return of.table.build(eqn, operands, results, flops=_flops(eqn))


@rule("dot_product_attention_bwd_wrapper", named=lambda eqn: "derivative of cuDNN attention")
def _backward(eqn: JaxprEqn) -> Factors:
    """Operands, statistics and result of the forward pass, and a cotangent -> cotangents of q, k, v, bias."""
    if _is_whole(eqn):
        return replicated_factors(eqn, 2.5 * _flops(eqn))
    of = _AttentionFactors(eqn)
    operands = [*of.arrays(), *map(of.other, eqn.invars[3:-2]), of.output(), of.output()]
    results = [*of.arrays(), *map(of.other, eqn.outvars[3:])]

    for (factor,) in (of.examples, of.key_heads):
        if any(not any(factor in dim for dim in dims) for dims in results):
            of.table.reductions[factor] = "sum"
    return of.table.build(eqn, operands, results, flops=2.5 * _flops(eqn))
