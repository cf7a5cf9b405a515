"""Repeated layers: which equations and inputs of a mesh are sharded alike.

A model of L layers repeats its equations L times. Deciding on each layer by itself hardly improves the plan and takes L
times as long, so repeated layers are decided once:
    1. A *run* is a stretch of equations that repeats a `period` n times, under other names.                    -> _runs
    2. Equations at one place of the period are alike if their operands are: made by equations that are alike, or by an
       earlier repetition of the run. The first repetition, whose operands come from elsewhere, stays apart.  -> _Labels
Inputs are alike if their first readers are. Runs of few repetitions are left alone. A period is two layers, since
neighbours may want alternate shardings (column, then row).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax.extend.core import JaxprEqn, Var
from numpy.typing import NDArray

from minialpa.ir.equations import is_literal

#: Fewest pairs of layers that are folded.
_LEAST_REPEATS = 4
#: Lengths, in equations, of stretches; the distance to the next occurrence of one may be a period.
_STRETCHES = (1, 4, 16, 64)
#: Most distances that are tried as periods.
_MOST_PERIODS = 256
#: Odd factors and a shift to mix two hashes, of splitmix64 and xxHash; others would do.
_FIRST_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SECOND_FACTOR = np.uint64(0xC2B2AE3D27D4EB4F)
_HASH_SHIFT = np.uint64(29)


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
    kind: Callable[[int], Hashable],
    kind_of_input: Callable[[Var], Hashable],
    times: Sequence[int],
) -> Folding | None:
    """None if no equations repeat. times: how often per step each equation runs.

    Equations of one `kind` have the same strategies if their operands have the same specs. Inputs of one
    `kind_of_input` may have the same specs.
    """
    numbers: dict[Hashable, int] = {}
    kinds = np.array([numbers.setdefault(kind(i), len(numbers)) for i in range(len(eqns))], np.int64)
    runs = _runs(kinds)
    if not runs:
        return None

    labels = _Labels(eqns, inputs, kind_of_input, runs)
    leaders = [labels.first_equation[label] for label in labels.of_equation]
    first_input: dict[Hashable, Var] = {}
    alike = {var: first_input.setdefault(labels.of_variable.get(var, var), var) for var in inputs}
    return _folding(eqns, leaders, alike, times)


def fold_alike(
    eqns: Sequence[JaxprEqn],
    inputs: Sequence[Var],
    alike: Mapping[int, int],
    kind: Callable[[int], Hashable],
    kind_of_input: Callable[[Var], Hashable],
    times: Sequence[int],
) -> Folding:
    """The folding of pairs of equations that are known to be `alike`, if their kinds agree, and of their inputs."""
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


# ---- labels ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RepeatedStretch:
    """Equations start, ..., end - 1: `n_repeats` times the same `period` equations."""

    start: int
    period: int
    n_repeats: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.n_repeats

    def place(self, i: int) -> tuple[int, int]:
        return divmod(i - self.start, self.period)


class _Labels:
    """Labels of equations and variables; equal labels mean alike.

    Attributes:
        maker: for each variable, the numbers of its equation and result.
        of_variable: the label of each result, and of each input that an equation reads.
    """

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        inputs: Sequence[Var],
        kind_of_input: Callable[[Var], Hashable],
        runs: Sequence[_RepeatedStretch],
    ) -> None:
        self.maker: dict[Var, tuple[int, int]] = {}
        self.of_variable: dict[Var, Hashable] = {}
        self.of_equation: list[int] = []
        self.first_equation: dict[int, int] = {}
        self._kind_of_input = {var: kind_of_input(var) for var in inputs}
        self._runs = runs
        self._run_at = [-1] * len(eqns)  # number of the run that an equation belongs to
        for number, run in enumerate(runs):
            self._run_at[run.start : run.end] = [number] * (run.end - run.start)

        # In order, as the label of an equation depends on the labels of its operands.
        numbers: dict[Hashable, int] = {}
        for i, eqn in enumerate(eqns):
            label = numbers.setdefault(self._key(eqn, i), len(numbers))
            self.of_equation.append(label)
            self.first_equation.setdefault(label, i)
            self._label_variables(eqn, i, label)

    def _label_variables(self, eqn: JaxprEqn, i: int, label: int) -> None:
        for k, operand in enumerate(eqn.invars):
            if not is_literal(operand) and operand in self._kind_of_input and operand not in self.of_variable:
                self.of_variable[operand] = ("input", self._kind_of_input[operand], label, k)
        for r, result in enumerate(eqn.outvars):
            self.maker[result] = (i, r)
            self.of_variable[result] = (label, r)

    def _key(self, eqn: JaxprEqn, i: int) -> Hashable:
        """Equal for equations at one place of a run whose operands are alike."""
        number = self._run_at[i]
        if number < 0:
            return "once", i

        run = self._runs[number]
        repeat, place = run.place(i)
        read: list[Hashable] = []
        for operand in eqn.invars:
            maker = None if is_literal(operand) else self.maker.get(operand)
            if maker is not None and self._run_at[maker[0]] == number and run.place(maker[0])[0] < repeat:
                # By distance: every repetition reads its predecessor, and the first repetition has other labels.
                made_repeat, made_place = run.place(maker[0])
                read.append(("before", repeat - made_repeat, made_place, maker[1]))
            elif not is_literal(operand):
                read.append(self.of_variable.get(operand, self._kind_of_input.get(operand, operand)))
        return number, place, tuple(read)


# ---- runs -----------------------------------------------------------------------------------------------------------

#: Minus the equations saved; period; start; end.
_HeapEntry = tuple[int, int, int, int]


def _runs(kinds: NDArray[np.int64]) -> list[_RepeatedStretch]:
    """Runs that do not overlap, the one that saves most equations first."""
    heap: list[_HeapEntry] = []
    for period in _periods(kinds):
        same = np.concatenate(([False], kinds[:-period] == kinds[period:], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1])
        for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            _push(heap, period, start, end + period)

    free = np.ones(len(kinds), bool)
    runs: list[_RepeatedStretch] = []
    while heap:
        saved, period, start, end = heapq.heappop(heap)
        taken = np.flatnonzero(~free[start:end]).tolist()
        if taken:
            # Better runs have taken equations of this stretch; the rest between them may still repeat.
            for before, after in zip((-1, *taken), (*taken, end - start), strict=True):
                _push(heap, period, start + before + 1, start + after)
        else:
            runs.append(_RepeatedStretch(start, period, -saved // period + 1))
            free[start : runs[-1].end] = False
    return runs


def _push(heap: list[_HeapEntry], period: int, start: int, end: int) -> None:
    """Push the run of double periods in a stretch of equations that repeats itself after `period`."""
    n_repeats = (end - start) // (2 * period)
    if n_repeats >= _LEAST_REPEATS:
        heapq.heappush(heap, (-(n_repeats - 1) * 2 * period, 2 * period, start, end))


def _periods(kinds: NDArray[np.int64]) -> list[int]:
    """Distances at which stretches of equations repeat, the most promising first."""
    saved: Counter[int] = Counter()
    hashed, length = kinds.astype(np.uint64), 1
    for wanted in _STRETCHES:
        while length < wanted and len(hashed) > length:
            hashed = _joined(hashed, length)
            length *= 2

        # A stable sort leaves equal stretches in order: neighbours are an occurrence and the next one.
        order = np.argsort(hashed, kind="stable")
        repeats = hashed[order[1:]] == hashed[order[:-1]]
        gaps, counts = np.unique((order[1:] - order[:-1])[repeats], return_counts=True)
        for gap, count in zip(gaps.tolist(), counts.tolist(), strict=True):
            saved[gap] = max(saved[gap], count)

    likely = [gap for gap, count in saved.items() if count >= _LEAST_REPEATS]
    return heapq.nlargest(_MOST_PERIODS, likely, key=lambda gap: (saved[gap] * gap, -gap))


def _joined(hashed: NDArray[np.uint64], length: int) -> NDArray[np.uint64]:
    joined: NDArray[np.uint64] = hashed[:-length] * _FIRST_FACTOR + hashed[length:] * _SECOND_FACTOR
    joined ^= joined >> _HASH_SHIFT
    return joined
