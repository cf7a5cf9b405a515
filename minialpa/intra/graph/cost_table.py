"""Node and edge costs of a cost graph while it is being built; all costs are seconds per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class CostTable:
    """Costs that add up as equations, inputs and readers are added.

    Attributes:
        nodes: for each node, the cost of each of its strategies; inf for a strategy that is forbidden.
        edges: for each pair (a, b) of nodes with a < b, the cost [strategy of a, strategy of b].
    """

    nodes: list[NDArray[np.float64]] = field(default_factory=list)
    edges: dict[tuple[int, int], NDArray[np.float64]] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        """Bytes of all arrays of costs."""
        return sum(costs.nbytes for costs in (*self.nodes, *self.edges.values()))

    def add_node(self, costs: Sequence[float] | NDArray[np.float64]) -> int:
        """The number of a new node whose strategies cost `costs`."""
        self.nodes.append(np.array(costs, np.float64))
        return len(self.nodes) - 1

    def add_to_node(self, node: int, costs: NDArray[np.float64]) -> None:
        self.nodes[node] += costs

    def forbid(self, node: int, strategies: Sequence[bool]) -> None:
        """Rule out the strategies of `node` that are True in the mask `strategies`."""
        self.nodes[node][strategies] = np.inf

    def add_edge(self, made: int | None, reader: int | None, cost: NDArray[np.float64]) -> None:
        """Add `cost[i, j]`, paid when `made` takes strategy i and `reader` strategy j.

        An end that is None has one strategy; at least one end is a node.
        """
        if made is None or reader is None:
            node = made if reader is None else reader
            assert node is not None
            self.nodes[node] += cost.reshape(-1)
        elif made == reader:
            self.nodes[reader] += np.diagonal(cost)
        else:
            key, matrix = ((made, reader), cost) if made < reader else ((reader, made), cost.T)
            self.edges[key] = self.edges[key] + matrix if key in self.edges else matrix
