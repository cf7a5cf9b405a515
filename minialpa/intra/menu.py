"""Strategies and prices of resharding, worked out once for each kind of equation and value of a mesh.

Models repeat themselves: most equations differ from an earlier one in nothing but the names of their variables, and
then have the very same `StrategySet`. Tuples of specs are therefore compared by identity here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from jax.extend.core import JaxprEqn
from numpy.typing import NDArray

from minialpa.cluster import LogicalMesh
from minialpa.intra.factors import Factors
from minialpa.intra.reshard import reshard_table
from minialpa.intra.strategies import Specs, StrategySet, enumerate_strategies, follow, has_contraction
from minialpa.jaxprs import dtype_name, is_literal, shape_of

T = TypeVar("T")


class Menu:
    """What `strategies` and `reshard` give for one mesh, where `n_together` sums share the time to start; remembers."""

    def __init__(self, mesh: LogicalMesh, forbidden: tuple[str, ...], n_together: int = 1) -> None:
        self.apart, self.forbidden, self.n_together = mesh, forbidden, n_together
        self.mesh = replace(mesh, alpha=tuple(alpha / n_together for alpha in mesh.alpha))
        # Each value comes with the tuples whose identity is part of its key, so that they stay alive.
        self._known: dict[Hashable, tuple[Any, tuple[Specs, ...]]] = {}

    def _once(self, key: Hashable, alive: tuple[Specs, ...], make: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = (make(), alive)
        found: T = self._known[key][0]
        return found

    def enumerate(
        self,
        eqn: JaxprEqn,
        factors: Factors,
        required: Mapping[int, int | None],
        n_pending: Mapping[int, int],
        *,
        scatter: bool,
    ) -> StrategySet:
        """`enumerate_strategies`."""
        options = (tuple(required.items()), tuple(sorted(n_pending.items())), scatter)
        return self._once(
            ("enumerate", kind_of(eqn, factors), options),
            (),
            lambda: enumerate_strategies(eqn, factors, self.mesh, required, n_pending, scatter=scatter),
        )

    def follow(
        self, eqn: JaxprEqn, factors: Factors, given: Mapping[int, Specs], n: int, *, whole: bool = False
    ) -> StrategySet:
        """`strategies.follow`."""
        leads = tuple((k, id(specs)) for k, specs in given.items())
        return self._once(
            ("follow", kind_of(eqn, factors), leads, n, whole),
            tuple(given.values()),
            lambda: follow(eqn, factors, self.mesh, given, n, whole=whole),
        )

    def reshard_s(self, shape: tuple[int, ...], n_bytes: float, made: Specs, wanted: Specs) -> NDArray[np.float64]:
        """Seconds to reshard an array, shape [len(made), len(wanted)]."""
        return self._once(
            ("reshard", shape, n_bytes, id(made), id(wanted)),
            (made, wanted),
            lambda: reshard_table(shape, n_bytes, self.apart, self.forbidden, self.n_together).matrix(made, wanted),
        )


class Menus:
    """The menus of all meshes; one such object serves any number of problems, which then share what they have alike."""

    def __init__(self) -> None:
        self._menus: dict[tuple[LogicalMesh, tuple[str, ...], int], Menu] = {}

    def of(self, mesh: LogicalMesh, forbidden: tuple[str, ...], n_together: int) -> Menu:
        key = (mesh, forbidden, n_together)
        if key not in self._menus:
            self._menus[key] = Menu(*key)
        return self._menus[key]


def kind_of(eqn: JaxprEqn, factors: Factors) -> Hashable:
    """What strategies depend on: equations of one kind have equal strategies."""
    first: dict[int, int] = {}
    same = tuple(first.setdefault(id(v), k) for k, v in enumerate(eqn.invars))
    arrays = tuple((shape_of(v), dtype_name(v), is_literal(v)) for v in (*eqn.invars, *eqn.outvars))
    return (
        arrays, same, has_contraction(eqn),
        factors.sizes, factors.operands, factors.results, tuple(factors.reductions.items()), factors.blocked,
        factors.linear, factors.linear_operands, factors.flops, factors.unaffected, factors.once,
    )  # fmt: skip
