"""Attention and its derivative as one operation each; `minialpa.attention.operation` says what they compute.

Letters: b example, g key/value head, r query head of that group, t query position, s key position, d and e features of
keys and values. Examples, heads and query positions may be split. The others are blocked:

    s      the softmax runs over it. The gradient may have to compute the sum of the softmax again, where the rounded
           `logsumexp` is too coarse, so it needs all keys as well.
    d, e   each shard would need whole scores: of d before the exponential, and of e to weigh its values.

flops = 2 b g r t s (d + e) forward and 2 b g r t s (3 d + 2 e) backward, which computes the scores again; only scores
that the window leaves count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.attention.blockwise import SIDE
from minialpa.ir.equations import shape_of
from minialpa.rules.common import Dim, FactorTable
from minialpa.rules.factors import Dims, Factors, Ramp
from minialpa.rules.known_rules import rule

#: Dimensions of the scores, and of what is added to them.
_SCORES = "bgrts"
_BLOCKED = "sde"
_QUERY, _KEY, _VALUE, _OUT, _STATISTICS = "btgrd", "bsgd", "bsge", "btgre", "btgr"


@rule("minialpa_attention")
def _attention(eqn: JaxprEqn) -> Factors:
    table, named = _letters(eqn)
    kind = eqn.params["kind"]
    operands = [
        *(_dims(named, letters) for letters in (_QUERY, _KEY, _VALUE)),
        *(_dims(named, letters) for letters in "ts"[: kind.n_positions]),
        *(_scores_like(named, shape_of(atom)) for atom in eqn.invars[3 + kind.n_positions :]),
    ]
    return table.build(
        eqn,
        operands,
        [_dims(named, _OUT), _dims(named, _STATISTICS)],
        flops=_n_scores(table, named, kind) * 2 * (_size(table, named, "d") + _size(table, named, "e")),
        ramps=_ramps(table, named, kind),
    )


@rule("minialpa_attention_gradient")
def _attention_gradient(eqn: JaxprEqn) -> Factors:
    """Linear in `out_bar`. A factor that a result lacks is summed over in it."""
    table, named = _letters(eqn)
    kind, wants_bias = eqn.params["kind"], eqn.params["wants_bias"]
    added = [_scores_like(named, shape_of(atom)) for atom in eqn.invars[6 + kind.n_positions :]]
    wanted = [dims for dims, is_wanted in zip(added, wants_bias, strict=False) if is_wanted]

    operands = [
        *(_dims(named, letters) for letters in (_QUERY, _KEY, _VALUE, _OUT, _STATISTICS, _OUT)),
        *(_dims(named, letters) for letters in "ts"[: kind.n_positions]),
        *added,
    ]
    results = [*(_dims(named, letters) for letters in (_QUERY, _KEY, _VALUE)), *wanted]
    for letter in "bgrt":
        if any(named[letter] not in dims for dims in results):
            table.reductions[named[letter][0]] = "sum"

    return table.build(
        eqn,
        operands,
        results,
        linear="each",
        linear_operands=(5,),
        flops=_n_scores(table, named, kind) * 2 * (3 * _size(table, named, "d") + 2 * _size(table, named, "e")),
        ramps=_ramps(table, named, kind),
    )


def _letters(eqn: JaxprEqn) -> tuple[FactorTable, dict[str, Dim]]:
    """A table with a factor for each letter."""
    b, t, g, r, d = shape_of(eqn.invars[0])
    s, e = shape_of(eqn.invars[1])[1], shape_of(eqn.invars[2])[-1]
    table = FactorTable()
    sizes = zip("bgrtsde", (b, g, r, t, s, d, e), strict=True)
    return table, {letter: table.dim(size, blocked=letter in _BLOCKED) for letter, size in sizes}


def _dims(named: Mapping[str, Dim], letters: str) -> Dims:
    return tuple(named[letter] for letter in letters)


def _scores_like(named: Mapping[str, Dim], shape: Sequence[int]) -> Dims:
    """Factors of a bias or mask, which is broadcast to the scores."""
    return tuple(() if size == 1 else named[letter] for letter, size in zip(_SCORES, shape, strict=True))


def _size(table: FactorTable, named: Mapping[str, Dim], letters: str) -> int:
    return math.prod(table.sizes[named[letter][0]] for letter in letters)


def _n_scores(table: FactorTable, named: Mapping[str, Dim], kind: Any) -> float:
    """Scores that the window leaves, if queries and keys count their positions from 0."""
    t, s = _size(table, named, "t"), _size(table, named, "s")
    queries = np.arange(t, dtype=np.float64)
    first = np.zeros(t) if kind.left is None else np.clip(queries - kind.left, 0, s)
    end = np.full(t, s) if kind.right is None else np.clip(queries + kind.right + 1, 0, s)
    return _size(table, named, "bgr") * float(np.sum(np.maximum(end - first, 0)))


def _ramps(table: FactorTable, named: Mapping[str, Dim], kind: Any) -> dict[int, Ramp]:
    """A query that sees no position ahead has as much work as there are positions behind it, up to the window."""
    t, s = _size(table, named, "t"), _size(table, named, "s")
    reach = [side for side in (kind.left, kind.right) if side != 0]
    if t != s or len(reach) != 1:
        return {}
    most = t if reach[0] is None else min(t, reach[0] + 1)
    return {named["t"][0]: Ramp(most, SIDE)}
