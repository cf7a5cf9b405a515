"""Forms of the values of the full-batch program in a step over micro-batches.

    Rows        has examples: each micro-batch computes its own rows
    Partial     a reduction over examples: each micro-batch has a part, and the total is known after the loop
    Own         each micro-batch has its own value, see `statistics`; results are the average
    Same        every micro-batch computes the same value, as a second result of an equation on examples
    Once        known once: an argument, a total, or a function of them

Loops are numbered from 1; `after` = 0 is before the first. A loop can read what is known after the loops before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax.extend.core import Var

from minialpa.rules.factors import Reduction


@dataclass(frozen=True, slots=True)
class Scale:
    """A scalar that is known only after a loop, as a factor or, if `divides`, as a divisor; see `scales`."""

    scalar: Var
    divides: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the examples.

    Attributes:
        loop: the loop that computes them; 0 for the arguments of the step.
        dim: the dimension of the examples.
        scale: a factor that the value still lacks, or None.
    """

    loop: int
    dim: int
    scale: Scale | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """A value whose total is the reduction of its micro-batch values.

    Attributes:
        loop: the loop that computes the parts.
        reduction: "sum", "max", ...
        count: number of elements in the sum of each entry, over the full batch; 0 if unknown.
        rescale: (own mean of the micro-batch) / (its part of the full mean), which is the number of micro-batches; None
            before the sum is divided by its count.
        factors: the known numbers that have multiplied the sum, or since `rescale` the mean.
        scale: a factor that the total still lacks, or None.
    """

    loop: int
    reduction: Reduction
    count: int = 0
    rescale: float | None = None
    factors: tuple[float, ...] = ()
    scale: Scale | None = None


@dataclass(frozen=True, slots=True)
class Own:
    """The micro-batch's own value in `loop`, with the count and factors of the means in it."""

    loop: int
    count: int = 0
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Same:
    """A value that is the same in all micro-batches, and is computed in `loop`."""

    loop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Once:
    """A value that is known once.

    Attributes:
        after: the loop after which it is known; 0: before the first.
        is_parameter: a function of arguments and of their updates, not of other totals.
        is_average: an average of the micro-batches' own values; no example may depend on it.
        uniform: the scalar that fills it, if it is a broadcast of one, else None.
        scale: a factor that may be applied later, or None; all its other operands are known before the first loop.
    """

    after: int
    is_parameter: bool = True
    is_average: bool = False
    uniform: Var | None = None
    scale: Scale | None = None


Form = Rows | Partial | Own | Same | Once

#: Arguments that are not batches, constants and literals.
KNOWN = Once(after=0)
