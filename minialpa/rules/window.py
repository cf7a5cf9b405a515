"""Windows that slide over an array: pooling and its gradients.

A dimension whose window is trivial (length 1, stride 1, no padding, no dilation) is one factor of all arrays; in every
other dimension neighbours mix, and all arrays are blocked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from minialpa.ir.equations import shape_of
from minialpa.rules.common import FactorTable, n_elements
from minialpa.rules.factors import Dims, Factors
from minialpa.rules.known_rules import rule


def _is_trivial(eqn: JaxprEqn, i: int) -> bool:
    """Whether dimension `i` passes unchanged. Gradients have no dilations."""
    ones = ("window_dimensions", "window_strides", "base_dilation")
    padding = tuple(eqn.params["padding"][i])
    return padding == (0, 0) and all(eqn.params[name][i] == 1 for name in ones if name in eqn.params)


def _windowed(table: FactorTable, eqn: JaxprEqn, large: Sequence[int], small: Sequence[int]) -> tuple[Dims, Dims]:
    """Dims of the array that windows slide over, and of the array with one element for each window."""
    pairs = []
    for i, (size, n_windows) in enumerate(zip(large, small, strict=True)):
        is_trivial = _is_trivial(eqn, i)
        dim = table.dim(size, blocked=not is_trivial)
        pairs.append((dim, dim if is_trivial else table.dim(n_windows, blocked=True)))
    return tuple(dim for dim, _ in pairs), tuple(dim for _, dim in pairs)


def _window_flops(eqn: JaxprEqn, n_windows: int) -> float:
    return float(n_windows * math.prod(eqn.params["window_dimensions"]))


@rule("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum")
def _reduce_window(eqn: JaxprEqn) -> Factors:
    """n arrays, and for `reduce_window` their n scalar initial values."""
    table = FactorTable()
    n_arrays = len(eqn.outvars)
    array, result = _windowed(table, eqn, shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]))
    operands = [array] * n_arrays + [()] * (len(eqn.invars) - n_arrays)
    linear = (0,) if eqn.primitive.name == "reduce_window_sum" else ()
    flops = _window_flops(eqn, n_elements(eqn.outvars[0]))
    return table.build(eqn, operands, [result] * n_arrays, linear="joint", linear_operands=linear, flops=flops)


@rule("select_and_scatter_add")
def _select_and_scatter_add(eqn: JaxprEqn) -> Factors:
    """Gradient of max pooling: (gradient of each window, array) -> gradient of the array; linear in the first."""
    table = FactorTable()
    array, windows = _windowed(table, eqn, shape_of(eqn.invars[1]), shape_of(eqn.invars[0]))
    flops = _window_flops(eqn, n_elements(eqn.invars[0]))
    return table.build(eqn, [windows, array], [array], linear="joint", linear_operands=(0,), flops=flops)


@rule("select_and_gather_add")
def _select_and_gather_add(eqn: JaxprEqn) -> Factors:
    """Tangent of max pooling: (tangent of the array, array) -> tangent of each window; linear in the first."""
    table = FactorTable()
    array, windows = _windowed(table, eqn, shape_of(eqn.invars[1]), shape_of(eqn.outvars[0]))
    flops = _window_flops(eqn, n_elements(eqn.outvars[0]))
    return table.build(eqn, [array, array], [windows], linear="joint", linear_operands=(0,), flops=flops)
