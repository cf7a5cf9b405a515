"""Equations in; out, the floats that a comparison reads, which must have equal bits for all of their readers.

Two readers of a partial sum may reduce it in two ways, which round differently. Most equations tolerate that. A
comparison does not: the derivative of y = max(x, 0) selects the elements with x == y, and finds none if x of the
forward pass and x of the backward pass differ in the last bit. So compared values are complete, and so are the values
from which linear equations and casts compute them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from jax.extend.core import JaxprEqn, Var

from minialpa.intra.strategies.loops import scan_body
from minialpa.ir.equations import Atom, is_inexact, is_literal, operand_vars, sub_jaxprs
from minialpa.rules.expensive import has_contraction
from minialpa.rules.known_rules import factors_of

#: Comparisons whose result changes with a bit, against any number.
_EQUALITIES = frozenset(("eq", "ne"))
#: Comparisons with a threshold that the step computes, such as the k-th largest element.
_ORDERS = frozenset(("ge", "gt", "le", "lt"))


def compared_values(eqns: Sequence[JaxprEqn]) -> frozenset[Var]:
    """The float variables of `eqns` that a comparison reads, also through linear equations and casts."""
    found = set[Var]()
    for eqn in reversed(eqns):
        found.update(_compared_operands(eqn, found))
    return frozenset(found)


def _compared_operands(eqn: JaxprEqn, found: set[Var]) -> Iterable[Var]:
    """found: compared variables among results of `eqn` and later ones."""
    name = eqn.primitive.name
    if name in _EQUALITIES or (name in _ORDERS and not any(map(is_literal, eqn.invars))):
        return _floats(eqn.invars)
    if name == "optimization_barrier":
        return _floats([atom for atom, out in zip(eqn.invars, eqn.outvars, strict=True) if out in found])

    body = scan_body(eqn)
    if body is not None:
        inside = compared_values(body.flat.eqns)
        return _floats([atom for atom, inner in zip(eqn.invars, body.flat.invars, strict=True) if inner in inside])
    if _tests_equality(eqn):
        return _floats(eqn.invars)

    # Only linear equations pass partial sums; the search passes none through products. Casts may read a sum twice.
    passes = name == "convert_element_type" or (factors_of(eqn).linear != "none" and not has_contraction(eqn))
    return _floats(eqn.invars) if passes and not found.isdisjoint(eqn.outvars) else ()


def _floats(atoms: Sequence[Atom]) -> list[Var]:
    return [atom for atom in atoms if not is_literal(atom) and is_inexact(atom)]


@functools.lru_cache(2**14)
def _tests_equality(eqn: JaxprEqn) -> bool:
    """Whether a loop or branch tests equality inside."""
    return any(
        (inner.primitive.name in _EQUALITIES and any(map(is_inexact, operand_vars(inner)))) or _tests_equality(inner)
        for body in sub_jaxprs(eqn)
        for inner in body.eqns
    )
