"""Masks as they are written become windows of positions, and boolean arrays of their own small shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.ir.equations import Atom, aval_of, is_literal, shape_of
from minialpa.recognition.positions import LAYOUTS, Window, WindowReader, operand_axes, shrunk
from minialpa.recognition.terms import Axes, Label, Mask
from minialpa.tracing.affine_programs import Program


@dataclass(frozen=True, slots=True)
class Part:
    """One condition of a mask: True where the array is `positive`. axes: the index of each dimension of the array."""

    var: Var
    axes: Axes
    positive: bool


Condition = Part | Window
#: A boolean array, the index of each of its dimensions, and whether it is to be true.
_Boolean = tuple[Atom, Axes, bool]


@dataclass(frozen=True, slots=True)
class MaskReader:
    """Reads how masks are computed.

    Attributes:
        producers: the equation of each variable.
        consts: the values of captured arrays.
        key: the index of key positions.
        queries: the indices of query positions.
    """

    producers: Mapping[Var, JaxprEqn]
    consts: Mapping[Var, object]
    key: Label
    queries: frozenset[Label]

    @property
    def _windows(self) -> WindowReader:
        return WindowReader(Program(self.producers, self.consts), self.key, self.queries)

    def read(self, masks: Sequence[Mask]) -> tuple[Window | None, tuple[Part, ...]]:
        """The window of all masks together, if they have one, and the other conditions."""
        window: Window | None = None
        parts: list[Part] = []
        for mask in masks:
            conditions = self._conditions(mask.leaf.var, mask.leaf.axes, mask.positive)
            assert conditions is not None, mask  # a variable is a condition itself, at least
            for condition in conditions:
                if isinstance(condition, Part):
                    parts.append(condition)
                elif window is None:
                    window = condition
                elif window.query == condition.query:
                    window = window.and_also(condition)
                else:  # a window of another index of the queries
                    parts.append(Part(mask.leaf.var, mask.leaf.axes, mask.positive))
        return window, tuple(dict.fromkeys(parts))

    def _conditions(self, atom: Atom, axes: Axes, positive: bool) -> list[Condition] | None:
        """The conditions that hold together where a boolean array is `positive`; None if it never is."""
        if is_literal(atom):
            return [] if bool(atom.val) == positive else None
        whole: list[Condition] = [Part(atom, axes, positive)]
        if atom in self.consts:
            window = self._windows.of_array(np.asarray(self.consts[atom]), axes) if positive else None
            return whole if window is None else [window]

        eqn = self.producers.get(atom)
        handler = None if eqn is None else _HANDLERS.get(eqn.primitive.name)
        found = None if eqn is None or handler is None else handler(self, eqn, axes, positive)
        return whole if found is None else found

    def _together(self, parts: Sequence[_Boolean]) -> list[Condition] | None:
        """The conditions of several boolean arrays; None if one of them never holds, or may not be taken apart."""
        found: list[Condition] = []
        for part in parts:
            conditions = self._conditions(*part)
            if conditions is None:
                return None
            found += conditions
        return found

    # ---- handlers of primitives: None if the array that the equation computes is to be a condition itself ----------

    def _of_layout(self, eqn: JaxprEqn, axes: Axes, positive: bool) -> list[Condition] | None:
        inner = operand_axes(eqn, axes)
        if inner is None or not _is_boolean(eqn.invars[0]):
            return None
        return self._together([(eqn.invars[0], inner, positive)])

    def _of_negation(self, eqn: JaxprEqn, axes: Axes, positive: bool) -> list[Condition] | None:
        return self._together([(eqn.invars[0], axes, not positive)])

    def _of_logic(self, eqn: JaxprEqn, axes: Axes, positive: bool) -> list[Condition] | None:
        """Both operands of `and` are true where it is, and both of `or` are false where it is."""
        if eqn.primitive.name != ("and" if positive else "or") or not _is_boolean(eqn.outvars[0]):
            return None
        return self._together([(x, shrunk(x, axes), positive) for x in eqn.invars])

    def _of_choice(self, eqn: JaxprEqn, axes: Axes, positive: bool) -> list[Condition] | None:
        """A choice between an array and false is true where both the array and what chooses it are."""
        which, *cases = eqn.invars
        is_by_element = bool(shape_of(which)) or not axes
        if not positive or not _is_boolean(which) or len(cases) != 2 or not is_by_element:
            return None
        if_false, if_true = cases
        if self._value(if_false) == 0:
            return self._together([(which, axes, True), (if_true, axes, True)])
        if self._value(if_true) == 0:
            return self._together([(which, axes, False), (if_false, axes, True)])
        return None

    def _of_comparison(self, eqn: JaxprEqn, axes: Axes, positive: bool) -> list[Condition] | None:
        window = self._windows.of_comparison(eqn, axes, positive)
        return None if window is None else [window]

    def _of_equality(self, eqn: JaxprEqn, axes: Axes, positive: bool) -> list[Condition] | None:
        """A comparison with 0 of a boolean array that was converted to numbers."""
        if self._value(eqn.invars[1]) != 0:
            return None
        return self._of_number(eqn.invars[0], axes, positive == (eqn.primitive.name == "ne")) or None

    def _of_number(self, atom: Atom, axes: Axes, positive: bool) -> list[Condition] | None:
        """The conditions of the boolean array that was converted to these numbers."""
        eqn = None if is_literal(atom) else self.producers.get(atom)
        if eqn is None:
            return None
        inner = axes if eqn.primitive.name == "convert_element_type" else operand_axes(eqn, axes)
        operand = eqn.invars[0]
        if inner is None or is_literal(operand):
            return None
        if not _is_boolean(operand):
            return self._of_number(operand, inner, positive)
        found = self._together([(operand, inner, positive)])
        return [Part(operand, inner, positive)] if found is None else found

    def _value(self, atom: Atom) -> float | None:
        """The number that all elements of an array are."""
        while not is_literal(atom):
            eqn = self.producers.get(atom)
            if eqn is None or eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type", "reshape"):
                return None
            atom = eqn.invars[0]
        return float(atom.val) if np.ndim(atom.val) == 0 and np.asarray(atom.val).dtype.kind in "biuf" else None


_Handler = Callable[[MaskReader, JaxprEqn, Axes, bool], "list[Condition] | None"]
_HANDLERS: Mapping[str, _Handler] = {
    **dict.fromkeys(LAYOUTS, MaskReader._of_layout),
    "and": MaskReader._of_logic,
    "eq": MaskReader._of_equality,
    "ge": MaskReader._of_comparison,
    "gt": MaskReader._of_comparison,
    "le": MaskReader._of_comparison,
    "lt": MaskReader._of_comparison,
    "ne": MaskReader._of_equality,
    "not": MaskReader._of_negation,
    "or": MaskReader._of_logic,
    "select_n": MaskReader._of_choice,
}


def _is_boolean(atom: Atom) -> bool:
    return bool(aval_of(atom).dtype == np.bool_)
