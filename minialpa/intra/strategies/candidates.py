"""The factors of an equation and a mesh shape in; its candidates, ways to split it without prices, out.

A candidate lets each mesh axis split one factor, pass a partial sum, or idle. This fixes all specs. Example:
`dot_general` [i k], [k j] -> [i j] on a mesh of shape (2,):
    axis 0 splits i     S0,R  R,R  -> S0,R
    axis 0 splits k     R,S0  S0,R -> R,R+P0, which may stay, be all-reduced (R,R) or reduce-scattered (S0,R or R,S0)
Reductions other than sums (max, ...) are finished at once.

Candidates depend on the divisors of sizes, not on the links of a mesh. Strategies (strategies.py) add prices.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jax.extend.core import JaxprEqn, Var
from numpy.typing import NDArray

from minialpa.intra.strategies.reshard import ReshardStep
from minialpa.ir.equations import bytes_of, is_literal, operand_vars, shape_of
from minialpa.rules.factors import Dims, Factors
from minialpa.sharding import Spec

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PassedSum:
    """`operands` and results hold summands."""

    operands: frozenset[int]


@dataclass(frozen=True, slots=True)
class RingUse:
    """Splits both factors; see `Factors.rings`."""

    split: int
    passed: int


Use = int | RingUse | PassedSum | None
#: For each mesh axis: the factor that it splits, the ring that it is, a partial sum that passes, or None.
Assignment = tuple[Use, ...]
#: A spec for each of several arrays.
Specs = tuple[Spec, ...]


@dataclass(frozen=True, slots=True)
class Bill:
    """Communication of a candidate.

    finish: for each result, the all-reduce of a max or another eager reduction, or None.
    moves: (result, made spec, left spec) for each result that is resharded.
    """

    finish: tuple[ReshardStep | None, ...]
    moves: tuple[tuple[int, Spec, Spec], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """Specs of operands, of results as shards compute them (`made`), and of results for later equations.

    n_shares: work of the equation / work of the busiest device. finish: see `Bill`.
    """

    operands: Specs
    made: Specs
    results: Specs
    n_shares: float
    finish: tuple[ReshardStep | None, ...]

    @property
    def bill(self) -> Bill:
        ends = enumerate(zip(self.made, self.results, strict=True))
        return Bill(self.finish, tuple((r, made, left) for r, (made, left) in ends if made != left))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Candidates:
    """The candidates of one equation, and its strategies, as columns.

    Candidates with equal operands and results are one strategy, which takes the cheapest candidate.

    Attributes:
        operands: [operand][strategy].
        made: [result][candidate if `has_choice`, else strategy], the spec as shards compute the result.
        results: [result][strategy], the spec for later equations.
        bill_of: by candidate, an index.
        strategies: for each strategy, its candidates.
        first: of these.
        has_choice: any strategy has several candidates.
    """

    operands: tuple[Specs, ...]
    made: tuple[Specs, ...]
    results: tuple[Specs, ...]
    n_shares: NDArray[np.float64]
    bills: tuple[Bill, ...]
    bill_of: NDArray[np.int64]
    strategies: tuple[tuple[int, ...], ...]
    first: NDArray[np.int64]
    has_choice: bool


def enumerate_candidates(
    eqn: JaxprEqn,
    factors: Factors,
    mesh_shape: Shape,
    required: Mapping[int, int | None],
    n_pending: Mapping[int, int],
    *,
    scatter: bool,
    most_splits: bool,
    kept: frozenset[int] = frozenset(),
) -> Candidates:
    """See `MeshStrategies.enumerate`. most_splits: only splits into the most shards."""
    assignments = list(_assignments(factors, mesh_shape, required, n_pending, kept))

    if most_splits:
        n_splits = [math.prod(_splits(assignment, mesh_shape).values()) for assignment in assignments]
        most = max(n_splits, default=0)
        assignments = [assignment for assignment, n in zip(assignments, n_splits, strict=True) if n == most]

    candidates: list[_Candidate] = []
    alike: dict[tuple[Specs, Specs], list[int]] = {}
    for assignment in assignments:
        # A single partial operand can be reduced before the equation instead.
        eager = [axis for axis, use in enumerate(assignment)
                 if not isinstance(use, PassedSum) or n_pending.get(axis, 0) > 1]  # fmt: skip
        leave = functools.partial(_left_specs, eqn, eager, mesh_shape, scatter)
        for candidate in _candidates_of(eqn, factors, mesh_shape, assignment, leave):
            alike.setdefault((candidate.operands, candidate.results), []).append(len(candidates))
            candidates.append(candidate)
    return _columns(candidates, [tuple(numbers) for numbers in alike.values()], len(eqn.invars), len(eqn.outvars))


def follow_candidates(
    eqn: JaxprEqn,
    factors: Factors,
    mesh_shape: Shape,
    given: Mapping[int, Specs],
    n_strategies: int,
    *,
    allow_partial: bool,
) -> Candidates:
    """For each strategy, the candidate that follows the `given` operands; see `MeshStrategies.follow`."""
    leave: Callable[[Specs], Iterable[Specs]] = (
        (lambda made: (made,)) if allow_partial else (lambda made: (_complete_specs(made),))
    )
    by_size = leads(eqn, given)
    known: dict[Specs, int] = {}
    candidates: list[_Candidate] = []
    strategies = []

    for s in range(n_strategies):
        specs = tuple(given[k][s] for k in by_size)
        if specs not in known:
            known[specs] = len(candidates)
            assignment = _following_assignment(eqn, factors, mesh_shape, dict(zip(by_size, specs, strict=True)))
            candidates.append(next(_candidates_of(eqn, factors, mesh_shape, assignment, leave)))
        strategies.append((known[specs],))
    return _columns(candidates, strategies, len(eqn.invars), len(eqn.outvars))


def _columns(
    candidates: Sequence[_Candidate], strategies: Sequence[tuple[int, ...]], n_operands: int, n_results: int
) -> Candidates:
    # Each bill is priced once.
    bills: dict[Bill, int] = {}
    bill_of = [bills.setdefault(candidate.bill, len(bills)) for candidate in candidates]

    # Candidates of one strategy may differ in `made`.
    has_choice = any(len(choice) > 1 for choice in strategies)
    firsts = [candidates[choice[0]] for choice in strategies]
    makers = candidates if has_choice else firsts

    return Candidates(
        operands=tuple(tuple(first.operands[k] for first in firsts) for k in range(n_operands)),
        made=tuple(tuple(maker.made[r] for maker in makers) for r in range(n_results)),
        results=tuple(tuple(first.results[r] for first in firsts) for r in range(n_results)),
        n_shares=np.array([candidate.n_shares for candidate in candidates], np.float64),
        bills=tuple(bills),
        bill_of=np.array(bill_of, np.int64),
        strategies=tuple(strategies),
        first=np.array([choice[0] for choice in strategies], np.int64),
        has_choice=has_choice,
    )


def leads(eqn: JaxprEqn, given: Iterable[int]) -> list[int]:
    """Operands decide in this order: largest first."""
    return sorted(given, key=lambda k: -bytes_of(eqn.invars[k]))


def same_operands(eqn: JaxprEqn) -> tuple[int, ...]:
    """For each operand, the first operand that is the same variable; -1 for literals."""
    first: dict[Var, int] = {}
    return tuple(-1 if is_literal(atom) else first.setdefault(atom, k) for k, atom in enumerate(eqn.invars))


# ---- assignments ----------------------------------------------------------------------------------------------------


def _assignments(
    factors: Factors,
    mesh_shape: Shape,
    required: Mapping[int, int | None],
    n_pending: Mapping[int, int],
    kept: frozenset[int],
) -> Iterator[Assignment]:
    """For the arguments, see `MeshStrategies.enumerate`."""
    linear = PassedSum(frozenset(factors.linear_operands))
    kept |= factors.of_empty_arrays
    free = [factor for factor in factors.splittable if factor not in required.values() and factor not in kept]
    rings = [RingUse(split, passed) for split, passed in factors.rings.items() if split in free]

    uses: list[Assignment] = []  # for each axis
    for axis, length in enumerate(mesh_shape):
        passes = (linear,) if factors.linear == "joint" and n_pending.get(axis, 0) else ()
        if length == 1:
            uses.append((None,))
        elif axis in required:
            uses.append((required[axis], *(passes if required[axis] is None else ())))
        else:
            uses.append((None, *free, *rings, *passes))

    # Several axes may split one factor.
    for assignment in itertools.product(*uses):
        splits = _splits(assignment, mesh_shape)
        if _has_whole_rings(factors, assignment, splits) and all(itertools.starmap(factors.may_split, splits.items())):
            yield assignment


def _has_whole_rings(factors: Factors, assignment: Assignment, splits: Mapping[int, int]) -> bool:
    """Whether each ring has all devices that split its first factor, and equal halves of the second factor."""
    for ring in {use for use in assignment if isinstance(use, RingUse)}:
        if ring.split in assignment or factors.sizes[ring.passed] % (2 * splits[ring.split]):
            return False
    return True


def _splits(assignment: Assignment, mesh_shape: Shape) -> dict[int, int]:
    splits: dict[int, int] = {}
    for factor, length in zip(map(_shared_factor, assignment), mesh_shape, strict=True):
        if factor is not None:
            splits[factor] = splits.get(factor, 1) * length
    return splits


def _shared_factor(use: Use) -> int | None:
    """The factor whose work an axis shares."""
    if isinstance(use, RingUse):
        return use.split
    return use if isinstance(use, int) else None


def _following_assignment(eqn: JaxprEqn, factors: Factors, mesh_shape: Shape, given: Mapping[int, Spec]) -> Assignment:
    """The assignment that follows the operands `given`; the first one that uses an axis decides."""
    assignment: list[Use] = []
    for axis in range(len(mesh_shape)):
        uses = (_use_of_axis(eqn, factors, k, spec, axis) for k, spec in given.items())
        assignment.append(next((use for use in uses if use is not None), None))
    return _legal_assignment(factors, mesh_shape, assignment, reversed(range(len(assignment))))


def _legal_assignment(factors: Factors, mesh_shape: Shape, uses: Sequence[Use], axes: Iterable[int]) -> Assignment:
    """`uses` without splits into more shards than a factor allows; the first of `axes` are dropped first."""
    assignment = list(uses)
    if not _has_whole_rings(factors, tuple(uses), _splits(tuple(uses), mesh_shape)):
        assignment = [use.split if isinstance(use, RingUse) else use for use in uses]
    for axis in axes:
        factor = _shared_factor(assignment[axis])
        if factor is None:
            continue
        n = _splits(tuple(assignment), mesh_shape)[factor]
        if factor in factors.of_empty_arrays or not factors.may_split(factor, n):
            assignment[axis] = None
    return tuple(assignment)


def _use_of_axis(eqn: JaxprEqn, factors: Factors, k: int, spec: Spec, axis: int) -> Use:
    if axis in spec.partial:
        return _passed_sum(eqn, factors, k)
    for dim, axes in enumerate(spec.dims):
        if axis in axes:
            return factors.leading_factor(k, dim)
    return None


def _passed_sum(eqn: JaxprEqn, factors: Factors, k: int) -> PassedSum | None:
    if k not in factors.linear_operands:
        return None
    if factors.linear == "joint":
        return PassedSum(frozenset(factors.linear_operands))
    is_alone = sum(var is eqn.invars[k] for var in operand_vars(eqn)) == 1
    return PassedSum(frozenset({k})) if factors.linear == "each" and is_alone else None


# ---- specs of an assignment -----------------------------------------------------------------------------------------


def _candidates_of(
    eqn: JaxprEqn,
    factors: Factors,
    mesh_shape: Shape,
    assignment: Assignment,
    leave: Callable[[Specs], Iterable[Specs]],
) -> Iterator[_Candidate]:
    """leave: the specs in which results may be left."""
    operands = tuple(_operand_spec(factors, assignment, k) for k in range(len(eqn.invars)))
    made = tuple(_made_spec(factors, assignment, r) for r in range(len(eqn.outvars)))
    finish = tuple(eager_reductions(factors, operands, made))
    n_shares = _n_shares(factors, _splits(assignment, mesh_shape))

    for results in leave(made):
        yield _Candidate(operands=operands, made=made, results=results, n_shares=n_shares, finish=finish)


def _n_shares(factors: Factors, splits: Mapping[int, int]) -> float:
    """`Candidates.n_shares`, without splits of a positional, reduced factor: there, each shard makes a full result."""
    return math.prod(factors.n_shares(factor, n) for factor, n in splits.items()
                     if factor not in factors.positional or factor not in factors.reductions)  # fmt: skip


def _spec(dims: Dims, assignment: Assignment, partial: Sequence[int]) -> Spec:
    return Spec(tuple(tuple(a for a, use in enumerate(assignment) if _splits_dim(use, dim)) for dim in dims),
                tuple(partial))  # fmt: skip


def _splits_dim(use: Use, dim: tuple[int, ...]) -> bool:
    return use.split in dim or use.passed in dim if isinstance(use, RingUse) else use in dim


def _operand_spec(factors: Factors, assignment: Assignment, k: int) -> Spec:
    # An operand that takes part once is zero on all devices but one.
    once = [factor for factor in _sums(factors) if factors.takes_part_once(factor, k)]
    partial = [
        axis
        for axis, use in enumerate(assignment)
        if (k in use.operands if isinstance(use, PassedSum) else use in once)
    ]
    return _spec(factors.operands[k], assignment, partial)


def _made_spec(factors: Factors, assignment: Assignment, r: int) -> Spec:
    # Sums over both factors of a ring are complete.
    summed = [factor for factor in _sums(factors) if factors.is_partial(factor, r)]
    partial = [axis for axis, use in enumerate(assignment) if isinstance(use, PassedSum) or use in summed]
    return _spec(factors.results[r], assignment, partial)


def _sums(factors: Factors) -> list[int]:
    return [factor for factor, reduction in factors.reductions.items() if reduction == "sum"]


def eager_reductions(factors: Factors, operands: Sequence[Spec], made: Sequence[Spec]) -> list[ReshardStep | None]:
    """For each result, the all-reduce of a reduction that cannot wait, or None."""
    if all(reduction == "sum" for reduction in factors.reductions.values()):
        return [None] * len(made)
    axes_of = _reduced_axes(factors, operands)
    return [_eager_reduction(factors, axes_of, r, spec) for r, spec in enumerate(made)]


def _reduced_axes(factors: Factors, operands: Sequence[Spec]) -> dict[int, tuple[int, ...]]:
    """Without sums."""
    axes_of: dict[int, tuple[int, ...]] = {}
    for k, spec in enumerate(operands):
        for dim, axes in enumerate(spec.dims):
            factor = factors.leading_factor(k, dim) if axes else None
            if factor is not None and factors.reductions.get(factor, "sum") != "sum":
                axes_of[factor] = axes
    return axes_of


def _eager_reduction(
    factors: Factors, axes_of: Mapping[int, tuple[int, ...]], r: int, spec: Spec
) -> ReshardStep | None:
    partial = [factor for factor in axes_of if factors.is_partial(factor, r)]
    kinds = {factors.reductions[factor] for factor in partial}
    assert len(kinds) <= 1, (kinds, r)
    if not kinds:
        return None
    axes = tuple(sorted(axis for factor in partial for axis in axes_of[factor]))
    return ReshardStep(kind="all-reduce", axes=axes, src=spec, dst=spec, reduction=kinds.pop())


def _complete_specs(made: Specs) -> Specs:
    return tuple(replace(spec, partial=()) for spec in made)


def _left_specs(eqn: JaxprEqn, eager: Sequence[int], mesh_shape: Shape, scatter: bool, made: Specs) -> Iterator[Specs]:
    """The specs in which results with the specs `made` may be left.

    Along each axis in `eager`, the partial sum of a single result stays, is all-reduced, or, with `scatter`, is
    scattered to a dimension. Several results all stay or are all all-reduced.
    """
    if len(made) != 1:
        yield made
        if _complete_specs(made) != made:
            yield _complete_specs(made)
        return

    (spec,), shape = made, shape_of(eqn.outvars[0])
    axes = [axis for axis in spec.partial if axis in eager]
    keep, reduce = -2, -1  # other choices are dimensions to scatter to
    for choice in itertools.product((keep, reduce, *(range(len(shape)) if scatter else ())), repeat=len(axes)):
        to = dict(zip(axes, choice, strict=True))
        dims = tuple(tuple(sorted((*dim, *(a for a in axes if to[a] == d)))) for d, dim in enumerate(spec.dims))
        left = Spec(dims, tuple(axis for axis in spec.partial if to.get(axis, keep) == keep))
        if left.fits(shape, mesh_shape):
            yield (left,)


# ---- checks ---------------------------------------------------------------------------------------------------------


def nearest_candidate(
    eqn: JaxprEqn, factors: Factors, mesh_shape: Shape, operands: Specs, made: Specs
) -> tuple[Specs, Specs]:
    """Operands and made results of the candidate that follows the first use of each axis in these specs.

    A candidate stays. Axes of the specs must be mesh axes with several devices.
    """
    assignment = _assignment_of(eqn, factors, mesh_shape, operands, made)
    return (
        tuple(_operand_spec(factors, assignment, k) for k in range(len(operands))),
        tuple(_made_spec(factors, assignment, r) for r in range(len(made))),
    )


def candidate_of(eqn: JaxprEqn, factors: Factors, mesh_shape: Shape, operands: Specs, made: Specs) -> Candidates:
    """`nearest_candidate`, as the only candidate."""
    assignment = _assignment_of(eqn, factors, mesh_shape, operands, made)
    found = next(_candidates_of(eqn, factors, mesh_shape, assignment, lambda specs: (specs,)))
    return _columns([found], [(0,)], len(operands), len(made))


def _assignment_of(eqn: JaxprEqn, factors: Factors, mesh_shape: Shape, operands: Specs, made: Specs) -> Assignment:
    uses = [_first_use(eqn, factors, operands, made, axis) for axis in range(len(mesh_shape))]
    return _legal_assignment(factors, mesh_shape, uses, range(len(uses)))


def _first_use(eqn: JaxprEqn, factors: Factors, operands: Specs, made: Specs, axis: int) -> Use:
    """The factor that `axis` splits in the first array, or its ring; else the partial sum that passes."""
    first = None
    for dims, spec in zip((*factors.operands, *factors.results), (*operands, *made), strict=True):
        for dim, axes in zip(dims, spec.dims, strict=True):
            if axis in axes:
                factor = factors.leading(dim)
                if first is None:
                    first = factor
                elif factor is not None and factors.rings.get(first) == factor:
                    return RingUse(first, factor)
    if first is not None:
        return first

    partial = (k for k, spec in enumerate(operands) if axis in spec.partial)
    return next((use for k in partial if (use := _passed_sum(eqn, factors, k)) is not None), None)
