"""An equation in; its `StrategySet` out, computed once per kind of equation.

Most equations of a model differ from an earlier one only in the names of variables and share its `StrategySet`.
Equations whose sizes have the same divisors share `Candidates`, on all meshes of one shape. Keys hold tuples of specs
by identity, which is faster than a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jax.extend.core import JaxprEqn, Var
from numpy.typing import NDArray

from minialpa.cluster import LogicalMesh
from minialpa.intra.strategies.candidates import (
    Candidates,
    Specs,
    enumerate_candidates,
    follow_candidates,
    leads,
    same_operands,
)
from minialpa.intra.strategies.combining import Sharing
from minialpa.intra.strategies.reshard import ReshardTable, forbidden_for, reshard_table, same_divisors
from minialpa.intra.strategies.strategies import StrategySet, priced, splits_most
from minialpa.ir.equations import bytes_of, dtype_name, is_constraint, shape_of, sub_jaxprs
from minialpa.rules.factors import Factors
from minialpa.rules.known_rules import factors_of
from minialpa.support.identity import ById
from minialpa.support.recent import Recent

T = TypeVar("T")
#: Seconds of resharding, [made spec, required spec].
_Tables = Recent[NDArray[np.float64]]

_MOST_TABLE_BYTES = 2**28
_MOST_EQUATIONS = 200_000
_KEY_BYTES = 500


@dataclass(frozen=True, slots=True, eq=False)
class StrategyKey:
    """A kind of equations, which differ only in the names of variables and so have equal strategies.

    same: see `same_operands`.
    """

    factors: Factors
    same: tuple[int, ...]
    result_shapes: tuple[tuple[int, ...], ...]


class DistinctSpecs(NamedTuple):
    """numbers: of the strategies, indices of `specs`."""

    specs: Specs
    numbers: NDArray[np.int64]


class _Options(NamedTuple):
    """Of `MeshStrategies.enumerate`, hashable."""

    required: tuple[tuple[int, int | None], ...]
    n_pending: tuple[tuple[int, int], ...]
    scatter: bool
    kept: frozenset[int]


class _Memo:
    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def get_or_make(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = make()
        value: T = self._known[key]
        return value

    def same(self, specs: Specs) -> Specs:
        return self.get_or_make(("specs", specs), lambda: specs)


class _ShapeCandidates:
    """`MeshStrategies` without prices, for all meshes of one shape."""

    def __init__(self, shape: tuple[int, ...], all_shapes: _Memo) -> None:
        self.shape, self._all_shapes = shape, all_shapes
        self._memo = _Memo()

    def enumerate(self, eqn: JaxprEqn, kind: StrategyKey, options: _Options, *, most_splits: bool) -> Candidates:
        return self._memo.get_or_make(
            ("enumerate", self._shared_key(kind), options, most_splits),
            lambda: self._deduplicated(
                enumerate_candidates(
                    eqn, kind.factors, self.shape, dict(options.required), dict(options.n_pending),
                    scatter=options.scatter, most_splits=most_splits, kept=options.kept,
                )
            ),
        )  # fmt: skip

    def follow(
        self, eqn: JaxprEqn, kind: StrategyKey, given: Mapping[int, Specs], n: int, *, allow_partial: bool
    ) -> Candidates:
        lead = tuple((k, ById(given[k])) for k in leads(eqn, given))
        return self._memo.get_or_make(
            ("follow", self._shared_key(kind), lead, n, allow_partial),
            lambda: self._deduplicated(
                follow_candidates(eqn, kind.factors, self.shape, given, n, allow_partial=allow_partial)
            ),
        )

    def numbers(self, table: ReshardTable, specs: Specs) -> NDArray[np.int64]:
        return self._memo.get_or_make((ById(table.number), ById(specs)), lambda: table.numbers(specs))

    def _deduplicated(self, candidates: Candidates) -> Candidates:
        """With specs that can be compared by identity."""
        return replace(
            candidates,
            operands=tuple(map(self._all_shapes.same, candidates.operands)),
            results=tuple(map(self._all_shapes.same, candidates.results)),
        )

    def _shared_key(self, kind: StrategyKey) -> object:
        """One object for all kinds with the same candidates."""
        return self._memo.get_or_make(kind, lambda: self._memo.get_or_make(self._key_by_divisors(kind), object))

    def _key_by_divisors(self, kind: StrategyKey) -> Hashable:
        return (
            _structure(kind.factors), same_divisors(kind.factors.sizes, self.shape), kind.same,
            tuple(same_divisors(shape, self.shape) for shape in kind.result_shapes),
        )  # fmt: skip


class MeshStrategies:
    """Strategies and resharding prices on one mesh, where sums share starts by `sharing`."""

    def __init__(
        self,
        mesh: LogicalMesh,
        forbidden: tuple[str, ...],
        sharing: Sharing,
        *,
        forbidden_s: float,
        shape: _ShapeCandidates,
        tables: _Tables,
    ) -> None:
        self._mesh, self._forbidden, self._sharing, self._forbidden_s = mesh, forbidden, sharing, forbidden_s
        self._gather_s = forbidden_s if "all-gather" in forbidden else None
        self._shape, self._tables, self._memo = shape, tables, _Memo()

    def enumerate(
        self,
        eqn: JaxprEqn,
        kind: StrategyKey,
        required: Mapping[int, int | None],
        n_pending: Mapping[int, int],
        *,
        scatter: bool,
        kept: frozenset[int] = frozenset(),
    ) -> StrategySet:
        """All strategies of `eqn`.

        required: for some axes, the factor that the axis, and no other axis, must split; None for an axis that may only
            pass partial sums.
        n_pending: for each axis, how many operands may be partial sums along it.
        scatter: whether partial sums may be reduce-scattered.
        kept: factors that only the axes in `required` may split.
        """
        options = _Options(tuple(required.items()), tuple(sorted(n_pending.items())), scatter, kept)

        def make() -> StrategySet:
            candidates = self._shape.enumerate(eqn, kind, options, most_splits=splits_most(eqn, self._mesh))
            return self._priced_strategies(eqn, kind, candidates)

        return self._memo.get_or_make(("enumerate", kind, options), make)

    def follow(
        self, eqn: JaxprEqn, kind: StrategyKey, given: Mapping[int, Specs], n: int, *, allow_partial: bool = True
    ) -> StrategySet:
        """`n` strategies. Strategy s reads operand k in spec `given[k][s]`, as far as the rule allows.

        An axis splits the same factor as in the operands. If operands disagree, the largest one decides, and the others
        are resharded. A factor that may not be split is gathered. Partial sums pass a linear equation; without
        `allow_partial`, results are all-reduced.
        """

        def make() -> StrategySet:
            candidates = self._shape.follow(eqn, kind, given, n, allow_partial=allow_partial)
            return self._priced_strategies(eqn, kind, candidates)

        lead = tuple((k, ById(specs)) for k, specs in given.items())
        return self._memo.get_or_make(("follow", kind, lead, n, allow_partial), make)

    def _priced_strategies(self, eqn: JaxprEqn, kind: StrategyKey, candidates: Candidates) -> StrategySet:
        return priced(eqn, kind.factors, self._mesh, candidates, sharing=self._sharing, gather_s=self._gather_s)

    def reshard_s(self, var: Var, made: Specs, required: Specs) -> NDArray[np.float64]:
        """[spec in `made`, spec in `required`]."""
        shape, n_bytes, forbidden = shape_of(var), bytes_of(var), forbidden_for(var, self._forbidden)

        def make() -> NDArray[np.float64]:
            table = reshard_table(shape, n_bytes, self._mesh, forbidden, self._sharing, self._forbidden_s)
            return table.between(self._shape.numbers(table, made), self._shape.numbers(table, required))

        key = (self, shape, n_bytes, forbidden, ById(made), ById(required))
        return self._tables.get_or_make(key, make)


class StrategyCache:
    """For all meshes; several problems may share it."""

    def __init__(self) -> None:
        self._memo = _Memo()
        self._tables: _Tables = Recent(_MOST_TABLE_BYTES, lambda seconds: seconds.nbytes + _KEY_BYTES)
        self._kinds: dict[JaxprEqn, StrategyKey] = {}

    def of(
        self, mesh: LogicalMesh, forbidden: tuple[str, ...], sharing: Sharing, forbidden_s: float = math.inf
    ) -> MeshStrategies:
        """See `reshard_table`."""
        shape = self._memo.get_or_make(("shape", mesh.shape), lambda: _ShapeCandidates(mesh.shape, self._memo))
        return self._memo.get_or_make(
            (mesh, forbidden, sharing, forbidden_s),
            lambda: MeshStrategies(mesh, forbidden, sharing, forbidden_s=forbidden_s, shape=shape, tables=self._tables),
        )

    def same(self, specs: Specs) -> Specs:
        """One tuple for all equal tuples, for keys by identity."""
        return self._memo.same(specs)

    def distinct(self, specs: Specs) -> DistinctSpecs:
        return self._memo.get_or_make(("distinct", ById(specs)), lambda: self._distinct(specs))

    def _distinct(self, specs: Specs) -> DistinctSpecs:
        number = {spec: i for i, spec in enumerate(dict.fromkeys(specs))}
        return DistinctSpecs(self.same(tuple(number)), np.array([number[spec] for spec in specs], np.int64))

    def kind_of(self, eqn: JaxprEqn) -> StrategyKey:
        found = self._kinds.get(eqn)
        if found is None:
            if len(self._kinds) >= _MOST_EQUATIONS:
                self._kinds.clear()
            found = self._kinds[eqn] = self._kind_of(eqn)
        return found

    def _kind_of(self, eqn: JaxprEqn) -> StrategyKey:
        factors, same = factors_of(eqn).on_mesh(), same_operands(eqn)
        arrays = tuple((shape_of(atom), dtype_name(atom)) for atom in (*eqn.invars, *eqn.outvars))
        text = str(eqn.params) if is_constraint(eqn) else tuple(str(body) for body in sub_jaxprs(eqn))
        key = (eqn.primitive.name, text, arrays, same, factors.sizes, factors.flops, _structure(factors))
        shapes = tuple(map(shape_of, eqn.outvars))
        return self._memo.get_or_make(key, lambda: StrategyKey(factors, same, shapes))


def _structure(factors: Factors) -> Hashable:
    """All properties on which candidates depend, except sizes of factors with equal work."""
    return (
        factors.operands, factors.results, tuple(factors.reductions.items()), factors.blocked, factors.linear,
        factors.linear_operands, factors.unaffected, factors.counted_once, factors.positional,
        tuple((factor, ramp, factors.sizes[factor]) for factor, ramp in factors.ramps.items()),
        tuple(factors.shifts.items()), tuple(factors.rings.items()),
    )  # fmt: skip
