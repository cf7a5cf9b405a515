"""Forms: what a value of the full-batch program is in a step over micro-batches.

    Rows        has examples: each micro-batch computes its own rows of it
    Partial     a reduction over examples: each micro-batch has a part, and its total is known behind the loop
    Own         each micro-batch has a value of its own, see `statistics`; results are the average
    Same        every micro-batch computes the same, beside something on examples
    Once        known once: an argument, a total, or what is computed from them

Loops are numbered from 1; `after` = 0 is before the first. A loop can read what is known after the loops before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax.extend.core import Var

from minialpa.rules.factors import Reduction


@dataclass(frozen=True, slots=True)
class Scale:
    """A scalar that is known only behind a loop, as a factor or, if `divides`, as a divisor; see `scales`."""

    scalar: Var
    divides: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the examples.

    Attributes:
        loop: the loop that computes them; 0 for the arguments of the step.
        dim: the dimension that holds the examples.
        scale: what the value has yet to be multiplied by, or None.
    """

    loop: int
    dim: int
    scale: Scale | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """A value whose total is the reduction of its micro-batch values.

    Attributes:
        loop: the loop that computes the parts.
        reduction: how they combine, such as "sum" or "max".
        count: number of elements that were added into each entry, over the full batch; 0 if it is not known.
        rescale: what a part of the full mean is multiplied by to be the micro-batch's own mean: the number of
            micro-batches, once the sum was divided by its count; until then None.
        factors: the known numbers that the sum, or since then the mean, was multiplied by.
        scale: what the total has yet to be multiplied by, or None.
    """

    loop: int
    reduction: Reduction
    count: int = 0
    rescale: float | None = None
    factors: tuple[float, ...] = ()
    scale: Scale | None = None


@dataclass(frozen=True, slots=True)
class Own:
    """The micro-batch's own value in `loop`. count, factors: those of the means that it is computed from."""

    loop: int
    count: int = 0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Same:
    """A value that all micro-batches compute alike in `loop`."""

    loop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Once:
    """A value that is known once.

    Attributes:
        after: the loop behind which it is known; 0: before the first.
        is_parameter: computed from arguments, or from what an update makes of them, and not from totals otherwise.
        is_average: an average over micro-batches of what each has of its own; no example may depend on it.
        uniform: the scalar that fills it, if it is a broadcast of one, else None.
        scale: what it may be multiplied by afterwards, or None; all else that it is computed from is known before
            the first loop.
    """

    after: int
    is_parameter: bool = True
    is_average: bool = False
    uniform: Var | None = None
    scale: Scale | None = None


Form = Rows | Partial | Own | Same | Once

#: Arguments that are not batches, constants and literals.
KNOWN = Once(after=0)
