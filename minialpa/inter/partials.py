"""Partial results: which equations they pass through, and what they become.

An aggregate of the loop is either *partial*, a part of a total that its reduction combines, or *private*, a value that
only the micro-batch has. Linear equations keep a partial result partial. A sum over the batch that is divided by its
number of terms is a mean; where the micro-batch needs a value of its own, it takes its own mean.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.intra.factors import Factors
from minialpa.jaxprs import Atom, is_literal, shape_of


@dataclass(frozen=True, slots=True)
class Partial:
    """A value whose total is the reduction of its micro-batch values.

    count: number of elements that were added into each entry, over the full batch.
    rescale: what makes the micro-batch's own mean of a part of the full mean: the number of micro-batches, once the
        sum was divided by its count, else None.
    """

    reduction: str
    count: int = 0
    rescale: float | None = None


PRIVATE = "private"

#: What may compute the number of terms of a mean.
_ARITHMETIC: dict[str, Callable[..., float]] = {
    "add": operator.add,
    "convert_element_type": float,
    "max": max,
    "mul": operator.mul,
    "sub": operator.sub,
}

Form = Partial | str


class Forms:
    """Forms of the aggregates that the loop computes, and the form of what an equation makes of them.

    eqns, sources: the equations, and the traced equation that each comes from. chunk_of: the chunk of each traced
    equation, where it is known.
    """

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        sources: Sequence[int],
        n: int,
        batch_size: int | None,
        chunk_of: Sequence[int | None] | None,
    ) -> None:
        self.eqns, self.sources, self.chunk_of = eqns, sources, chunk_of
        self.n, self.batch_size = n, batch_size
        self.producer = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
        self.of: dict[Var, Form] = {}

    def stays_partial(self, i: int, eqn: JaxprEqn, factors: Factors, needed: bool) -> Partial | None:
        """The form of the results if `eqn` is linear in partial operands and nothing else stands in the way."""
        partials = self.kept_partial(eqn, factors, needed)
        forms = [f for f in map(self.of.get, partials.values()) if isinstance(f, Partial)]
        if not forms or any(k not in factors.linear_operands for k in partials):
            return None
        if any(f.reduction != "sum" for f in forms):
            return None
        others = [k for k in factors.linear_operands if k not in partials and not self.is_zero(eqn.invars[k])]
        if factors.linear == "joint":
            # Anything else that is added would count once per micro-batch; private values can be shared out.
            private = all(self.is_private(eqn.invars[k]) for k in others)
            same_scale = len({f.rescale for f in forms}) == 1
            if not private or (needed and (others or not same_scale)) or self._crosses(eqn, i):
                return None
            summed = [factors.sizes[f] for f in factors.reductions if f not in factors.positional]
            count = forms[0].count * int(np.prod(summed or [1]))
            return replace(forms[0], count=count)
        if factors.linear != "each" or len(forms) != 1:
            return None
        coefficients = [v for k, v in enumerate(eqn.invars) if k not in partials and not is_literal(v)]
        if any(v in self.of for v in coefficients):
            return forms[0]  # a micro-batch's own coefficient: only in the loop can they meet
        scalar = all(not shape_of(eqn.invars[k]) for k in others)
        if needed:
            return self._scaled(eqn, forms[0])
        return forms[0] if scalar else None

    def kept_partial(self, eqn: JaxprEqn, factors: Factors, needed: bool) -> dict[int, Atom]:
        """Partial operands by position. Of a needed product of two, a mean is taken as the micro-batch's own value."""
        partials: dict[int, Atom] = {k: v for k, v in enumerate(eqn.invars) if self.is_partial(v)}
        if needed and factors.linear == "each" and len(partials) > 1:
            sums = {k: v for k, v in partials.items() if getattr(self.of.get(v), "rescale", None) is None}
            return sums if len(sums) == 1 else partials
        return partials

    def is_private(self, atom: Atom) -> bool:
        return not is_literal(atom) and self.of.get(atom) == PRIVATE

    def is_partial(self, atom: Atom) -> bool:
        return not is_literal(atom) and isinstance(self.of.get(atom), Partial)

    def _crosses(self, eqn: JaxprEqn, i: int) -> bool:
        """Whether operands of `eqn` come from different chunks."""
        if self.chunk_of is None:
            return False
        mine = [v for v in eqn.invars if not is_literal(v) and self.is_partial(v)]
        chunks = {self.chunk_of[self.sources[self.producer[v]]] for v in mine}
        return len(chunks) > 1

    def _scaled(self, eqn: JaxprEqn, form: Partial) -> Partial:
        """Recognise the division of a sum by its number of examples or terms, or by one less (unbiased variance)."""
        known = next((c for c in map(self._constant, eqn.invars) if c is not None), None)
        if form.rescale is not None or form.count == 0 or not known:
            return form
        divisor = {"div": known, "mul": 1 / known}.get(eqn.primitive.name, 0.0)
        whole = round(divisor)
        if whole == 0 or abs(divisor - whole) > 1e-6 * whole:
            return form
        if form.count % whole == 0 and whole % (self.batch_size or 1) == 0:
            return replace(form, rescale=float(self.n))
        return replace(form, rescale=whole / max(form.count / self.n - 1, 1)) if whole == form.count - 1 else form

    def _constant(self, atom: Atom) -> float | None:
        """The value of a real scalar that is known now: `jnp.var` computes its divisor in the program."""
        if is_literal(atom):
            return None if np.ndim(atom.val) or np.iscomplexobj(atom.val) else float(atom.val)
        i = self.producer.get(atom)
        if i is None or shape_of(atom) or self.eqns[i].primitive.name not in _ARITHMETIC:
            return None
        values = [self._constant(v) for v in self.eqns[i].invars]
        return None if None in values else _ARITHMETIC[self.eqns[i].primitive.name](*values)

    def is_zero(self, atom: Atom) -> bool:
        while not is_literal(atom):
            i = self.producer.get(atom)
            if i is None or self.eqns[i].primitive.name not in ("broadcast_in_dim", "convert_element_type", "copy"):
                return False
            atom = self.eqns[i].invars[0]
        return bool(np.all(np.asarray(atom.val) == 0))
