"""`MaskReader.read` turns the masks of an attention into a window of positions, and arrays before their broadcast.

A causal mask [b h t s] becomes `Window(t, s, right=0)`. A padding mask stays the array [b s].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.ir.equations import Atom, aval_of, is_literal, maker_of, shape_of
from minialpa.recognition.terms import Axes, Label, Mask
from minialpa.tracing.affine import Affine, combined, filled, stretched
from minialpa.tracing.affine_programs import AffineProgram

#: Largest offset of a window: its sums with positions fit into 32 bits.
_FARTHEST = 1 << 30


@dataclass(frozen=True, slots=True)
class Window:
    """Index `query` at i sees index `key` at j if i - left <= j <= i + right. None is no bound."""

    query: Label
    key: Label
    left: int | None = None
    right: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no query sees a key."""
        return self.left is not None and self.right is not None and self.left + self.right < 0

    def and_also(self, other: Window) -> Window:
        def least(a: int | None, b: int | None) -> int | None:
            return b if a is None else a if b is None else min(a, b)

        return Window(self.query, self.key, least(self.left, other.left), least(self.right, other.right))


@dataclass(frozen=True, slots=True)
class MaskCondition:
    """True where `var` equals `positive`. axes: the index of each of its dimensions."""

    var: Var
    axes: Axes
    positive: bool


@dataclass(frozen=True, slots=True)
class SegmentCondition:
    """True where an array with indices of queries, or a constant, equals an array with indices of keys."""

    query: tuple[Var, Axes] | bool
    key: tuple[Var, Axes]


Condition = MaskCondition | SegmentCondition | Window
#: A boolean array, its indices, and the required value.
_Boolean = tuple[Atom, Axes, bool]


