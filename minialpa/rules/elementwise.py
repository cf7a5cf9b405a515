"""Rules of elementwise primitives: a dimension of the result is a factor, shared with every operand that has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from jax.extend.core import JaxprEqn

from minialpa.ir.equations import has_all, is_inexact, moves_memory, shape_of
from minialpa.rules.common import FactorTable, is_complex, is_summable, n_elements
from minialpa.rules.factors import Dims, Factors
from minialpa.rules.known_rules import rule


def _follow(atom: Any, shape: tuple[int, ...], result: Dims) -> Dims:
    if not shape_of(atom):
        return ()
    return tuple(dim if size == n else () for size, n, dim in zip(shape_of(atom), shape, result, strict=True))


def elementwise(
    eqn: JaxprEqn,
    linear: Literal["none", "joint", "each"] = "none",
    linear_operands: Sequence[int] = (),
    *,
    flops_per_element: float = 1.0,
) -> Factors:
    """Results have one shape, to which operands are broadcast."""
    table = FactorTable()
    shape = shape_of(eqn.outvars[0])
    result = table.dims(shape)

    return table.build(
        eqn,
        [_follow(atom, shape, result) for atom in eqn.invars],
        [result for _ in eqn.outvars],
        linear=linear,
        linear_operands=linear_operands,
        flops=flops_per_element * n_elements(eqn.outvars[0]),
    )


@rule("abs", "acos", "acosh", "and", "asin", "asinh", "atan", "atan2", "atanh")
@rule("bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "clz", "cos", "cosh", "digamma")
@rule("eq", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt")
@rule("igamma", "igamma_grad_a", "igammac", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "log2")
@rule("logistic", "lt", "lt_to", "max", "min", "mulhi", "ne", "nextafter", "not", "one_minus_square", "or")
@rule("polygamma", "polynomial", "population_count", "pow", "reduce_precision", "regularized_incomplete_beta", "rem")
@rule("round", "rsqrt", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt")
@rule("square", "tan", "tanh", "threefry2x32", "xor", "zeta")
def _nonlinear(eqn: JaxprEqn) -> Factors:
    return elementwise(eqn)


@rule("add", "add_any", "complex", "conj", "imag", "neg", "real", "sub")
def _linear_in_all(eqn: JaxprEqn) -> Factors:
    return elementwise(eqn, "joint", range(len(eqn.invars)))


# `name` is `jax.ad_checkpoint.checkpoint_name`.
@rule("copy", "minialpa_per_micro_batch", "name", "sharding_constraint", "stop_gradient")
def _identity(eqn: JaxprEqn) -> Factors:
    return elementwise(eqn, "joint", (0,), flops_per_element=0.0)


@rule("mul")
def _mul(eqn: JaxprEqn) -> Factors:
    return elementwise(eqn, "each", (0, 1))


@rule("div")
def _div(eqn: JaxprEqn) -> Factors:
    # Division of integers rounds, so it is not linear.
    return elementwise(eqn, "each", (0,) if is_inexact(eqn.outvars[0]) else ())


@rule("select_n")
def _select_n(eqn: JaxprEqn) -> Factors:
    return elementwise(eqn, "joint", range(1, len(eqn.invars)))


def _conversion_is_linear(source: Any, target: Any) -> bool:
    """From numbers to floats or complex numbers with all floats of the source.

    Integers may overflow. A narrower float may hold a sum and not its summands. Real numbers lose imaginary parts.
    """
    if not is_inexact(target) or not is_summable(source) or (is_complex(source) and not is_complex(target)):
        return False
    return not is_inexact(source) or has_all(target.aval.dtype, source.aval.dtype)


@rule("convert_element_type")
def _convert_element_type(eqn: JaxprEqn) -> Factors:
    return elementwise(eqn, "joint", (0,) if _conversion_is_linear(eqn.invars[0], eqn.outvars[0]) else ())


@rule("bitcast_convert_type")
def _bitcast_convert_type(eqn: JaxprEqn) -> Factors:
    """If the widths differ, the array of narrower elements has one more dimension."""
    (operand,), (result,) = eqn.invars, eqn.outvars
    table = FactorTable()
    n_common = min(len(shape_of(operand)), len(shape_of(result)))
    common = table.dims(shape_of(operand)[:n_common])
    operand_dims, result_dims = (
        common + table.dims(shape_of(atom)[n_common:], blocked=True) for atom in (operand, result)
    )
    return table.build(eqn, [operand_dims], [result_dims])


@rule("device_put", "optimization_barrier", "minialpa_gradient")
def _barrier(eqn: JaxprEqn) -> Factors:
    """Partial sums may pass if all arrays are numbers."""
    table = FactorTable()
    arrays = [table.dims(shape_of(atom)) for atom in eqn.invars]
    numbers = [i for i, atom in enumerate(eqn.invars) if is_summable(atom)]
    # Devices do not sum in host memory.
    is_linear = len(numbers) == len(eqn.invars) and not moves_memory(eqn)
    linear: Literal["none", "joint"] = "joint" if is_linear else "none"
    return table.build(eqn, arrays, arrays, linear=linear, linear_operands=numbers)
