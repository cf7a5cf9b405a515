"""Repeated layers: the equations of a mesh in, which of them are to be sharded alike out.

A model of L layers has the same equations L times over. Its plan hardly gets better by deciding on each layer anew, and
the solver takes L times as long, so what repeats is decided once:
    1. A *run* is a stretch of equations that is n times the same `period`, but for names.                      -> _runs
    2. Equations at one place of the period are alike where what they read is alike: made by equations that are alike,
       or by an earlier repetition of the run. The first repetition, whose operands come from elsewhere, and what
       depends on it in its own repetition, stay apart.                                                       -> _Labels
Inputs are alike where the equations that read them first are. A run of a few repetitions is not worth it. A period is
two layers where there are enough of them, since neighbours may want alternate shardings (column, then row).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jax.extend.core import JaxprEqn, Var
from numpy.typing import NDArray

from minialpa.tracing.jaxprs import is_literal

#: Pairs of layers from which on they are folded.
_LEAST_REPEATS = 4
#: Lengths of the stretches of equations whose distance from their next occurrence may be a period, and how many
#: distances are looked at.
_STRETCHES = (1, 4, 16, 64)
_MOST_PERIODS = 256


#: For some operands of an equation several variables, each with its part.
Varied = Mapping[int, tuple[tuple[Var, float], ...]]


@dataclass(frozen=True, slots=True)
class Folding:
    """Which equations and inputs are alike.

    leaders[i]: the first equation that equation i is like, often i itself. counts[i]: how many are like leader i.
    inputs[v]: the first input that input v is like. varied[i][k]: for leader i, what its operand k is in the equations
    like it, where these are not alike, and the part of the equations that each is read by.
    """

    leaders: tuple[int, ...]
    counts: Mapping[int, int]
    inputs: Mapping[Var, Var]
    varied: Mapping[int, Varied]


def fold(
    eqns: Sequence[JaxprEqn],
    inputs: Sequence[Var],
    kind: Callable[[int], Hashable],
    kind_of_input: Callable[[Var], Hashable],
) -> Folding | None:
    """None where nothing repeats. Equal `kind`: equal strategies, if operands have equal ones; inputs likewise."""
    numbers: dict[Hashable, int] = {}
    kinds = np.array([numbers.setdefault(kind(i), len(numbers)) for i in range(len(eqns))], np.int64)
    runs = _runs(kinds)
    if not runs:
        return None
    labels = _Labels(eqns, inputs, kind_of_input, runs)
    leaders = [labels.first_equation[label] for label in labels.of_equation]
    first_input: dict[Hashable, Var] = {}
    alike = {v: first_input.setdefault(labels.of_variable.get(v, v), v) for v in inputs}
    return Folding(tuple(leaders), Counter(leaders), alike, _varied(eqns, leaders, alike))


def _varied(eqns: Sequence[JaxprEqn], leaders: Sequence[int], inputs: Mapping[Var, Var]) -> dict[int, Varied]:
    leader_of: dict[Var, Var] = dict(inputs)
    read: dict[int, list[Counter[Var]]] = {}
    for eqn, leader in zip(eqns, leaders, strict=True):
        leader_of.update(zip(eqn.outvars, eqns[leader].outvars, strict=True))
        found = read.setdefault(leader, [Counter() for _ in eqn.invars])
        for counter, v in zip(found, eqn.invars, strict=True):
            if not is_literal(v):
                counter[leader_of.get(v, v)] += 1
    out: dict[int, Varied] = {}
    for i, found in read.items():
        several = {k: counter for k, counter in enumerate(found) if len(counter) > 1}
        if several:
            out[i] = {k: tuple((v, n / c.total()) for v, n in c.items()) for k, c in several.items()}
    return out


# ---- labels ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    start: int
    period: int
    n_repeats: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.n_repeats

    def place(self, i: int) -> tuple[int, int]:
        """Repetition and place in it."""
        return divmod(i - self.start, self.period)


class _Labels:
    """Equal labels for what is alike, given in the order of the equations."""

    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        inputs: Sequence[Var],
        kind_of_input: Callable[[Var], Hashable],
        runs: Sequence[_Run],
    ) -> None:
        self.kind_of_input = {v: kind_of_input(v) for v in inputs}
        self.maker: dict[Var, tuple[int, int]] = {}
        self.of_variable: dict[Var, Hashable] = {}
        self.of_equation: list[int] = []
        self.first_equation: dict[int, int] = {}
        numbers: dict[Hashable, int] = {}
        run_at = [-1] * len(eqns)
        for n, run in enumerate(runs):
            run_at[run.start : run.end] = [n] * (run.end - run.start)
        for i, eqn in enumerate(eqns):
            n = run_at[i]
            key = self._key(eqn, i, n, runs[n], run_at) if n >= 0 else ("once", i)
            label = numbers.setdefault(key, len(numbers))
            self.of_equation.append(label)
            self.first_equation.setdefault(label, i)
            for k, v in enumerate(eqn.invars):
                if not is_literal(v) and v in self.kind_of_input and v not in self.of_variable:
                    self.of_variable[v] = ("input", self.kind_of_input[v], label, k)
            for r, v in enumerate(eqn.outvars):
                self.maker[v] = (i, r)
                self.of_variable[v] = (label, r)

    def _key(self, eqn: JaxprEqn, i: int, n: int, run: _Run, run_at: Sequence[int]) -> Hashable:
        repeat, place = run.place(i)
        read: list[Hashable] = []
        for v in eqn.invars:
            maker = None if is_literal(v) else self.maker.get(v)
            if maker is not None and run_at[maker[0]] == n and run.place(maker[0])[0] < repeat:
                made_repeat, made_place = run.place(maker[0])
                read.append(("before", repeat - made_repeat, made_place, maker[1]))
            elif not is_literal(v):
                read.append(self.of_variable.get(v, self.kind_of_input.get(v, v)))
        return n, place, tuple(read)


# ---- runs -----------------------------------------------------------------------------------------------------------


def _runs(kinds: NDArray[np.int64]) -> list[_Run]:
    """Runs that do not overlap; first come those that save most equations."""
    heap: list[tuple[int, int, int, int]] = []  # equations saved, negative; period; start; end
    for period in _periods(kinds):
        same = np.concatenate(([False], kinds[:-period] == kinds[period:], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1])
        for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            _push(heap, period, start, end + period)
    free = np.ones(len(kinds), bool)
    runs: list[_Run] = []
    while heap:
        saved, period, start, end = heapq.heappop(heap)
        taken = np.flatnonzero(~free[start:end])
        if len(taken):
            for a, b in zip((-1, *taken.tolist()), (*taken.tolist(), end - start), strict=True):
                _push(heap, period, start + a + 1, start + b)
        else:
            runs.append(_Run(start, period, -saved // period + 1))
            free[start : runs[-1].end] = False
    return runs


def _push(heap: list[tuple[int, int, int, int]], period: int, start: int, end: int) -> None:
    """Note the run of double periods in a stretch of equations that repeats itself after `period`."""
    n_repeats = (end - start) // (2 * period)
    if n_repeats >= _LEAST_REPEATS:
        heapq.heappush(heap, (-(n_repeats - 1) * 2 * period, 2 * period, start, end))


def _periods(kinds: NDArray[np.int64]) -> list[int]:
    """Distances at which stretches of equations come again, those that promise to save most."""
    saved: Counter[int] = Counter()
    hashed, length = kinds.astype(np.uint64), 1
    for wanted in _STRETCHES:
        while length < wanted and len(hashed) > length:
            hashed = hashed[:-length] * np.uint64(0x9E3779B97F4A7C15) + hashed[length:] * np.uint64(0xC2B2AE3D27D4EB4F)
            hashed ^= hashed >> np.uint64(29)
            length *= 2
        order = np.argsort(hashed, kind="stable")
        again = hashed[order[1:]] == hashed[order[:-1]]
        gaps, counts = np.unique((order[1:] - order[:-1])[again], return_counts=True)
        for gap, count in zip(gaps.tolist(), counts.tolist(), strict=True):
            saved[gap] = max(saved[gap], count)
    likely = [gap for gap, count in saved.items() if count >= _LEAST_REPEATS]
    return heapq.nlargest(_MOST_PERIODS, likely, key=lambda gap: (saved[gap] * gap, -gap))