@dataclass(frozen=True, slots=True)
class MaskReader:
    """Reads the equations of masks.

    consts: the values of captured arrays.
    key, queries: indices of positions.
    """

    producers: Mapping[Var, JaxprEqn]
    consts: Mapping[Var, object]
    key: Label
    queries: frozenset[Label]

    def read(self, masks: Sequence[Mask]) -> tuple[Window | None, tuple[MaskCondition | SegmentCondition, ...]]:
        """The window of all masks, if any, and the other conditions."""
        window: Window | None = None
        parts: list[MaskCondition | SegmentCondition] = []
        for mask in masks:
            conditions = self._conditions(mask.leaf.var, mask.leaf.axes, mask.positive)
            assert conditions is not None, mask  # a variable is at least a condition by itself
            for condition in conditions:
                if not isinstance(condition, Window):
                    parts.append(condition)
                elif window is None:
                    window = condition
                elif window.query == condition.query:
                    window = window.and_also(condition)
                else:  # a window of another query index
                    parts.append(MaskCondition(mask.leaf.var, mask.leaf.axes, mask.positive))
        return window, tuple(dict.fromkeys(parts))

    def _conditions(self, atom: Atom, axes: Axes, positive: bool) -> list[Condition] | None:
        """They hold together where a boolean array equals `positive`; None if it never does."""
        if is_literal(atom):
            return [] if bool(atom.val) == positive else None
        whole: list[Condition] = [MaskCondition(atom, axes, positive)]
        if atom in self.consts:
            window = self._window_of_array(np.asarray(self.consts[atom]), axes) if positive else None
            return whole if window is None else [window]

        eqn = self.producers.get(atom)
        handler = None if eqn is None else _HANDLERS.get(eqn.primitive.name)
        found = None if eqn is None or handler is None else handler(self, eqn, axes, positive)
        return whole if found is None else found

    def _conditions_of_all(self, parts: Sequence[_Boolean]) -> list[Condition] | None:
        found: list[Condition] = []
        for part in parts:
            conditions = self._conditions(*part)
            if conditions is None:
                return None
            found += conditions
        return found

    # ---- handlers of primitives: None if the result is one condition by itself ---------------------------------------

    def _of_layout(self, eqn: JaxprEqn, axes: Axes, positive: bool) -> list[Condition] | None:
        inner = _operand_axes(eqn, axes)
        if inner is None or not _is_boolean(eqn.invars[0]):
            return None
        return self._conditions_of_all([(eqn.invars[0], inner, positive)])

    def _of_negation(self, eqn: JaxprEqn, axes: Axes, positive: bool) -> list[Condition] | None:
        return self._conditions_of_all([(eqn.invars[0], axes, not positive)])

    def _of_logic(self, eqn: JaxprEqn, axes: Axes, positive: bool) -> list[Condition] | None:
        """A true `and` has true operands, and a false `or` false operands."""
        if eqn.primitive.name != ("and" if positive else "or") or not _is_boolean(eqn.outvars[0]):
            return None
        return self._conditions_of_all([(x, _operand_indices(x, axes), positive) for x in eqn.invars])

    def _of_choice(self, eqn: JaxprEqn, axes: Axes, positive: bool) -> list[Condition] | None:
        """A choice between an array and False is true where both the array and the chooser are."""
        which, *cases = eqn.invars
        is_by_element = bool(shape_of(which)) or not axes
        if not positive or not _is_boolean(which) or len(cases) != 2 or not is_by_element:
            return None
        if_false, if_true = cases
        if self._number_everywhere(if_false) == 0:
            return self._conditions_of_all([(which, axes, True), (if_true, axes, True)])
        if self._number_everywhere(if_true) == 0:
            return self._conditions_of_all([(which, axes, False), (if_false, axes, True)])
        return None

    def _of_comparison(self, eqn: JaxprEqn, axes: Axes, positive: bool) -> list[Condition] | None:
        window = self._window_of_comparison(eqn, axes, positive)
        return None if window is None else [window]

    def _of_equality(self, eqn: JaxprEqn, axes: Axes, positive: bool) -> list[Condition] | None:
        are_equal = positive == (eqn.primitive.name == "eq")
        if self._number_everywhere(eqn.invars[1]) == 0:
            return self._of_number(eqn.invars[0], axes, not are_equal) or None
        segments = self._segments(eqn, axes) if are_equal else None
        return None if segments is None else [segments]

    def _segments(self, eqn: JaxprEqn, axes: Axes) -> SegmentCondition | None:
        sides = [self._source(atom, _operand_indices(atom, axes)) for atom in eqn.invars]
        if aval_of(eqn.invars[0]).dtype.kind not in "bui":
            return None
        for query, key in (sides, sides[::-1]):
            if query is None or key is None:
                return None
            if self.key in key[1] and self.key not in query[1] and not self.queries & set(key[1]):
                return SegmentCondition(query, key)
        return None

    def _source(self, atom: Atom, axes: Axes) -> tuple[Var, Axes] | None:
        """The array before changes of its layout."""
        if is_literal(atom):
            return None
        eqn = self.producers.get(atom)
        inner = None if eqn is None else _operand_axes(eqn, axes)
        found = None if eqn is None or inner is None else self._source(eqn.invars[0], inner)
        return found or (atom, axes)

    def _of_number(self, atom: Atom, axes: Axes, positive: bool) -> list[Condition] | None:
        """Booleans may be converted to numbers."""
        eqn = maker_of(atom, self.producers)
        if eqn is None:
            return None
        inner = axes if eqn.primitive.name == "convert_element_type" else _operand_axes(eqn, axes)
        operand = eqn.invars[0]
        if inner is None or is_literal(operand):
            return None
        if not _is_boolean(operand):
            return self._of_number(operand, inner, positive)
        found = self._conditions_of_all([(operand, inner, positive)])
        return [MaskCondition(operand, inner, positive)] if found is None else found

    def _number_everywhere(self, atom: Atom) -> float | None:
        while not is_literal(atom):
            eqn = self.producers.get(atom)
            if eqn is None or eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type", "reshape"):
                return None
            atom = eqn.invars[0]
        return float(atom.val) if np.ndim(atom.val) == 0 and np.asarray(atom.val).dtype.kind in "biuf" else None

    # ---- windows ---------------------------------------------------------------------------------------------------

    def _window_of_comparison(self, eqn: JaxprEqn, axes: Axes, positive: bool) -> Window | None:
        # For integers, a > b is a - b - 1 >= 0.
        sign, offset = {"ge": (1, 0), "gt": (1, -1), "le": (-1, 0), "lt": (-1, -1)}[eqn.primitive.name]
        a, b = map(AffineProgram(self.producers, self.consts).affine, eqn.invars)
        if a is None or b is None:
            return None

        shape = shape_of(eqn.outvars[0])
        difference = combined(filled(shape, offset), combined(stretched(a, shape), stretched(b, shape), -1), sign)
        if not positive:
            # For integers, not (x >= 0) is -x - 1 >= 0.
            difference = combined(filled(shape, -1), difference, -1)
        return self._where_not_negative(difference, axes)

    def _where_not_negative(self, x: Affine, axes: Axes) -> Window | None:
        """Of x >= 0, if x is i - j + c or j - i + c for positions i of a query and j of a key."""
        factors = Counter[Label | None]()
        for label, stride, size in zip(axes, x.strides, x.shape, strict=True):
            factors[label] += stride if size > 1 else 0
        moving = {label: factor for label, factor in factors.items() if factor}
        queries = [label for label in moving if label in self.queries]
        if len(queries) != 1 or moving.keys() != {queries[0], self.key} or abs(x.offset) > _FARTHEST:
            return None
        match moving[queries[0]], moving[self.key]:
            case 1, -1:
                return Window(queries[0], self.key, right=x.offset)
            case -1, 1:
                return Window(queries[0], self.key, left=x.offset)
        return None

    def _window_of_array(self, value: np.ndarray, axes: Axes) -> Window | None:
        """A constant mask may be a band along the diagonal."""
        labels = [label for label in axes if label is not None]
        if value.dtype != np.bool_ or len(labels) != 2 or self.key not in labels or not value.any():
            return None
        (query,) = (label for label in labels if label != self.key)
        if query not in self.queries:
            return None

        # seen[query, key].
        value = value.reshape([size for size, label in zip(value.shape, axes, strict=True) if label is not None])
        seen = value.T if labels[0] == self.key else value
        offsets = np.arange(seen.shape[1]) - np.arange(seen.shape[0])[:, None]
        left, right = -int(offsets[seen].min()), int(offsets[seen].max())
        if not np.array_equal(seen, (offsets >= -left) & (offsets <= right)):
            return None

        # A side that hides no key needs no bound.
        return Window(
            query,
            self.key,
            left=None if offsets.min() >= -left else left,
            right=None if offsets.max() <= right else right,
        )


