"""`Factors`: the dimensions of an equation's arrays that are split together, and the effect of splitting them.

`dot_general` on `[b i k],[b k j] -> [b i j]` has four factors. Splitting `i` splits dimension 1 of the first operand
and of the result. Splitting `k`, absent from the result, leaves partial sums. The form follows Shardy's sharding rules
(openxla/shardy, RFC "sharding rules"). f is the number of a factor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from jax import lax
from jax.extend.core import JaxprEqn

from minialpa.ir.equations import is_control_flow
from minialpa.support.divisors import divisors

Reduction = Literal["sum", "max", "min", "and", "or", "prod", "xor"]
Dims = tuple[tuple[int, ...], ...]
#: Shapes of several arrays.
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Ramp:
    """Work that grows with the position: position i, counted from one end, has min(i + 1, most) units.

    Attributes:
        block: number of positions that are computed together.
    """

    most: int
    block: int

    def parts(self, n_positions: int) -> int:
        steep = min(n_positions, self.most)
        return steep * (steep + 1) // 2 + (n_positions - steep) * self.most


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Factors of one equation, numbered from 0.

    Attributes:
        operands, results: for each array and dimension the factors, outermost first, whose lengths multiply to the
            dimension's length. Dimensions of length 1 may have no factors.
        reductions: factors that some result lacks, with the reduction of the partial results.
        blocked: factors that may not be split: the operation mixes positions along them (sort, cumsum), or a shard's
            result depends on its position.
        linear: `joint`: the results are linear in all `linear_operands` together (add); `each`: in each of them (mul,
            dot), so not in a variable that is listed twice.
        unaffected: pairs (factor, result): the result lacks a reduced factor and is equal in all shards, such as the
            counter of a loop.
        counted_once: pairs (factor, operand), such as initial values of sums over a loop; see `takes_part_once`.
        positional: blocked factors that may be split if shards know their positions; see `on_mesh` and `in_time`.
        ramps: factors with unequal work per position.
        shifts: blocked factors that may be split if devices pass slices on: position i of a result is position
            i + shift of the operand, modulo the length.
        rings: factor -> blocked factor. Devices may split both together, and pass slices with the second around a ring.
    """

    sizes: tuple[int, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    reductions: Mapping[int, Reduction] = ()  # type: ignore[assignment]
    blocked: frozenset[int] = frozenset()
    linear: Literal["none", "joint", "each"] = "none"
    linear_operands: tuple[int, ...] = ()
    flops: float = 0.0
    unaffected: frozenset[tuple[int, int]] = frozenset()
    counted_once: frozenset[tuple[int, int]] = frozenset()
    positional: frozenset[int] = frozenset()
    ramps: Mapping[int, Ramp] = ()  # type: ignore[assignment]
    shifts: Mapping[int, int] = ()  # type: ignore[assignment]
    rings: Mapping[int, int] = ()  # type: ignore[assignment]

    def __post_init__(self) -> None:
        object.__setattr__(self, "reductions", dict(self.reductions))
        object.__setattr__(self, "ramps", dict(self.ramps))
        object.__setattr__(self, "shifts", dict(self.shifts))
        object.__setattr__(self, "rings", dict(self.rings))

    @property
    def splittable(self) -> tuple[int, ...]:
        return tuple(f for f, size in enumerate(self.sizes) if size > 1 and f not in self.blocked)

    @property
    def of_empty_arrays(self) -> frozenset[int]:
        """jax cannot read arrays without elements that devices share."""
        if 0 not in self.sizes:
            return frozenset()
        named = (frozenset(itertools.chain.from_iterable(dims)) for dims in (*self.operands, *self.results))
        return frozenset().union(*(found for found in named if any(self.sizes[f] == 0 for f in found)))

    def on_mesh(self) -> Factors:
        """The factors for mesh axes: devices know their positions, and pass slices to each other."""
        return replace(self, blocked=self.blocked.difference(self.positional, self.shifts))

    def in_time(self, eqn: JaxprEqn) -> Factors:
        """The factors of `eqn` for micro-batches, which may split positional factors of loops and branches.

        Each iteration makes its own random bits, so no full-batch array exists that a micro-batch could cut.
        """
        return self.on_mesh() if self.positional and is_control_flow(eqn) else self

    def leading_factor(self, operand: int, dim: int) -> int | None:
        """See `leading`."""
        return self.leading(self.operands[operand][dim])

    def leading(self, dim: tuple[int, ...]) -> int | None:
        """The factor that contiguous blocks of a dimension split: the first longer than 1."""
        return next((f for f in dim if self.sizes[f] > 1), None)

    def is_partial(self, factor: int, result: int) -> bool:
        has_factor = any(factor in dim for dim in self.results[result])
        return factor in self.reductions and not has_factor and (factor, result) not in self.unaffected

    def affects(self, factor: int, result: int) -> bool:
        return any(factor in dim for dim in self.results[result]) or self.is_partial(factor, result)

    def takes_part_once(self, factor: int, operand: int) -> bool:
        """Whether only one shard along a reduced `factor` has the value of an operand, and the others have zero.

        Otherwise a sum over shards would count it several times, as `operand` of scatter_add(operand, indices,
        updates), split over its indices.
        """
        if factor not in self.reductions or any(factor in dim for dim in self.operands[operand]):
            return False
        return (self.linear == "joint" and operand in self.linear_operands) or (factor, operand) in self.counted_once

    def shape(self, dims: Dims, n_splits: Mapping[int, int]) -> tuple[int, ...]:
        """Local shape, with factors in `n_splits[factor]` parts."""
        return tuple(math.prod(self.sizes[f] // n_splits.get(f, 1) for f in dim) for dim in dims)

    def local_shapes(self, n_splits: Mapping[int, int]) -> tuple[Shapes, Shapes]:
        operands = tuple(self.shape(dims, n_splits) for dims in self.operands)
        return operands, tuple(self.shape(dims, n_splits) for dims in self.results)

    def n_shares(self, factor: int, n: int) -> float:
        """Work of the whole over work of the busiest of n parts; n if all work equally."""
        if factor not in self.ramps:
            return n
        size, work = self.sizes[factor], self.ramps[factor].parts
        return work(size) / (work(size) - work(size - size // n))

    def may_balance(self, factor: int, n: int) -> bool:
        """Whether n parts may exchange halves for about equal work.

        Parts i and n - 1 - i exchange their second halves, which consist of whole blocks.
        """
        if factor not in self.ramps or factor in self.positional or n < 2:
            return False
        return self.sizes[factor] % (2 * n * self.ramps[factor].block) == 0

    def n_balanced_shares(self, factor: int, n: int) -> float:
        """After the exchange of `may_balance`."""
        size, work = self.sizes[factor], self.ramps[factor].parts
        until = [work(half * size // (2 * n)) for half in range(2 * n + 1)]
        halves = [end - start for start, end in itertools.pairwise(until)]
        return work(size) / max(halves[2 * i] + halves[2 * (n - 1 - i) + 1] for i in range(n))

    def may_split(self, factor: int, n: int) -> bool:
        """Whether splitting `factor` into `n` parts cuts every array into contiguous, equal blocks."""
        if factor in self.blocked or self.sizes[factor] % n:
            return False
        for dims in (*self.operands, *self.results):
            for dim in dims:
                # After an outer factor, the blocks would be strided.
                if factor in dim and any(self.sizes[f] > 1 for f in dim[: dim.index(factor)]):
                    return False
        return True

    def smallest_splits(self) -> Iterator[tuple[int, int]]:
        """Each factor that may be split, with its smallest number of parts."""
        for f in self.splittable:
            _, n, *_ = divisors(self.sizes[f])
            if self.may_split(f, n):
                yield f, n


# ---- combining partial results ---------------------------------------------------------------------------------------

_COMBINED: Mapping[Reduction, tuple[Callable[..., Any], Callable[..., Any]]] = MappingProxyType(
    {
        "and": (lax.bitwise_and, lax.reduce_and),
        "max": (lax.max, lax.reduce_max),
        "min": (lax.min, lax.reduce_min),
        "or": (lax.bitwise_or, lax.reduce_or),
        "prod": (lax.mul, lax.reduce_prod),
        "sum": (lax.add, lax.reduce_sum),
        "xor": (lax.bitwise_xor, lax.reduce_xor),
    }
)


def combine(how: Reduction, a: Any, b: Any) -> Any:
    """Of two partial results in their dtype: integers wrap around, and NaN stays."""
    return _COMBINED[how][0](a, b)


def combine_along(how: Reduction, parts: Any) -> Any:
    return _COMBINED[how][1](parts, (0,))
