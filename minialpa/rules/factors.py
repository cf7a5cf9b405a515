"""Named factors: which dimensions of an equation's arrays are split together, and what comes of splitting them.

`dot_general` on `[b i k],[b k j] -> [b i j]` has four factors. Splitting factor `i` splits dimension 1 of the first
operand and dimension 1 of the result; splitting `k`, absent from the result, leaves partial sums. The same table serves
the sharding strategies (a mesh axis is given to a factor) and micro-batches (the batch factor is split in time).
The form is that of Shardy's sharding rules (openxla/shardy, RFC "sharding rules"). f stands for the number of a factor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from jax.extend.core import JaxprEqn

from minialpa.ir.equations import is_control_flow
from minialpa.support.divisors import divisors

Reduction = Literal["sum", "max", "min", "and", "or", "prod", "xor"]
Dims = tuple[tuple[int, ...], ...]
#: Shapes of several arrays.
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Ramp:
    """Work that grows with the position: position i, counted from one of the ends, has min(i + 1, most) parts of it.

    Attributes:
        most: parts of the work of a position far from that end.
        block: positions that are computed together, so that only whole blocks are spared what their positions need not.
    """

    most: int
    block: int

    def parts(self, n_positions: int) -> int:
        """Parts of the work of the first positions."""
        steep = min(n_positions, self.most)
        return steep * (steep + 1) // 2 + (n_positions - steep) * self.most


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Factors of one equation, numbered from 0.

    Attributes:
        sizes: the length of each factor.
        operands: for each operand and each of its dimensions, the factors that make it up, outermost first; the product
            of their sizes is the dimension's length. Dimensions of length 1 may have none.
        results: the same for each result.
        reductions: factors that some result lacks, and how the partial results of a split are combined. If the equation
            is jointly linear, an operand of `linear_operands` that lacks the reduced factor takes part once:
            scatter_add(operand, indices, updates) split over its indices keeps `operand` in one shard, zeros elsewhere.
        blocked: factors that may not be split, because the operation mixes positions along them (sort, cumsum) or
            because a shard's result would depend on its position.
        linear: `joint`: the results are linear in all operands listed in `linear_operands` taken together (add);
            `each`: linear in each of them alone (mul, dot), so not in a variable that is listed twice; else `none`.
        linear_operands: numbers of the operands that `linear` is about.
        flops: floating point operations of the whole equation.
        unaffected: pairs (factor, result) of a result that lacks a reduced factor and does not depend on arrays that
            have it, so that every shard computes the same, such as the counter of a loop.
        once: pairs (factor, operand) of additional operands that take part once: initial values of sums over a loop.
        positional: blocked factors of the second kind that can be split if shards know their positions, as devices do:
            see `on_mesh` and `known_rules.OnShards`. Micro-batches split those of loops and branches alone, see
            `in_time`.
        ramps: factors whose positions have unequal work, as under a causal mask.
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
    once: frozenset[tuple[int, int]] = frozenset()
    positional: frozenset[int] = frozenset()
    ramps: Mapping[int, Ramp] = ()  # type: ignore[assignment]

    def __post_init__(self) -> None:
        object.__setattr__(self, "reductions", dict(self.reductions))
        object.__setattr__(self, "ramps", dict(self.ramps))

    @property
    def splittable(self) -> tuple[int, ...]:
        """Factors that may be split, in order."""
        return tuple(f for f, size in enumerate(self.sizes) if size > 1 and f not in self.blocked)

    def on_mesh(self) -> Factors:
        """The factors as mesh axes may split them: with positional factors not blocked."""
        return replace(self, blocked=self.blocked - self.positional)

    def in_time(self, eqn: JaxprEqn) -> Factors:
        """The factors of `eqn` as micro-batches may split them.

        Positional factors of loops and branches are not blocked: what is made inside, such as random bits, is made for
        each iteration anew, so there is no full-batch value of which a micro-batch could take its rows.
        """
        return self.on_mesh() if self.positional and is_control_flow(eqn) else self

    def leading_factor(self, operand: int, dim: int) -> int | None:
        """The factor that is split when dimension `dim` of an operand is cut into contiguous blocks, if any."""
        return self.leading(self.operands[operand][dim])

    def leading(self, dim: tuple[int, ...]) -> int | None:
        """The factor that is split when a dimension that is made of these is cut: the first longer than 1, if any."""
        return next((f for f in dim if self.sizes[f] > 1), None)

    def is_partial(self, factor: int, result: int) -> bool:
        """Whether shards along `factor` leave partial values of a result, to be combined by `reductions[factor]`."""
        has_factor = any(factor in dim for dim in self.results[result])
        return factor in self.reductions and not has_factor and (factor, result) not in self.unaffected

    def affects(self, factor: int, result: int) -> bool:
        """Whether a result depends on arrays that have `factor`."""
        return any(factor in dim for dim in self.results[result]) or self.is_partial(factor, result)

    def takes_part_once(self, factor: int, operand: int) -> bool:
        """Whether, of all shards along `factor`, only one may see the value of an operand, and the others zero."""
        if factor not in self.reductions or any(factor in dim for dim in self.operands[operand]):
            return False
        return (self.linear == "joint" and operand in self.linear_operands) or (factor, operand) in self.once

    def shape(self, dims: Dims, n_splits: Mapping[int, int]) -> tuple[int, ...]:
        """Local shape of an array whose factors are split into `n_splits[factor]` parts."""
        return tuple(math.prod(self.sizes[f] // n_splits.get(f, 1) for f in dim) for dim in dims)

    def local_shapes(self, n_splits: Mapping[int, int]) -> tuple[Shapes, Shapes]:
        """Local shapes of all operands, and of all results; `n_splits` as in `shape`."""
        operands = tuple(self.shape(dims, n_splits) for dims in self.operands)
        return operands, tuple(self.shape(dims, n_splits) for dims in self.results)

    def n_shares(self, factor: int, n: int) -> float:
        """How many times less than the whole the busiest of n parts along a factor has to do; n, if all do the same."""
        if factor not in self.ramps:
            return n
        size, work = self.sizes[factor], self.ramps[factor].parts
        return work(size) / (work(size) - work(size - size // n))

    def may_balance(self, factor: int, n: int) -> bool:
        """Whether n parts along a factor may exchange halves with each other, so that they have about equal work.

        Part i and part n - 1 - i exchange their second halves, each of which is some whole blocks.
        """
        if factor not in self.ramps or factor in self.positional or n < 2:
            return False
        return self.sizes[factor] % (2 * n * self.ramps[factor].block) == 0

    def n_balanced_shares(self, factor: int, n: int) -> float:
        """The same as `n_shares`, if parts exchange halves as `may_balance` says."""
        size, work = self.sizes[factor], self.ramps[factor].parts
        until = [work(half * size // (2 * n)) for half in range(2 * n + 1)]
        halves = [end - start for start, end in itertools.pairwise(until)]
        return work(size) / max(halves[2 * i] + halves[2 * (n - 1 - i) + 1] for i in range(n))

    def may_split(self, factor: int, n: int) -> bool:
        """Whether splitting `factor` in `n` cuts every array into contiguous, equal blocks."""
        if factor in self.blocked or self.sizes[factor] % n:
            return False
        for dims in (*self.operands, *self.results):
            for dim in dims:
                # With an outer factor in the same dimension, the blocks would be strided.
                if factor in dim and any(self.sizes[f] > 1 for f in dim[: dim.index(factor)]):
                    return False
        return True

    def smallest_splits(self) -> Iterator[tuple[int, int]]:
        """Each factor that may be split, with the least number of parts that it may be split into."""
        for f in self.splittable:
            _, n, *_ = divisors(self.sizes[f])
            if self.may_split(f, n):
                yield f, n
