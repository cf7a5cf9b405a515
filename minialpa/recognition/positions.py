"""Comparisons of positions as windows: equations in, `Window` out.

A window is a condition -left <= j - i <= right on the position i of a query and the position j of a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.ir.equations import Atom, aval_of, is_literal, shape_of
from minialpa.recognition.terms import Axes, Label


@dataclass(frozen=True, slots=True)
class Window:
    """A condition on positions: index `query` at i sees index `key` at j if i - left <= j <= i + right."""

    query: Label
    key: Label
    left: int | None = None
    right: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no query sees any key."""
        return self.left is not None and self.right is not None and self.left + self.right < 0

    def and_also(self, other: Window) -> Window:
        def least(a: int | None, b: int | None) -> int | None:
            return b if a is None else a if b is None else min(a, b)

        return Window(self.query, self.key, least(self.left, other.left), least(self.right, other.right))


#: Offsets of windows at most, so that sums and differences of positions and offsets have 32 bits.
_FARTHEST = 1 << 30
#: A whole number as a sum of indices times factors, and a number, which is under None.
Position = dict[Label | None, int]


@dataclass(frozen=True, slots=True)
class WindowReader:
    """Reads how positions are compared.

    Attributes:
        producers: the equation of each variable.
        key: the index of key positions.
        queries: the indices of query positions.
    """

    producers: Mapping[Var, JaxprEqn]
    key: Label
    queries: frozenset[Label]

    def of_comparison(self, eqn: JaxprEqn, axes: Axes, positive: bool) -> Window | None:
        """The window in which a comparison of positions is `positive`; None if it is no window.

        axes: the index of each dimension of the result.
        """
        # For whole numbers, a > b is a - b - 1 >= 0.
        sides = {"ge": (1, 0), "gt": (1, -1), "le": (-1, 0), "lt": (-1, -1)}.get(eqn.primitive.name)
        if sides is None:
            return None
        a, b = (self._position(atom, shrunk(atom, axes)) for atom in eqn.invars)
        if a is None or b is None:
            return None

        sign, offset = sides
        difference = _sum(a, b, -1)
        difference = {label: sign * factor for label, factor in difference.items()}
        difference[None] = difference.get(None, 0) + offset
        if not positive:
            # For whole numbers, not (x >= 0) is -x - 1 >= 0.
            difference = {label: -factor for label, factor in difference.items()}
            difference[None] -= 1
        return self._where_not_negative(difference)

    def _where_not_negative(self, x: Position) -> Window | None:
        """i - j + c >= 0 or j - i + c >= 0, for the position i of a query and j of a key."""
        factors = {label: factor for label, factor in x.items() if factor and label is not None}
        queries = [label for label in factors if label in self.queries]
        if len(queries) != 1 or factors.keys() != {queries[0], self.key} or abs(x[None]) > _FARTHEST:
            return None
        match factors[queries[0]], factors[self.key]:
            case 1, -1:
                return Window(queries[0], self.key, right=x[None])
            case -1, 1:
                return Window(queries[0], self.key, left=x[None])
        return None

    def _position(self, atom: Atom, axes: Axes) -> Position | None:
        """An array of whole numbers as a sum of indices and a number, if none of its values overflows."""
        if is_literal(atom):
            value = np.asarray(atom.val)
            return {None: int(value)} if value.ndim == 0 and value.dtype.kind in "iu" else None
        eqn = self.producers.get(atom)
        if eqn is None or not _has_32_bits(atom):
            return None
        found = self._computed(eqn, axes)
        return found if found is not None and _fits(found, atom, axes) else None

    def _computed(self, eqn: JaxprEqn, axes: Axes) -> Position | None:
        """The result of an equation as a sum of indices and a number, if it were computed without overflow."""
        match eqn.primitive.name:
            case "iota":
                label = axes[eqn.params["dimension"]]
                return {} if label is None else {label: 1}
            case "add" | "sub":
                a, b = (self._position(x, shrunk(x, axes)) for x in eqn.invars)
                sign = 1 if eqn.primitive.name == "add" else -1
                return None if a is None or b is None else _sum(a, b, sign)
            case "convert_element_type":
                return self._position(eqn.invars[0], axes)
        inner = operand_axes(eqn, axes)
        return None if inner is None else self._position(eqn.invars[0], inner)

    def of_array(self, value: np.ndarray, axes: Axes) -> Window | None:
        """The window that a captured array is; None if it is no window."""
        labels = [label for label in axes if label is not None]
        if value.dtype != np.bool_ or len(labels) != 2 or self.key not in labels or not value.any():
            return None
        (query,) = (label for label in labels if label != self.key)
        if query not in self.queries:
            return None

        # seen[i, j]: the query at i sees the key at j.
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


def _has_32_bits(atom: Atom) -> bool:
    """Whether these are signed integers of 32 bits or more."""
    dtype = aval_of(atom).dtype
    return bool(dtype.kind == "i" and dtype.itemsize >= 4)


def _fits(x: Position, atom: Atom, axes: Axes) -> bool:
    """Whether the dtype of an array has the smallest and the largest value of x."""
    ends = [x.get(label, 0) * (size - 1) for size, label in zip(shape_of(atom), axes, strict=True) if label is not None]
    offset, limits = x.get(None, 0), np.iinfo(aval_of(atom).dtype)
    low, high = offset + sum(min(0, end) for end in ends), offset + sum(max(0, end) for end in ends)
    return bool(limits.min <= low and high <= limits.max)


def _sum(a: Position, b: Position, factor: int) -> Position:
    """a + factor * b."""
    return {label: a.get(label, 0) + factor * b.get(label, 0) for label in {*a, *b}}


# ---- layouts -------------------------------------------------------------------------------------------------------

LAYOUTS = ("broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "copy", "stop_gradient")


def operand_axes(eqn: JaxprEqn, axes: Axes) -> Axes | None:
    """The indices of the operand's dimensions, if the equation only changes its layout."""
    name = eqn.primitive.name
    if name in ("copy", "stop_gradient"):
        return axes
    if name not in LAYOUTS:
        return None

    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if name == "broadcast_in_dim":
        return tuple(
            None if size == 1 else axes[i] for size, i in zip(old, eqn.params["broadcast_dimensions"], strict=True)
        )
    if name == "transpose":
        inverse = np.argsort(eqn.params["permutation"])
        return tuple(axes[i] for i in inverse)

    # Of reshapes, those that add or leave out dimensions of length 1.
    if [size for size in old if size != 1] != [size for size in new if size != 1]:
        return None
    left = iter([label for label, size in zip(axes, new, strict=True) if size != 1])
    return tuple(None if size == 1 else next(left) for size in old)


def shrunk(atom: Atom, axes: Axes) -> Axes:
    """The indices of an operand that broadcasts along dimensions of length 1."""
    shape = shape_of(atom)
    return tuple(None if size == 1 else label for size, label in zip(shape, axes, strict=True)) if shape else ()
