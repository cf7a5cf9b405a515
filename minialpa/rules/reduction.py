"""Rules of reductions, scans along an axis, orderings, transforms of whole axes (fft, linear algebra), and windows.

The axis of an operation is blocked, unless partial results can be combined. A dimension with a window is blocked,
unless the window is trivial: length 1, stride 1, no padding, no dilation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from jax.extend.core import JaxprEqn

from minialpa.ir.equations import shape_of
from minialpa.rules.common import FactorTable, n_elements
from minialpa.rules.factors import Dims, Factors, Reduction
from minialpa.rules.known_rules import rule
from minialpa.rules.layout import whole_or_blocked

_COMBINED: dict[str, Reduction] = {
    "reduce_and": "and",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_or": "or",
    "reduce_prod": "prod",
    "reduce_sum": "sum",
    "reduce_xor": "xor",
}


@rule(*_COMBINED)
def _reduce(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    axes, combine = set(eqn.params["axes"]), _COMBINED[eqn.primitive.name]
    shape = shape_of(eqn.invars[0])
    operand = tuple(table.dim(size, reduction=combine if i in axes else None) for i, size in enumerate(shape))
    result = tuple(dim for i, dim in enumerate(operand) if i not in axes)
    linear = (0,) if combine == "sum" else ()
    flops = float(n_elements(eqn.invars[0]))
    return table.build(eqn, [operand], [result], linear="joint", linear_operands=linear, flops=flops)


def _blocked_axes(table: FactorTable, shape: tuple[int, ...], axes: Iterable[int]) -> Dims:
    blocked = {axis % len(shape) for axis in axes}
    return tuple(table.dim(size, blocked=i in blocked) for i, size in enumerate(shape))


@rule("argmax", "argmin", "reduce")
def _reduce_whole(eqn: JaxprEqn) -> Factors:
    """`reduce` has n arrays and n scalar initial values, combined by a function of the user."""
    table = FactorTable()
    n_arrays, axes = len(eqn.outvars), set(eqn.params["dimensions" if eqn.primitive.name == "reduce" else "axes"])
    array = _blocked_axes(table, shape_of(eqn.invars[0]), axes)
    result = tuple(dim for i, dim in enumerate(array) if i not in axes)
    operands: list[Dims] = [array] * n_arrays + [()] * (len(eqn.invars) - n_arrays)
    return table.build(eqn, operands, [result] * n_arrays, flops=float(n_arrays * n_elements(eqn.invars[0])))


@rule("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")
def _scan_axis(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    dims = _blocked_axes(table, shape_of(eqn.invars[0]), [eqn.params["axis"]])
    linear = (0,) if eqn.primitive.name == "cumsum" else ()
    flops = float(n_elements(eqn.invars[0]))
    return table.build(eqn, [dims], [dims], linear="joint", linear_operands=linear, flops=flops)


@rule("sort")
def _sort(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    dims = _blocked_axes(table, shape_of(eqn.invars[0]), [eqn.params["dimension"]])
    return table.build(eqn, [dims for _ in eqn.invars], [dims for _ in eqn.outvars])


@rule("approx_top_k", "top_k")
def _top_k(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    shape, k_shape = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    axis = eqn.params.get("axis", eqn.params.get("reduction_dimension", -1)) % len(shape)
    operand = _blocked_axes(table, shape, [axis])
    result = (*operand[:axis], table.dim(k_shape[axis], blocked=True), *operand[axis + 1 :])
    return table.build(eqn, [operand], [result for _ in eqn.outvars])


def _batched_dims(table: FactorTable, eqn: JaxprEqn, batch: Dims) -> tuple[list[Dims], list[Dims]]:
    """`batch`, then blocked dimensions."""

    def dims(shape: tuple[int, ...]) -> Dims:
        return batch + table.dims(shape[len(batch) :], blocked=True)

    return [dims(shape_of(atom)) for atom in eqn.invars], [dims(shape_of(var)) for var in eqn.outvars]


@rule("fft")
def _fft(eqn: JaxprEqn) -> Factors:
    """flops = 5 n log2(n) for n elements (Cooley & Tukey)."""
    table = FactorTable()
    shape = shape_of(eqn.invars[0])
    batch = table.dims(shape[: len(shape) - len(eqn.params["fft_lengths"])])
    operands, results = _batched_dims(table, eqn, batch)
    n_transformed = max(math.prod(eqn.params["fft_lengths"]), 1)
    flops = 5.0 * max(n_elements(eqn.invars[0]), n_elements(eqn.outvars[0])) * math.log2(n_transformed)
    return table.build(eqn, operands, results, linear="joint", linear_operands=(0,), flops=flops)


#: Operations on one n x n matrix, in units of n**3 (Golub & Van Loan, Matrix Computations).
_CUBIC: dict[str, float] = {
    "cholesky": 1 / 3,
    "eig": 25.0,
    "eigh": 9.0,
    "geqrf": 4 / 3,
    "hessenberg": 10 / 3,
    "householder_product": 4 / 3,
    "lu": 2 / 3,
    "ormqr": 4.0,
    "qr": 8 / 3,
    "schur": 25.0,
    "svd": 22.0,
    "tridiagonal": 4 / 3,
}


@rule("lu_pivots_to_permutation", *_CUBIC)
def _decomposition(eqn: JaxprEqn) -> Factors:
    """The last two dimensions of the first operand are matrices (for pivots, the last one)."""
    table = FactorTable()
    name, shape = eqn.primitive.name, shape_of(eqn.invars[0])
    n_core = 1 if name == "lu_pivots_to_permutation" else 2
    operands, results = _batched_dims(table, eqn, table.dims(shape[: len(shape) - n_core]))
    return table.build(eqn, operands, results, flops=_CUBIC.get(name, 0.0) * n_elements(eqn.invars[0]) * shape[-1])


@rule("triangular_solve")
def _triangular_solve(eqn: JaxprEqn) -> Factors:
    """`a x = b` or `x a = b`: right-hand sides are independent, with n**2 flops each."""
    table = FactorTable()
    a, b = shape_of(eqn.invars[0]), shape_of(eqn.invars[1])
    batch = table.dims(a[:-2])
    rows, columns = table.dim(a[-1], blocked=True), table.dim(a[-1], blocked=True)
    each = table.dim(b[-1] if eqn.params["left_side"] else b[-2])
    solved = table.dim(a[-1], blocked=True)
    x = (*batch, solved, each) if eqn.params["left_side"] else (*batch, each, solved)
    flops = float(n_elements(eqn.invars[1]) * a[-1])
    operands = [(*batch, rows, columns), x]
    return table.build(eqn, operands, [x], linear="joint", linear_operands=(1,), flops=flops)


# ---- windows ---------------------------------------------------------------------------------------------------------


def _is_trivial(eqn: JaxprEqn, i: int) -> bool:
    """Whether dimension `i` passes unchanged. Gradients have no dilations."""
    ones = ("window_dimensions", "window_strides", "base_dilation")
    padding = tuple(eqn.params["padding"][i])
    return padding == (0, 0) and all(eqn.params[name][i] == 1 for name in ones if name in eqn.params)


def _windowed_dims(table: FactorTable, eqn: JaxprEqn, large: Sequence[int], small: Sequence[int]) -> tuple[Dims, Dims]:
    """Of the array under the windows, and of the array with one element per window."""
    return whole_or_blocked(table, large, small, [_is_trivial(eqn, i) for i in range(len(large))])


def _window_flops(eqn: JaxprEqn, n_windows: int) -> float:
    return float(n_windows * math.prod(eqn.params["window_dimensions"]))


@rule("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum")
def _reduce_window(eqn: JaxprEqn) -> Factors:
    table = FactorTable()
    n_arrays = len(eqn.outvars)
    array, result = _windowed_dims(table, eqn, shape_of(eqn.invars[0]), shape_of(eqn.outvars[0]))
    operands = [array] * n_arrays + [()] * (len(eqn.invars) - n_arrays)
    linear = (0,) if eqn.primitive.name == "reduce_window_sum" else ()
    flops = _window_flops(eqn, n_elements(eqn.outvars[0]))
    return table.build(eqn, operands, [result] * n_arrays, linear="joint", linear_operands=linear, flops=flops)


@rule("select_and_gather_add", "select_and_scatter_add")
def _max_pooling(eqn: JaxprEqn) -> Factors:
    """Its tangent: (tangent of the array, array) -> tangent of each window; its gradient the other way around."""
    table = FactorTable()
    is_gradient = eqn.primitive.name == "select_and_scatter_add"
    of_windows = eqn.invars[0] if is_gradient else eqn.outvars[0]
    array, windows = _windowed_dims(table, eqn, shape_of(eqn.invars[1]), shape_of(of_windows))
    flops = _window_flops(eqn, n_elements(of_windows))
    first, result = (windows, array) if is_gradient else (array, windows)
    return table.build(eqn, [first, array], [result], linear="joint", linear_operands=(0,), flops=flops)
