"""Parts of arrays at static or dynamic positions: pad, slice, dynamic_slice, dynamic_update_slice.

A dimension that is taken whole is one factor of all arrays; one that is cut or padded is blocked. Linear, no flops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from minialpa.ir.equations import shape_of
from minialpa.rules.common import FactorTable
from minialpa.rules.factors import Dims, Factors, Shapes
from minialpa.rules.known_rules import rule


def _whole_or_blocked(
    table: FactorTable, source: Sequence[int], target: Sequence[int], is_whole: Sequence[bool]
) -> tuple[Dims, Dims]:
    """Factors of two arrays: a shared one for each dimension that is whole, a blocked one on either side for others."""
    pairs = []
    for source_size, target_size, whole in zip(source, target, is_whole, strict=True):
        dim = table.dim(source_size, blocked=not whole)
        pairs.append((dim, dim if whole else table.dim(target_size, blocked=True)))
    return tuple(dim for dim, _ in pairs), tuple(dim for _, dim in pairs)


def _are_equal(source: Sequence[int], target: Sequence[int]) -> list[bool]:
    """For each dimension, whether it has the same length in both shapes."""
    return [size == target_size for size, target_size in zip(source, target, strict=True)]


@rule("pad")
def _pad(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    is_whole = [tuple(config) == (0, 0, 0) for config in eqn.params["padding_config"]]
    operand, result = _whole_or_blocked(table, shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]), is_whole)
    return table.build(eqn, [operand, ()], [result], linear="joint", linear_operands=(0, 1))


def _local_slice(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    """Split dimensions are whole ones, which a shard's slice takes up to its own end."""
    sizes = zip(shape_of(eqn.invars[0]), operands[0], eqn.params["limit_indices"], strict=True)
    return dict(eqn.params, limit_indices=tuple(limit if local == size else local for size, local, limit in sizes))


@rule("slice", localize=_local_slice)
def _slice(eqn: JaxprEqn) -> Factors:
    """A dimension is whole if nothing is cut off; then its stride is 1 or its length is at most 1."""
    table = FactorTable()
    source, target = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    operand, result = _whole_or_blocked(table, source, target, _are_equal(source, target))
    return table.build(eqn, [operand], [result], linear="joint", linear_operands=(0,))


def _local_dynamic_slice(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    return dict(eqn.params, slice_sizes=results[0])


@rule("dynamic_slice", localize=_local_dynamic_slice)
def _dynamic_slice(eqn: JaxprEqn) -> Factors:
    """The start of a dimension that is taken whole is clamped to 0, on a shard as well."""
    table = FactorTable()
    source, target = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    operand, result = _whole_or_blocked(table, source, target, _are_equal(source, target))
    return table.build(eqn, [operand, *(() for _ in eqn.invars[1:])], [result], linear="joint", linear_operands=(0,))


@rule("dynamic_update_slice")
def _dynamic_update_slice(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    source, part = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    operand, update = _whole_or_blocked(table, source, part, _are_equal(source, part))
    return table.build(
        eqn, [operand, update, *(() for _ in eqn.invars[2:])], [operand], linear="joint", linear_operands=(0, 1)
    )
