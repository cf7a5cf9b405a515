"""Rules of equations that keep the elements of an array: they permute, repeat or leave out dimensions, or convert.

`LAYOUTS` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping

from jax.extend.core import JaxprEqn

from minialpa.ir.equations import aval_of, shape_of
from minialpa.recognition.numbering import FLOATS, keeps_elements
from minialpa.recognition.rewrites import converted
from minialpa.recognition.rule import Known, Rule
from minialpa.recognition.terms import Form, Label, NoFormula, Number


def same(known: Known, eqn: JaxprEqn) -> Form:
    return known[eqn.invars[0]]


def _convert(known: Known, eqn: JaxprEqn) -> Form:
    old, new = (aval_of(atom).dtype.name for atom in (eqn.invars[0], eqn.outvars[0]))
    form = known[eqn.invars[0]]
    if old == new:
        return form
    if old in FLOATS and new in FLOATS:
        return Form(form.axes, converted(form.term, old, new))

    # Every dtype has the whole numbers below 128.
    if isinstance(form.term, Number) and form.term.value in range(128) and (new in FLOATS or "int" in new):
        return form
    raise NoFormula


def _reduce_precision(known: Known, eqn: JaxprEqn) -> Form:
    """What saved values go through under `jax.checkpoint`: a rounding to the dtype that they have."""
    if not keeps_elements(eqn):
        raise NoFormula
    return known[eqn.invars[0]]


def _transpose(known: Known, eqn: JaxprEqn) -> Form:
    form = known[eqn.invars[0]]
    return Form(tuple(form.axes[i] for i in eqn.params["permutation"]), form.term)


def _broadcast_in_dim(known: Known, eqn: JaxprEqn) -> Form:
    form = known[eqn.invars[0]]
    axes: list[Label | None] = [None] * len(shape_of(eqn.outvars[0]))
    for label, i in zip(form.axes, eqn.params["broadcast_dimensions"], strict=True):
        axes[i] = label
    return Form(tuple(axes), form.term)


def _reshape(known: Known, eqn: JaxprEqn) -> Form:
    """Dimensions of length 1 come and go; other ones stay as they are."""
    form = known[eqn.invars[0]]
    if eqn.primitive.name == "reshape" and eqn.params.get("dimensions") is not None:
        raise NoFormula
    old, new = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    kept = [label for label, size in zip(form.axes, old, strict=True) if size != 1]
    if [size for size in old if size != 1] != [size for size in new if size != 1]:
        raise NoFormula
    left = iter(kept)
    return Form(tuple(None if size == 1 else next(left) for size in new), form.term)


def _part_of_number(known: Known, eqn: JaxprEqn) -> Form:
    """A part of an array whose elements are all one number, such as the head mask of ones that no user gave."""
    form = known[eqn.invars[0]]
    if not isinstance(form.term, Number):
        raise NoFormula
    return Form((None,) * len(shape_of(eqn.outvars[0])), form.term)


LAYOUTS: Mapping[str, Rule] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "convert_element_type": _convert,
    "copy": same,
    "copy_p": same,
    "dynamic_slice": _part_of_number,
    "expand_dims": _reshape,
    "name": same,
    "reduce_precision": _reduce_precision,
    "reshape": _reshape,
    "slice": _part_of_number,
    "squeeze": _reshape,
    "stop_gradient": same,
    "transpose": _transpose,
}
