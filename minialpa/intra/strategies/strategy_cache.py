"""Strategies and prices of resharding, worked out once for each kind of equation and value.

Models repeat themselves: most equations differ from an earlier one in nothing but the names of their variables, and
then have the very same `StrategySet` on a mesh. Equations of other sizes that are divided by the same numbers have the
same `Ways`, on all meshes of one shape. Tuples of specs are therefore compared by identity here.

What grows with the number of kinds, or of equations, is kept up to so many bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from jax.extend.core import JaxprEqn
from numpy.typing import NDArray

from minialpa.cluster import LogicalMesh
from minialpa.intra.strategies.candidates import Specs, Ways, enumerate_ways, follow_ways, leads, same_operands
from minialpa.intra.strategies.reshard import ReshardTable, reshard_table, same_divisors
from minialpa.intra.strategies.strategies import StrategySet, priced, splits_most
from minialpa.rules.factors import Factors, factors_of
from minialpa.support.recent import Recent
from minialpa.tracing.jaxprs import dtype_name, is_constraint, shape_of, sub_jaxprs

T = TypeVar("T")

#: Bytes of tables of resharding that all menus keep together; equations whose kinds are known without looking.
_MOST_TABLE_BYTES, _MOST_EQUATIONS = 2**28, 200_000


@dataclass(frozen=True, slots=True, eq=False)
class EquationKind:
    """Equations that differ in the names of variables only, which have equal strategies.

    factors: those on a mesh. same: for each operand the first that is the same, -1 for literals.
    """

    factors: Factors
    same: tuple[int, ...]
    result_shapes: tuple[tuple[int, ...], ...]


class _Memo:
    """Values by their keys. Each comes with what its key holds by identity, so that this stays alive."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Any, Any]] = {}

    def once(self, key: Hashable, alive: Any, make: Callable[[], T]) -> T:
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = make(), alive
        value: T = found[0]
        return value

    def same(self, specs: Specs) -> Specs:
        """The tuple that stands for all that are equal."""
        return self.once(("specs", specs), None, lambda: specs)


class _Shape:
    """`Ways` on the meshes of one shape."""

    def __init__(self, shape: tuple[int, ...], memo: _Memo) -> None:
        self.shape, self._all = shape, memo
        self._memo = _Memo()

    def enumerate(self, eqn: JaxprEqn, kind: EquationKind, options: tuple[Any, ...], *, most_splits: bool) -> Ways:
        required, pending, scatter, kept = options
        return self._memo.once(
            ("enumerate", self._alike(kind), options, most_splits),
            None,
            lambda: self._same(
                enumerate_ways(
                    eqn, kind.factors, self.shape, dict(required), dict(pending), scatter=scatter,
                    most_splits=most_splits, kept=kept,
                )
            ),
        )  # fmt: skip

    def follow(self, eqn: JaxprEqn, kind: EquationKind, given: Mapping[int, Specs], n: int, *, whole: bool) -> Ways:
        lead = tuple((k, id(given[k])) for k in leads(eqn, given))
        return self._memo.once(
            ("follow", self._alike(kind), lead, n, whole),
            tuple(given.values()),
            lambda: self._same(follow_ways(eqn, kind.factors, self.shape, given, n, whole=whole)),
        )

    def numbers(self, table: ReshardTable, specs: Specs) -> NDArray[np.int64]:
        """`ReshardTable.numbers`."""
        return self._memo.once((id(table.number), id(specs)), (table.number, specs), lambda: table.numbers(specs))

    def _same(self, ways: Ways) -> Ways:
        """With specs that can be compared by identity."""
        operands, results = (tuple(map(self._all.same, columns)) for columns in (ways.operands, ways.results))
        return replace(ways, operands=operands, results=results)

    def _alike(self, kind: EquationKind) -> object:
        """The same for all kinds that have the same ways."""
        return self._memo.once(kind, None, lambda: self._memo.once(self._divided(kind), None, object))

    def _divided(self, kind: EquationKind) -> Hashable:
        """A kind with what matters of its sizes."""
        return (
            _structure(kind.factors), same_divisors(kind.factors.sizes, self.shape), kind.same,
            tuple(same_divisors(shape, self.shape) for shape in kind.result_shapes),
        )  # fmt: skip


#: Seconds of resharding, [made, wanted], with these specs.
_Tables = Recent[tuple[NDArray[np.float64], Specs, Specs]]
#: Of a table, besides its entries.
_KEY_BYTES = 500


