"""Equations with fresh result variables: of a function, or an old equation on other operands."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Var

from minialpa.ir.block import Block
from minialpa.ir.equations import Atom, fresh_var, is_literal, type_of
from minialpa.support.private_jax import result_avals, settings_of
from minialpa.tracing.flattening import trace_flat


class EquationMaker:
    """Caches result types and traced functions. Use one object under one configuration of jax."""

    def __init__(self) -> None:
        self._avals: dict[Hashable, Sequence[Any]] = {}
        self._flat: dict[Hashable, Block] = {}

    def rebuild(self, eqn: JaxprEqn, invars: Sequence[Atom], params: Mapping[str, Any] | None = None) -> JaxprEqn:
        """The equation on other operands, with fresh result variables."""
        new_params = dict(eqn.params) if params is None else dict(params)
        operands = tuple(atom.aval for atom in invars)
        try:
            key = (eqn.primitive, tuple(new_params.items()), operands, settings_of(eqn))
            if key not in self._avals:
                self._avals[key] = result_avals(eqn, operands, new_params)
            avals = self._avals[key]
        except TypeError:  # a parameter that cannot be hashed
            avals = result_avals(eqn, operands, new_params)
        outvars = [fresh_var(aval) for aval in avals]
        new: JaxprEqn = eqn.replace(invars=list(invars), outvars=outvars, params=new_params)
        return new

    def compute(self, key: Hashable, fun: Callable[..., Any], *operands: Atom) -> tuple[list[JaxprEqn], list[Atom]]:
        """`equations_for`, cached by `key` and operand types. Functions with equal keys must compute the same."""
        kind = key, tuple(atom.aval for atom in operands)
        if kind not in self._flat:
            self._flat[kind] = _flat_of(fun, operands)
        return _on_atoms(self._flat[kind], operands)


def equations_for(fun: Callable[..., Any], *operands: Atom) -> tuple[list[JaxprEqn], list[Atom]]:
    """Equations that compute `fun` on existing atoms, and the atoms of its results."""
    return _on_atoms(_flat_of(fun, operands), operands)


def _flat_of(fun: Callable[..., Any], operands: Sequence[Atom]) -> Block:
    flat, _ = trace_flat(fun, *[type_of(atom.aval, keeps_weak=False) for atom in operands])
    assert not flat.constvars, flat.constvars
    return flat


def _on_atoms(flat: Block, operands: Sequence[Atom]) -> tuple[list[JaxprEqn], list[Atom]]:
    """The equations of `flat` on these operands, and the atoms of its results."""
    env: dict[Var, Atom] = dict(zip(flat.invars, operands, strict=True))

    def read(atom: Atom) -> Atom:
        return atom if is_literal(atom) else env[atom]

    eqns = []
    for eqn in flat.eqns:
        outvars = [fresh_var(var.aval) for var in eqn.outvars]
        eqns.append(eqn.replace(invars=[read(atom) for atom in eqn.invars], outvars=outvars))
        env.update(zip(eqn.outvars, outvars, strict=True))
    return eqns, [read(atom) for atom in flat.outvars]


def unary_equation(fun: Callable[[Any], Any]) -> Callable[[Var], tuple[JaxprEqn, Var]]:
    """Maps an operand to the equation `fun(operand)` and its result. `fun` must trace to one equation of one array."""
    maker = EquationMaker()

    def make(operand: Var) -> tuple[JaxprEqn, Var]:
        (eqn,), (result,) = maker.compute(None, fun, operand)
        return eqn, result

    return make
