"""Which equations of earlier loops a loop runs again, since it reads their results and they were not kept."""

from __future__ import annotations

from collections.abc import Set

from jax.extend.core import Var

from minialpa.inter.microbatch.forms import Partial, Rows
from minialpa.inter.microbatch.segments import Segments
from minialpa.inter.microbatch.split_step import is_loop
from minialpa.ir.equations import operand_vars


def recomputed_equations(segments: Segments, segment: int, kept: Set[Var]) -> set[int]:
    """Equations of earlier loops whose results the loop `segment` reads. Those with side effects run only once.

    kept: values that are not computed again.
    """
    wanted, recomputed = set[Var](), set[int]()

    # Backwards, since an equation that runs again makes its operands wanted.
    for i in range(len(segments.eqns) - 1, -1, -1):
        eqn = segments.eqns[i]
        runs = segments.places[i] == segment

        if _may_repeat(segments, i, segment) and kept.isdisjoint(eqn.outvars) and not wanted.isdisjoint(eqn.outvars):
            recomputed.add(i)
            runs = True
        if runs:
            wanted.update(var for var in operand_vars(eqn) if segments.reads_of_micro_batch(i, var))
    return recomputed


def _may_repeat(segments: Segments, i: int, segment: int) -> bool:
    """Whether an equation runs in a loop before `segment` and has no side effects."""
    place = segments.places[i]
    return place is not None and is_loop(place) and place < segment and not segments.eqns[i].effects


def compared_rows(segments: Segments) -> set[Var]:
    """Rows of which a reduction finds the largest or smallest among the examples.

    They are kept: the derivative of the reduction looks for that one again, and compares to the last bit.
    """
    compared: set[Var] = set()
    for eqn, place in zip(segments.eqns, segments.places, strict=True):
        forms = [segments.forms.form(var) for var in eqn.outvars] if place is not None else []
        if any(isinstance(form, Partial) and form.reduction in ("max", "min") for form in forms):
            compared.update(var for var in operand_vars(eqn) if isinstance(segments.forms.form(var), Rows))
    return compared
