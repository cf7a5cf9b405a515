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


@dataclass(frozen=True, slots=True)
class Scale:
    """A scalar that is known only behind a loop, as a factor or, `divides`, as a divisor; see `segments`."""

    scalar: Var
    divides: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows along dimension `dim`, computed in `loop`; 0 for the arguments of the step.

    scale: what the value has yet to be multiplied by.
    """

    loop: int
    dim: int
    scale: Scale | None = None


@dataclass(frozen=True, slots=True)
class Partial:
    """A value whose total is the reduction of its micro-batch values.

    count: number of elements that were added into each entry, over the full batch.
    rescale: what makes the micro-batch's own mean of a part of the full mean: the number of micro-batches, once the
        sum was divided by its count, else None.
    scale: what the total has yet to be multiplied by.
    """

    loop: int
    reduction: str
    count: int = 0
    rescale: float | None = None
    scale: Scale | None = None


@dataclass(frozen=True, slots=True)
class Own:
    """The micro-batch's own value in `loop`."""

    loop: int


@dataclass(frozen=True, slots=True)
class Same:
    """A value that all micro-batches compute alike in `loop`."""

    loop: int


@dataclass(frozen=True, slots=True)
class Once:
    """A value that is known after loop `after`.

    is_parameter: computed from arguments, or from what an update makes of them, and not from totals otherwise.
    is_average: an average over micro-batches of what each has of its own; no example may depend on it.
    uniform: the scalar that fills it, if it is a broadcast of one.
    scale: what it may be multiplied by afterwards; all else that it is computed from is known before the first loop.
    """

    after: int
    is_parameter: bool = True
    is_average: bool = False
    uniform: Var | None = None
    scale: Scale | None = None


Form = Rows | Partial | Own | Same | Once

#: Arguments that are not batches, constants and literals.
KNOWN = Once(0)
