"""Reshape: the common factors of two shapes, such as `[b s h] -> [(b s) h]` and `[d] -> [h k]`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from minialpa.ir.equations import shape_of
from minialpa.rules.common import Dim, FactorTable
from minialpa.rules.factors import Dims, Factors, Shapes
from minialpa.rules.known_rules import rule


def common_factors(table: FactorTable, source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims]:
    """Factors of two shapes of one row-major array: from the outside, always the largest common divisor.

    `[8 6] -> [4 12]` is `[(4 2) 6] -> [4 (2 6)]`. If what is left of two dimensions has no common divisor, both shapes
    get blocked factors until their strides agree again.
    """
    source_dims: list[Dim] = [() for _ in source]
    target_dims: list[Dim] = [() for _ in target]
    if math.prod(source) == 0:
        return table.dims(source, blocked=True), table.dims(target, blocked=True)

    # (length without factors so far, dimension), outermost first. Lengths of 1 need no factor.
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
    """Give pending dimensions of both shapes blocked factors until these have the same number of elements."""
    n_left = n_right = 1
    while n_left != n_right or n_left == 1:
        pending, dims = (left, left_dims) if n_left <= n_right else (right, right_dims)
        size, i = pending.pop(0)
        dims[i] += table.dim(size, blocked=True)
        n_left, n_right = (n_left * size, n_right) if pending is left else (n_left, n_right * size)


def _local_reshape(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    return dict(eqn.params, new_sizes=results[0])


@rule("reshape", localize=_local_reshape)
def _reshape(eqn: JaxprEqn) -> Factors:
    """Common factors of both shapes; `dimensions`, where given, transposes the operand first."""
    table = FactorTable()
    shape = shape_of(eqn.invars[0])
    order = eqn.params["dimensions"] or range(len(shape))
    permuted, result = common_factors(table, [shape[i] for i in order], shape_of(eqn.outvars[0]))
    placed = dict(zip(order, permuted, strict=True))
    operand = tuple(placed[i] for i in range(len(shape)))
    return table.build(eqn, [operand], [result], linear="joint", linear_operands=(0,))
