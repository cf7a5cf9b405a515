"""Names of indices: `Indices` gives forms that meet in an equation one name for each dimension that they share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from minialpa.recognition.terms import Axes, Form, Label, NoFormula, Part, Scores, renamed


class Indices:
    """The names that are in use."""

    def __init__(self) -> None:
        self._names = itertools.count()
        #: Indices of scores, whose names mean the same in all forms.
        self.fixed: set[Label] = set()
        self._fixed_names: dict[Label, Label] = {}

    def new_axes(self, shape: Sequence[int]) -> Axes:
        """A new name for each dimension, except those of length 1."""
        return tuple(None if size == 1 else next(self._names) for size in shape)

    def apart(self, form: Form, taken: Iterable[Label]) -> Form:
        """The form with other names for its indices, but for those that are fixed and those not in `taken`."""
        taken = set(taken)
        own = form.term.labels | set(form.axes) - {None}
        return with_names(form, {label: next(self._names) for label in own if label in taken - self.fixed})

    def with_fixed_names(self, form: Form) -> Form:
        """The form of scores with names for its indices that mean the same in all forms, and that no leaf has."""
        names = {label: self._fixed_names.setdefault(label, next(self._names)) for label in self._free(form)}
        self.fixed.update(names.values())
        return with_names(form, names)

    def _free(self, form: Form) -> list[Label]:
        """The indices of the dimensions that may have another name."""
        return [label for label in form.axes if label is not None and label not in self.fixed]

    # ---- elementwise -----------------------------------------------------------------------------------------------

    def aligned(self, forms: Sequence[Form]) -> tuple[Axes, list[Form]]:
        """Forms of arrays of one shape, with one name for each dimension. Numbers have no dimensions."""
        axes = self._names_to_keep(forms)
        out = []
        for form in forms:
            if not form.axes:  # a number
                out.append(form)
                continue
            # A name of another dimension of the result would make two indices one.
            form = self.apart(form, set(self._free(form)) & set(axes))
            axes = tuple(own if label is None else label for label, own in zip(axes, form.axes, strict=True))
            out.append(with_names(form, _changes(form.axes, axes)))

        named = check_apart(axes)
        if any(form.term.labels - named for form in out):
            raise NoFormula
        return axes, out

    def _names_to_keep(self, forms: Sequence[Form]) -> Axes:
        """For each dimension, the name that the result takes over from an operand; None if any name will do."""
        axes: list[Label | None] = [None] * max(len(form.axes) for form in forms)
        for form in forms:
            for i, label in enumerate(form.axes):
                if label not in self.fixed:
                    continue
                if axes[i] not in (None, label):
                    raise NoFormula
                axes[i] = label

        # Scores keep the names of their indices: then a saved product has the same ones in the backward pass.
        for form in forms:
            for i, label in enumerate(form.axes if isinstance(form.term, Scores | Part) else ()):
                if axes[i] is None and label not in axes:
                    axes[i] = label
        return tuple(axes)

    # ---- products of matrices --------------------------------------------------------------------------------------

    def joined(self, left: Form, right: Form, pairs: Iterable[tuple[int, int]]) -> tuple[Form, Form]:
        """The operands of a product, with one name for the dimensions of each pair, and else with different ones."""
        right = self.apart(right, left.term.labels | set(left.axes) - {None})
        for i, j in pairs:
            a, b = left.axes[i], right.axes[j]
            if a is None or b is None or a == b:
                continue
            if b not in self.fixed:
                right = with_names(right, {b: a})
            elif a not in self.fixed:
                left = with_names(left, {a: b})
            else:
                raise NoFormula
        return left, right


def with_names(form: Form, names: Mapping[Label, Label]) -> Form:
    """The form with other names for some of its indices."""
    axes = tuple(label if label is None else names.get(label, label) for label in form.axes)
    return Form(axes, renamed(form.term, names))


def check_apart(axes: Axes) -> set[Label]:
    """The names of dimensions, which have to be different."""
    named = [label for label in axes if label is not None]
    if len(set(named)) != len(named):
        raise NoFormula
    return set(named)


def _changes(old: Axes, new: Axes) -> dict[Label, Label]:
    names = {a: b for a, b in zip(old, new, strict=True) if a is not None}
    return {a: b for a, b in names.items() if a != b}
