"""What the nodes of a cost graph decide: the specs of variables, and the strategies of equations.

A solution picks one strategy for each node. Every class here turns these picks, numbers of strategies by node, into the
specs that they stand for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minialpa.intra.strategies.loops import ScanBody
from minialpa.intra.strategies.strategies import StrategySet
from minialpa.sharding import EquationSpecs, Spec


def _strategy(node: int | None, picks: Sequence[int]) -> int:
    """The strategy that a solution picks for `node`; what has no node has one strategy."""
    return 0 if node is None else picks[node]


@dataclass(frozen=True, slots=True)
class Choice:
    """The spec of a variable under each strategy of `node`; one spec if `node` is None."""

    node: int | None
    specs: tuple[Spec, ...]

    def read(self, picks: Sequence[int]) -> Spec:
        return self.specs[_strategy(self.node, picks)]


@dataclass(frozen=True, slots=True)
class Record:
    """The strategy of an equation under each strategy of `node`; one strategy if `node` is None."""

    node: int | None
    strategies: StrategySet

    def read(self, picks: Sequence[int]) -> EquationSpecs:
        return self.strategies.read(_strategy(self.node, picks))

    def compute_s(self, picks: Sequence[int]) -> float:
        return float(self.strategies.compute_s[_strategy(self.node, picks)])

    @property
    def least_compute_s(self) -> float:
        return float(self.strategies.compute_s.min())


@dataclass(frozen=True, slots=True)
class PassRecord:
    """An equation that passes several arrays on without changing their specs."""

    arrays: tuple[Choice, ...]

    def read(self, picks: Sequence[int]) -> EquationSpecs:
        specs = tuple(choice.read(picks) for choice in self.arrays)
        return EquationSpecs(specs, specs, specs)

    def compute_s(self, picks: Sequence[int]) -> float:
        return 0.0

    @property
    def least_compute_s(self) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class LoopRecord:
    """A scan that is planned as a loop.

    Attributes:
        scan: its body.
        operands: for each operand of the scan, its spec.
        results: for each result of the scan, its spec.
        body: for each equation of the body, its record.
    """

    scan: ScanBody
    operands: tuple[Choice, ...]
    results: tuple[Choice, ...]
    body: tuple[AnyRecord, ...]

    def read(self, picks: Sequence[int]) -> EquationSpecs:
        operands = tuple(choice.read(picks) for choice in self.operands)
        results = tuple(choice.read(picks) for choice in self.results)
        return EquationSpecs(operands, results, results, tuple(record.read(picks) for record in self.body))

    def compute_s(self, picks: Sequence[int]) -> float:
        return self.scan.length * sum(record.compute_s(picks) for record in self.body)

    @property
    def least_compute_s(self) -> float:
        return self.scan.length * sum(record.least_compute_s for record in self.body)


AnyRecord = Record | PassRecord | LoopRecord
