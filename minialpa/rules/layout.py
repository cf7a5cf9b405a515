"""Rules of rearrangements, reshapes, slices, and arrays without operands.

A kept dimension is one factor of operand and result. A dimension that is joined, cut, padded or reversed is blocked,
and the dimension that `iota` counts is positional. All are linear in the arrays that they move, and cost no flops.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from minialpa.ir.equations import shape_of
from minialpa.rules.common import Dim, FactorTable
from minialpa.rules.factors import Dims, Factors, Shapes
from minialpa.rules.known_rules import Starts, rule
from minialpa.tracing.rotation import rotate_p


def _factors_of_move(eqn: JaxprEqn, table: FactorTable, operand: Dims, result: Dims) -> Factors:
    return table.build(eqn, [operand], [result], linear="joint", linear_operands=(0,))


def _local_sizes(name: str, eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    """The parameter `name` is the shape of the result."""
    return {**eqn.params, name: results[0]}


_local_shape = partial(_local_sizes, "shape")


@rule("broadcast_in_dim", localize=_local_shape)
def _broadcast_in_dim(eqn: JaxprEqn) -> Factors:
    """Dimensions that are new, or grow from length 1, are factors of the result alone."""
    table = FactorTable()
    shape = shape_of(eqn.outvars[0])
    result = table.dims(shape)
    targets = eqn.params["broadcast_dimensions"]
    operand = tuple(
        result[i] if size == shape[i] else () for size, i in zip(shape_of(eqn.invars[0]), targets, strict=True)
    )
    return _factors_of_move(eqn, table, operand, result)


@rule("transpose")
def _transpose(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    operand = table.dims(shape_of(eqn.invars[0]))
    return _factors_of_move(eqn, table, operand, tuple(operand[i] for i in eqn.params["permutation"]))


@rule("squeeze")
def _squeeze(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    operand = table.dims(shape_of(eqn.invars[0]))
    dropped = {i % len(operand) for i in eqn.params["dimensions"]}
    return _factors_of_move(eqn, table, operand, tuple(dim for i, dim in enumerate(operand) if i not in dropped))


@rule("rev")
def _rev(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    reversed_dims = set(eqn.params["dimensions"])
    dims = tuple(table.dim(size, blocked=i in reversed_dims) for i, size in enumerate(shape_of(eqn.invars[0])))
    return _factors_of_move(eqn, table, dims, dims)


@rule(rotate_p.name)
def _rotate(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    rotated, shift = eqn.params["dim"], eqn.params["shift"]
    shape = shape_of(eqn.invars[0])
    dims = tuple(table.dim(size, shift=shift if i == rotated else None) for i, size in enumerate(shape))
    return _factors_of_move(eqn, table, dims, dims)


def _local_tile(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    sizes = zip(operands[0], results[0], eqn.params["reps"], strict=True)
    return dict(eqn.params, reps=tuple(tiled // size if size else n_reps for size, tiled, n_reps in sizes))


@rule("tile", localize=_local_tile)
def _tile(eqn: JaxprEqn) -> Factors:
    """Each dimension of the result is (repetitions, dimension of the operand)."""
    table = FactorTable()
    operand = table.dims(shape_of(eqn.invars[0]))
    repetitions = table.dims(eqn.params["reps"])
    return _factors_of_move(
        eqn, table, operand, tuple(rep + dim for rep, dim in zip(repetitions, operand, strict=True))
    )


def _dims_joined_along(table: FactorTable, shapes: Sequence[tuple[int, ...]], axis: int) -> list[Dims]:
    common = table.dims(shapes[0][:axis] + shapes[0][axis + 1 :])
    return [(*common[:axis], table.dim(shape[axis], blocked=True), *common[axis:]) for shape in shapes]


@rule("concatenate", "split")
def _concatenate(eqn: JaxprEqn) -> Factors:
    table, n = FactorTable(), len(eqn.invars)
    axis = eqn.params["dimension" if eqn.primitive.name == "concatenate" else "axis"]
    dims = _dims_joined_along(table, [shape_of(atom) for atom in (*eqn.invars, *eqn.outvars)], axis)
    return table.build(eqn, dims[:n], dims[n:], linear="joint", linear_operands=range(n))


@rule("stack", "unstack")
def _stack(eqn: JaxprEqn) -> Factors:
    table, axis = FactorTable(), eqn.params["axis"]
    atoms = eqn.invars if eqn.primitive.name == "stack" else eqn.outvars
    part = table.dims(shape_of(atoms[0]))
    parts, whole = [part for _ in atoms], [(*part[:axis], table.dim(len(atoms), blocked=True), *part[axis:])]
    operands, results = (parts, whole) if eqn.primitive.name == "stack" else (whole, parts)
    return table.build(eqn, operands, results, linear="joint", linear_operands=range(len(operands)))


def _iota_on_shards(eqn: JaxprEqn, operands: Sequence[Any], params: Mapping[str, Any], starts: Starts) -> list[Any]:
    counted = params["dimension"]
    # Count in integers: in 16-bit floats, a rounded start plus a count may differ from the rounded sum.
    counts = lax.broadcasted_iota(np.int32, params["shape"], counted) + starts.results[0][counted]
    return [lax.convert_element_type(counts, params["dtype"])]


@rule("iota", localize=_local_shape, on_shards=_iota_on_shards)
def _iota(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    counted = eqn.params["dimension"]
    result = tuple(table.dim(size, positional=i == counted) for i, size in enumerate(shape_of(eqn.outvars[0])))
    return table.build(eqn, [table.dims(shape_of(atom), blocked=True) for atom in eqn.invars], [result])


@rule("empty", localize=_local_shape)
def _empty(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    return table.build(eqn, [], [table.dims(shape_of(eqn.outvars[0]))])


# ---- reshape ---------------------------------------------------------------------------------------------------------


def common_factors(table: FactorTable, source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims]:
    """Of two shapes of one row-major array: from the outside, always the largest common divisor.

    `[8 6] -> [4 12]` is `[(4 2) 6] -> [4 (2 6)]`. If the remaining lengths of two dimensions have no common divisor,
    both shapes get blocked factors until their strides agree.
    """
    source_dims: list[Dim] = [() for _ in source]
    target_dims: list[Dim] = [() for _ in target]
    if math.prod(source) == 0:
        return table.dims(source, blocked=True), table.dims(target, blocked=True)

    # [length without factors so far, dimension], outermost first. Lengths of 1 need no factor.
    left = [[size, i] for i, size in enumerate(source) if size > 1]
    right = [[size, i] for i, size in enumerate(target) if size > 1]
    while left and right:
        divisor = math.gcd(left[0][0], right[0][0])
        if divisor == 1:
            _block_until_aligned(table, left, source_dims, right, target_dims)
            continue

        factor = table.dim(divisor)
        for pending, dims in ((left, source_dims), (right, target_dims)):
            dims[pending[0][1]] += factor
            pending[0][0] //= divisor
            if pending[0][0] == 1:
                pending.pop(0)

    assert not left and not right, (source, target)
    return tuple(source_dims), tuple(target_dims)


def _block_until_aligned(
    table: FactorTable, left: list[list[int]], left_dims: list[Dim], right: list[list[int]], right_dims: list[Dim]
) -> None:
    n_left = n_right = 1
    while n_left != n_right or n_left == 1:
        pending, dims = (left, left_dims) if n_left <= n_right else (right, right_dims)
        size, i = pending.pop(0)
        dims[i] += table.dim(size, blocked=True)
        n_left, n_right = (n_left * size, n_right) if pending is left else (n_left, n_right * size)


@rule("reshape", localize=partial(_local_sizes, "new_sizes"))
def _reshape(eqn: JaxprEqn) -> Factors:
    """`dimensions`, if given, transposes the operand first."""
    table = FactorTable()
    shape = shape_of(eqn.invars[0])
    order = eqn.params["dimensions"] or range(len(shape))
    permuted, result = common_factors(table, [shape[i] for i in order], shape_of(eqn.outvars[0]))
    placed = dict(zip(order, permuted, strict=True))
    operand = tuple(placed[i] for i in range(len(shape)))
    return table.build(eqn, [operand], [result], linear="joint", linear_operands=(0,))


# ---- parts of arrays -------------------------------------------------------------------------------------------------


def whole_or_blocked(
    table: FactorTable, source: Sequence[int], target: Sequence[int], is_whole: Sequence[bool] | None = None
) -> tuple[Dims, Dims]:
    """is_whole: whether each dimension passes unchanged; by default, if its sizes are equal."""
    pairs = []
    is_whole = is_whole or [a == b for a, b in zip(source, target, strict=True)]
    for source_size, target_size, whole in zip(source, target, is_whole, strict=True):
        dim = table.dim(source_size, blocked=not whole)
        pairs.append((dim, dim if whole else table.dim(target_size, blocked=True)))
    return tuple(dim for dim, _ in pairs), tuple(dim for _, dim in pairs)


@rule("pad")
def _pad(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    is_whole = [tuple(config) == (0, 0, 0) for config in eqn.params["padding_config"]]
    operand, result = whole_or_blocked(table, shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]), is_whole)
    return table.build(eqn, [operand, ()], [result], linear="joint", linear_operands=(0, 1))


def local_ends(name: str, eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    """Whole dimensions, whose parameter `name` is their size, are whole in a shard, too."""
    sizes = zip(shape_of(eqn.invars[0]), operands[0], eqn.params[name], strict=True)
    return {**eqn.params, name: tuple(local if end == size else end for size, local, end in sizes)}


@rule("slice", localize=partial(local_ends, "limit_indices"))
def _slice(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    source, target = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    operand, result = whole_or_blocked(table, source, target)
    return _factors_of_move(eqn, table, operand, result)


@rule("dynamic_slice", localize=partial(_local_sizes, "slice_sizes"))
def _dynamic_slice(eqn: JaxprEqn) -> Factors:
    """The start of a whole dimension is clamped to 0, on a shard, too."""
    table = FactorTable()
    source, target = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    operand, result = whole_or_blocked(table, source, target)
    return table.build(eqn, [operand, *(() for _ in eqn.invars[1:])], [result], linear="joint", linear_operands=(0,))


@rule("dynamic_update_slice")
def _dynamic_update_slice(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    source, part = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    operand, update = whole_or_blocked(table, source, part)
    return table.build(
        eqn, [operand, update, *(() for _ in eqn.invars[2:])], [operand], linear="joint", linear_operands=(0, 1)
    )
