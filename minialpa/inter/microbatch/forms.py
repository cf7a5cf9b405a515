"""Forms: the operands of an equation of the full-batch program in, the form of its results over micro-batches out.

With a batch x of 8 examples, weights w, and 4 micro-batches:

    y = x @ w            PerExample     micro-batch m computes rows 2 m and 2 m + 1
    s = sum(y, 0)        Partial        micro-batch m computes a part; the sum is complete after the loop
    s / 8                Partial        linear equations keep a partial sum partial
    mean of a BatchNorm  PerMicroBatch  a statistic of 2 examples, see `statistics`; the step returns the average
    counter of a scan    Same           equal in all micro-batches, as a second result of an equation on examples
    w, exp(s)            Complete       equal for all: an argument, a finished reduction, or a function of these

Loops are numbered from 1. A value with `after` = l is complete after loop l, or before the first loop if l is 0.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.batching import Kinds
from minialpa.ir.equations import Atom, is_literal, operand_vars, shape_of
from minialpa.rules.factors import Factors, Reduction


@dataclass(frozen=True, slots=True)
class Scale:
    """A scalar, complete only after a loop, that multiplies a value or, if `divides`, divides it; see `scales`."""

    scalar: Var
    divides: bool = False


@dataclass(frozen=True, slots=True)
class PerExample:
    """A value with a dimension of examples, which micro-batches cut.

    Attributes:
        loop: the loop that computes the value; 0 for an argument of the step.
        dim: the dimension of the examples.
        scale: a factor that the value still lacks, or None.
    """

    loop: int
    dim: int
    scale: Scale | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """A reduction over examples, of which each micro-batch has a part.

    Attributes:
        loop: the loop that computes the parts.
        reduction: "sum", "max", ...
        count: the number of full-batch elements in each entry of the sum; 0 if unknown.
        rescale: (mean over the micro-batch) / (part of the full mean); the number of micro-batches, unless the variance
            is unbiased: 4 for (x0 + x1) / 8 in micro-batches of 2. None before the sum is divided by its count.
        factors: the known numbers that multiplied the sum or, once `rescale` is set, the mean.
        scale: a factor that the complete sum still lacks, or None.
    """

    loop: int
    reduction: Reduction
    count: int = 0
    rescale: float | None = None
    factors: tuple[float, ...] = ()
    scale: Scale | None = None


@dataclass(frozen=True, slots=True)
class PerMicroBatch:
    """A statistic of the micro-batch's examples, computed in `loop`; for a mean, with `count` and `factors` as in
    `Partial`.
    """

    loop: int
    count: int = 0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Same:
    """A value that every micro-batch computes in `loop`, with equal results."""

    loop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """A value that is complete after a loop, and equal for all micro-batches.

    Attributes:
        after: the loop; 0 for a value that is complete before the first loop.
        is_parameter: whether the value depends on arguments and their updates alone, and on no other reduction.
        is_average: whether it is an average of per-micro-batch values; equations on examples may not read it.
        uniform: the scalar that fills the array and is complete only after a loop, or None.
        scale: a factor that may be applied later. All other operands are complete before the first loop.
    """

    after: int
    is_parameter: bool = True
    is_average: bool = False
    uniform: Var | None = None
    scale: Scale | None = None


Form = PerExample | Partial | PerMicroBatch | Same | Complete

#: Arguments that are not batches, constants and literals.
KNOWN = Complete(after=0)


# ---- forms of a program ----------------------------------------------------------------------------------------------

#: Primitives that may compute the number of terms of a mean.
_ARITHMETIC: dict[str, Callable[..., float]] = {
    "add": operator.add,
    "convert_element_type": float,
    "max": max,
    "mul": operator.mul,
    "sub": operator.sub,
}

#: Relative distance at which a divisor counts as an integer: 1 / n as a float32 literal is off by up to 6e-8.
_INTEGER_TOLERANCE = 1e-6


class ValueForms:
    """The forms of the variables of a program, set equation by equation. A variable that is not in `of` is `KNOWN`."""

    def __init__(self, eqns: Sequence[JaxprEqn], n: int, batch_size: int) -> None:
        self.n, self.batch_size = n, batch_size
        self.producer = {var: eqn for eqn in eqns for var in eqn.outvars}
        self.of: dict[Var, Form] = {}

    def form(self, atom: Atom) -> Form:
        return KNOWN if is_literal(atom) else self.of.get(atom, KNOWN)

    def set_results(self, eqn: JaxprEqn, form: Form) -> None:
        self.of.update((var, form) for var in eqn.outvars)

    def row_dims(self, eqn: JaxprEqn) -> Kinds:
        """The dimension of the examples of each per-example operand."""
        forms = {var: self.form(var) for var in operand_vars(eqn)}
        return {var: form.dim for var, form in forms.items() if isinstance(form, PerExample)}

    def stays_partial(self, eqn: JaxprEqn, factors: Factors, is_per_micro_batch: bool) -> Partial | None:
        """The form of the results if a loop can apply `eqn` to its partial sums, else None.

        For partial sums s and t, 2 s and s + t stay partial; s * t and exp(s) need complete sums.
        is_per_micro_batch: whether `eqn` reads reductions as statistics of the micro-batch.
        """
        partials = self.kept_partial(eqn, factors, is_per_micro_batch)
        if not self._may_stay(eqn, factors, partials):
            return None
        if factors.linear == "joint":
            return self._form_of_sum(eqn, factors, partials, is_per_micro_batch)
        if factors.linear != "each" or len(partials) != 1:
            return None

        # A product of one partial sum and coefficients.
        (form,) = partials.values()
        if any(isinstance(self.form(atom), PerMicroBatch) for atom in eqn.invars):
            return form  # a per-micro-batch coefficient exists only in the loop
        others = [k for k in factors.linear_operands if k not in partials and not self.is_zero(eqn.invars[k])]
        if not is_per_micro_batch and any(shape_of(eqn.invars[k]) for k in others):
            return None  # cheaper on the complete sum, where it runs once
        return self._form_of_product(eqn, form)

    def _may_stay(self, eqn: JaxprEqn, factors: Factors, partials: dict[int, Partial]) -> bool:
        """Whether `partials` are linear operands and sums of one loop, which has all operands."""
        forms = list(partials.values())
        if not forms or any(k not in factors.linear_operands for k in partials):
            return False
        if any(form.reduction != "sum" for form in forms) or len({(form.loop, form.scale) for form in forms}) > 1:
            return False
        return all(self._is_known_in(atom, forms[0].loop) for atom in eqn.invars)

    def kept_partial(self, eqn: JaxprEqn, factors: Factors, is_per_micro_batch: bool) -> dict[int, Partial]:
        """The operands, by position, that `eqn` reads as partial sums.

        In a product for one micro-batch, only a sum stays partial, if it is the only sum: means are read as the
        micro-batch's.
        """
        found = ((k, self.form(var)) for k, var in enumerate(eqn.invars))
        partials = {k: form for k, form in found if isinstance(form, Partial)}
        if is_per_micro_batch and factors.linear == "each" and len(partials) > 1:
            sums = {k: form for k, form in partials.items() if form.rescale is None}
            return sums if len(sums) == 1 else partials
        return partials

    def _form_of_sum(
        self, eqn: JaxprEqn, factors: Factors, partials: dict[int, Partial], is_per_micro_batch: bool
    ) -> Partial | None:
        """The form of a sum of partial sums. Other summands count in every micro-batch, so they have to be
        per-micro-batch values.
        """
        first, *more = partials.values()
        others = [k for k in factors.linear_operands if k not in partials and not self.is_zero(eqn.invars[k])]
        all_per_micro_batch = all(isinstance(self.form(eqn.invars[k]), PerMicroBatch) for k in others)
        if not all_per_micro_batch or (others and first.scale is not None):
            return None

        # The means of a micro-batch are joined if they are means of the same kind.
        if is_per_micro_batch and (others or any(form.rescale != first.rescale for form in more)):
            return None
        summed = [factors.sizes[factor] for factor in factors.reductions if factor not in factors.positional]
        factors_of_all = {form.factors for form in partials.values()}
        same_factors = first.factors if len(factors_of_all) == 1 else ()
        return replace(first, count=first.count * int(np.prod(summed or [1])), factors=same_factors)

    def _is_known_in(self, atom: Atom, loop: int) -> bool:
        form = self.form(atom)
        return form.after < loop if isinstance(form, Complete) else form.loop <= loop

    def _form_of_product(self, eqn: JaxprEqn, form: Partial) -> Partial:
        """The form after a product with a known number. A division by the number of terms sets `rescale`."""
        factor = self.factor(eqn)
        if form.count == 0 or not factor:
            return form
        form = replace(form, factors=(*form.factors, factor))
        if form.rescale is not None:
            return form

        # An unbiased variance may be a mean times B / (B - 1), so all factors count together.
        rescales = (self._rescale(form.count, form.factors[k:]) for k in range(len(form.factors)))
        rescale = next((found for found in rescales if found is not None), None)
        return form if rescale is None else replace(form, rescale=rescale, factors=())

    def _rescale(self, count: int, factors: Sequence[float]) -> float | None:
        """`Partial.rescale` of a sum of `count` elements times `factors`, or None.

        The factors must divide by a number of examples or terms, or by the terms less one (unbiased variance).
        """
        # A divisor in the program is a float, so it is an integer only up to rounding.
        divisor = 1 / product if (product := math.prod(factors)) else math.inf
        n_terms = round(divisor) if math.isfinite(divisor) else 0
        if n_terms == 0 or abs(divisor - n_terms) > _INTEGER_TOLERANCE * n_terms:
            return None

        if count % n_terms == 0 and n_terms % self.batch_size == 0:
            return float(self.n)
        return n_terms / max(count / self.n - 1, 1) if n_terms == count - 1 else None

    def factor(self, eqn: JaxprEqn) -> float | None:
        """The number by which `eqn` multiplies its operand, or None."""
        known = next((constant for constant in map(self._constant, eqn.invars) if constant), None)
        if known is None or eqn.primitive.name not in ("mul", "div"):
            return None
        return known if eqn.primitive.name == "mul" else 1 / known

    def unbiased(self, count: int, factors: Sequence[float]) -> float:
        """(b / (b - 1)) / (B / (B - 1)) if the last of `factors` multiply to B / (B - 1), else 1.

        B = `count` elements in the full batch, b = B / n in a micro-batch: corrects an unbiased variance for b
        elements, by 1.75 for B = 8 and n = 4.
        """
        for k in range(len(factors) if count > 1 else 0):
            if math.isclose(math.prod(factors[k:]), count / (count - 1), rel_tol=_INTEGER_TOLERANCE):
                n_in_micro_batch = count / self.n
                return n_in_micro_batch / max(n_in_micro_batch - 1, 1) * (count - 1) / count
        return 1.0

    def _constant(self, atom: Atom) -> float | None:
        """The value of a constant real scalar, or None. `jnp.var` computes its divisor with equations."""
        if is_literal(atom):
            return None if np.ndim(atom.val) or np.iscomplexobj(atom.val) else float(atom.val)
        eqn = self.producer.get(atom)
        if eqn is None or shape_of(atom) or eqn.primitive.name not in _ARITHMETIC:
            return None
        values = [self._constant(atom) for atom in eqn.invars]
        return None if None in values else _ARITHMETIC[eqn.primitive.name](*values)

    def is_zero(self, atom: Atom) -> bool:
        while not is_literal(atom):
            eqn = self.producer.get(atom)
            if eqn is None or eqn.primitive.name not in ("broadcast_in_dim", "convert_element_type", "copy"):
                return False
            atom = eqn.invars[0]
        return bool(np.all(np.asarray(atom.val) == 0))
