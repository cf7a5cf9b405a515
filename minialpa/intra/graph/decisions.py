"""What a node of a cost graph decides: for each of its strategies, the specs of values and the ways to run equations.

In: the numbers of the strategies that a solution picks, by node. Out: the specs that they stand for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minialpa.intra.strategies.loops import ScanBody
from minialpa.intra.strategies.strategies import StrategySet
from minialpa.sharding import EquationSpecs, Spec


@dataclass(frozen=True, slots=True)
class Choice:
    """Specs of a variable for each strategy of `node`; node None has the one strategy."""

    node: int | None
    specs: tuple[Spec, ...]

    def read(self, choices: Sequence[int]) -> Spec:
        return self.specs[0 if self.node is None else choices[self.node]]


@dataclass(frozen=True, slots=True)
class Record:
    """Strategies of an equation for each strategy of `node`."""

    node: int | None
    strategies: StrategySet

    def read(self, choices: Sequence[int]) -> EquationSpecs:
        s = 0 if self.node is None else choices[self.node]
        return self.strategies.read(s)

    def compute_s(self, choices: Sequence[int]) -> float:
        return float(self.strategies.compute_s[0 if self.node is None else choices[self.node]])


@dataclass(frozen=True, slots=True)
class PassRecord:
    """An equation that passes arrays on, side by side, each as it comes."""

    arrays: tuple[Choice, ...]

    def read(self, choices: Sequence[int]) -> EquationSpecs:
        specs = tuple(choice.read(choices) for choice in self.arrays)
        return EquationSpecs(specs, specs, specs)

    def compute_s(self, choices: Sequence[int]) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class LoopRecord:
    """A scan: what its body reads and leaves, and the records of the body."""

    scan: ScanBody
    operands: tuple[Choice, ...]
    results: tuple[Choice, ...]
    body: tuple[AnyRecord, ...]

    def read(self, choices: Sequence[int]) -> EquationSpecs:
        operands = tuple(choice.read(choices) for choice in self.operands)
        results = tuple(choice.read(choices) for choice in self.results)
        return EquationSpecs(operands, results, results, tuple(record.read(choices) for record in self.body))

    def compute_s(self, choices: Sequence[int]) -> float:
        return self.scan.length * sum(record.compute_s(choices) for record in self.body)


AnyRecord = Record | PassRecord | LoopRecord
