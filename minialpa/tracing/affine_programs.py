"""`AffineProgram.affine` returns an integer variable of a program as an affine function of the position.

It follows the equations back, also into and out of loops, branches and calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.ir.equations import Atom, called, is_call, is_literal, maker_of, scan_counts, shape_of
from minialpa.tracing.affine import Affine, At, fits, of_constant, of_value
from minialpa.tracing.affine_rules import RULES


@dataclass(frozen=True, slots=True)
class Outside:
    """The operand that an input of a body stands for; if `is_stacked`, each iteration reads another slice of it."""

    atom: Atom
    is_stacked: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class AffineProgram:
    """One jaxpr, with the values that its inputs stand for.

    Attributes:
        producers: the equation that computes each variable.
        values: captured arrays.
        around: the program that contains this one, or None.
        inputs: the operand in `around` for each input; carries that change are absent.
        branch: for a branch of a `cond`, the operand in `around` that chooses, and the number of this branch.
    """

    producers: Mapping[Var, JaxprEqn]
    values: Mapping[Var, Any]
    around: AffineProgram | None = None
    inputs: Mapping[Var, Outside] = field(default_factory=dict)
    branch: tuple[Atom, int] | None = None
    _known: dict[tuple[Var, At | None], Affine | None] = field(default_factory=dict)

    def affine(self, atom: Atom, at: At | None = None) -> Affine | None:
        """`atom`, or its slice at `at`, as an affine function; None if it is not affine or may overflow."""
        dtype = getattr(atom.aval, "dtype", None)
        if dtype is None or not (jnp.issubdtype(dtype, np.integer) or dtype == np.bool_) or 0 in shape_of(atom):
            return None
        if is_literal(atom):
            return of_constant(np.asarray(atom.val), shape_of(atom), at)
        if (atom, at) not in self._known:
            found = self._follow_back(atom, at)
            self._known[atom, at] = found if found is not None and fits(found, dtype) else None
        return self._known[atom, at]

    def _follow_back(self, var: Var, at: At | None) -> Affine | None:
        """`affine` before the test for overflow."""
        if var in self.inputs:
            return self._follow_input(self.inputs[var], at)
        if var in self.values:
            return of_value(self.values[var], at)

        eqn = self.producers.get(var)
        if eqn is None:
            return None
        r = eqn.outvars.index(var)
        if is_call(eqn):
            inner, operands = called(eqn)
            return _result_inside(self, inner, [Outside(atom) for atom in operands], r, at)
        if eqn.primitive.name == "optimization_barrier":
            return self.affine(eqn.invars[r], at)
        if eqn.primitive.name == "scan":
            return _follow_scan(self, eqn, r, at)
        if eqn.primitive.name == "cond":
            found = [_follow_branch(self, eqn, k, r, at) for k in range(len(eqn.params["branches"]))]
            return found[0] if all(one == found[0] for one in found) else None
        rule = RULES.get(eqn.primitive.name)
        return None if rule is None else rule(self.affine, eqn, at)

    def _follow_input(self, outside: Outside, at: At | None) -> Affine | None:
        """An input, from its operand in the program around this one."""
        around = self.around
        assert around is not None, outside
        if outside.is_stacked:
            x = around.affine(outside.atom, None if at is None else At(at.dim + 1, at.position))
            is_same = x is not None and (x.strides[0] == 0 or x.shape[0] == 1)
            return Affine(x.offset, x.strides[1:], x.shape[1:]) if x is not None and is_same else None

        # A `cond` returns zeros for residuals of branches that it does not take. The backward `cond` has the same
        # chooser, so the residuals that it reads come from the branch of the same number.
        eqn = maker_of(outside.atom, around.producers, "cond")
        if self.branch is not None and eqn is not None:
            index, number = self.branch
            if eqn.invars[0] is index:
                return _follow_branch(around, eqn, number, eqn.outvars.index(outside.atom), at)
        return around.affine(outside.atom, at)


def inside(
    closed: Any, around: AffineProgram, inputs: Sequence[Outside | None], branch: tuple[Atom, int] | None = None
) -> AffineProgram:
    """The `AffineProgram` of a jaxpr, closed or not, in `around`. inputs: the operand of each input, if known.

    branch: for a branch of a `cond`, as in `AffineProgram`.
    """
    jaxpr = getattr(closed, "jaxpr", closed)
    known = {var: outside for var, outside in zip(jaxpr.invars, inputs, strict=True) if outside is not None}
    producers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    values = dict(zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True))
    return AffineProgram(producers, values, around, known, branch)


def inputs_of_scan(eqn: JaxprEqn) -> list[Outside | None]:
    """The operand for each input of a scan's body; None for carries that change."""
    n_consts, n_carry = scan_counts(eqn)
    jaxpr = eqn.params["jaxpr"].jaxpr
    inputs: list[Outside | None] = [
        Outside(atom, is_stacked=k >= n_consts + n_carry) for k, atom in enumerate(eqn.invars)
    ]
    for r in range(n_carry):
        if jaxpr.outvars[r] is not jaxpr.invars[n_consts + r]:
            inputs[n_consts + r] = None
    return inputs


def _result_inside(
    around: AffineProgram,
    closed: Any,
    inputs: Sequence[Outside | None],
    r: int,
    at: At | None,
    branch: tuple[Atom, int] | None = None,
) -> Affine | None:
    """Result `r` of a jaxpr in `around`; other parameters as in `inside`."""
    return inside(closed, around, inputs, branch).affine(getattr(closed, "jaxpr", closed).outvars[r], at)


def _follow_branch(around: AffineProgram, eqn: JaxprEqn, number: int, r: int, at: At | None) -> Affine | None:
    inputs = [Outside(atom) for atom in eqn.invars[1:]]
    return _result_inside(around, eqn.params["branches"][number], inputs, r, at, (eqn.invars[0], number))


def _follow_scan(around: AffineProgram, eqn: JaxprEqn, r: int, at: At | None) -> Affine | None:
    """An unchanged carry, or stacked slices that are equal in all iterations."""
    n_consts, n_carry = scan_counts(eqn)
    inputs = inputs_of_scan(eqn)
    if r < n_carry:
        outside = inputs[n_consts + r]
        return None if outside is None else around.affine(outside.atom, at)

    inner = None if at is None or at.dim == 0 else At(at.dim - 1, at.position)
    x = _result_inside(around, eqn.params["jaxpr"], inputs, r, inner)
    n = 1 if at is not None and at.dim == 0 else eqn.params["length"]
    return None if x is None else Affine(x.offset, (0, *x.strides), (n, *x.shape))
