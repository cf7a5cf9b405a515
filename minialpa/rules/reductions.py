"""How partial results of a reduction are combined: those of micro-batches, rows, stages or devices.

    combine(how, a, b) = a o b          combine_along(how, x) = x[0] o x[1] o ...

Both keep the dtype, so that integers wrap around as they do in one reduction over everything, and a NaN stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jax import lax

from minialpa.rules.factors import Reduction

_COMBINED: Mapping[Reduction, tuple[Callable[..., Any], Callable[..., Any]]] = MappingProxyType(
    {
        "and": (lax.bitwise_and, lax.reduce_and),
        "max": (lax.max, lax.reduce_max),
        "min": (lax.min, lax.reduce_min),
        "or": (lax.bitwise_or, lax.reduce_or),
        "prod": (lax.mul, lax.reduce_prod),
        "sum": (lax.add, lax.reduce_sum),
        "xor": (lax.bitwise_xor, lax.reduce_xor),
    }
)


def combine(how: Reduction, a: Any, b: Any) -> Any:
    """Two partial results of one shape and dtype as one."""
    return _COMBINED[how][0](a, b)


def combine_along(how: Reduction, parts: Any) -> Any:
    """All partial results along the first dimension as one."""
    return _COMBINED[how][1](parts, (0,))