class Menu:
    """What `strategies` and `reshard` give for one mesh, where `n_together` sums share the time to start; remembers."""

    def __init__(
        self, mesh: LogicalMesh, forbidden: tuple[str, ...], n_together: int, shape: _Shape, tables: _Tables,
        forbidden_s: float,
    ) -> None:  # fmt: skip
        """`tables`: of resharding, of all menus."""
        self._tables = tables
        self.apart, self.forbidden, self.n_together, self.forbidden_s = mesh, forbidden, n_together, forbidden_s
        self.gather_s = forbidden_s if "all-gather" in forbidden else None
        self.mesh = replace(mesh, alpha=tuple(alpha / n_together for alpha in mesh.alpha))
        self._shape, self._memo = shape, _Memo()

    def enumerate(
        self,
        eqn: JaxprEqn,
        kind: EquationKind,
        required: Mapping[int, int | None],
        n_pending: Mapping[int, int],
        *,
        scatter: bool,
        kept: frozenset[int] = frozenset(),
    ) -> StrategySet:
        """`enumerate_strategies`."""
        options = (tuple(required.items()), tuple(sorted(n_pending.items())), scatter, kept)

        def make() -> StrategySet:
            ways = self._shape.enumerate(eqn, kind, options, most_splits=splits_most(eqn, self.mesh))
            return priced(eqn, kind.factors, self.mesh, ways, self.gather_s)

        return self._memo.once(("enumerate", kind, options), None, make)

    def follow(
        self, eqn: JaxprEqn, kind: EquationKind, given: Mapping[int, Specs], n: int, *, whole: bool = False
    ) -> StrategySet:
        """`strategies.follow`."""

        def make() -> StrategySet:
            ways = self._shape.follow(eqn, kind, given, n, whole=whole)
            return priced(eqn, kind.factors, self.mesh, ways, self.gather_s)

        lead = tuple((k, id(specs)) for k, specs in given.items())
        return self._memo.once(("follow", kind, lead, n, whole), tuple(given.values()), make)

    def reshard_s(self, shape: tuple[int, ...], n_bytes: float, made: Specs, wanted: Specs) -> NDArray[np.float64]:
        """Seconds to reshard an array, shape [len(made), len(wanted)]."""

        def make() -> NDArray[np.float64]:
            table = self._memo.once(
                ("table", shape, n_bytes),
                None,
                lambda: reshard_table(shape, n_bytes, self.apart, self.forbidden, self.n_together, self.forbidden_s),
            )
            return table.between(self._shape.numbers(table, made), self._shape.numbers(table, wanted))

        # With what the key holds by identity, so that this stays alive.
        key = (self, shape, n_bytes, id(made), id(wanted))
        return self._tables.once(key, lambda: (make(), made, wanted))[0]


class Menus:
    """The menus of all meshes; one such object serves any number of problems, which then share what they have alike."""

    def __init__(self) -> None:
        self._memo = _Memo()
        self._tables: _Tables = Recent(_MOST_TABLE_BYTES, lambda table: table[0].nbytes + _KEY_BYTES)
        self._kinds: dict[int, tuple[EquationKind, JaxprEqn]] = {}  # by the identity of an equation

    def of(self, mesh: LogicalMesh, forbidden: tuple[str, ...], n_together: int, forbidden_s: float = math.inf) -> Menu:
        """`forbidden_s`: see `reshard_table`."""
        shape = self._memo.once(("shape", mesh.shape), None, lambda: _Shape(mesh.shape, self._memo))
        return self._memo.once(
            (mesh, forbidden, n_together, forbidden_s),
            None,
            lambda: Menu(mesh, forbidden, n_together, shape, self._tables, forbidden_s),
        )

    def same(self, specs: Specs) -> Specs:
        """The tuple that stands for all that are equal: specs are compared by identity."""
        return self._memo.same(specs)

    def kind_of(self, eqn: JaxprEqn) -> EquationKind:
        """Equations of one kind have the same."""
        found = self._kinds.get(id(eqn))
        if found is None:
            if len(self._kinds) >= _MOST_EQUATIONS:
                self._kinds.clear()
            found = self._kinds[id(eqn)] = self._kind_of(eqn), eqn
        return found[0]

    def _kind_of(self, eqn: JaxprEqn) -> EquationKind:
        factors, same = factors_of(eqn).on_mesh(), same_operands(eqn)
        arrays = tuple((shape_of(v), dtype_name(v)) for v in (*eqn.invars, *eqn.outvars))
        text = str(eqn.params) if is_constraint(eqn) else tuple(str(body) for body in sub_jaxprs(eqn))
        key = (eqn.primitive.name, text, arrays, same, factors.sizes, factors.flops, _structure(factors))
        shapes = tuple(shape_of(v) for v in eqn.outvars)
        return self._memo.once(key, None, lambda: EquationKind(factors, same, shapes))


def _structure(factors: Factors) -> Hashable:
    """All of them but sizes."""
    return (
        factors.operands, factors.results, tuple(factors.reductions.items()), factors.blocked, factors.linear,
        factors.linear_operands, factors.unaffected, factors.once, factors.positional,
    )  # fmt: skip