_LAYOUTS = ("broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "copy", "stop_gradient")
_Handler = Callable[[MaskReader, JaxprEqn, Axes, bool], "list[Condition] | None"]
_HANDLERS: Mapping[str, _Handler] = {
    **dict.fromkeys(_LAYOUTS, MaskReader._of_layout),
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


def _operand_axes(eqn: JaxprEqn, axes: Axes) -> Axes | None:
    """None if the equation changes more than the layout."""
    name = eqn.primitive.name
    if name in ("copy", "stop_gradient"):
        return axes
    if name not in _LAYOUTS:
        return None

    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if name == "broadcast_in_dim":
        dims = eqn.params["broadcast_dimensions"]
        return tuple(None if size == 1 else axes[i] for size, i in zip(old, dims, strict=True))
    if name == "transpose":
        return tuple(axes[i] for i in np.argsort(eqn.params["permutation"]))

    # A reshape may only add or drop dimensions of length 1.
    if [size for size in old if size != 1] != [size for size in new if size != 1]:
        return None
    left = iter([label for label, size in zip(axes, new, strict=True) if size != 1])
    return tuple(None if size == 1 else next(left) for size in old)


def _operand_indices(atom: Atom, axes: Axes) -> Axes:
    shape = shape_of(atom)
    return tuple(None if size == 1 else label for size, label in zip(shape, axes, strict=True)) if shape else ()
