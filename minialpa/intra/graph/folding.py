"""Pairs of equal equations in repeated layers in; the equations and inputs that are sharded alike out.

A short step (`ir/repeats.py`) has the pairs: an equation of its model unit, and the same equation of the unit before.
If both have the same kind, they share one node of the cost graph, whose cost counts for both. Edges lead to the nodes
of the operands in either unit. Inputs are alike if such equations read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from minialpa.ir.equations import is_literal

#: By operand of an equation: the variables in this place, each with the fraction of the runs that read it.
Varied = Mapping[int, tuple[tuple[Var, float], ...]]


@dataclass(frozen=True, slots=True)
class Folding:
    """Equations and inputs that are alike.

    Attributes:
        leaders: for each equation, the number of the first one that is sharded alike, often itself.
        times: runs per step, by leader.
        inputs: the same for inputs.
        varied: for each leader, the operands in which its equations read different variables.
    """

    leaders: tuple[int, ...]
    times: Mapping[int, int]
    inputs: Mapping[Var, Var]
    varied: Mapping[int, Varied]


def fold(
    eqns: Sequence[JaxprEqn],
    inputs: Sequence[Var],
    alike: Mapping[int, int],
    kind: Callable[[int], Hashable],
    kind_of_input: Callable[[Var], Hashable],
    times: Sequence[int],
) -> Folding:
    """The folding of the pairs `alike` (numbers of equations), and of their inputs.

    kind: of equation i. Equations of one kind have equal strategies if their operands have equal specs.
    kind_of_input: inputs of one kind may have the same specs.
    """
    leaders = list(range(len(eqns)))
    place = {v: k for k, v in enumerate(inputs)}
    leader_of = {v: v for v in inputs}
    for one, other in alike.items():
        if kind(one) != kind(other):
            continue
        leaders[max(one, other)] = min(one, other)
        for operands in zip(eqns[one].invars, eqns[other].invars, strict=True):
            a, b = (None if is_literal(atom) else place.get(atom) for atom in operands)
            if a is not None and b is not None and kind_of_input(inputs[a]) == kind_of_input(inputs[b]):
                leader_of[inputs[max(a, b)]] = leader_of[inputs[min(a, b)]]
    total = Counter[int]()
    for leader, n in zip(leaders, times, strict=True):
        total[leader] += n
    return Folding(tuple(leaders), total, leader_of, _varied_operands(eqns, leaders, leader_of, times))


def _varied_operands(
    eqns: Sequence[JaxprEqn], leaders: Sequence[int], inputs: Mapping[Var, Var], times: Sequence[int]
) -> dict[int, Varied]:
    """The first of several alike variables stands for all."""
    leader_of: dict[Var, Var] = dict(inputs)
    read: dict[int, list[Counter[Var]]] = {}
    for eqn, leader, n in zip(eqns, leaders, times, strict=True):
        leader_of.update(zip(eqn.outvars, eqns[leader].outvars, strict=True))
        counters = read.setdefault(leader, [Counter() for _ in eqn.invars])
        for counter, operand in zip(counters, eqn.invars, strict=True):
            if not is_literal(operand):
                counter[leader_of.get(operand, operand)] += n

    varied: dict[int, Varied] = {}
    for leader, counters in read.items():
        several = {k: counter for k, counter in enumerate(counters) if len(counter) > 1}
        if several:
            varied[leader] = {k: _fractions(counter) for k, counter in several.items()}
    return varied


def _fractions(counter: Counter[Var]) -> tuple[tuple[Var, float], ...]:
    return tuple((var, count / counter.total()) for var, count in counter.items())
