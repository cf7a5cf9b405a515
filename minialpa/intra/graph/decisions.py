"""A strategy number for each node (`picks`) in; specs of variables and equations out.

Example: `Choice(3, (S0, R))` is a variable with spec S0 if picks[3] == 0, and R if picks[3] == 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from minialpa.intra.solver.cost_graph import Edge, EdgeCosts
from minialpa.intra.strategies.loops import ScanBody
from minialpa.intra.strategies.strategies import StrategySet
from minialpa.sharding import EquationSpecs, Spec


def _strategy(node: int | None, picks: Sequence[int]) -> int:
    return 0 if node is None else picks[node]


@dataclass(frozen=True, slots=True)
class Choice:
    """The spec of a variable under each strategy of `node`, or the only one."""

    node: int | None
    specs: tuple[Spec, ...]

    def read(self, picks: Sequence[int]) -> Spec:
        return self.specs[_strategy(self.node, picks)]


@dataclass(frozen=True, slots=True)
class Record:
    """A strategy of an equation per strategy of `node`, or the only one."""

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
    """An optimization barrier passes arrays on in their specs."""

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
    """A scan that is planned as a loop, with a record per equation of `body`."""

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


@dataclass(frozen=True, slots=True, eq=False)
class CostTable:
    """The costs of a growing cost graph, in seconds per step.

    nodes: [node][strategy]; inf for a forbidden strategy.
    """

    nodes: list[NDArray[np.float64]] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)

    @property
    def n_bytes(self) -> int:
        return sum(costs.nbytes for costs in (*self.nodes, *(edge.cost.table for edge in self.edges)))

    def add_node(self, costs: Sequence[float] | NDArray[np.float64]) -> int:
        self.nodes.append(np.array(costs, np.float64))
        return len(self.nodes) - 1

    def forbid(self, node: int, strategies: Sequence[bool]) -> None:
        """strategies: a mask."""
        self.nodes[node][strategies] = np.inf

    def add_edge(self, made: int | None, reader: int | None, cost: EdgeCosts) -> None:
        """Add `cost`, paid by the strategies of node `made`, its rows, and of node `reader`.

        None stands for an end with a single strategy; at least one end is a node.
        """
        if made is None or reader is None:
            node = made if reader is None else reader
            assert node is not None
            self.nodes[node] += cost.dense().reshape(-1)
        elif made == reader:
            self.nodes[reader] += cost.table[cost.rows, cost.columns]
        else:
            self.edges.append(Edge(made, reader, cost))
