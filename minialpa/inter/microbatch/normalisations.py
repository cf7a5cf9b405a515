"""Normalisations over examples, as in BatchNorm: which equations of a step read the moments of an array.

A normalisation of activations x is recognised by all of

    1. totals m of the first and second moments of x, with a dimension for features;
    2. every forward equation on examples that reads such a total maps x to a x + b, with a and b of these totals;
    3. one of these a has an inverse root (rsqrt, sqrt or pow) in it;
    4. the result is scaled or shifted by parameters, or the totals enter running averages that the step returns.

A standardised loss, advantages that are divided by their spread, or a whitening loss lacks 1 or 4.

`find_moments` gathers the `Moments` of each array of a traced step, from how its values depend on examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.batching import AGGREGATE, Kinds, is_barrier
from minialpa.tracing.jaxprs import Atom, is_inexact, is_literal, operand_vars, shape_of
from minialpa.tracing.trace import TracedStep

_ROOTS = ("rsqrt", "sqrt", "pow")
_AFFINE = ("add", "add_any", "sub", "mul", "div")
_MOVES = ("convert_element_type", "copy", "neg", "reduce_precision")


@dataclass(slots=True, kw_only=True)
class Moments:
    """Equations around the moments of one array `x`, as far as they were seen. Equations are given by number.

    Attributes:
        x: the array, with a dimension of examples.
        entries: equations on examples that read the moments.
        totals: equations that compute the moments, or what follows from them alone, in order.
        first: the first of them; -1 before there is one.
        is_affine: whether all forward entries are as in 2.
        divides: whether one of the entries multiplies or divides by an inverse root, as in 3.
        is_adjusted: whether parameters or running averages are involved, as in 4.
        in_backward: whether a backward pass computes some of the moments, again.
    """

    x: Var
    entries: list[int] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    first: int = -1
    is_affine: bool = True
    divides: bool = False
    is_adjusted: bool = False
    in_backward: bool = False

    @property
    def is_normalisation(self) -> bool:
        return self.is_affine and self.divides and self.is_adjusted


def find_moments(step: TracedStep, kinds: Kinds) -> list[Moments]:
    """The moments that examples read."""
    return [m for m in _Walk(step, kinds).run() if m.entries]


class _Walk:
    """A walk over a program that gathers what is computed from the moments of each array."""

    def __init__(self, step: TracedStep, kinds: Kinds) -> None:
        self.step, self.kinds = step, kinds
        self.inputs = set(step.flat.invars)  # and what is computed from inputs alone
        self.root: dict[Var, tuple[Var, int]] = {}  # array on examples -> the x that it is a polynomial of, degree
        self.summed: set[Var] = set()  # those that were summed over other dimensions of each example
        self.moment: dict[Var, Var | None] = {}  # total -> the x whose moments it is computed from; None: of others
        self.rooted: set[Var] = set()  # totals with an inverse root
        self.adjusted: set[Var] = set()  # totals that arguments of the step are part of
        self.normalised: dict[Var, Var] = {}  # result of a normalisation -> its x
        self.moments: dict[Var, Moments] = {}

    def run(self) -> list[Moments]:
        for i, eqn in enumerate(self.step.flat.eqns):
            if is_barrier(eqn):
                self._pass_on(eqn)
            else:
                self._visit(i, eqn)
        self._find_running_averages()
        return list(self.moments.values())

    def _visit(self, i: int, eqn: JaxprEqn) -> None:
        operands = operand_vars(eqn)
        on_examples = [var for var in operands if isinstance(self.kinds.get(var), int)]
        totals = [var for var in operands if self.kinds.get(var) == AGGREGATE]

        if on_examples:
            self._visit_on_examples(i, eqn, on_examples, totals)
        elif totals:
            self._of_totals(i, eqn, totals)
        elif any(var in self.inputs for var in operands):
            self.inputs.update(eqn.outvars)

    def _visit_on_examples(self, i: int, eqn: JaxprEqn, on_examples: Sequence[Var], totals: Sequence[Var]) -> None:
        if any(self.kinds.get(var) == AGGREGATE for var in eqn.outvars):
            self._reduce(i, eqn, on_examples)
        elif totals:
            self._read(i, eqn, on_examples, totals)
        else:
            self._follow(eqn, on_examples)

        # Scaled or shifted by a parameter.
        adjusts = eqn.primitive.name in _AFFINE and any(map(self._is_parameter, eqn.invars))
        if adjusts and on_examples[0] in self.normalised:
            self.moments[self.normalised[on_examples[0]]].is_adjusted = True

    def _pass_on(self, eqn: JaxprEqn) -> None:
        """What passes a barrier is what it was."""
        for var, out in zip(eqn.invars, eqn.outvars, strict=True):
            if is_literal(var):
                continue
            if var in self.moment:
                self.moment[out] = self.moment[var]
            if var in self.normalised:
                self.normalised[out] = self.normalised[var]
            for group in (self.inputs, self.summed, self.rooted, self.adjusted):
                if var in group:
                    group.add(out)
            self.root[out] = self._root(var)

    def _root(self, var: Var) -> tuple[Var, int]:
        return self.root.get(var, (var, 1))

    def _is_parameter(self, atom: Atom) -> bool:
        """Whether an operand is computed from arguments of the step that are not examples, and has features."""
        return not is_literal(atom) and atom in self.inputs and atom not in self.kinds and bool(shape_of(atom))

    def _reduce(self, i: int, eqn: JaxprEqn, on_examples: Sequence[Var]) -> None:
        """A sum over examples is a moment of x if it sums a polynomial of x of degree 1 or 2, feature by feature."""
        (x, degree), *others = {self._root(var) for var in on_examples}
        (out, *more) = eqn.outvars
        is_moment = eqn.primitive.name == "reduce_sum" and not others and not more and degree <= 2
        is_moment = is_moment and is_inexact(out) and bool(shape_of(out))
        self.moment.update((var, x if is_moment else None) for var in eqn.outvars)
        if is_moment:
            moments = self.moments.setdefault(x, Moments(x=x, first=i))
            moments.totals.append(i)
            moments.in_backward |= self.step.origins[i].direction == "backward"

    def _of_totals(self, i: int, eqn: JaxprEqn, totals: Sequence[Var]) -> None:
        """What follows from the moments of one x alone belongs to it."""
        of = {self.moment.get(var) for var in totals}
        x = of.pop() if len(of) == 1 else None
        self.moment.update((var, x) for var in eqn.outvars)
        if x is not None:
            self.moments[x].totals.append(i)
        if eqn.primitive.name in _ROOTS or any(var in self.rooted for var in totals):
            self.rooted.update(eqn.outvars)
        if any(var in self.adjusted for var in totals) or any(map(self._is_parameter, eqn.invars)):
            self.adjusted.update(eqn.outvars)

    # ---- equations on examples ------------------------------------------------------------------------------------

    def _follow(self, eqn: JaxprEqn, on_examples: Sequence[Var]) -> None:
        """Whether the result of an equation that reads no totals is a polynomial of the same x."""
        operand, name, out = on_examples[0], eqn.primitive.name, eqn.outvars[0]
        x, degree = self._root(operand)

        if name in _MOVES or (name in ("mul", "div") and any(map(_is_number, eqn.invars))):
            self.root[out] = x, degree
            self.summed.update(eqn.outvars if operand in self.summed else ())
            if operand in self.normalised:
                self.normalised[out] = self.normalised[operand]
        elif name == "reduce_sum":
            self.root[out] = x, degree
            self.summed.add(out)
        elif degree == 1 and not self.summed.intersection(on_examples) and self._squares(eqn, on_examples):
            self.root[out] = x, 2

    def _squares(self, eqn: JaxprEqn, on_examples: Sequence[Var]) -> bool:
        """Whether an equation multiplies what is linear in x with itself, or with another such array."""
        if eqn.primitive.name == "mul":
            return len(on_examples) == 2 and self._root(on_examples[1]) == (self._root(on_examples[0])[0], 1)
        return eqn.primitive.name == "square" or (eqn.primitive.name == "integer_pow" and eqn.params["y"] == 2)

    def _read(self, i: int, eqn: JaxprEqn, on_examples: Sequence[Var], totals: Sequence[Var]) -> None:
        """Note that an equation on examples reads totals, and whether it maps x to a x + b."""
        operand = on_examples[0]
        x = self._root(operand)[0]
        if operand in self.normalised and any(var in self.adjusted and self.moment.get(var) is not x for var in totals):
            self.moments[self.normalised[operand]].is_adjusted = True  # by a parameter that an update has changed

        is_affine = self._is_affine(eqn, on_examples, totals)
        for var in totals:
            of = self.moment.get(var)
            if of is not None and (is_affine or self.step.origins[i].direction != "backward"):
                self.moments[of].entries.append(i)
                self.moments[of].is_affine &= is_affine
        if is_affine:
            self._normalise(eqn, operand, totals[0])

    def _is_affine(self, eqn: JaxprEqn, on_examples: Sequence[Var], totals: Sequence[Var]) -> bool:
        """Whether an equation adds a total of x to what is linear in x, or multiplies or divides it by one."""
        if eqn.primitive.name not in _AFFINE or len(on_examples) > 1 or len(totals) > 1:
            return False
        operand = on_examples[0]
        x, degree = self._root(operand)
        is_linear = degree == 1 and operand not in self.summed
        return (
            is_linear and self.moment.get(totals[0]) is x and (eqn.primitive.name != "div" or eqn.invars[0] is operand)
        )

    def _normalise(self, eqn: JaxprEqn, operand: Var, total: Var) -> None:
        x, out = self._root(operand)[0], eqn.outvars[0]
        self.root[out] = x, 1
        if eqn.primitive.name in ("mul", "div") and total in self.rooted:
            self.moments[x].divides = True
            self.moments[x].is_adjusted |= total in self.adjusted
            self.normalised[out] = x
        elif operand in self.normalised:
            self.normalised[out] = x

    def _find_running_averages(self) -> None:
        for var in self.step.flat.outvars:
            of = None if is_literal(var) else self.moment.get(var)
            if of is not None and var in self.adjusted:
                self.moments[of].is_adjusted = True


def _is_number(atom: Atom) -> bool:
    return is_literal(atom) and not shape_of(atom)
