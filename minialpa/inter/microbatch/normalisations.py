"""Normalisations over examples, as in BatchNorm: a step in, the moments of its arrays and their uses out.

The mean and variance of x may be statistics of the micro-batch if all of these hold:

    1. x is computed from parameters: arguments whose new values depend on a backward pass;
    2. the step returns running averages of the first and of the second moment of x, see `averages`;
    3. every forward equation on examples that reads a moment of x maps x to a x + b, with a and b of these moments;
    4. the moments meet no other reductions in the forward pass; a term of a loss meets them.

Standardised advantages and targets lack 1; whitening losses, and means for a log, lack 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.averages import OTHER, AffineValue, Moment, mixes, replaced_inputs, result_values
from minialpa.inter.microbatch.batching import AGGREGATE, Kinds, aggregates_in, is_barrier, per_example_in
from minialpa.ir.equations import Atom, is_inexact, is_literal, operand_vars, shape_of
from minialpa.tracing.trace import TracedStep

_AFFINE = ("add", "add_any", "sub", "mul", "div")
_MOVES = (
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "neg",
    "reduce_precision",
    "reshape",
    "squeeze",
    "stop_gradient",
    "transpose",
)


@dataclass(slots=True, kw_only=True)
class Moments:
    """The equations around the moments of one array `x`, by number, and whether the rules above hold.

    Attributes:
        entries: equations on examples that read the moments.
        aggregates: equations that compute the moments, or functions of them, in order.
        averages: equations of `aggregates` that add moments to running averages.
        results: functions of the moments that the step returns besides running averages.
        of_batch: whether x is computed from the batch alone.
        of_weights: whether rule 1 holds.
        averaged: the degrees of the moments for which rule 2 holds.
        is_affine: whether rule 3 holds.
        is_used_otherwise: whether rule 4 fails.
        in_backward: whether a backward pass recomputes some of the moments.
    """

    x: Var
    entries: list[int] = field(default_factory=list)
    aggregates: list[int] = field(default_factory=list)
    averages: list[int] = field(default_factory=list)
    results: set[Var] = field(default_factory=set)
    of_batch: bool = False
    of_weights: bool = False
    averaged: set[int] = field(default_factory=set)
    is_affine: bool = True
    is_used_otherwise: bool = False
    in_backward: bool = False

    @property
    def is_normalisation(self) -> bool:
        return self.of_weights and self.averaged >= {1, 2} and self.is_affine and not self.is_used_otherwise


def find_moments(step: TracedStep, kinds: Kinds) -> list[Moments]:
    return [m for m in _Walk(step, kinds).run() if m.entries]


class _Walk:
    """Records moments, equation by equation."""

    def __init__(self, step: TracedStep, kinds: Kinds) -> None:
        self.step, self.kinds = step, kinds
        self.root: dict[Var, tuple[Var, int]] = {}  # array on examples -> the x that it is a polynomial of, degree
        self.summed: set[Var] = set()  # arrays on examples that were summed over other dimensions
        self.value: dict[Var, AffineValue] = {}  # of variables without examples
        self.moments: dict[Var, Moments] = {}

    def run(self) -> list[Moments]:
        inputs = zip(self.step.flat.invars, self.step.batch_dims, strict=True)
        self.value.update(
            (var, AffineValue(inputs=frozenset([i]))) for i, (var, dim) in enumerate(inputs) if dim is None
        )
        for i, eqn in enumerate(self.step.flat.eqns):
            if is_barrier(eqn):
                self._pass_barrier(eqn)
            else:
                self._visit_equation(i, eqn)

        self._record_results()
        return list(self.moments.values())

    def _visit_equation(self, i: int, eqn: JaxprEqn) -> None:
        on_examples, aggregates = per_example_in(eqn, self.kinds), aggregates_in(eqn, self.kinds)
        if not on_examples:
            self._visit_without_examples(i, eqn)
        elif any(self.kinds.get(var) == AGGREGATE for var in eqn.outvars):
            self._visit_reduction(i, eqn, on_examples, aggregates)
        elif aggregates:
            self._visit_reader(i, eqn, on_examples, aggregates)
        else:
            self._follow_polynomial(eqn, on_examples)

    def _pass_barrier(self, eqn: JaxprEqn) -> None:
        for var, out in zip(eqn.invars, eqn.outvars, strict=True):
            if is_literal(var):
                continue
            self.value[out] = self._value(var)
            self.root[out] = self._root(var)
            if var in self.summed:
                self.summed.add(out)

    def _root(self, var: Var) -> tuple[Var, int]:
        return self.root.get(var, (var, 1))

    def _value(self, atom: Atom) -> AffineValue:
        if is_literal(atom) or (atom not in self.value and atom not in self.kinds):
            return AffineValue()
        return self.value.get(atom, OTHER)

    def _moments_of(self, value: AffineValue) -> list[Moments]:
        return [self.moments[x] for x in value.arrays if x is not None]

    # ---- reductions -----------------------------------------------------------------------------------------------

    def _visit_reduction(self, i: int, eqn: JaxprEqn, on_examples: Sequence[Var], aggregates: Sequence[Var]) -> None:
        """A sum over examples is a moment of x if it sums a polynomial of x of degree 1 or 2, feature by feature."""
        self._note_reader(i, aggregates, is_affine=False)
        (x, degree), *others = {self._root(var) for var in on_examples}
        (out, *more) = eqn.outvars
        is_moment = eqn.primitive.name == "reduce_sum" and not others and not more and degree <= 2
        if not (is_moment and is_inexact(out) and bool(shape_of(out))):
            self.value.update(dict.fromkeys(eqn.outvars, OTHER))
            return

        self.value[out] = AffineValue(moments=frozenset([Moment(x, degree)]))
        moments = self.moments.setdefault(x, Moments(x=x))
        moments.aggregates.append(i)
        moments.in_backward |= self.step.origins[i].direction == "backward"

    def _visit_without_examples(self, i: int, eqn: JaxprEqn) -> None:
        """Functions of moments belong to them; derivatives, which are of the loss, do not."""
        operands = [self._value(atom) for atom in eqn.invars]
        direction = self.step.origins[i].direction
        adds_moments = any(value.moments and not value.is_average for value in operands)

        for var, value in zip(eqn.outvars, result_values(eqn, operands), strict=True):
            is_mixed = mixes(eqn, operands, value)
            self.value[var] = OTHER if is_mixed and direction == "backward" else value
            for moments in self._moments_of(self.value[var]):
                moments.aggregates.append(i)
                moments.is_used_otherwise |= is_mixed and direction == "forward"
                if value.is_average and adds_moments:
                    moments.averages.append(i)

    # ---- equations on examples ------------------------------------------------------------------------------------

    def _follow_polynomial(self, eqn: JaxprEqn, on_examples: Sequence[Var]) -> None:
        """Record whether an equation that reads no reductions returns a polynomial of the same x."""
        operand, name, out = on_examples[0], eqn.primitive.name, eqn.outvars[0]
        x, degree = self._root(operand)

        if name in _MOVES or (name in ("mul", "div") and any(map(_is_number, eqn.invars))):
            self.root[out] = x, degree
            self.summed.update(eqn.outvars if operand in self.summed else ())
        elif name == "reduce_sum":
            self.root[out] = x, degree
            self.summed.add(out)
        elif degree == 1 and not self.summed.intersection(on_examples) and self._is_square(eqn, on_examples):
            self.root[out] = x, 2

    def _is_square(self, eqn: JaxprEqn, on_examples: Sequence[Var]) -> bool:
        if eqn.primitive.name == "mul":
            return len(on_examples) == 2 and self._root(on_examples[1]) == (self._root(on_examples[0])[0], 1)
        return eqn.primitive.name == "square" or (eqn.primitive.name == "integer_pow" and eqn.params["y"] == 2)

    def _visit_reader(self, i: int, eqn: JaxprEqn, on_examples: Sequence[Var], aggregates: Sequence[Var]) -> None:
        is_affine = self._is_affine(eqn, on_examples, aggregates)
        self._note_reader(i, aggregates, is_affine=is_affine)
        if is_affine:
            self.root[eqn.outvars[0]] = self._root(on_examples[0])[0], 1

    def _note_reader(self, i: int, aggregates: Sequence[Var], *, is_affine: bool) -> None:
        """Record that an equation on examples reads moments. Derivatives of a normalisation are not affine."""
        if not is_affine and self.step.origins[i].direction == "backward":
            return
        for var in aggregates:
            for moments in self._moments_of(self._value(var)):
                moments.entries.append(i)
                moments.is_affine &= is_affine

    def _is_affine(self, eqn: JaxprEqn, on_examples: Sequence[Var], aggregates: Sequence[Var]) -> bool:
        """Whether the equation adds moments of x to a linear function of x, or multiplies or divides it by moments."""
        if eqn.primitive.name not in _AFFINE or len(on_examples) > 1 or len(aggregates) > 1:
            return False
        operand = on_examples[0]
        x, degree = self._root(operand)
        is_linear = degree == 1 and operand not in self.summed
        is_of_x = self._value(aggregates[0]).arrays == {x}
        return is_linear and is_of_x and (eqn.primitive.name != "div" or eqn.invars[0] is operand)

    # ---- results --------------------------------------------------------------------------------------------------

    def _record_results(self) -> None:
        """Record returned moments, and rules 1 and 2."""
        outvars = self.step.flat.outvars
        values = [self._value(atom) for atom in outvars]
        replaced = replaced_inputs(self.step, values)
        for atom, value, inputs in zip(outvars, values, replaced, strict=True):
            for moment in value.moments if None not in value.arrays else ():
                assert moment.x is not None, moment
                if not value.is_average:
                    self.moments[moment.x].results.add(atom)
                elif inputs:
                    self.moments[moment.x].averaged.add(moment.degree)

        arguments = [var for var, dim in zip(self.step.flat.invars, self.step.batch_dims, strict=True) if dim is None]
        of_arguments = _computed_from(self.step.flat.eqns, arguments)
        of_weights = self._computed_from_weights(values, replaced)
        for moments in self.moments.values():
            moments.of_batch = moments.x not in of_arguments
            moments.of_weights = moments.x in of_weights

    def _computed_from_weights(self, values: Sequence[AffineValue], replaced: Sequence[frozenset[int]]) -> set[Var]:
        """The variables computed from arguments that a backward pass changes, or whose gradients the step returns."""
        flat, origins = self.step.flat, self.step.origins
        backward = [eqn for eqn, origin in zip(flat.eqns, origins, strict=True) if origin.direction == "backward"]
        changed = _computed_from(flat.eqns, (var for eqn in backward for var in eqn.outvars))

        weights = set[Var]()
        for atom, value, inputs, like in zip(flat.outvars, values, replaced, self.step.layouts, strict=True):
            is_statistic = value.is_average and not any(moments.in_backward for moments in self._moments_of(value))
            if not is_literal(atom) and atom in changed and not is_statistic:
                weights.update(flat.invars[i] for i in (*inputs, like) if i is not None)
        return _computed_from(flat.eqns, weights)


def _computed_from(eqns: Sequence[JaxprEqn], start: Iterable[Var]) -> set[Var]:
    """`start`, and all variables that depend on it."""
    found = set(start)
    for eqn in eqns:
        if not found.isdisjoint(operand_vars(eqn)):
            found.update(eqn.outvars)
    return found


def _is_number(atom: Atom) -> bool:
    return is_literal(atom) and not shape_of(atom)
