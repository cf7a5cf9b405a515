"""Ways to run an equation on a logical mesh: its factors and what they may be split by in, specs without prices out.

A way gives each mesh axis to one factor of the equation, to none, or lets a partial sum pass along it. That fixes the
specs of the operands, and what the equation makes of them. An axis on a reduced factor leaves a partial sum; so do
partial operands of a linear equation. What is made may stay so, or be all-reduced or reduce-scattered at once: these
are ways of their own. Other reductions (max, ...) are finished at once.

Ways depend on sizes only in what divides them, and not on the links of a mesh, so few are ever worked out; strategies
(strategies.py) are ways with prices.
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

from minialpa.intra.strategies.reshard import Step
from minialpa.rules.factors import Dims, Factors
from minialpa.sharding import Spec
from minialpa.tracing.jaxprs import bytes_of, is_literal, operand_vars, shape_of

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pass:
    """A partial sum that passes through an equation: `operands` hold summands, so the results do."""

    operands: frozenset[int]


#: For each mesh axis the factor that it splits, a partial sum that passes, or nothing.
Assignment = tuple[int | Pass | None, ...]
#: A spec for each of several arrays.
Specs = tuple[Spec, ...]


@dataclass(frozen=True, slots=True)
class Bill:
    """What a way communicates: the all-reduces that finish results, and how results are left otherwise than made.

    moves: (result, spec as it is made, spec as it is left).
    """

    finish: tuple[Step | None, ...]
    moves: tuple[tuple[int, Spec, Spec], ...]


@dataclass(frozen=True, slots=True)
class _Way:
    """n_shares: in how many parts the work is split."""

    operands: Specs
    made: Specs
    results: Specs
    n_shares: int
    finish: tuple[Step | None, ...]

    @property
    def bill(self) -> Bill:
        ends = enumerate(zip(self.made, self.results, strict=True))
        return Bill(self.finish, tuple((r, made, left) for r, (made, left) in ends if made != left))


@dataclass(frozen=True, slots=True, eq=False)
class Ways:
    """Ways to run one equation, as columns: entry w of each tuple or array belongs to way w.

    operands[k], made[r], results[r]: specs of operand k, of result r as the shards compute it, and as it is left.
    n_shares: in how many parts the work is split. bills: what is communicated, of which way w pays bill_of[w].
    strategies[s]: the ways between which strategy s has the choice, as they read and leave the same.
    """

    operands: tuple[Specs, ...]
    made: tuple[Specs, ...]
    results: tuple[Specs, ...]
    n_shares: NDArray[np.int64]
    bills: tuple[Bill, ...]
    bill_of: NDArray[np.int64]
    strategies: tuple[tuple[int, ...], ...]
    first: NDArray[np.int64]
    has_choice: bool


def _columns(ways: Sequence[_Way], strategies: Sequence[tuple[int, ...]], n_operands: int, n_results: int) -> Ways:
    """Operands and results by strategy; what is made by way, where there is a choice."""
    bills: dict[Bill, int] = {}
    bill_of = np.array([bills.setdefault(way.bill, len(bills)) for way in ways], np.int64)
    has_choice = any(len(choice) > 1 for choice in strategies)
    firsts = [ways[choice[0]] for choice in strategies]
    return Ways(
        tuple(tuple(way.operands[k] for way in firsts) for k in range(n_operands)),
        tuple(tuple(way.made[r] for way in (ways if has_choice else firsts)) for r in range(n_results)),
        tuple(tuple(way.results[r] for way in firsts) for r in range(n_results)),
        np.array([way.n_shares for way in ways], np.int64),
        tuple(bills),
        bill_of,
        tuple(strategies),
        np.array([choice[0] for choice in strategies], np.int64),
        has_choice,
    )


def enumerate_ways(
    eqn: JaxprEqn,
    factors: Factors,
    mesh_shape: Shape,
    required: Mapping[int, int | None],
    n_pending: Mapping[int, int],
    *,
    scatter: bool,
    most_splits: bool,
    kept: frozenset[int] = frozenset(),
) -> Ways:
    """All ways to run `eqn`; see `enumerate_strategies`. most_splits: only those that split it in most parts."""
    assignments = list(_assignments(factors, mesh_shape, required, n_pending, kept))
    if most_splits:
        n_splits = [math.prod(_splits(assignment, mesh_shape).values()) for assignment in assignments]
        assignments = [a for a, n in zip(assignments, n_splits, strict=True) if n == max(n_splits)]
    ways: list[_Way] = []
    alike: dict[tuple[Specs, Specs], list[int]] = {}
    for assignment in assignments:
        # A single partial operand can as well be reduced before the equation.
        eager = [a for a, f in enumerate(assignment) if not isinstance(f, Pass) or n_pending.get(a, 0) > 1]
        leave = functools.partial(_reduced, eqn, eager, mesh_shape, scatter)
        for way in _ways_of(eqn, factors, mesh_shape, assignment, leave):
            alike.setdefault((way.operands, way.results), []).append(len(ways))
            ways.append(way)
    return _columns(ways, [tuple(numbers) for numbers in alike.values()], len(eqn.invars), len(eqn.outvars))


def follow_ways(
    eqn: JaxprEqn, factors: Factors, mesh_shape: Shape, given: Mapping[int, Specs], n: int, *, whole: bool
) -> Ways:
    """`n` ways, one for each of the specs that operands are `given` in; see `follow`."""
    leave: Callable[[Specs], Iterable[Specs]] = (lambda made: (_whole(made),)) if whole else (lambda made: (made,))
    by_size = leads(eqn, given)
    known: dict[Specs, int] = {}
    ways: list[_Way] = []
    strategies = []
    for s in range(n):
        specs = tuple(given[k][s] for k in by_size)
        if specs not in known:
            known[specs] = len(ways)
            assignment = _followed(eqn, factors, mesh_shape, dict(zip(by_size, specs, strict=True)))
            ways.append(next(_ways_of(eqn, factors, mesh_shape, assignment, leave)))
        strategies.append((known[specs],))
    return _columns(ways, strategies, len(eqn.invars), len(eqn.outvars))


def leads(eqn: JaxprEqn, given: Iterable[int]) -> list[int]:
    """Operands in the order in which they have a say: the largest first."""
    return sorted(given, key=lambda k: -bytes_of(eqn.invars[k]))


def same_operands(eqn: JaxprEqn) -> tuple[int, ...]:
    """For each operand the first that is the same; -1 for literals."""
    first: dict[int, int] = {}
    return tuple(-1 if is_literal(v) else first.setdefault(id(v), k) for k, v in enumerate(eqn.invars))


def _assignments(
    factors: Factors,
    mesh_shape: Shape,
    required: Mapping[int, int | None],
    n_pending: Mapping[int, int],
    kept: frozenset[int],
) -> Iterator[Assignment]:
    """Every assignment such that all splits are even and contiguous."""
    linear = Pass(frozenset(factors.linear_operands))
    options: list[Assignment] = []
    for axis, length in enumerate(mesh_shape):
        passes = (linear,) if factors.linear == "joint" and n_pending.get(axis, 0) else ()
        if length == 1:
            options.append((None,))
        elif axis in required:
            options.append((required[axis], *(passes if required[axis] is None else ())))
        else:
            free = [f for f in factors.splittable if f not in required.values() and f not in kept]
            options.append((None, *free, *passes))
    for assignment in itertools.product(*options):
        if all(factors.may_split(f, n) for f, n in _splits(assignment, mesh_shape).items()):
            yield assignment


def _splits(assignment: Assignment, mesh_shape: Shape) -> dict[int, int]:
    splits: dict[int, int] = {}
    for axis, factor in enumerate(assignment):
        if isinstance(factor, int):
            splits[factor] = splits.get(factor, 1) * mesh_shape[axis]
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
    factors: Factors, operands: Sequence[Spec], made: Sequence[Spec], mesh_shape: Shape
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


def _ways_of(
    eqn: JaxprEqn,
    factors: Factors,
    mesh_shape: Shape,
    assignment: Assignment,
    leave: Callable[[Specs], Iterable[Specs]],
) -> Iterator[_Way]:
    """The ways of one assignment: `leave` gives the ways to leave what is made."""
    operands = tuple(_operand_spec(factors, assignment, k) for k in range(len(eqn.invars)))
    made = tuple(_made_spec(factors, assignment, r) for r in range(len(eqn.outvars)))
    finish = tuple(eager_reductions(factors, operands, made, mesh_shape))
    n_shares = _n_shares(factors, _splits(assignment, mesh_shape))
    yield from (_Way(operands, made, results, n_shares, finish) for results in leave(made))


def _n_shares(factors: Factors, splits: Mapping[int, int]) -> int:
    """In how many parts the work is split. Each part of a table makes a whole result, most of it zeros."""
    return math.prod(n for f, n in splits.items() if f not in factors.positional or f not in factors.reductions)


def _whole(made: Specs) -> Specs:
    return tuple(replace(spec, partial=()) for spec in made)


def _reduced(eqn: JaxprEqn, eager: Sequence[int], mesh_shape: Shape, scatter: bool, made: Specs) -> Iterator[Specs]:
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
        if left.fits(shape, mesh_shape):
            yield (left,)


def _followed(eqn: JaxprEqn, factors: Factors, mesh_shape: Shape, given: Mapping[int, Spec]) -> Assignment:
    assignment: list[int | Pass | None] = []
    for axis in range(len(mesh_shape)):
        found = (_use_of_axis(eqn, factors, k, spec, axis) for k, spec in given.items())
        assignment.append(next((f for f in found if f is not None), None))
    for axis in reversed(range(len(assignment))):
        factor = assignment[axis]
        if isinstance(factor, int) and not factors.may_split(factor, _splits(tuple(assignment), mesh_shape)[factor]):
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
    alone = sum(v is eqn.invars[k] for v in operand_vars(eqn)) == 1
    return Pass(frozenset({k})) if factors.linear == "each" and alone else None


def nearest_way(
    eqn: JaxprEqn, factors: Factors, mesh_shape: Shape, operands: Specs, made: Specs
) -> tuple[Specs, Specs]:
    """Operands and made results of the way that gives each axis to what these specs give it to first.

    The specs are those of a way if they are all the same. Axes of specs are axes of the mesh, and have several devices.
    """
    assignment = [_first_use(eqn, factors, operands, made, axis) for axis in range(len(mesh_shape))]
    for axis, factor in enumerate(assignment):
        n_splits = _splits(tuple(assignment), mesh_shape)
        if isinstance(factor, int) and not factors.may_split(factor, n_splits[factor]):
            assignment[axis] = None
    found = tuple(assignment)
    return (
        tuple(_operand_spec(factors, found, k) for k in range(len(operands))),
        tuple(_made_spec(factors, found, r) for r in range(len(made))),
    )


def _first_use(eqn: JaxprEqn, factors: Factors, operands: Specs, made: Specs, axis: int) -> int | Pass | None:
    """The factor that `axis` splits in some array; else how it passes a partial sum."""
    for arrays, specs in ((factors.operands, operands), (factors.results, made)):
        for dims, spec in zip(arrays, specs, strict=True):
            for dim, axes in zip(dims, spec.dims, strict=True):
                if axis in axes:
                    return next((f for f in dim if factors.sizes[f] > 1), None)
    partial = (k for k, spec in enumerate(operands) if axis in spec.partial)
    return next((use for k in partial if (use := _passing(eqn, factors, k)) is not None), None)
