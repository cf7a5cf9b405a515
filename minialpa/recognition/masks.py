"""Masks as they are written become windows of positions, and boolean arrays of their own small shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.recognition.algebra import Axes, Label, Mask
from minialpa.tracing.jaxprs import Atom, aval_of, is_literal, shape_of


@dataclass(frozen=True, slots=True)
class Part:
    """One condition of a mask: True where the array is `positive`. axes: the index of each dimension of the array."""

    var: Var
    axes: Axes
    positive: bool


@dataclass(frozen=True, slots=True)
class Window:
    """A condition on positions: index `query` at i sees index `key` at j if i - left <= j <= i + right."""

    query: Label
    key: Label
    left: int | None = None
    right: int | None = None

    def and_also(self, other: Window) -> Window:
        def least(a: int | None, b: int | None) -> int | None:
            return b if a is None else a if b is None else min(a, b)

        return Window(self.query, self.key, least(self.left, other.left), least(self.right, other.right))


Condition = Part | Window


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

    def read(self, masks: Sequence[Mask]) -> tuple[Window | None, tuple[Part, ...]]:
        """The window of all masks together, if they have one, and the other conditions."""
        window: Window | None = None
        parts: list[Part] = []
        for mask in masks:
            for condition in self._split(mask.leaf.var, mask.leaf.axes, mask.positive):
                if isinstance(condition, Part):
                    parts.append(condition)
                elif window is None:
                    window = condition
                elif window.query == condition.query:
                    window = window.and_also(condition)
                else:  # a window of another index of the queries
                    parts.append(Part(mask.leaf.var, mask.leaf.axes, mask.positive))
        return window, tuple(dict.fromkeys(parts))

    def _split(self, atom: Atom, axes: Axes, positive: bool) -> list[Condition]:
        """The conditions that hold together where a boolean array is `positive`."""
        if is_literal(atom):
            return [] if bool(atom.val) == positive else [_never(atom)]
        whole: list[Condition] = [Part(atom, axes, positive)]
        if atom in self.consts:
            band = self._band(np.asarray(self.consts[atom]), axes) if positive else None
            return whole if band is None else [band]

        eqn = self.producers.get(atom)
        if eqn is None:
            return whole
        name = eqn.primitive.name
        inner = _operand_axes(eqn, axes)
        if inner is not None and aval_of(eqn.invars[0]).dtype == np.bool_:
            return self._or_whole(whole, [(eqn.invars[0], inner, positive)])
        if name == "not":
            return self._or_whole(whole, [(eqn.invars[0], axes, not positive)])
        if name == ("and" if positive else "or") and aval_of(atom).dtype == np.bool_:
            return self._or_whole(whole, [(x, _shrunk(x, axes), positive) for x in eqn.invars])
        if name == "select_n" and positive and aval_of(eqn.invars[0]).dtype == np.bool_ and len(eqn.invars) == 3:
            return self._selected(eqn, axes, whole)
        if name in ("ne", "eq") and self._value(eqn.invars[1]) == 0:
            return self._as_boolean(eqn.invars[0], axes, positive == (name == "ne")) or whole
        window = self._window(eqn, axes, positive)
        return whole if window is None else [window]

    def _or_whole(self, whole: list[Condition], parts: list[tuple[Atom, Axes, bool]]) -> list[Condition]:
        try:
            return [condition for part in parts for condition in self._split(*part)]
        except _NeverError:
            return whole

    def _selected(self, eqn: JaxprEqn, axes: Axes, whole: list[Condition]) -> list[Condition]:
        which, if_false, if_true = eqn.invars
        if not shape_of(which) and axes:
            return whole
        if self._value(if_false) == 0:
            return self._or_whole(whole, [(which, axes, True), (if_true, axes, True)])
        if self._value(if_true) == 0:
            return self._or_whole(whole, [(which, axes, False), (if_false, axes, True)])
        return whole

    def _as_boolean(self, atom: Atom, axes: Axes, positive: bool) -> list[Condition] | None:
        """A comparison with 0 of a boolean array that was converted to numbers."""
        eqn = None if is_literal(atom) else self.producers.get(atom)
        if eqn is None or eqn.primitive.name not in (*_LAYOUTS, "convert_element_type"):
            return None
        inner = axes if eqn.primitive.name == "convert_element_type" else _operand_axes(eqn, axes)
        operand = eqn.invars[0]
        if inner is None or is_literal(operand):
            return None
        if aval_of(operand).dtype == np.bool_:
            return self._or_whole([Part(operand, inner, positive)], [(operand, inner, positive)])
        return self._as_boolean(operand, inner, positive)

    # ---- positions -------------------------------------------------------------------------------------------------

    def _value(self, atom: Atom) -> float | None:
        """The number that all elements of an array are."""
        while not is_literal(atom):
            eqn = self.producers.get(atom)
            if eqn is None or eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type", "reshape"):
                return None
            atom = eqn.invars[0]
        return float(atom.val) if np.ndim(atom.val) == 0 and np.asarray(atom.val).dtype.kind in "biuf" else None

    def _window(self, eqn: JaxprEqn, axes: Axes, positive: bool) -> Window | None:
        """A comparison of positions: i - j + c >= 0 or j - i + c >= 0."""
        # For whole numbers, a > b is a - b - 1 >= 0, and not (x >= 0) is -x - 1 >= 0.
        sides = {"ge": (1, 0), "gt": (1, -1), "le": (-1, 0), "lt": (-1, -1)}.get(eqn.primitive.name)
        if sides is None:
            return None
        left, right = (self._position(atom, _shrunk(atom, axes)) for atom in eqn.invars)
        if left is None or right is None:
            return None
        sign, offset = sides
        terms = {label: sign * (left.get(label, 0) - right.get(label, 0)) for label in {*left, *right}}
        c = terms.pop(None, 0) + offset
        if not positive:
            terms, c = {label: -factor for label, factor in terms.items()}, -c - 1

        factors = {label: factor for label, factor in terms.items() if factor}
        queries = [label for label in factors if label in self.queries]
        if len(queries) != 1 or factors.keys() != {queries[0], self.key}:
            return None
        if factors[queries[0]] == 1 and factors[self.key] == -1:
            return Window(queries[0], self.key, right=c)
        if factors[queries[0]] == -1 and factors[self.key] == 1:
            return Window(queries[0], self.key, left=c)
        return None

    def _position(self, atom: Atom, axes: Axes) -> dict[Label | None, int] | None:
        """An array of whole numbers as a sum of indices and a number, which is under None."""
        if is_literal(atom):
            value = np.asarray(atom.val)
            return {None: int(value)} if value.ndim == 0 and value.dtype.kind in "iu" else None
        eqn = self.producers.get(atom)
        # Smaller whole numbers could overflow.
        if eqn is None or aval_of(atom).dtype.kind != "i" or aval_of(atom).dtype.itemsize < 4:
            return None
        name = eqn.primitive.name
        if name == "iota":
            return {axes[eqn.params["dimension"]]: 1} if axes[eqn.params["dimension"]] is not None else {}
        if name in _LAYOUTS or name == "convert_element_type":
            inner = axes if name == "convert_element_type" else _operand_axes(eqn, axes)
            operand = eqn.invars[0]
            return None if inner is None else self._position(operand, inner)
        if name in ("add", "sub"):
            a, b = (self._position(x, _shrunk(x, axes)) for x in eqn.invars)
            if a is None or b is None:
                return None
            sign = 1 if name == "add" else -1
            return {label: a.get(label, 0) + sign * b.get(label, 0) for label in {*a, *b}}
        return None

    def _band(self, value: np.ndarray, axes: Axes) -> Window | None:
        """The window that a captured array is."""
        labels = [label for label in axes if label is not None]
        if value.dtype != np.bool_ or len(labels) != 2 or self.key not in labels or not value.any():
            return None
        (query,) = (label for label in labels if label != self.key)
        if query not in self.queries:
            return None
        value = value.reshape([size for size, label in zip(value.shape, axes, strict=True) if label is not None])
        seen = value.T if labels[0] == self.key else value
        offsets = np.arange(seen.shape[1]) - np.arange(seen.shape[0])[:, None]
        left, right = -int(offsets[seen].min()), int(offsets[seen].max())
        if not np.array_equal(seen, (offsets >= -left) & (offsets <= right)):
            return None
        # A side that hides nothing is no condition.
        return Window(
            query,
            self.key,
            left=None if offsets.min() >= -left else left,
            right=None if offsets.max() <= right else right,
        )


class _NeverError(Exception):
    """A mask that hides everything."""


def _never(_: Atom) -> Condition:
    raise _NeverError


_LAYOUTS = ("broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "copy", "stop_gradient")


def _operand_axes(eqn: JaxprEqn, axes: Axes) -> Axes | None:
    """The indices of the operand's dimensions, if the equation only changes its layout."""
    name = eqn.primitive.name
    if name in ("copy", "stop_gradient"):
        return axes
    if name not in _LAYOUTS:
        return None
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if name == "broadcast_in_dim":
        return tuple(
            None if size == 1 else axes[i] for size, i in zip(old, eqn.params["broadcast_dimensions"], strict=True)
        )
    if name == "transpose":
        inverse = np.argsort(eqn.params["permutation"])
        return tuple(axes[i] for i in inverse)
    if [size for size in old if size != 1] != [size for size in new if size != 1]:
        return None
    left = iter([label for label, size in zip(axes, new, strict=True) if size != 1])
    return tuple(None if size == 1 else next(left) for size in old)


def _shrunk(atom: Atom, axes: Axes) -> Axes:
    """The indices of an operand that broadcasts along dimensions of length 1."""
    shape = shape_of(atom)
    return tuple(None if size == 1 else label for size, label in zip(shape, axes, strict=True)) if shape else ()
