"""Reductions of whole numbers of every dtype beside a training step, as results and as counts in its state.

A `Counted` has separate arrays in the batch and in the state, so that any step can have some. All are exact: integers
wrap around, and floats are whole numbers, NaN and infinities, whose sums need no rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import jax
import numpy as np

from tests.reductions import REDUCTIONS, values

_EVERY = (
    *("max", "min", "any", "all", "argmax", "count_nonzero"),
    *("segment_max", "at min", "sort", "einsum", "scan of max"),
)
_NUMBERS = (
    *("sum of its dtype", "prod of its dtype", "cumsum", "segment_sum", "segment_prod", "at add"),
    *("at multiply", "lax.reduce by add", "lax.reduce by a function", "windows by add", "scan of add"),
)
_BITS = ("bitwise and", "bitwise or", "bitwise xor", "lax.reduce by or", "lax.reduce by xor", "scan of xor")
_FLOATS = ("max", "min", "nanmax", "argmin", "segment_max", "at max")
#: The reductions of each dtype, in groups that come equally often.
REDUCED: dict[str, tuple[tuple[str, ...], ...]] = {
    "bool": (_EVERY, _BITS),
    **{f"{sign}int{bits}": (_EVERY, _NUMBERS, _BITS) for sign in ("", "u") for bits in (8, 16, 32)},
    **dict.fromkeys(("int4", "uint4"), (_EVERY, _NUMBERS)),  # jax has no bitwise reductions of four bits
    **dict.fromkeys(("float16", "bfloat16", "float32"), (_FLOATS,)),
}
#: The reduction that adds the batch to a count of the state.
_COUNTS = {
    **{"bool": "bitwise or", "uint8": "bitwise and", "uint16": "bitwise or", "uint32": "bitwise xor"},
    **{"int4": "sum of its dtype", "uint4": "sum of its dtype", "int8": "prod of its dtype", "int16": "max"},
    **{"int32": "sum of its dtype", "float16": "min", "bfloat16": "max", "float32": "max"},
}


@dataclass(frozen=True, slots=True)
class Counted:
    """A reduction of examples of a dtype. axis: as in `REDUCTIONS`. kept: whether the state also counts examples."""

    name: str
    dtype: str
    axis: int | None = 0
    kept: bool = False


def draw_counted(random: Random) -> tuple[Counted, ...]:
    """Several reductions."""
    dtypes = [random.choice(list(REDUCED)) for _ in range(random.randint(2, 5))]
    return tuple(
        Counted(
            random.choice(random.choice(REDUCED[dtype])),
            dtype,
            axis=random.choice([0, 0, None, 1]),
            kept=random.random() < 0.3,
        )
        for dtype in dtypes
    )


def _count(dtype: str, x: Any) -> Any:
    return REDUCTIONS[_COUNTS[dtype]](x, 0)


def counted_state(counted: tuple[Counted, ...]) -> dict[str, Any]:
    """The arrays of the reductions in the first state."""
    return {f"count of {one.dtype}": values(one.dtype, seed=3)[0] for one in counted if one.kept}


def counted_batch(counted: tuple[Counted, ...], size: int) -> dict[str, Any]:
    """The arrays of the reductions in a batch of `size` examples. Floats are whole, so they have no rounding."""
    rows = {one.dtype: np.resize(values(one.dtype, seed=size), (size, values(one.dtype).shape[1])) for one in counted}
    batch = {d: x if "float" not in d else np.round(x.astype(np.float32)).astype(x.dtype) for d, x in rows.items()}
    if "float16" in batch:
        # A NaN of each sign, because their bits are at both ends of the order of floats.
        batch["float16"][size // 3, :2] = np.nan, np.copysign(np.nan, -1)
    return {f"of {d}": x for d, x in batch.items()}


def counted_results(counted: tuple[Counted, ...], state: Any, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The new state, and results, of the reductions."""
    kept = {}
    for one in counted:
        name = f"count of {one.dtype}"
        if name in state:
            stacked = jax.numpy.stack([state[name], _count(one.dtype, batch[f"of {one.dtype}"])])
            kept[name] = _count(one.dtype, stacked)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        results = {
            f"{one.name} of {one.dtype} along {one.axis}": REDUCTIONS[one.name](batch[f"of {one.dtype}"], one.axis)
            for one in counted
        }
    return kept, results
