"""An equation and shards of its operands in, shards of its results out.

`localize` gives its parameters on shards; the other functions run it. A shard is one part of each split factor f.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from minialpa.rules.factors import Dims, Factors
from minialpa.rules.known_rules import Starts, localizer_of, on_shards_of
from minialpa.support.private_jax import under_settings_of
from minialpa.tracing.evaluation import eval_on_shards


def localize(eqn: JaxprEqn, factors: Factors, n_splits: Mapping[int, int]) -> dict[str, Any]:
    fun = localizer_of(eqn)
    if fun is None:
        return dict(eqn.params)
    return fun(eqn, *factors.local_shapes(n_splits))


def run_shard(
    eqn: JaxprEqn, factors: Factors, operands: Sequence[Any], n_splits: Mapping[int, int], parts: Mapping[int, Any]
) -> list[Any]:
    """The shard of each result.

    n_splits[f]: number of parts of a factor.
    parts[f]: number of this shard's part, for each split positional factor: an int32, which may be traced.
    """
    params = localize(eqn, factors, n_splits)
    if not parts:
        return eval_on_shards(eqn, operands, params)

    begins = {f: part * (factors.sizes[f] // n_splits[f]) for f, part in parts.items()}
    return _on_shards_from(eqn, factors, operands, params, functools.partial(_first_known, begins))


def run_from(
    eqn: JaxprEqn, factors: Factors, operands: Sequence[Any], n_splits: Mapping[int, int], begins: Mapping[int, Any]
) -> list[Any]:
    """`run_shard` if blocked factors are split, too: positional factors, and factors of results only.

    begins[f]: of the shard, for each blocked factor that is split.
    """
    # Along other than positional factors, compute full results and cut them.
    whole = begins.keys() - factors.positional
    params = localize(eqn, factors, {f: n for f, n in n_splits.items() if f not in whole})
    if len(whole) < len(begins):
        start = functools.partial(_first_known, {f: begin for f, begin in begins.items() if f not in whole})
        results = _on_shards_from(eqn, factors, operands, params, start)
    else:
        results = eval_on_shards(eqn, operands, params)

    for f in whole:
        for r, dims in enumerate(factors.results):
            for d, dim in enumerate(dims):
                if f in dim:
                    inner = math.prod(factors.sizes[other] for other in dim if other != f)
                    results[r] = part_of(results[r], d, begins[f] * inner, n_splits[f])
    return results


def _first_known(begins: Mapping[int, Any], dim: tuple[int, ...]) -> Any:
    """0 without a split positional factor."""
    return next((begins[f] for f in dim if f in begins), 0)


def part_of(x: Any, dim: int, start: Any, n: int) -> Any:
    """One n-th of an array, from a start that may be traced."""
    return lax.dynamic_slice_in_dim(x, start, np.shape(x)[dim] // n, dim)


def run_rows(eqn: JaxprEqn, factors: Factors, operands: Sequence[Any], factor: int, rows: tuple[int, int]) -> list[Any]:
    """At positions `rows` = (start, stop) of one factor, from operands at these positions."""
    sizes = list(factors.sizes)
    sizes[factor] = rows[1] - rows[0]
    params = localize(eqn, replace(factors, sizes=tuple(sizes)), {})
    if factor not in factors.positional:
        return eval_on_shards(eqn, operands, params)
    return _on_shards_from(eqn, factors, operands, params, lambda dim: rows[0] if factor in dim else 0)


def _on_shards_from(
    eqn: JaxprEqn,
    factors: Factors,
    operands: Sequence[Any],
    params: Mapping[str, Any],
    start: Callable[[tuple[int, ...]], Any],
) -> list[Any]:
    """start: from the factors of a dimension to the beginning of the shard."""

    def starts(arrays: Iterable[Dims]) -> tuple[tuple[Any, ...], ...]:
        return tuple(tuple(start(dim) for dim in dims) for dims in arrays)

    on_shards = on_shards_of(eqn)
    with under_settings_of(eqn):
        return list(on_shards(eqn, operands, params, Starts(starts(factors.operands), starts(factors.results))))
