"""Strategies: an equation in, the ways to run it on a logical mesh out.

A strategy gives each mesh axis to one factor of the equation, or to none. Factors fix the specs of all operands and
results. An axis on a reduced factor leaves partial results, which are all-reduced, or reduce-scattered onto another
dimension of the result. Cost is in seconds: max(flops / peak, bytes / bandwidth) on each device, plus collectives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn

from minialpa.cluster import LogicalMesh
from minialpa.cost import Collective
from minialpa.intra.factors import Dims, Factors
from minialpa.jaxprs import bytes_of, dtype_name, shape_of
from minialpa.sharding import Spec


@dataclass(frozen=True, slots=True)
class Strategy:
    """Specs of the operands and results of an equation, its compute seconds, and the collectives on its results."""

    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    compute_s: float
    collectives: tuple[Collective, ...] = ()

    def seconds(self, mesh: LogicalMesh) -> float:
        return self.compute_s + sum(c.seconds(mesh) for c in self.collectives)


def enumerate_strategies(
    eqn: JaxprEqn, factors: Factors, mesh: LogicalMesh, required: Mapping[int, int | None] | None = None
) -> list[Strategy]:
    """All strategies of `eqn` on `mesh`. `required[axis]` fixes the factor of an axis (None: no factor)."""
    assignments = list(_assignments(factors, mesh, required or {}))
    if mesh.device is None and is_contraction(eqn):
        # With compute for nothing, doing everything everywhere would always be cheapest.
        n_splits = [math.prod(_splits(assignment, mesh).values()) for assignment in assignments]
        assignments = [a for a, n in zip(assignments, n_splits, strict=True) if n == max(n_splits)]
    return [s for assignment in assignments for s in _strategies_of(eqn, factors, mesh, assignment)]


def _assignments(
    factors: Factors, mesh: LogicalMesh, required: Mapping[int, int | None]
) -> Iterator[tuple[int | None, ...]]:
    """Every way to give each mesh axis a factor, such that all splits are even and contiguous."""
    options: list[tuple[int | None, ...]] = []
    for axis, length in enumerate(mesh.shape):
        if length == 1:
            options.append((None,))
        elif axis in required:
            options.append((required[axis],))
        else:
            options.append((None, *factors.splittable))
    for assignment in itertools.product(*options):
        if all(factors.may_split(f, n) for f, n in _splits(assignment, mesh).items()):
            yield assignment


def _splits(assignment: Sequence[int | None], mesh: LogicalMesh) -> dict[int, int]:
    splits: dict[int, int] = {}
    for axis, factor in enumerate(assignment):
        if factor is not None:
            splits[factor] = splits.get(factor, 1) * mesh.shape[axis]
    return splits


def _spec(dims: Dims, assignment: Sequence[int | None]) -> Spec:
    return Spec(tuple(tuple(a for a, f in enumerate(assignment) if f is not None and f in dim) for dim in dims))


def _strategies_of(
    eqn: JaxprEqn, factors: Factors, mesh: LogicalMesh, assignment: Sequence[int | None]
) -> Iterator[Strategy]:
    operands = tuple(_spec(dims, assignment) for dims in factors.operands)
    results = tuple(_spec(dims, assignment) for dims in factors.results)
    n_splits = math.prod(_splits(assignment, mesh).values())
    compute = compute_s(eqn, factors, mesh, n_splits)
    yield Strategy(operands, results, compute, _all_reduces(eqn, factors, results, assignment, mesh))
    if len(results) != 1:
        return
    partial = [axis for axis, f in enumerate(assignment) if f is not None and factors.is_partial(f, 0)]
    if not partial:
        return
    shape = shape_of(eqn.outvars[0])
    for d in range(len(shape)):
        dims = results[0].dims
        scattered = Spec((*dims[:d], (*dims[d], *partial), *dims[d + 1 :]))
        if scattered.fits(shape, mesh.shape):
            local = bytes_of(eqn.outvars[0]) / results[0].n_shards(mesh.shape)
            yield Strategy(operands, (scattered,), compute, (Collective("reduce-scatter", local, tuple(partial)),))


def _all_reduces(
    eqn: JaxprEqn, factors: Factors, results: Sequence[Spec], assignment: Sequence[int | None], mesh: LogicalMesh
) -> tuple[Collective, ...]:
    """The all-reduces of results that are partial along some axes."""
    out = []
    for r, (v, spec) in enumerate(zip(eqn.outvars, results, strict=True)):
        axes = tuple(a for a, f in enumerate(assignment) if f is not None and factors.is_partial(f, r))
        if axes:
            out.append(Collective("all-reduce", bytes_of(v) / spec.n_shards(mesh.shape), axes))
    return tuple(out)


def compute_s(eqn: JaxprEqn, factors: Factors, mesh: LogicalMesh, n_splits: int) -> float:
    """Seconds on one device when the work is split in `n_splits` parts.

    Contractions read and write memory; other operations count what they write, as XLA fuses their reads. On a mesh
    without a device, compute has no price.
    """
    if mesh.device is None:
        return 0.0
    dtype = dtype_name(eqn.invars[0]) if eqn.invars else "float32"
    written = sum(bytes_of(v) for v in eqn.outvars)
    read = sum(bytes_of(v) for v in eqn.invars) if is_contraction(eqn) else 0
    work = max(factors.flops / mesh.device.flops_per_s(dtype), (read + written) / mesh.device.memory_bandwidth)
    return work / n_splits


def is_contraction(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in ("dot_general", "conv_general_dilated")


def follow(eqn: JaxprEqn, factors: Factors, mesh: LogicalMesh, given: Mapping[int, Spec]) -> Strategy:
    """The strategy that takes the operands in `given` (by position) as they are, as far as the rule allows.

    An axis that splits operands splits the same factor here; where operands disagree, the largest one wins and the
    others are resharded. A factor that may not be split is gathered. Reduced factors are all-reduced at once.
    """
    by_size = sorted(given, key=lambda k: -bytes_of(eqn.invars[k]))
    assignment: list[int | None] = []
    for axis in range(len(mesh.shape)):
        found = (_factor_on_axis(factors, k, given[k], axis) for k in by_size)
        assignment.append(next((f for f in found if f is not None), None))
    for axis in reversed(range(len(assignment))):
        splits = _splits(assignment, mesh)
        factor = assignment[axis]
        if factor is not None and not factors.may_split(factor, splits[factor]):
            assignment[axis] = None
    return next(_strategies_of(eqn, factors, mesh, assignment))


def _factor_on_axis(factors: Factors, operand: int, spec: Spec, axis: int) -> int | None:
    for d, axes in enumerate(spec.dims):
        if axis in axes:
            return factors.leading_factor(operand, d)
    return None
