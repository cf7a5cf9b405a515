"""The law of rules: parts of an operation along a factor, each computed by itself, together give the whole.

An operand goes in, and its part comes out; the parts of a result go in, and the whole comes out. Users check their
rules by this law (`check_sharding_rule`), and the tests all rules.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minialpa.rules.factors import Dims, Factors
from minialpa.rules.reductions import combine


@dataclass(frozen=True, slots=True)
class Part:
    """One of n equal parts of an operation along a factor, by its number."""

    factor: int
    number: int
    n: int


def cut(x: Any, dims: Dims, part: Part) -> Any:
    """The part of an array with these factors; the whole array if it lacks the one that is cut."""
    for axis, dim in enumerate(dims):
        if part.factor in dim:
            size = x.shape[axis] // part.n
            x = x[(slice(None),) * axis + (slice(part.number * size, (part.number + 1) * size),)]
    return x


def wholes(parts: Sequence[np.ndarray], factors: Factors, factor: int, result: int) -> list[np.ndarray]:
    """What the parts of a result say that it is as a whole: one array, or if each has the whole result, each of them.

    parts: the result of each part of the operation along `factor`, in order.
    """
    axes = [axis for axis, dim in enumerate(factors.results[result]) if factor in dim]
    if axes:
        return [np.concatenate(parts, axis=axes[0])]
    if factors.is_partial(factor, result):
        return [np.asarray(functools.reduce(functools.partial(combine, factors.reductions[factor]), parts))]
    return list(parts)
