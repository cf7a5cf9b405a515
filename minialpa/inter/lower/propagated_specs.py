"""Shardings of a program from the specs of its results: each equation takes the candidate that suits its readers.

From the last equation to the first, an equation computes its results in the specs of their readers, from operands that
are split as far as its rule allows. If readers differ, the spec with the most shards wins. There is no search: most
values of programs that fill arrays have one reader.

Every device computes reductions and matrix products in full. In parts, their rounding would depend on the number of
devices.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import LogicalMesh
from minialpa.intra.strategies.combining import ALONE
from minialpa.intra.strategies.reshard import reshard_table
from minialpa.intra.strategies.strategy_cache import MeshStrategies, StrategyCache, StrategyKey
from minialpa.ir.equations import Atom, bytes_of, is_literal, shape_of
from minialpa.rules.expensive import has_contraction
from minialpa.sharding import EquationSpecs, Spec


def propagated_specs(
    inputs: Sequence[Var], eqns: Sequence[JaxprEqn], results: Sequence[tuple[Var, Spec]], mesh: LogicalMesh
) -> tuple[dict[Var, Spec], dict[JaxprEqn, EquationSpecs]]:
    """The spec of each variable and of each equation. `inputs` are replicated; `results` have the given specs."""
    chooser = _Chooser(mesh)
    read: dict[Var, Spec] = {}
    for var, spec in results:
        _note_reader(read, var, spec, mesh)

    equations: dict[JaxprEqn, EquationSpecs] = {}
    for eqn in reversed(eqns):
        chosen = equations[eqn] = chooser.choose(eqn, [read.get(var) for var in eqn.outvars])
        read.update(zip(eqn.outvars, chosen.results, strict=True))
        for atom, spec in zip(eqn.invars, chosen.operands, strict=True):
            if not is_literal(atom):
                _note_reader(read, atom, spec, mesh)

    read.update((var, _replicated(var)) for var in inputs)
    return read, equations


def _note_reader(read: dict[Var, Spec], var: Var, spec: Spec, mesh: LogicalMesh) -> None:
    """The spec with the most shards wins."""
    if var not in read or spec.n_shards(mesh.shape) > read[var].n_shards(mesh.shape):
        read[var] = spec


class _Chooser:
    """Equations that differ only in names share one choice."""

    def __init__(self, mesh: LogicalMesh) -> None:
        self._mesh = mesh
        self._cache = StrategyCache()
        self._strategies: MeshStrategies = self._cache.of(mesh, (), ALONE)
        self._choices: dict[tuple[StrategyKey, tuple[Spec | None, ...]], EquationSpecs] = {}

    def choose(self, eqn: JaxprEqn, read: Sequence[Spec | None]) -> EquationSpecs:
        """read: the spec of each result for its readers; None for an unused result."""
        if not any(spec is not None and spec.axes for spec in read):
            return _computed_everywhere(eqn, read)
        kind = self._cache.kind_of(eqn)
        key = kind, tuple(read)
        if key not in self._choices:
            self._choices[key] = self._choose(eqn, kind, read)
        return self._choices[key]

    def _choose(self, eqn: JaxprEqn, kind: StrategyKey, read: Sequence[Spec | None]) -> EquationSpecs:
        """The cheapest candidate without partial sums."""
        if kind.factors.reductions or has_contraction(eqn):
            return _computed_everywhere(eqn, read)

        strategies = self._strategies.enumerate(eqn, kind, {}, {}, scatter=False)
        candidates = [strategies.read(s) for s in range(len(strategies.compute_s))]
        whole = [one for one in candidates if not any(spec.partial for spec in (*one.operands, *one.made))]
        if not whole:
            return _computed_everywhere(eqn, read)
        best = min(whole, key=lambda one: self._price(eqn, one, read))
        return EquationSpecs(best.operands, best.made, _specs_left(best.made, read))

    def _price(self, eqn: JaxprEqn, specs: EquationSpecs, read: Sequence[Spec | None]) -> tuple[float, float]:
        """Seconds of communication after the equation, then bytes on each device."""
        shape = self._mesh.shape
        moved_s = 0.0
        for var, made, left in zip(eqn.outvars, specs.made, _specs_left(specs.made, read), strict=True):
            if made != left:
                moved_s += reshard_table(shape_of(var), bytes_of(var), self._mesh).cost(made, left)

        arrays = [*zip(eqn.outvars, specs.made, strict=True), *zip(eqn.invars, specs.operands, strict=True)]
        held = sum(bytes_of(atom) / spec.n_shards(shape) for atom, spec in arrays if not is_literal(atom))
        return moved_s, held


def _specs_left(made: Sequence[Spec], read: Sequence[Spec | None]) -> tuple[Spec, ...]:
    """The specs of results after the equation: of their readers, or as computed without readers."""
    return tuple(own if spec is None else spec for own, spec in zip(made, read, strict=True))


def _computed_everywhere(eqn: JaxprEqn, read: Sequence[Spec | None]) -> EquationSpecs:
    """Every device computes the whole equation and keeps its shards of the results."""
    made = tuple(map(_replicated, eqn.outvars))
    return EquationSpecs(tuple(map(_replicated, eqn.invars)), made, _specs_left(made, read))


def _replicated(atom: Atom) -> Spec:
    return Spec.replicated(len(shape_of(atom)))
