"""Copies through which several contractions share the resharding of what they read.

The price of resharding is on the edge between a value and each of its readers. If several matrix products or
convolutions of one task read a value, they read a copy of it instead: then the value is resharded, and the seconds of
that are counted, once. The copy costs nothing in the program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn, Var

from minialpa.intra.strategies.strategies import SHARED_NAME
from minialpa.ir.equations import is_inexact, operand_vars, reading, shape_of
from minialpa.rules.heavy import has_contraction
from minialpa.support.private_jax import with_source_of
from minialpa.tracing.new_equations import unary_equation


@dataclass(frozen=True, slots=True)
class Placed:
    """An equation with copies among its neighbours.

    Attributes:
        eqn: the equation, or a copy for it and later ones to read.
        number: the number of the original equation, or of the one in front of which the copy stands.
        copied: what is copied; None for equations that are no copies.
    """

    eqn: JaxprEqn
    number: int
    copied: Var | None = None


def shared_copies() -> Callable[[Var], tuple[JaxprEqn, Var]]:
    """A function that makes the equation that copies a value, and the copy."""
    return unary_equation(lambda x: checkpoint_name(x, SHARED_NAME))


def share_reads(eqns: Sequence[JaxprEqn], tasks: Sequence[Hashable]) -> list[Placed]:
    """`eqns` with the copies, each in front of the first equation that reads it.

    tasks: for each equation the task that it belongs to, or None if it shares nothing.
    """
    copy_of = shared_copies()
    copies: dict[int, list[Placed]] = defaultdict(list)
    renamed: dict[int, dict[Var, Any]] = defaultdict(dict)

    for var, numbers in _shared_reads(eqns, tasks):
        eqn, copy = copy_of(var)
        first = numbers[0]
        copies[first].append(Placed(with_source_of(eqn, eqns[first]), first, var))
        for i in numbers:
            renamed[i][var] = copy

    placed: list[Placed] = []
    for i, eqn in enumerate(eqns):
        placed += [*copies[i], Placed(reading(eqn, renamed[i]) if i in renamed else eqn, i)]
    return placed


def _shared_reads(eqns: Sequence[JaxprEqn], tasks: Sequence[Hashable]) -> list[tuple[Var, list[int]]]:
    """Values that several contractions of one task read, each with the numbers of these."""
    made = {var for eqn, task in zip(eqns, tasks, strict=True) if task is not None for var in eqn.outvars}
    readers: dict[tuple[Var, Hashable], list[int]] = defaultdict(list)

    for i, (eqn, task) in enumerate(zip(eqns, tasks, strict=True)):
        if task is not None and has_contraction(eqn):
            for var in dict.fromkeys(operand_vars(eqn)):
                # What a contraction multiplies; a loop that has one inside reads other values, too.
                if var in made and len(shape_of(var)) > 1 and is_inexact(var):
                    readers[var, task].append(i)
    return [(var, numbers) for (var, _), numbers in readers.items() if len(numbers) > 1]
