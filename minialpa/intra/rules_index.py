"""Gather and scatter: dimensions that are taken whole, and the batch dimensions of indices.

With `b` for index dimensions, `w` for window dimensions taken whole and blocked ones in capitals:
    gather       [V w], [b I] -> [b w]            embedding; take_along_axis has some `b` in the operand too
    scatter-add  [V w], [b I], [b w] -> [V w]     its gradient; `b` is a reduction, of the updates only
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode

from minialpa.intra.factors import Factors, Reduction, rule
from minialpa.intra.rules_common import Dim, FactorTable, Shapes, is_inexact, n_elements
from minialpa.jaxprs import shape_of


def _interleave(n: int, placed: Sequence[int], window: Sequence[Dim], batch: Sequence[Dim]) -> tuple[Dim, ...]:
    """`n` dimensions of which those at `placed` are the window, in order, and the others the batch."""
    at_window = dict(zip(placed, window, strict=True))
    rest = iter(batch)
    return tuple(at_window[i] if i in at_window else next(rest) for i in range(n))


def _shared(operand_dims: Sequence[int], index_dims: Sequence[int], batch: Sequence[Dim]) -> dict[int, Dim]:
    """Dimensions of the operand that are batch dimensions of the indices as well."""
    return {i: batch[j] for i, j in zip(operand_dims, index_dims, strict=True)}


def _local_gather(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    """Only dimensions that are taken whole are split as windows, so their slices are the shards."""
    whole, local = shape_of(eqn.invars[0]), operands[0]
    sizes = zip(whole, local, eqn.params["slice_sizes"], strict=True)
    return dict(eqn.params, slice_sizes=tuple(m if size == n else size for n, m, size in sizes))


def _fills_linearly(eqn: JaxprEqn) -> bool:
    """Whether positions out of bounds add up: nothing, zero or NaN is filled in."""
    if GatherScatterMode.from_any(eqn.params["mode"]) != GatherScatterMode.FILL_OR_DROP:
        return True
    fill = eqn.params["fill_value"]
    return is_inexact(eqn.outvars[0]) if fill is None else bool(fill == 0 or np.isnan(fill))


@rule("gather", localize=_local_gather)
def _gather(eqn: JaxprEqn) -> Factors:
    numbers, table = eqn.params["dimension_numbers"], FactorTable()
    shape, index_shape = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    batch = table.dims(index_shape[:-1])
    shared = _shared(numbers.operand_batching_dims, numbers.start_indices_batching_dims, batch)
    operand, window = [], []
    for i, (size, taken) in enumerate(zip(shape, eqn.params["slice_sizes"], strict=True)):
        dim = shared[i] if i in shared else table.dim(size, blocked=taken != size)
        operand.append(dim)
        if i not in shared and i not in numbers.collapsed_slice_dims:
            window.append(dim if taken == size else table.dim(taken, blocked=True))
    result = _interleave(len(shape_of(eqn.outvars[0])), numbers.offset_dims, window, batch)
    indices = (*batch, table.dim(index_shape[-1], blocked=True))
    linear = (0,) if _fills_linearly(eqn) else ()
    return table.build(eqn, [tuple(operand), indices], [result], linear="joint", linear_operands=linear)


#: How partial results of updates are combined. Overwriting depends on the order, and a product of products would count
#: the operand more than once without being linear in it: there index dimensions are blocked.
_COMBINED: dict[str, Reduction] = {
    "scatter-add": "sum",
    "scatter-max": "max",
    "scatter-min": "min",
    "scatter-sub": "sum",
}


@rule("scatter", "scatter-mul", *_COMBINED)
def _scatter(eqn: JaxprEqn) -> Factors:
    numbers, table = eqn.params["dimension_numbers"], FactorTable()
    shape, index_shape, update_shape = (shape_of(v) for v in eqn.invars)
    combine = _COMBINED.get(eqn.primitive.name)
    shared_indices = set(numbers.scatter_indices_batching_dims)
    batch = tuple(
        table.dim(size) if i in shared_indices else table.dim(size, blocked=combine is None, reduction=combine)
        for i, size in enumerate(index_shape[:-1])
    )
    shared = _shared(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, batch)
    updated = iter(update_shape[i] for i in numbers.update_window_dims)
    operand, window = [], []
    for i, size in enumerate(shape):
        is_window = i not in shared and i not in numbers.inserted_window_dims
        taken = next(updated) if is_window else 1
        dim = shared[i] if i in shared else table.dim(size, blocked=taken != size)
        operand.append(dim)
        if is_window:
            window.append(dim if taken == size else table.dim(taken, blocked=True))
    updates = _interleave(len(update_shape), numbers.update_window_dims, window, batch)
    indices = (*batch, table.dim(index_shape[-1], blocked=True))
    return table.build(
        eqn,
        [tuple(operand), indices, updates],
        [tuple(operand)],
        linear="joint",
        linear_operands=(0, 2) if combine == "sum" else (),
        flops=float(n_elements(eqn.invars[2])) if combine else 0.0,
    )
