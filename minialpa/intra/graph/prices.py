"""The equations of a mesh in; strategies and resharding prices out, by the sums that start together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import LogicalMesh
from minialpa.intra.strategies.combining import (
    WITH_GRADIENTS,
    Sharing,
    StartCounts,
    combined_sums,
    sum_groups,
)
from minialpa.intra.strategies.loops import ScanBody, scan_body
from minialpa.intra.strategies.strategy_cache import MeshStrategies, StrategyCache
from minialpa.ir.block import Block
from minialpa.ir.equations import operand_vars
from minialpa.options import AutoShardingOption


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableFacts:
    """Facts about all variables of a mesh, also inside planned loops.

    with_gradients: variables whose sums start with the sums of gradients.
    n_together: for each variable whose sum starts with others, the size of this group.
    """

    with_gradients: Set[Var]
    n_together: Mapping[Var, int]
    n_readers: Mapping[Var, int]

    def is_shared(self, var: Var) -> bool:
        return self.n_readers.get(var, 0) > 1


def facts_of(eqns: Sequence[JaxprEqn], *, plans_loops: bool) -> VariableFacts:
    """plans_loops: whether bodies of scans are planned."""
    together: dict[Var, int] = {}
    with_gradients: set[Var] = set()
    n_readers: Counter[Var] = Counter()
    for body in (tuple(eqns), *((scan.flat.eqns for scan in loop_scans(eqns)) if plans_loops else ())):
        groups = sum_groups(body)
        together.update(groups.n_together)
        with_gradients.update(var for var, group in groups.number.items() if group == WITH_GRADIENTS)
        n_readers.update(var for eqn in body for var in operand_vars(eqn))

    return VariableFacts(with_gradients=with_gradients, n_together=together, n_readers=n_readers)


def loop_scans(eqns: Sequence[JaxprEqn]) -> Iterator[ScanBody]:
    """Also inside loops, each body once."""
    seen: set[Block] = set()
    pending = [eqns]
    while pending:
        for scan in map(scan_body, pending.pop()):
            if scan is not None and scan.flat not in seen:
                seen.add(scan.flat)
                pending.append(scan.flat.eqns)
                yield scan


class MeshPrices:
    """On `mesh`, under the collectives that `option` allows."""

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
        """counted: in an earlier solution. forbidden_s: seconds of a forbidden step."""
        self._mesh, self._forbidden, self._forbidden_s = mesh, option.forbidden_collectives, forbidden_s
        self._cache, self._facts, self._counted = cache, facts, counted
        self._kinds = combined_sums(mesh, option)
        self._by_sharing: dict[tuple[int, bool], MeshStrategies] = {}  # a mesh takes long to hash

    def of(self, made: Sequence[Var]) -> MeshStrategies:
        """made: results of the equation, or variables to reshard."""
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
