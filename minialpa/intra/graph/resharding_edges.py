"""Edges of the cost graph: what it costs to reshard a variable from the spec of its maker to that of each reader."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

import numpy as np
from jax.extend.core import Var

from minialpa.errors import InfeasibleError
from minialpa.intra.graph.cost_table import CostTable
from minialpa.intra.graph.decisions import Choice
from minialpa.intra.graph.mesh_prices import MeshPrices
from minialpa.intra.graph.option_constraints import forbidden_message
from minialpa.ir.equations import bytes_of, shape_of
from minialpa.options import AutoShardingOption
from minialpa.sharding import Spec

#: What is hidden costs a little, so that of two solutions that hide everything the one is found which hides less.
_HIDDEN_PRICE = 0.1


class Reader(NamedTuple):
    """The strategies of a node that read a variable.

    Attributes:
        var: the variable.
        node: the node that reads it; None for a reader that has one strategy.
        wanted: the spec in which each strategy wants the variable.
        times: how often per step the variable is resharded; a fraction for one of several that are read in turn.
    """

    var: Var
    node: int | None
    wanted: tuple[Spec, ...]
    times: float


class ReshardingEdges:
    """Adds edges to `costs`, by the `choices` of the variables so far."""

    def __init__(
        self,
        costs: CostTable,
        choices: Mapping[Var, Choice],
        prices: MeshPrices,
        option: AutoShardingOption,
        *,
        hidden: Set[Var] = frozenset(),
    ) -> None:
        """`hidden`: values whose collectives work hides, so that they cost a part of what they take."""
        self._costs, self._choices, self._prices, self._option = costs, choices, prices, option
        self._hidden = hidden
        self._deferred: list[Reader] = []

    def add(self, reader: Reader) -> None:
        """Add what it costs to reshard the variable to the specs that `reader` wants.

        Raises InfeasibleError if neither end has a choice and the options forbid the resharding.
        """
        var, node, wanted, times = reader
        made = self._choices[var]
        seconds = self._prices.of((var,)).reshard_s(shape_of(var), bytes_of(var), made.specs, wanted)
        if not seconds.any():
            return

        if made.node is None and node is None:
            if not np.isfinite(seconds).all():
                raise InfeasibleError(forbidden_message(self._option, var, made.specs[0], wanted[0]))
            return
        self._costs.add_edge(made.node, node, times * seconds * (_HIDDEN_PRICE if var in self._hidden else 1.0))

    def defer(self, reader: Reader) -> None:
        """Add the edge in `add_deferred`, because a later equation may make the variable."""
        self._deferred.append(reader)

    def add_deferred(self) -> None:
        for reader in self._deferred:
            self.add(reader)
