"""Rules of gather and scatter. b: index dimensions, w: window dimensions taken whole, capitals: positional or blocked.

    gather       [V w], [b I] -> [b w]            embedding; in take_along_axis, the operand has some `b`, too
    scatter-add  [V w], [b I], [b w] -> [V w]     its gradient; `b` is a reduction, of the updates only

`V` is positional if a window has one row. For indices of other shards, a shard of the table gathers zeros, so gathered
values are partial sums, and drops updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode

from minialpa.ir.equations import is_inexact, shape_of
from minialpa.rules.common import Dim, FactorTable, is_summable, n_elements
from minialpa.rules.factors import Factors, Reduction
from minialpa.rules.known_rules import Starts, rule
from minialpa.rules.layout import local_ends
from minialpa.tracing.evaluation import eval_on_shards


def _interleave(n: int, placed: Sequence[int], window: Sequence[Dim], batch: Sequence[Dim]) -> tuple[Dim, ...]:
    """`placed`: positions of `window`."""
    at_window = dict(zip(placed, window, strict=True))
    rest = iter(batch)
    return tuple(at_window[i] if i in at_window else next(rest) for i in range(n))


def _shared_dims(operand_dims: Sequence[int], index_dims: Sequence[int], batch: Sequence[Dim]) -> dict[int, Dim]:
    return {i: batch[j] for i, j in zip(operand_dims, index_dims, strict=True)}


def _fills_linearly(eqn: JaxprEqn) -> bool:
    """Whether values for indices out of bounds are linear in the operand: zero, NaN, or an element of it."""
    if _mode(eqn.params) != GatherScatterMode.FILL_OR_DROP:
        return True
    fill = eqn.params["fill_value"]
    return is_inexact(eqn.outvars[0]) if fill is None else bool(fill == 0 or np.isnan(fill))


@dataclass(frozen=True, slots=True)
class _LocalIndices:
    """Index vectors [b n], clamped to the whole array as in mode CLIP, in a shard.

    local: [b n] int32, relative to the beginning of the shard.
    is_mine: [b] bool, whether the window is in this shard.
    is_valid: [b] bool, whether clamping did not change the indices.
    """

    local: Any
    is_mine: Any
    is_valid: Any


def _local_indices(indices: Any, last: Sequence[int], last_here: Sequence[int], starts: Sequence[Any]) -> _LocalIndices:
    """The windows of a shard; each argument has a value for each of the n components of an index vector.

    last: largest start of a window in the whole array.
    last_here: the same in the shard, relative to its beginning.
    starts: the beginning of the shard.
    """

    def for_all(values: Sequence[Any], dtype: Any) -> Any:
        row = jnp.stack([jnp.asarray(value, dtype) for value in values])
        return lax.broadcast_in_dim(row, indices.shape, (indices.ndim - 1,))

    # Indices of a narrow type cannot reach the end of a long dimension.
    largest = int(jnp.iinfo(indices.dtype).max)
    bounds = for_all([min(start, largest) for start in last], indices.dtype)
    clipped = lax.clamp(jnp.zeros_like(indices), indices, bounds)
    local = clipped.astype(np.int32) - for_all(starts, np.int32)
    is_mine = (local >= 0) & (local <= for_all(last_here, np.int32))
    return _LocalIndices(local, is_mine.all(-1), (clipped == indices).all(-1))


def _mode(params: Mapping[str, Any]) -> GatherScatterMode:
    return GatherScatterMode.from_any(params["mode"])


def _gather_on_shards(eqn: JaxprEqn, operands: Sequence[Any], params: Mapping[str, Any], starts: Starts) -> list[Any]:
    """Zeros for windows of other shards. Only the first shard has fill values for invalid indices."""
    table, indices = operands
    numbers, shape = params["dimension_numbers"], shape_of(eqn.invars[0])
    dims = numbers.start_index_map
    last = [shape[d] - eqn.params["slice_sizes"][d] for d in dims]
    last_here = [table.shape[d] - params["slice_sizes"][d] for d in dims]
    found = _local_indices(indices, last, last_here, [starts.operands[0][d] for d in dims])

    local = dict(params, mode=GatherScatterMode.CLIP, indices_are_sorted=False)
    (rows,) = eval_on_shards(eqn, [table, found.local], local)
    batch = [d for d in range(rows.ndim) if d not in numbers.offset_dims]

    def where(mask: Any, chosen: Any, otherwise: Any) -> Any:
        return jnp.where(lax.broadcast_in_dim(mask, rows.shape, batch), chosen, otherwise)

    mine = where(found.is_mine, rows, jnp.zeros_like(rows))
    if _mode(params) != GatherScatterMode.FILL_OR_DROP:
        return [mine]

    is_first = np.bool_(True)
    for start in starts.operands[0]:
        is_first = is_first & (start == 0)
    fill = jnp.where(is_first, jnp.full_like(rows, params["fill_value"]), jnp.zeros_like(rows))
    return [where(found.is_valid, mine, fill)]


@rule("gather", localize=partial(local_ends, "slice_sizes"), on_shards=_gather_on_shards)
def _gather(eqn: JaxprEqn) -> Factors:
    """`batch` is b of the module, `window` is w, and positional dimensions are V."""
    numbers, table = eqn.params["dimension_numbers"], FactorTable()
    shape, index_shape = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    batch = table.dims(index_shape[:-1])
    shared = _shared_dims(numbers.operand_batching_dims, numbers.start_indices_batching_dims, batch)
    indexed = set(numbers.start_index_map) if is_summable(eqn.outvars[0]) else set()

    operand, window = [], []
    for i, (size, taken) in enumerate(zip(shape, eqn.params["slice_sizes"], strict=True)):
        if i in shared:
            dim = shared[i]
        elif taken == 1 < size and i in indexed:
            dim = table.dim(size, positional=True, reduction="sum")
        else:
            dim = table.dim(size, blocked=taken != size)
        operand.append(dim)
        if i not in shared and i not in numbers.collapsed_slice_dims:
            window.append(dim if taken == size else table.dim(taken, blocked=True))

    result = _interleave(len(shape_of(eqn.outvars[0])), numbers.offset_dims, window, batch)
    indices = (*batch, table.dim(index_shape[-1], blocked=True))
    linear = (0,) if _fills_linearly(eqn) else ()
    return table.build(eqn, [tuple(operand), indices], [result], linear="joint", linear_operands=linear)


#: Reductions over index dimensions. Other scatters block these: overwriting depends on the order of updates, and a
#: product of shards would have the operand once for each shard.
_COMBINED: dict[str, Reduction] = {
    "scatter-add": "sum",
    "scatter-max": "max",
    "scatter-min": "min",
    "scatter-sub": "sum",
}


def _scatter_on_shards(eqn: JaxprEqn, operands: Sequence[Any], params: Mapping[str, Any], starts: Starts) -> list[Any]:
    """Indices out of bounds drop the updates of other shards."""
    operand, indices, updates = operands
    numbers = params["dimension_numbers"]

    # For each dimension of the operand, its window in the updates.
    single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    update_dims = iter(numbers.update_window_dims)
    window_dims = [None if d in single else next(update_dims) for d in range(operand.ndim)]

    def last_starts(shape: Sequence[int], update_shape: Sequence[int]) -> list[int]:
        taken = [1 if dim is None else update_shape[dim] for dim in window_dims]
        return [shape[d] - taken[d] for d in numbers.scatter_dims_to_operand_dims]

    last = last_starts(shape_of(eqn.invars[0]), shape_of(eqn.invars[2]))
    begin = [starts.operands[0][d] for d in numbers.scatter_dims_to_operand_dims]
    found = _local_indices(indices, last, last_starts(operand.shape, updates.shape), begin)

    is_kept = found.is_mine if _mode(params) == GatherScatterMode.CLIP else found.is_mine & found.is_valid
    kept = lax.broadcast_in_dim(is_kept, indices.shape, tuple(range(indices.ndim - 1)))
    where = jnp.where(kept, found.local, jnp.full_like(found.local, -1))
    changed = {"mode": GatherScatterMode.FILL_OR_DROP, "indices_are_sorted": False, "unique_indices": False}
    return eval_on_shards(eqn, [operand, where, updates], {**params, **changed})


@rule("scatter", "scatter-mul", *_COMBINED, on_shards=_scatter_on_shards)
def _scatter(eqn: JaxprEqn) -> Factors:
    numbers, table = eqn.params["dimension_numbers"], FactorTable()
    shape, index_shape, update_shape = (shape_of(atom) for atom in eqn.invars)
    combine = _COMBINED.get(eqn.primitive.name)

    # Index dimensions that the operand lacks are reduced.
    shared_indices = set(numbers.scatter_indices_batching_dims)
    batch = tuple(
        table.dim(size) if i in shared_indices else table.dim(size, blocked=combine is None, reduction=combine)
        for i, size in enumerate(index_shape[:-1])
    )
    shared = _shared_dims(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, batch)

    updated = iter(update_shape[i] for i in numbers.update_window_dims)
    operand, window = [], []
    for i, size in enumerate(shape):
        is_window = i not in shared and i not in numbers.inserted_window_dims
        taken = next(updated) if is_window else 1
        is_indexed = taken == 1 and i in numbers.scatter_dims_to_operand_dims
        dim = shared[i] if i in shared else table.dim(size, blocked=taken != size, positional=is_indexed and size > 1)
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
