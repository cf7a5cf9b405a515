"""`pallas_call`: an axis of the grid whose parts work on separate parts of the arrays is a factor.

A grid of G positions along an axis may be cut into U parts of s = G / U if, for every index map b of an array with D
blocks along a dimension, and all positions g,

    b(g + s) = b(g)                              the dimension does not follow the axis, or
    b(g + s) = b(g) + D / U,  0 <= b(g < s) < D / U      it follows: part p of the grid has part p of the blocks.

Every result follows each axis that is cut, so parts write to separate blocks. The maps are small programs of integers,
which `known_integers` computes for the whole grid. Nothing else may tell a part from the whole: the body does not ask
for its position along the axis, and carries nothing in scratch memory (`kernel_body`). On a shard runs the same body
with the same index maps, on a shorter grid.

    [(u rest) ...], ... -> [(u rest) ...]        u: U parts of the grid, rest: elements of a part, which stay together
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.ir.equations import shape_of
from minialpa.rules.common import Dim, FactorTable
from minialpa.rules.factors import Dims, Factors, Shapes
from minialpa.rules.kernel_body import carries, computes_on_blocks, positions_read
from minialpa.rules.known_integers import UNKNOWN, Value, evaluate
from minialpa.rules.known_rules import replicated_factors, rule
from minialpa.rules.registered import jaxpr_flops
from minialpa.support.divisors import divisors
from minialpa.support.private_jax import KernelArray, KernelGrid, kernel_grid, local_kernel_params, written_operands

#: Positions of a grid for which index maps are computed, at most.
_MOST_POSITIONS = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """An axis of a grid that may be cut.

    Attributes:
        axis: its number.
        parts: number of parts, at most.
        dims: for each array, the dimension that follows the axis, or None.
    """

    axis: int
    parts: int
    dims: tuple[int | None, ...]


def _cuts(eqn: JaxprEqn, grid: KernelGrid) -> list[_Cut]:
    """The axes that may be cut, in order."""
    body = eqn.params["jaxpr"]
    if eqn.effects or not _does_only_compute(body, grid):
        return []
    # Index maps are computed at each position.
    if not 0 < math.prod(grid.sizes) <= _MOST_POSITIONS:
        return []
    indices = [_indices(array, grid) for array in grid.arrays]
    if any(len(values) != len(array.shape) for values, array in zip(indices, grid.arrays, strict=True)):
        return []

    found = (_largest_cut(grid, indices, axis) for axis in _interchangeable_axes(body, grid))
    return [cut for cut in found if cut is not None]


def _does_only_compute(body: Any, grid: KernelGrid) -> bool:
    """Whether a kernel does nothing but compute the blocks of its results from those of its operands."""
    return grid.is_plain and computes_on_blocks(body) and not _writes_operands(body, grid)


def _interchangeable_axes(body: Any, grid: KernelGrid) -> Iterator[int]:
    """The axes along which the body does the same at each position: it neither asks where it is nor carries values."""
    # The axes that vmap has added are not among those that the body counts.
    own_axes = [axis for axis in range(len(grid.sizes)) if axis not in grid.vmapped]
    asked = {own_axes[axis] for axis in positions_read(body)}

    for axis, size in enumerate(grid.sizes):
        if size == 1 or axis in asked:
            continue
        # A part begins where the axes that run faster are at 0. What scratch memory holds then is of the part before.
        inner = {i for i, own in enumerate(own_axes) if own > axis}
        if not (grid.n_scratch and carries(body, grid.n_scratch, inner)):
            yield axis


def _writes_operands(body: Any, grid: KernelGrid) -> bool:
    """Whether the body writes into the blocks of an operand."""
    n_read = len(body.invars) - grid.n_scratch - grid.n_results
    return any(number < n_read for number in written_operands(body))


def _indices(array: KernelArray, grid: KernelGrid) -> list[Value]:
    """The block indices of an array over the grid, one for each dimension."""
    n_axes = len(grid.sizes)
    positions = [
        Value(
            np.arange(size, dtype=np.int32).reshape([-1 if i == axis else 1 for i in range(n_axes)]), frozenset({axis})
        )
        for axis, size in enumerate(grid.sizes)
    ]
    n_other = len(array.index_map.jaxpr.invars) - n_axes
    return evaluate(array.index_map, [*positions, *[UNKNOWN] * n_other])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Division:
    """An axis of a grid in equal parts, which may or may not be a cut.

    Attributes:
        axis: its number.
        parts: number of parts.
        part_size: positions of a part.
        n_axes: number of axes of the grid.
    """

    axis: int
    parts: int
    part_size: int
    n_axes: int


def _largest_cut(grid: KernelGrid, indices: Sequence[Sequence[Value]], axis: int) -> _Cut | None:
    """The cut of an axis into the most parts, if there is any; `indices` as from `_indices`, for each array."""
    size, n_axes = grid.sizes[axis], len(grid.sizes)
    for parts in reversed(divisors(size)[1:]):
        division = _Division(axis=axis, parts=parts, part_size=size // parts, n_axes=n_axes)
        cut = _cut(grid, indices, division)
        if cut is not None:
            return cut
    return None


def _cut(grid: KernelGrid, indices: Sequence[Sequence[Value]], division: _Division) -> _Cut | None:
    """How the arrays follow an axis that is divided; None if some array does not."""
    dims: list[int | None] = []
    for array, values in zip(grid.arrays, indices, strict=True):
        found = [_relation(array, d, value, division) for d, value in enumerate(values)]
        # The blocks of a part along two dimensions would lie on the array's diagonal.
        if "other" in found or found.count("follows") > 1:
            return None
        dims.append(found.index("follows") if "follows" in found else None)

    # A result that does not follow the axis is written again by every part.
    n_operands = len(dims) - grid.n_results
    if None in dims[n_operands:]:
        return None
    # An operand and a result in the same memory are cut alike.
    if any(dims[i - grid.n_index] != dims[n_operands + o] for i, o in grid.aliases):
        return None
    return _Cut(axis=division.axis, parts=division.parts, dims=tuple(dims))


def _relation(
    array: KernelArray, dim: int, value: Value, division: _Division
) -> Literal["follows", "independent", "other"]:
    """What a dimension with the block index `value` has to do with an axis: see the two formulas above."""
    step = _step(value, division)
    if step == 0:
        return "independent"
    return "follows" if step is not None and _follows(array, dim, value, step, division) else "other"


def _step(value: Value, division: _Division) -> int | None:
    """By how much an index grows from each position to the same one of the next part; None if that is not known."""
    known = value.known
    if known is None:
        return None if division.axis in value.axes else 0
    if known.ndim != division.n_axes or known.shape[division.axis] == 1:
        return 0
    along = np.moveaxis(known, division.axis, 0).astype(np.int64)
    steps = along[division.part_size :] - along[: -division.part_size]
    return int(steps.flat[0]) if np.all(steps == steps.flat[0]) else None


def _follows(array: KernelArray, dim: int, value: Value, step: int, division: _Division) -> bool:
    """Whether the blocks of a dimension are cut into as many equal parts as the axis, in the same order."""
    block, length = array.blocks[dim], array.shape[dim]
    if block is None or length % block or length // block != step * division.parts:
        return False
    assert value.known is not None
    first = np.take(value.known, range(division.part_size), axis=division.axis)
    return int(first.min()) >= 0 and int(first.max()) < step


def _local_call(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    """Parameters for shards: the grid of the parts that they hold."""
    grid = kernel_grid(eqn.params)
    shapes = (*operands[grid.n_index :], *results)
    sizes = list(grid.sizes)
    for cut in _cuts(eqn, grid):
        array = next(a for a, dim in enumerate(cut.dims) if dim is not None)
        dim = cut.dims[array]
        assert dim is not None
        n_held = shapes[array][dim] * cut.parts // grid.arrays[array].shape[dim]
        sizes[cut.axis] = grid.sizes[cut.axis] // cut.parts * n_held
    return local_kernel_params(eqn.params, tuple(sizes), shapes)


def _name(eqn: JaxprEqn) -> str:
    name = eqn.params.get("name") or getattr(getattr(eqn.params["jaxpr"], "debug_info", None), "func_name", "")
    return f"pallas_call ({name})" if name else "pallas_call"


@rule("pallas_call", localize=_local_call, named=_name)
def _pallas_call(eqn: JaxprEqn) -> Factors:
    grid = kernel_grid(eqn.params)
    flops = grid.flops or math.prod(grid.sizes) * jaxpr_flops(eqn.params["jaxpr"])
    cuts = _cuts(eqn, grid)
    if not cuts:
        return replicated_factors(eqn, flops)

    table = FactorTable()
    factors = {cut.axis: table.dim(cut.parts) for cut in cuts}
    index = [table.dims(shape_of(atom), blocked=True) for atom in eqn.invars[: grid.n_index]]
    arrays = [_dims(table, array, a, cuts, factors) for a, array in enumerate(grid.arrays)]
    n_read = len(arrays) - grid.n_results
    return table.build(eqn, [*index, *arrays[:n_read]], arrays[n_read:], flops=flops)


def _dims(table: FactorTable, array: KernelArray, a: int, cuts: Sequence[_Cut], factors: Mapping[int, Dim]) -> Dims:
    """The factors of an array: the parts of an axis that a dimension follows, then what stays together."""
    dims = []
    for d, length in enumerate(array.shape):
        cut = next((cut for cut in cuts if cut.dims[a] == d), None)
        if cut is None:
            dims.append(table.dim(length, blocked=True))
        elif cut.parts == length:
            dims.append(factors[cut.axis])
        else:
            dims.append((*factors[cut.axis], *table.dim(length // cut.parts, blocked=True)))
    return tuple(dims)
