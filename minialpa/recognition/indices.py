"""Names of indices, and numbers of arrays.

Forms that meet in an equation get one name for each common dimension, so the order of dimensions has no effect.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from minialpa.ir.equations import Atom, aval_of, has_all, is_literal
from minialpa.recognition.terms import Axes, Form, Label, NoFormula, Scores, SoftmaxArray, renamed


class Indices:
    def __init__(self) -> None:
        self._names = itertools.count()
        #: Of indices of scores, with one meaning in all forms.
        self.fixed: set[Label] = set()
        self._fixed_names: dict[Label, Label] = {}

    def new_axes(self, shape: Sequence[int]) -> Axes:
        """None for a dimension of length 1."""
        return tuple(None if size == 1 else next(self._names) for size in shape)

    def apart(self, form: Form, taken: Iterable[Label]) -> Form:
        """With new names for its indices in `taken`, unless these are fixed."""
        taken = set(taken)
        own = form.term.labels | set(form.axes) - {None}
        return with_names(form, {label: next(self._names) for label in own if label in taken - self.fixed})

    def with_fixed_names(self, form: Form) -> Form:
        """No leaf has these names."""
        names = {label: self._fixed_names.setdefault(label, next(self._names)) for label in self._free_names(form)}
        self.fixed.update(names.values())
        return with_names(form, names)

    def _free_names(self, form: Form) -> list[Label]:
        return [label for label in form.axes if label is not None and label not in self.fixed]

    # ---- elementwise -----------------------------------------------------------------------------------------------

    def aligned(self, forms: Sequence[Form]) -> tuple[Axes, list[Form]]:
        """One name for each dimension of arrays of one shape. Numbers have no dimensions."""
        axes = self._names_to_keep(forms)
        out = []
        for form in forms:
            if not form.axes:  # a number
                out.append(form)
                continue
            # The name of another dimension would make two indices one.
            form = self.apart(form, set(self._free_names(form)) & set(axes))
            axes = tuple(own if label is None else label for label, own in zip(axes, form.axes, strict=True))
            names = {a: b for a, b in zip(form.axes, axes, strict=True) if a is not None}
            out.append(with_names(form, {a: b for a, b in names.items() if a != b}))

        named = check_apart(axes)
        if any(form.term.labels - named for form in out):
            raise NoFormula
        return axes, out

    def _names_to_keep(self, forms: Sequence[Form]) -> Axes:
        """The name of each dimension that the result takes from an operand; None if any name is possible."""
        axes: list[Label | None] = [None] * max(len(form.axes) for form in forms)
        for form in forms:
            for i, label in enumerate(form.axes):
                if label not in self.fixed:
                    continue
                if axes[i] not in (None, label):
                    raise NoFormula
                axes[i] = label

        # Scores keep their names, so a saved product has them in the backward pass.
        for form in forms:
            for i, label in enumerate(form.axes if isinstance(form.term, Scores | SoftmaxArray) else ()):
                if axes[i] is None and label not in axes:
                    axes[i] = label
        return tuple(axes)

    # ---- products of matrices --------------------------------------------------------------------------------------

    def joined(self, left: Form, right: Form, pairs: Iterable[tuple[int, int]]) -> tuple[Form, Form]:
        """Dimensions of a pair get one name, all others different names."""
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
    axes = tuple(label if label is None else names.get(label, label) for label in form.axes)
    return Form(axes, renamed(form.term, names))


def check_apart(axes: Axes) -> set[Label]:
    """Raises NoFormula if two names are equal."""
    named = [label for label in axes if label is not None]
    if len(set(named)) != len(named):
        raise NoFormula
    return set(named)


# ---- numbers of arrays -----------------------------------------------------------------------------------------------


#: The equations before arrays by which these are compared.
_DEPTH = 12
#: Dtypes of attentions, narrow ones first.
FLOATS = ("bfloat16", "float16", "float32", "float64")


class Numbers:
    """Equal for equal computations.

    Unlike in `tracing/values.py`, a barrier or a wider dtype of floats keeps the number: an attention reads its scores
    before and after these.
    """

    def __init__(self, producers: Mapping[Var, JaxprEqn]) -> None:
        self._producers = producers
        self._of_var: dict[Var, int] = {}
        self._of_key: dict[Any, int] = {}

    def __call__(self, atom: Atom, depth: int = _DEPTH) -> int:
        if is_literal(atom):
            return self._intern(("literal", str(aval_of(atom)), repr(atom.val)))
        if atom not in self._of_var:
            key = self._key(atom, depth)
            self._of_var[atom] = key if isinstance(key, int) else self._intern(key)
        return self._of_var[atom]

    def _intern(self, key: Any) -> int:
        return self._of_key.setdefault(key, len(self._of_key))

    def _key(self, var: Var, depth: int) -> Any:
        """The number of an equal operand, or a key."""
        eqn = self._producers.get(var)
        if eqn is None or eqn.effects:
            return ("variable", var)
        i = eqn.outvars.index(var)
        if eqn.primitive.name == "optimization_barrier" or keeps_elements(eqn):
            return self(eqn.invars[i], depth)
        if depth == 0:
            return ("variable", var)

        key = (eqn.primitive, i, tuple(eqn.params.items()), tuple(self(atom, depth - 1) for atom in eqn.invars))
        try:
            hash(key)
        except TypeError:  # a parameter that cannot be hashed
            return ("variable", var)
        return key


def keeps_elements(eqn: JaxprEqn) -> bool:
    """The identity on elements, or a wider dtype of floats."""
    name = eqn.primitive.name
    if name == "convert_element_type":
        old, new = (aval_of(atom).dtype for atom in (eqn.invars[0], eqn.outvars[0]))
        return old.name in FLOATS and new.name in FLOATS and has_all(new, old)
    if name == "reduce_precision":
        info = jnp.finfo(aval_of(eqn.outvars[0]).dtype)
        return bool(eqn.params["exponent_bits"] >= info.nexp and eqn.params["mantissa_bits"] >= info.nmant)
    return name in ("copy", "name", "stop_gradient")
