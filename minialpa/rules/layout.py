"""Rearrangements of dimensions: broadcast, transpose, concatenate, split and the like, and arrays without operands.

A dimension that is kept is one factor of operand and result; a dimension that is joined, cut or reversed is blocked,
and one that `iota` counts along is positional. All are linear in the arrays they move, and cost no flops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from minialpa.ir.equations import shape_of
from minialpa.rules.common import FactorTable
from minialpa.rules.factors import Dims, Factors, Shapes
from minialpa.rules.known_rules import Starts, rule


def _moved(eqn: JaxprEqn, table: FactorTable, operand: Dims, result: Dims) -> Factors:
    """Factors of an equation with one operand and one result, linear in the operand."""
    return table.build(eqn, [operand], [result], linear="joint", linear_operands=(0,))


def _local_broadcast(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    return dict(eqn.params, shape=results[0])


@rule("broadcast_in_dim", localize=_local_broadcast)
def _broadcast_in_dim(eqn: JaxprEqn) -> Factors:
    """New dimensions, and those that grow from length 1, are factors of the result alone."""
    table = FactorTable()
    shape = shape_of(eqn.outvars[0])
    result = table.dims(shape)
    targets = eqn.params["broadcast_dimensions"]
    operand = tuple(
        result[i] if size == shape[i] else () for size, i in zip(shape_of(eqn.invars[0]), targets, strict=True)
    )
    return _moved(eqn, table, operand, result)


@rule("transpose")
def _transpose(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    operand = table.dims(shape_of(eqn.invars[0]))
    return _moved(eqn, table, operand, tuple(operand[i] for i in eqn.params["permutation"]))


@rule("squeeze")
def _squeeze(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    operand = table.dims(shape_of(eqn.invars[0]))
    dropped = {i % len(operand) for i in eqn.params["dimensions"]}
    return _moved(eqn, table, operand, tuple(dim for i, dim in enumerate(operand) if i not in dropped))


@rule("rev")
def _rev(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    reversed_dims = set(eqn.params["dimensions"])
    dims = tuple(table.dim(size, blocked=i in reversed_dims) for i, size in enumerate(shape_of(eqn.invars[0])))
    return _moved(eqn, table, dims, dims)


def _local_tile(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    sizes = zip(operands[0], results[0], eqn.params["reps"], strict=True)
    return dict(eqn.params, reps=tuple(tiled // size if size else n_reps for size, tiled, n_reps in sizes))


@rule("tile", localize=_local_tile)
def _tile(eqn: JaxprEqn) -> Factors:
    """Each dimension of the result is (repetitions, dimension of the operand)."""
    table = FactorTable()
    operand = table.dims(shape_of(eqn.invars[0]))
    repetitions = table.dims(eqn.params["reps"])
    return _moved(eqn, table, operand, tuple(rep + dim for rep, dim in zip(repetitions, operand, strict=True)))


def _joined_along(table: FactorTable, shapes: Sequence[tuple[int, ...]], axis: int) -> list[Dims]:
    """Dims of arrays that agree in all dimensions but `axis`, which is blocked."""
    common = table.dims(shapes[0][:axis] + shapes[0][axis + 1 :])
    return [(*common[:axis], table.dim(shape[axis], blocked=True), *common[axis:]) for shape in shapes]


@rule("concatenate")
def _concatenate(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    *operands, result = _joined_along(
        table, [shape_of(atom) for atom in (*eqn.invars, *eqn.outvars)], eqn.params["dimension"]
    )
    return table.build(eqn, operands, [result], linear="joint", linear_operands=range(len(operands)))


@rule("split")
def _split(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    operand, *results = _joined_along(
        table, [shape_of(atom) for atom in (*eqn.invars, *eqn.outvars)], eqn.params["axis"]
    )
    return table.build(eqn, [operand], results, linear="joint", linear_operands=(0,))


@rule("stack")
def _stack(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    axis, part = eqn.params["axis"], table.dims(shape_of(eqn.invars[0]))
    result = (*part[:axis], table.dim(len(eqn.invars), blocked=True), *part[axis:])
    operands = [part for _ in eqn.invars]
    return table.build(eqn, operands, [result], linear="joint", linear_operands=range(len(operands)))


@rule("unstack")
def _unstack(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    axis, part = eqn.params["axis"], table.dims(shape_of(eqn.outvars[0]))
    operand = (*part[:axis], table.dim(len(eqn.outvars), blocked=True), *part[axis:])
    return table.build(eqn, [operand], [part for _ in eqn.outvars], linear="joint", linear_operands=(0,))


def _local_shape(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    return dict(eqn.params, shape=results[0])


def _iota_on_shards(eqn: JaxprEqn, operands: Sequence[Any], params: Mapping[str, Any], starts: Starts) -> list[Any]:
    counted = params["dimension"]
    # Counted as integers: added in 16-bit floats, a rounded start and a count need not be the rounded sum.
    counts = lax.broadcasted_iota(np.int32, params["shape"], counted) + starts.results[0][counted]
    return [lax.convert_element_type(counts, params["dtype"])]


@rule("iota", localize=_local_shape, on_shards=_iota_on_shards)
def _iota(eqn: JaxprEqn) -> Factors:
    """Values count along `dimension`, which is positional."""
    table = FactorTable()
    counted = eqn.params["dimension"]
    result = tuple(table.dim(size, positional=i == counted) for i, size in enumerate(shape_of(eqn.outvars[0])))
    return table.build(eqn, [table.dims(shape_of(atom), blocked=True) for atom in eqn.invars], [result])


@rule("empty", localize=_local_shape)
def _empty(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    return table.build(eqn, [], [table.dims(shape_of(eqn.outvars[0]))])
