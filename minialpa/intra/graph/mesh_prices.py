"""Strategies and prices of resharding on one mesh, by how many collectives share the time to start."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import Var

from minialpa.cluster import LogicalMesh
from minialpa.intra.graph.variable_facts import VariableFacts
from minialpa.intra.strategies.combining import Sharing, StartCounts, combined_sums
from minialpa.intra.strategies.strategy_cache import MeshStrategies, StrategyCache
from minialpa.options import AutoShardingOption


class MeshPrices:
    """The strategies and prices on `mesh` under the collectives that `option` allows, from `cache`."""

    def __init__(
        self,
        mesh: LogicalMesh,
        option: AutoShardingOption,
        *,
        cache: StrategyCache,
        facts: VariableFacts,
        counted: StartCounts | None,
        forbidden_s: float,
    ) -> None:
        """`counted`: starts of the sums of gradients; None: not counted. `forbidden_s`: see `reshard_table`."""
        self._mesh, self._forbidden, self._forbidden_s = mesh, option.forbidden_collectives, forbidden_s
        self._cache, self._facts, self._counted = cache, facts, counted
        self._kinds = combined_sums(mesh, option)
        self._by_sharing: dict[tuple[int, bool], MeshStrategies] = {}  # most sums, and whether they are counted

    def of(self, made: Sequence[Var]) -> MeshStrategies:
        """Those for the sums `made`."""
        n_sums, is_counted = 1, False
        for var in made:
            n_sums = max(n_sums, self._facts.n_together.get(var, 1))
            is_counted |= self._counted is not None and var in self._facts.with_gradients

        found = self._by_sharing.get((n_sums, is_counted))
        if found is None:
            sharing = Sharing(self._kinds, n_sums, self._counted if is_counted else None)
            found = self._cache.of(self._mesh, self._forbidden, sharing, self._forbidden_s)
            self._by_sharing[n_sums, is_counted] = found
        return found
