"""Rules of `dot_general` and `conv_general_dilated`: linear in each operand; partial sums over contracted factors.

A `Dim` is the tuple of factors of one dimension, outermost first; `Dims` are the dimensions of an array.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.ir.equations import is_inexact, shape_of
from minialpa.rules.common import Dim, FactorTable, n_elements
from minialpa.rules.factors import Dims, Factors, Shapes
from minialpa.rules.known_rules import rule


def _in_order(dims: dict[int, Dim]) -> Dims:
    return tuple(dims[i] for i in range(len(dims)))


@rule("dot_general")
def _dot_general(eqn: JaxprEqn) -> Factors:
    """`[b i k], [b k j] -> [b i j]   sum(k)`; flops = 2 * b * i * j * k.

    b: batch dimensions; i, j: other dimensions of lhs and rhs; k: contracted dimensions.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs_shape, rhs_shape = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    table = FactorTable()

    batch = table.dims(lhs_shape[i] for i in lhs_batch)
    # Rounded partial sums would change an integer result of floats.
    is_rounded = is_inexact(eqn.invars[0]) and not is_inexact(eqn.outvars[0])
    contract = tuple(
        table.dim(lhs_shape[i], blocked=is_rounded, reduction=None if is_rounded else "sum") for i in lhs_contract
    )
    lhs = dict(zip((*lhs_batch, *lhs_contract), batch + contract, strict=True))
    rhs = dict(zip((*rhs_batch, *rhs_contract), batch + contract, strict=True))

    lhs_rest = {i: table.dim(size) for i, size in enumerate(lhs_shape) if i not in lhs}
    rhs_rest = {i: table.dim(size) for i, size in enumerate(rhs_shape) if i not in rhs}

    return table.build(
        eqn,
        [_in_order(lhs | lhs_rest), _in_order(rhs | rhs_rest)],
        [(*batch, *lhs_rest.values(), *rhs_rest.values())],
        linear="each",
        linear_operands=(0, 1),
        flops=2.0 * n_elements(eqn.outvars[0]) * math.prod(lhs_shape[i] for i in lhs_contract),
    )


def _local_conv(eqn: JaxprEqn, operands: Shapes, results: Shapes) -> dict[str, Any]:
    """feature groups = channels of lhs / channels of one kernel; batch groups = batch of lhs / batch of the result."""
    (lhs, rhs), (out,) = operands, results
    numbers = eqn.params["dimension_numbers"]
    return dict(
        eqn.params,
        feature_group_count=lhs[numbers.lhs_spec[1]] // rhs[numbers.rhs_spec[1]],
        batch_group_count=lhs[numbers.lhs_spec[0]] // out[numbers.out_spec[0]],
    )


def _spatial(table: FactorTable, eqn: JaxprEqn, axis: int, sizes: tuple[int, int, int]) -> tuple[Dim, Dim, Dim]:
    """Lengths in lhs, rhs and result: `sizes`.

    A window of length 1 keeps positions (pointwise convolution). A window as long as its input sums over positions (the
    weight gradient). Every other window mixes neighbours and is blocked.
    """
    lhs, rhs, out = sizes
    is_plain = (
        tuple(eqn.params["padding"][axis]) == (0, 0)
        and eqn.params["lhs_dilation"][axis] == eqn.params["rhs_dilation"][axis] == 1
    )

    if is_plain and rhs == 1 and eqn.params["window_strides"][axis] == 1:
        position = table.dim(lhs)
        return position, table.dim(1), position
    if is_plain and rhs == lhs and out == 1:
        position = table.dim(lhs, reduction="sum")
        return position, position, table.dim(1)

    return table.dim(lhs, blocked=True), table.dim(rhs, blocked=True), table.dim(out, blocked=True)


def _n_products(eqn: JaxprEqn, axis: int, sizes: tuple[int, int, int]) -> int:
    """Pairs of result and window positions on an element of lhs, not on padding or a hole of a dilation."""
    lhs, rhs, out = sizes
    stride, dilation = eqn.params["window_strides"][axis], eqn.params["lhs_dilation"][axis]
    in_result, in_window = np.arange(out)[:, None] * stride, np.arange(rhs) * eqn.params["rhs_dilation"][axis]
    position = in_result + in_window - int(eqn.params["padding"][axis][0])
    return int(np.sum((position % dilation == 0) & (position >= 0) & (position < lhs * dilation)))


@rule("conv_general_dilated", localize=_local_conv)
def _conv_general_dilated(eqn: JaxprEqn) -> Factors:
    """`[b n, g c, *in], [b g o, c, *window] -> [n, b g o, *out]`, in the order of ConvDimensionNumbers.

    b: batch groups, g: feature groups (one of them is 1), n: batch, c: channels in a group, o: results of a group.
    flops = 2 * n * (b g o) * c * products along each spatial dimension.
    """
    numbers = eqn.params["dimension_numbers"]
    specs = (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    lhs_shape, rhs_shape, out_shape = (
        tuple(shape_of(atom)[i] for i in spec) for atom, spec in zip((*eqn.invars, *eqn.outvars), specs, strict=True)
    )

    table = FactorTable()
    batch_groups = table.dim(eqn.params["batch_group_count"])
    groups = table.dim(eqn.params["feature_group_count"])
    batch, channels = table.dim(out_shape[0]), table.dim(rhs_shape[1], reduction="sum")
    n_groups = eqn.params["batch_group_count"] * eqn.params["feature_group_count"]
    features = batch_groups + groups + table.dim(rhs_shape[0] // n_groups)
    lhs, rhs, out = [batch_groups + batch, groups + channels], [features, channels], [batch, features]
    flops = 2.0 * math.prod(out_shape[:2]) * rhs_shape[1]

    for axis, sizes in enumerate(zip(lhs_shape[2:], rhs_shape[2:], out_shape[2:], strict=True)):
        flops *= _n_products(eqn, axis, sizes)
        for array, dim in zip((lhs, rhs, out), _spatial(table, eqn, axis, sizes), strict=True):
            array.append(dim)

    # From the order of `specs` to the order of the arrays.
    *operands, result = (
        _in_order(dict(zip(spec, dims, strict=True))) for spec, dims in zip(specs, (lhs, rhs, out), strict=True)
    )
    return table.build(
        eqn,
        operands,
        [result],
        linear="each",
        linear_operands=(0, 1),
        flops=flops,
    )
