"""Comparisons of positions as windows: equations in, `Window` out.

A window is a condition -left <= j - i <= right on the position i of a query and the position j of a key.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.ir.equations import Atom, shape_of
from minialpa.recognition.terms import Axes, Label
from minialpa.tracing.affine import Affine, combined, filled
from minialpa.tracing.affine_programs import Program


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


@dataclass(frozen=True, slots=True)
class WindowReader:
    """Reads how positions are compared.

    Attributes:
        program: where arrays come from.
        key: the index of key positions.
        queries: the indices of query positions.
    """

    program: Program
    key: Label
    queries: frozenset[Label]

    def of_comparison(self, eqn: JaxprEqn, axes: Axes, positive: bool) -> Window | None:
        """The window in which a comparison of positions is `positive`; None if it is no window.

        axes: the index of each dimension of the result.
        """
        # For whole numbers, a > b is a - b - 1 >= 0.
        sides = {"ge": (1, 0), "gt": (1, -1), "le": (-1, 0), "lt": (-1, -1)}.get(eqn.primitive.name)
        a, b = map(self.program.affine, eqn.invars)
        if sides is None or a is None or b is None:
            return None

        shape, (sign, offset) = shape_of(eqn.outvars[0]), sides
        left, right = (x if x.shape else filled(shape, x.offset) for x in (a, b))
        difference = combined(filled(shape, offset), combined(left, right, -1), sign)
        if not positive:
            # For whole numbers, not (x >= 0) is -x - 1 >= 0.
            difference = combined(filled(shape, -1), difference, -1)
        return self._where_not_negative(difference, axes)

    def _where_not_negative(self, x: Affine, axes: Axes) -> Window | None:
        """i - j + c >= 0 or j - i + c >= 0, for the position i of a query and j of a key."""
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
