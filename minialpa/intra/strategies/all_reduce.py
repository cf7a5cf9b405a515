"""The shards of an array in; their reduction along mesh axes out on every device.

    sums                        integers wrap around in their dtype             psum
    maxima, minima              a NaN wins, and -0 < 0                          pmax, pmin of integers in the same order
    and, or of booleans         are the minimum and the maximum                 pmin, pmax
    all others                  XLA has no collective for them                  all-gather, then a local reduction

XLA's collectives drop NaNs in a maximum, on CPUs and GPUs. With integers of less than eight bits, they may write over
other memory, so these are sent as eight bits: modulo a power of two, results are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from minialpa.rules.factors import Reduction, combine_along

#: Reductions of booleans that are a minimum or a maximum.
_OF_BOOLEANS: dict[Reduction, Reduction] = {"and": "min", "max": "max", "min": "min", "or": "max"}


def is_gathered(how: Reduction, dtype: Any) -> bool:
    if dtype == np.bool_:
        return how not in _OF_BOOLEANS
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return how not in (("sum",) if is_complex else ("sum", "max", "min"))


def is_narrow(dtype: Any) -> bool:
    """Less than eight bits."""
    return bool(jnp.issubdtype(dtype, jnp.integer)) and jnp.iinfo(dtype).bits < 8


def all_reduce(x: Any, names: Sequence[str], how: Reduction) -> Any:
    """names: mesh axes."""
    if is_narrow(x.dtype):
        return all_reduce(x.astype(np.int8), names, how).astype(x.dtype)
    if is_gathered(how, x.dtype):
        return combine_along(how, lax.all_gather(x, names))
    if x.dtype == np.bool_:
        return all_reduce(x.astype(np.int8), names, _OF_BOOLEANS[how]).astype(np.bool_)
    if how == "sum":
        return lax.psum(x, names)

    over = lax.pmax if how == "max" else lax.pmin
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return over(x, names)
    wide = x.astype(np.float32) if x.dtype.itemsize < 2 else x
    return _floats_of(over(_ordered_integers(wide, how), names), wide.dtype).astype(x.dtype)


def _ordered_integers(x: Any, how: Reduction) -> Any:
    """In the order of the floats `x`; a NaN is the largest, or for a minimum the smallest."""
    dtype = np.dtype(f"int{8 * x.dtype.itemsize}")
    bounds = np.iinfo(dtype)
    of_nan = np.array(bounds.max if how == "max" else bounds.min, dtype)
    return jnp.where(jnp.isnan(x), of_nan, _reordered_bits(lax.bitcast_convert_type(x, dtype)))


def _floats_of(ordered: Any, dtype: Any) -> Any:
    return lax.bitcast_convert_type(_reordered_bits(ordered), dtype)


def _reordered_bits(bits: Any) -> Any:
    """Bits of floats to integers in the same order, and back: negative floats have their bits in reverse order."""
    return jnp.where(bits < 0, bits ^ np.array(np.iinfo(bits.dtype).max, bits.dtype), bits)
