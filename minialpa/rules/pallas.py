"""Rule of `pallas_call`: an axis of the grid whose parts work on separate parts of the arrays is a factor.

A grid of G positions along an axis may be cut into U parts of s = G / U if, for every index map b of an array with D
blocks along a dimension, and all positions g,

    b(g + s) = b(g)                              the dimension does not follow the axis, or
    b(g + s) = b(g) + D / U,  0 <= b(g < s) < D / U      it follows: part p of the grid has part p of the blocks.

Every result follows each cut axis, so parts write separate blocks. The body must neither read its position along the
axis nor carry values in scratch memory (`kernel_body`). A shard runs the same body and index maps on a shorter grid.
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
from minialpa.rules.known_integers import UNKNOWN, KnownScalar, evaluate
from minialpa.rules.known_rules import replicated_factors, rule
from minialpa.rules.registered import jaxpr_flops
from minialpa.support.divisors import divisors
from minialpa.support.private_jax import KernelArray, KernelGrid, kernel_grid, local_kernel_params, written_operands

#: Index maps are computed for grids of at most so many positions.
_MOST_POSITIONS = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """An axis of a grid that may be cut, into at most `parts` parts.

    dims: for each array, the dimension that follows the axis.
    """

    axis: int
    parts: int
    dims: tuple[int | None, ...]


def _cuts(eqn: JaxprEqn, grid: KernelGrid) -> list[_Cut]:
    body = eqn.params["jaxpr"]
    n_read = len(body.invars) - grid.n_scratch - grid.n_results
    writes_operands = any(number < n_read for number in written_operands(body))
    if eqn.effects or not grid.is_plain or not computes_on_blocks(body) or writes_operands:
        return []
    if not 0 < math.prod(grid.sizes) <= _MOST_POSITIONS:
        return []
    indices = [_indices(array, grid) for array in grid.arrays]
    if any(len(values) != len(array.shape) for values, array in zip(indices, grid.arrays, strict=True)):
        return []

    found = (_largest_cut(grid, indices, axis) for axis in _interchangeable_axes(body, grid))
    return [cut for cut in found if cut is not None]


def _interchangeable_axes(body: Any, grid: KernelGrid) -> Iterator[int]:
    """The body neither reads its position along these axes nor carries values."""
    # The axes of `vmap` have no number in the body.
    own_axes = [axis for axis in range(len(grid.sizes)) if axis not in grid.vmapped]
    asked = {own_axes[axis] for axis in positions_read(body)}

    for axis, size in enumerate(grid.sizes):
        if size == 1 or axis in asked:
            continue
        # A part begins with the inner axes at 0.
        inner = {i for i, own in enumerate(own_axes) if own > axis}
        if not (grid.n_scratch and carries(body, grid.n_scratch, inner)):
            yield axis


def _indices(array: KernelArray, grid: KernelGrid) -> list[KnownScalar]:
    """By dimension, over the grid."""
    n_axes = len(grid.sizes)
    positions = [
        KnownScalar(
            np.arange(size, dtype=np.int32).reshape([-1 if i == axis else 1 for i in range(n_axes)]), frozenset({axis})
        )
        for axis, size in enumerate(grid.sizes)
    ]
    n_other = len(array.index_map.jaxpr.invars) - n_axes
    return evaluate(array.index_map, [*positions, *[UNKNOWN] * n_other])


def _largest_cut(grid: KernelGrid, indices: Sequence[Sequence[KnownScalar]], axis: int) -> _Cut | None:
    """indices: by array."""
    cuts = (_cut(grid, indices, axis, parts) for parts in reversed(divisors(grid.sizes[axis])[1:]))
    return next((cut for cut in cuts if cut is not None), None)


def _cut(grid: KernelGrid, indices: Sequence[Sequence[KnownScalar]], axis: int, parts: int) -> _Cut | None:
    """None if an array does not allow it."""
    dims: list[int | None] = []
    part_size = grid.sizes[axis] // parts
    for array, values in zip(grid.arrays, indices, strict=True):
        n_blocks = [length // block if block and length % block == 0 else None
                    for length, block in zip(array.shape, array.blocks, strict=True)]  # fmt: skip
        found = [_relation(n, value, axis, part_size) for n, value in zip(n_blocks, values, strict=True)]
        # The blocks of a part would lie on the diagonal.
        if "other" in found or found.count("follows") > 1:
            return None
        dims.append(found.index("follows") if "follows" in found else None)

    # Every part would write a result that does not follow the axis.
    n_operands = len(dims) - grid.n_results
    if None in dims[n_operands:]:
        return None
    # Operand and result in the same memory are cut alike.
    if any(dims[i - grid.n_index] != dims[n_operands + o] for i, o in grid.aliases):
        return None
    return _Cut(axis=axis, parts=parts, dims=tuple(dims))


def _relation(
    n_blocks: int | None, value: KnownScalar, axis: int, part_size: int
) -> Literal["follows", "independent", "other"]:
    """To a dimension with the block indices `value`: the formulas of the module.

    n_blocks: of the dimension; None if they do not divide it.
    """
    known = value.known
    if known is None:
        return "other" if axis in value.axes else "independent"
    if known.ndim <= axis or known.shape[axis] == 1:
        return "independent"

    along = np.moveaxis(known, axis, 0).astype(np.int64)
    steps = along[part_size:] - along[:-part_size]
    step = int(steps.flat[0])
    if np.any(steps != step):
        return "other"
    if step == 0:
        return "independent"
    first = along[:part_size]
    is_in_order = n_blocks == step * (len(along) // part_size) and first.min() >= 0 and first.max() < step
    return "follows" if is_in_order else "other"


def _local_call(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
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
    """(parts of the axis that the dimension follows, blocked rest)."""
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
