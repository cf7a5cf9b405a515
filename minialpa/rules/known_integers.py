"""A jaxpr of scalars in, its integers at all points of a kernel's grid out: index maps, and the tests of `pl.when`.

On a grid (4, 8), the results of `lambda i, j: (2 * j, 0)` are arrays of shapes (1, 8) and ().
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.ir.equations import Atom, aval_of, is_literal, sub_jaxprs


@dataclass(frozen=True, slots=True)
class KnownScalar:
    """A scalar of a program.

    known: the value at each point of the grid, of length 1 along axes on which it does not depend; None if unknown.
    axes: the axes of the grid on which it may depend.
    """

    known: np.ndarray | None
    axes: frozenset[int] = frozenset()


def constant(value: Any) -> KnownScalar:
    """Python integers have 32 bits, as in kernels."""
    return KnownScalar(np.asarray(value, np.int32) if isinstance(value, int) else np.asarray(value))


#: An unknown value, independent of the grid.
UNKNOWN = KnownScalar(None)


def _quotient(x: Any, y: Any) -> Any:
    """Towards zero, as in lax. A quotient by 0 has no meaning."""
    dtype = np.result_type(x, y)
    if dtype.kind == "i":  # the least integer has no absolute value in its own type
        x, y = x.astype(np.int64), y.astype(np.int64)
    magnitude = np.abs(x) // np.maximum(np.abs(y), 1)
    return np.where((x < 0) != (y < 0), -magnitude, magnitude).astype(dtype)


#: Elementwise functions of arrays of integers and bools, by primitive.
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "and": np.bitwise_and,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "div": _quotient,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": lambda x: np.logical_not(x) if x.dtype == np.bool_ else np.invert(x),
    "or": np.bitwise_or,
    "rem": lambda x, y: x - y * _quotient(x, y),
    "select_n": lambda which, *cases: np.choose(which.astype(np.int64), cases),
    "sign": np.sign,
    "sub": np.subtract,
}
#: Calls whose jaxpr has the operands of the equation.
CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call")


def evaluate(jaxpr: Any, operands: Sequence[KnownScalar]) -> list[KnownScalar]:
    consts = getattr(jaxpr, "consts", ())
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    values: dict[Var, KnownScalar] = dict(zip(jaxpr.constvars, map(constant, consts), strict=False))
    values.update(zip(jaxpr.invars, operands, strict=True))
    for eqn in jaxpr.eqns:
        results = compute(eqn, [read(values, atom) for atom in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(values, atom) for atom in jaxpr.outvars]


def read(values: Mapping[Var, KnownScalar], atom: Atom) -> KnownScalar:
    return KnownScalar(np.asarray(atom.val, aval_of(atom).dtype)) if is_literal(atom) else values.get(atom, UNKNOWN)


def compute(eqn: JaxprEqn, operands: Sequence[KnownScalar]) -> list[KnownScalar]:
    """Unknown unless operands are known."""
    axes = frozenset[int]().union(*(operand.axes for operand in operands))
    known = [operand.known for operand in operands]
    name = eqn.primitive.name
    is_scalar = all(not getattr(var.aval, "shape", ()) for var in eqn.outvars)
    if name in CALLS and is_scalar:
        (inner, *_) = sub_jaxprs(eqn)
        if len(getattr(inner, "jaxpr", inner).invars) == len(operands):
            return evaluate(inner, operands)
    if is_scalar and all(value is not None for value in known):
        if name in FUNCTIONS:
            with np.errstate(all="ignore"):  # integers wrap, as on devices
                return [KnownScalar(np.asarray(FUNCTIONS[name](*known)), axes)]
        if name == "convert_element_type" and np.dtype(eqn.params["new_dtype"]).kind in "iub":
            return [KnownScalar(known[0].astype(eqn.params["new_dtype"]), axes)]  # type: ignore[union-attr]
    return [KnownScalar(None, axes)] * len(eqn.outvars)
