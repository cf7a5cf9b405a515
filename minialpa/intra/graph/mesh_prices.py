"""Strategies and prices of resharding on one mesh, by how many collectives share the time to start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.extend.core import Var

from minialpa.cluster import LogicalMesh
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
        n_together: Mapping[Var, int],
        forbidden_s: float,
    ) -> None:
        """`n_together`: see `VariableFacts`; `forbidden_s`: see `reshard_table`."""
        self._mesh, self._forbidden, self._forbidden_s = mesh, option.forbidden_collectives, forbidden_s
        self._cache, self._n_together = cache, n_together
        self._by_sums: dict[int, MeshStrategies] = {}  # by the number of sums that start together

    def of(self, made: Sequence[Var], at_least: int = 1) -> MeshStrategies:
        """Those for the sums `made`, each of which starts together with at least `at_least` sums, itself included."""
        n_sums = at_least
        for var in made:
            n_sums = max(n_sums, self._n_together.get(var, 1))

        found = self._by_sums.get(n_sums)
        if found is None:
            found = self._cache.of(self._mesh, self._forbidden, n_sums, self._forbidden_s)
            self._by_sums[n_sums] = found
        return found
