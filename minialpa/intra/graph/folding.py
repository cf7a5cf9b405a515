"""Repeated layers of a short step: which equations and inputs of a mesh are sharded alike.

A short step (`ir/repeats.py`) tells which equations of its model unit are equations of the unit before it. If these
also have the same kind, they are decided once: they share a node of the cost graph, whose cost counts for both. Its
edges lead to the nodes of its operands in either unit. Inputs are alike if such equations read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from minialpa.ir.equations import is_literal

#: For some operands of an equation, several variables, each with its part.
Varied = Mapping[int, tuple[tuple[Var, float], ...]]


@dataclass(frozen=True, slots=True)
class Folding:
    """Equations and inputs that are alike.

    Attributes:
        leaders: for each equation, the first equation that is like it; often itself.
        times: for each leader, how often per step the equations that are like it run.
        inputs: for each input, the first input that is like it.
        varied: for leaders: by operand, if the equations like the leader read different variables, these variables,
            each with the fraction of the equations that read it.
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
    """The folding of pairs of equations that are known to be `alike`, by their numbers, and of their inputs.

    times: how often per step each equation runs. Equations of one `kind` have the same strategies if their operands
    have the same specs. Inputs of one `kind_of_input` may have the same specs.
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
    return _folding(eqns, leaders, leader_of, times)


def _folding(
    eqns: Sequence[JaxprEqn], leaders: Sequence[int], inputs: Mapping[Var, Var], times: Sequence[int]
) -> Folding:
    total = Counter[int]()
    for leader, n in zip(leaders, times, strict=True):
        total[leader] += n
    return Folding(tuple(leaders), total, inputs, _varied(eqns, leaders, inputs, times))


def _varied(
    eqns: Sequence[JaxprEqn], leaders: Sequence[int], inputs: Mapping[Var, Var], times: Sequence[int]
) -> dict[int, Varied]:
    """`Folding.varied`; of variables that are alike, the first stands for all."""
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
