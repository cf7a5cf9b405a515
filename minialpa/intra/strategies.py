"""Strategies: an equation in, the ways to run it on a logical mesh out.

A strategy gives each mesh axis to one factor of the equation, to none, or lets a partial sum pass along it. That fixes
the specs of the operands, and what the equation makes of them. An axis on a reduced factor leaves a partial sum; so do
partial operands of a linear equation. What is made may stay so, or be all-reduced or reduce-scattered at once: these
are strategies of their own. Other reductions (max, ...) are finished at once.

Cost is in seconds: max(flops / peak, bytes / bandwidth) on each device, plus collectives.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax.extend.core import JaxprEqn
from numpy.typing import NDArray

from minialpa.cluster import LogicalMesh
from minialpa.intra.factors import Dims, Factors
from minialpa.intra.reshard import Step, reshard_table
from minialpa.jaxprs import bytes_of, dtype_name, is_literal, shape_of, sub_jaxprs
from minialpa.sharding import EquationSpecs, Spec

#: The `checkpoint_name` of a copy that several contractions read.
SHARED_NAME = "minialpa_shared"


@dataclass(frozen=True, slots=True)
class Pass:
    """A partial sum that passes through an equation: `operands` hold summands, so the results do."""

    operands: frozenset[int]


#: For each mesh axis the factor that it splits, a partial sum that passes, or nothing.
Assignment = tuple[int | Pass | None, ...]
#: A spec for each of several arrays.
Specs = tuple[Spec, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StrategySet:
    """Strategies of one equation as columns: entry s of each tuple or array belongs to strategy s.

    operands[k], made[r], results[r]: specs of operand k, of result r as the shards compute it, and as it is left.
    compute_s, communication_s: seconds of the equation itself, and of turning what is made into the results.
    """

    operands: tuple[tuple[Spec, ...], ...]
    made: tuple[tuple[Spec, ...], ...]
    results: tuple[tuple[Spec, ...], ...]
    compute_s: NDArray[np.float64]
    communication_s: NDArray[np.float64]

    @property
    def seconds(self) -> NDArray[np.float64]:
        return self.compute_s + self.communication_s

    def read(self, s: int) -> EquationSpecs:
        """Strategy number `s`."""

        def row(columns: tuple[Specs, ...]) -> Specs:
            return tuple(column[s] for column in columns)

        return EquationSpecs(row(self.operands), row(self.made), row(self.results))

    def select(self, keep: Sequence[int]) -> StrategySet:
        """The strategies of these numbers."""

        def kept(columns: tuple[Specs, ...]) -> tuple[Specs, ...]:
            return tuple(tuple(column[s] for s in keep) for column in columns)

        numbers = list(keep)
        compute, communication = self.compute_s[numbers], self.communication_s[numbers]
        return StrategySet(kept(self.operands), kept(self.made), kept(self.results), compute, communication)


@dataclass(frozen=True, slots=True)
class _Strategy:
    operands: tuple[Spec, ...]
    made: tuple[Spec, ...]
    results: tuple[Spec, ...]
    compute_s: float
    communication_s: float


def _as_set(eqn: JaxprEqn, rows: Sequence[_Strategy]) -> StrategySet:
    return StrategySet(
        tuple(tuple(s.operands[k] for s in rows) for k in range(len(eqn.invars))),
        tuple(tuple(s.made[r] for s in rows) for r in range(len(eqn.outvars))),
        tuple(tuple(s.results[r] for s in rows) for r in range(len(eqn.outvars))),
        np.array([s.compute_s for s in rows]),
        np.array([s.communication_s for s in rows]),
    )


def enumerate_strategies(
    eqn: JaxprEqn,
    factors: Factors,
    mesh: LogicalMesh,
    required: Mapping[int, int | None] | None = None,
    n_pending: Mapping[int, int] | None = None,
    *,
    scatter: bool = True,
) -> StrategySet:
    """All strategies of `eqn` on `mesh`.

    required[axis]: the factor that this axis and no other must split (None: a sum may pass). n_pending[axis]: how many
    operands may come as partial sums along an axis. scatter: whether partial sums may be reduce-scattered.
    """
    pending = n_pending or {}
    assignments = list(_assignments(factors, mesh, required or {}, pending))
    if mesh.device is None and has_contraction(eqn):
        # With compute for nothing, doing everything everywhere would always be cheapest.
        n_splits = [math.prod(_splits(assignment, mesh).values()) for assignment in assignments]
        assignments = [a for a, n in zip(assignments, n_splits, strict=True) if n == max(n_splits)]
    cheapest: dict[tuple[tuple[Spec, ...], tuple[Spec, ...]], _Strategy] = {}
    for assignment in assignments:
        # A single partial operand can as well be reduced before the equation.
        eager = [a for a, f in enumerate(assignment) if not isinstance(f, Pass) or pending.get(a, 0) > 1]
        for s in _strategies_of(eqn, factors, mesh, assignment, functools.partial(_reduced, eqn, eager, mesh, scatter)):
            key = (s.operands, s.results)
            if key not in cheapest or s.compute_s + s.communication_s < _seconds(cheapest[key]):
                cheapest[key] = s
    return _as_set(eqn, list(cheapest.values()))


def _seconds(strategy: _Strategy) -> float:
    return strategy.compute_s + strategy.communication_s


def _assignments(
    factors: Factors, mesh: LogicalMesh, required: Mapping[int, int | None], n_pending: Mapping[int, int]
) -> Iterator[Assignment]:
    """Every assignment such that all splits are even and contiguous."""
    linear = Pass(frozenset(factors.linear_operands))
    options: list[Assignment] = []
    for axis, length in enumerate(mesh.shape):
        passes = (linear,) if factors.linear == "joint" and n_pending.get(axis, 0) else ()
        if length == 1:
            options.append((None,))
        elif axis in required:
            options.append((required[axis], *(passes if required[axis] is None else ())))
        else:
            free = [f for f in factors.splittable if f not in required.values()]
            options.append((None, *free, *passes))
    for assignment in itertools.product(*options):
        if all(factors.may_split(f, n) for f, n in _splits(assignment, mesh).items()):
            yield assignment


def _splits(assignment: Assignment, mesh: LogicalMesh) -> dict[int, int]:
    splits: dict[int, int] = {}
    for axis, factor in enumerate(assignment):
        if isinstance(factor, int):
            splits[factor] = splits.get(factor, 1) * mesh.shape[axis]
    return splits


def _spec(dims: Dims, assignment: Assignment, partial: Sequence[int]) -> Spec:
    return Spec(tuple(tuple(a for a, f in enumerate(assignment) if f in dim) for dim in dims), tuple(partial))


def _operand_spec(factors: Factors, assignment: Assignment, k: int) -> Spec:
    partial = []
    for axis, f in enumerate(assignment):
        if isinstance(f, Pass):
            waits = k in f.operands
        else:
            waits = f is not None and factors.reductions.get(f) == "sum" and factors.takes_part_once(f, k)
        if waits:
            partial.append(axis)
    return _spec(factors.operands[k], assignment, partial)


def _made_spec(factors: Factors, assignment: Assignment, r: int) -> Spec:
    partial = []
    for axis, f in enumerate(assignment):
        if isinstance(f, Pass) or (f is not None and factors.is_partial(f, r) and factors.reductions[f] == "sum"):
            partial.append(axis)
    return _spec(factors.results[r], assignment, partial)


def eager_reductions(
    factors: Factors, operands: Sequence[Spec], made: Sequence[Spec], mesh_shape: tuple[int, ...]
) -> list[Step | None]:
    """For each result, the all-reduce other than of a sum that finishes it right away."""
    if all(reduction == "sum" for reduction in factors.reductions.values()):
        return [None] * len(made)
    axes_of: dict[int, list[int]] = {}
    for k, spec in enumerate(operands):
        for d, axes in enumerate(spec.dims):
            factor = factors.leading_factor(k, d) if axes else None
            if factor is not None and factors.reductions.get(factor, "sum") != "sum":
                axes_of[factor] = list(axes)
    out: list[Step | None] = []
    for r, spec in enumerate(made):
        found = [(f, tuple(axes)) for f, axes in axes_of.items() if factors.is_partial(f, r)]
        assert len({factors.reductions[f] for f, _ in found}) <= 1, found
        axes = tuple(sorted(axis for _, own in found for axis in own))
        out.append(Step("all-reduce", axes, spec, spec, reduction=factors.reductions[found[0][0]]) if axes else None)
    return out


def _strategies_of(
    eqn: JaxprEqn,
    factors: Factors,
    mesh: LogicalMesh,
    assignment: Assignment,
    leave: Callable[[Specs], Iterable[Specs]],
) -> Iterator[_Strategy]:
    """The strategies of one assignment: `leave` gives the ways to leave what is made."""
    operands = tuple(_operand_spec(factors, assignment, k) for k in range(len(eqn.invars)))
    made = tuple(_made_spec(factors, assignment, r) for r in range(len(eqn.outvars)))
    compute = compute_s(eqn, factors, mesh, _n_shares(factors, _splits(assignment, mesh)))
    finishing = sum(
        _collective_s(step, bytes_of(v), mesh)
        for step, v in zip(eager_reductions(factors, operands, made, mesh.shape), eqn.outvars, strict=True)
        if step is not None
    )
    for results in leave(made):
        seconds = finishing
        for v, src, dst in zip(eqn.outvars, made, results, strict=True):
            seconds += _reshard_s(shape_of(v), bytes_of(v), src, dst, mesh)
        yield _Strategy(operands, made, results, compute, seconds)


def _n_shares(factors: Factors, splits: Mapping[int, int]) -> int:
    """In how many parts the work is split. Each part of a table makes a whole result, most of it zeros."""
    return math.prod(n for f, n in splits.items() if f not in factors.positional or f not in factors.reductions)


def _collective_s(step: Step, n_bytes: float, mesh: LogicalMesh) -> float:
    collective = step.collective(n_bytes, mesh.shape)
    return collective.seconds(mesh) if collective else 0.0


@functools.lru_cache(maxsize=1 << 16)
def _reshard_s(shape: tuple[int, ...], n_bytes: float, src: Spec, dst: Spec, mesh: LogicalMesh) -> float:
    return 0.0 if src == dst else reshard_table(shape, n_bytes, mesh).cost(src, dst)


def _whole(made: Specs) -> Specs:
    return tuple(replace(spec, partial=()) for spec in made)


def _reduced(eqn: JaxprEqn, eager: Sequence[int], mesh: LogicalMesh, scatter: bool, made: Specs) -> Iterator[Specs]:
    """What may be left of partial results: for each axis the sum stays, is all-reduced, or scattered to a dimension."""
    if len(made) != 1:
        yield made
        if _whole(made) != made:
            yield _whole(made)
        return
    (spec,), shape = made, shape_of(eqn.outvars[0])
    axes = [axis for axis in spec.partial if axis in eager]
    keep, reduce = -2, -1
    for ways in itertools.product((keep, reduce, *(range(len(shape)) if scatter else ())), repeat=len(axes)):
        to = dict(zip(axes, ways, strict=True))
        dims = tuple(tuple(sorted((*dim, *(a for a in axes if to[a] == d)))) for d, dim in enumerate(spec.dims))
        left = Spec(dims, tuple(a for a in spec.partial if to.get(a, keep) == keep))
        if left.fits(shape, mesh.shape):
            yield (left,)


def compute_s(eqn: JaxprEqn, factors: Factors, mesh: LogicalMesh, n_splits: int) -> float:
    """Seconds on one device when the work is split in `n_splits` parts.

    Contractions read and write memory; other operations count what they write, as XLA fuses their reads. What takes
    the only row of an array, or makes one of a row, writes nothing. On a mesh without a device, compute has no price.
    """
    if mesh.device is None or _is_row(eqn):
        return 0.0
    dtype = dtype_name(eqn.invars[0]) if eqn.invars else "float32"
    written = sum(bytes_of(v) for v in eqn.outvars)
    read = sum(bytes_of(v) for v in eqn.invars) if is_contraction(eqn) else 0
    work = max(factors.flops / mesh.device.flops_per_s(dtype), (read + written) / mesh.device.memory_bandwidth)
    return work / n_splits


def _is_row(eqn: JaxprEqn) -> bool:
    """Whether an array of one row becomes the row, or the other way round."""
    if eqn.primitive.name not in ("reshape", "squeeze"):
        return False
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    return before == (1, *after) or after == (1, *before)


def is_contraction(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in ("dot_general", "conv_general_dilated")


def is_shared_copy(eqn: JaxprEqn) -> bool:
    """Whether an equation copies a value for several contractions to read."""
    return eqn.primitive.name == "name" and eqn.params["name"] == SHARED_NAME


def has_contraction(eqn: JaxprEqn) -> bool:
    """Whether the equation, or one inside it, is a contraction."""
    return is_contraction(eqn) or any(has_contraction(e) for inner in sub_jaxprs(eqn) for e in inner.eqns)


def follow(
    eqn: JaxprEqn, factors: Factors, mesh: LogicalMesh, given: Mapping[int, Specs], n: int, *, whole: bool = False
) -> StrategySet:
    """`n` strategies, of which number s takes each operand in `given` as its spec s, as far as the rule allows.

    An axis that splits operands splits the same factor here; where operands disagree, the largest one wins and the
    others are resharded. A factor that may not be split is gathered. Partial sums pass where the equation is linear;
    `whole`: the results are not left as partial sums.
    """
    leave: Callable[[Specs], Iterable[Specs]] = (lambda made: (_whole(made),)) if whole else (lambda made: (made,))
    by_size = sorted(given, key=lambda k: -bytes_of(eqn.invars[k]))
    known: dict[tuple[Spec, ...], _Strategy] = {}
    rows = []
    for s in range(n):
        specs = tuple(given[k][s] for k in by_size)
        if specs not in known:
            assignment = _followed(eqn, factors, mesh, dict(zip(by_size, specs, strict=True)))
            known[specs] = next(_strategies_of(eqn, factors, mesh, assignment, leave))
        rows.append(known[specs])
    return _as_set(eqn, rows)


def _followed(eqn: JaxprEqn, factors: Factors, mesh: LogicalMesh, given: Mapping[int, Spec]) -> Assignment:
    assignment: list[int | Pass | None] = []
    for axis in range(len(mesh.shape)):
        found = (_use_of_axis(eqn, factors, k, spec, axis) for k, spec in given.items())
        assignment.append(next((f for f in found if f is not None), None))
    for axis in reversed(range(len(assignment))):
        factor = assignment[axis]
        if isinstance(factor, int) and not factors.may_split(factor, _splits(tuple(assignment), mesh)[factor]):
            assignment[axis] = None
    return tuple(assignment)


def _use_of_axis(eqn: JaxprEqn, factors: Factors, k: int, spec: Spec, axis: int) -> int | Pass | None:
    if axis in spec.partial:
        return _passing(eqn, factors, k)
    for d, axes in enumerate(spec.dims):
        if axis in axes:
            return factors.leading_factor(k, d)
    return None


def _passing(eqn: JaxprEqn, factors: Factors, k: int) -> Pass | None:
    """How a partial sum in operand `k` can pass."""
    if k not in factors.linear_operands:
        return None
    if factors.linear == "joint":
        return Pass(frozenset(factors.linear_operands))
    alone = sum(v is eqn.invars[k] for v in eqn.invars if not is_literal(v)) == 1
    return Pass(frozenset({k})) if factors.linear == "each" and alone else None
