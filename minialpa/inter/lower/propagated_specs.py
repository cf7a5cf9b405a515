"""Shardings of a program whose results have given ones: each equation takes the candidate that its readers ask for.

From the last equation to the first: an equation computes its results in the specs in which they are read, from operands
that are split as far as its rule allows; this is what the equations before it are asked for. A value with several
readers has the spec with the most shards among theirs, and is resharded for the others. There is no search: every
choice is right, and in programs that fill arrays, most values have one reader.

Reductions and matrix products are computed in full on every device: in parts, their rounding would depend on the number
of devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import LogicalMesh
from minialpa.intra.strategies.combining import ALONE
from minialpa.intra.strategies.reshard import reshard_table
from minialpa.intra.strategies.strategies import StrategySet
from minialpa.intra.strategies.strategy_cache import EquationKind, MeshStrategies, StrategyCache
from minialpa.ir.equations import Atom, bytes_of, is_literal, shape_of
from minialpa.rules.heavy import has_contraction
from minialpa.sharding import EquationSpecs, Spec


@dataclass(frozen=True, slots=True)
class PropagatedSpecs:
    """The specs of a program.

    Attributes:
        specs: the spec in which each variable is left where it is made; inputs are replicated.
        equations: specs of operands and results, by the `id` of the equation.
    """

    specs: Mapping[Var, Spec]
    equations: Mapping[JaxprEqn, EquationSpecs]


def propagated_specs(
    inputs: Sequence[Var], eqns: Sequence[JaxprEqn], results: Sequence[tuple[Var, Spec]], mesh: LogicalMesh
) -> PropagatedSpecs:
    """Specs of the program `eqns`, whose replicated `inputs` become `results` in the specs that stand beside them."""
    chooser = _Chooser(mesh)
    read: dict[Var, Spec] = {}
    for var, spec in results:
        _note(read, var, spec, mesh)

    equations: dict[JaxprEqn, EquationSpecs] = {}
    for eqn in reversed(eqns):
        chosen = equations[eqn] = chooser.choose(eqn, [read.get(var) for var in eqn.outvars])
        read.update(zip(eqn.outvars, chosen.results, strict=True))
        for atom, spec in zip(eqn.invars, chosen.operands, strict=True):
            if not is_literal(atom):
                _note(read, atom, spec, mesh)

    read.update((var, _replicated(var)) for var in inputs)
    return PropagatedSpecs(read, equations)


def _note(read: dict[Var, Spec], var: Var, spec: Spec, mesh: LogicalMesh) -> None:
    """Let `var` have `spec`, unless another reader wants more shards."""
    if var not in read or spec.n_shards(mesh.shape) > read[var].n_shards(mesh.shape):
        read[var] = spec


class _Chooser:
    """Chooses the specs of equations on one mesh; equations that differ in names only are looked at once."""

    def __init__(self, mesh: LogicalMesh) -> None:
        self._mesh = mesh
        self._cache = StrategyCache()
        self._strategies: MeshStrategies = self._cache.of(mesh, (), ALONE)
        self._known: dict[tuple[EquationKind, tuple[Spec | None, ...]], EquationSpecs] = {}

    def choose(self, eqn: JaxprEqn, read: Sequence[Spec | None]) -> EquationSpecs:
        """The specs of an equation. `read`: the spec in which each result is read; None if nothing reads it."""
        if not any(spec is not None and spec.axes for spec in read):
            return _everywhere(eqn, read)
        kind = self._cache.kind_of(eqn)
        key = kind, tuple(read)
        if key not in self._known:
            self._known[key] = self._choose(eqn, kind, read)
        return self._known[key]

    def _choose(self, eqn: JaxprEqn, kind: EquationKind, read: Sequence[Spec | None]) -> EquationSpecs:
        if kind.factors.reductions or has_contraction(eqn):
            return _everywhere(eqn, read)

        strategies = self._strategies.enumerate(eqn, kind, {}, {}, scatter=False)
        candidates = [strategies.read(s) for s in range(_n_strategies(strategies))]
        whole = [one for one in candidates if not _has_partial(one)]
        if not whole:
            return _everywhere(eqn, read)
        best = min(whole, key=lambda one: self._price(eqn, one, read))
        return EquationSpecs(best.operands, best.made, _left(best.made, read))

    def _price(self, eqn: JaxprEqn, specs: EquationSpecs, read: Sequence[Spec | None]) -> tuple[float, float]:
        """Seconds of communication behind the equation, then bytes that each device holds."""
        shape = self._mesh.shape
        moved_s = 0.0
        for var, made, left in zip(eqn.outvars, specs.made, _left(specs.made, read), strict=True):
            if made != left:
                moved_s += reshard_table(shape_of(var), bytes_of(var), self._mesh).cost(made, left)

        arrays = [*zip(eqn.outvars, specs.made, strict=True), *zip(eqn.invars, specs.operands, strict=True)]
        held = sum(bytes_of(atom) / spec.n_shards(shape) for atom, spec in arrays if not is_literal(atom))
        return moved_s, held


def _left(made: Sequence[Spec], read: Sequence[Spec | None]) -> tuple[Spec, ...]:
    """The specs in which results are left: as they are read, or as they are made if nothing reads them."""
    return tuple(own if spec is None else spec for own, spec in zip(made, read, strict=True))


def _everywhere(eqn: JaxprEqn, read: Sequence[Spec | None]) -> EquationSpecs:
    """Every device computes all of the equation, and keeps its shards of the results."""
    made = tuple(map(_replicated, eqn.outvars))
    return EquationSpecs(tuple(map(_replicated, eqn.invars)), made, _left(made, read))


def _has_partial(specs: EquationSpecs) -> bool:
    return any(spec.partial for spec in (*specs.operands, *specs.made))


def _n_strategies(strategies: StrategySet) -> int:
    return len(strategies.compute_s)


def _replicated(atom: Atom) -> Spec:
    return Spec.replicated(len(shape_of(atom)))
