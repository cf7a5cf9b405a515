"""Rules of named factors, for all calls of an operation.

A `ShardingRule` has the factors of each dimension by name, without lengths. With the shapes of a call it gives
`NamedFactors`, and these the `Factors` of an equation. A factor may be split if

    some operand has it,  every result has it or its parts are combined,  and it is not listed for replication.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minialpa.errors import ShardingError
from minialpa.rules.factors import Dims, Factors, Reduction, Shapes

#: The factors of one dimension by name, outermost first.
Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ArrayRule:
    """The dimensions of one array.

    Attributes:
        leading: name of the group of leading dimensions that `...` stands for, or None.
        dims: the factors of each other dimension.
    """

    leading: str | None
    dims: tuple[Names, ...]

    def named(self, shape: Sequence[int]) -> tuple[Names, ...] | None:
        """The factors of each dimension of an array of this shape; None if its rank does not fit."""
        n_leading = len(shape) - len(self.dims)
        if n_leading < 0 or (n_leading and self.leading is None):
            return None
        return (*((f"...{self.leading}.{i}",) for i in range(n_leading)), *self.dims)

    def of_shape(self, shape: Sequence[int]) -> ArrayRule:
        """The rule for one rank: `...` becomes a name for each leading dimension."""
        dims = self.named(shape)
        assert dims is not None, (self, shape)
        return ArrayRule(None, dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dimension:
    """Dimension `axis` of array number `array` of a call, operands first, with the names of its factors."""

    array: int
    axis: int
    names: Names
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingRule:
    """The named factors of an operation.

    Attributes:
        text: the written rule, for messages.
        operands: the dimensions of each operand.
        results: the dimensions of each result.
        reductions: pairs (factor, reduction of partial results).
        replicated: factors that may not be split.
        sizes: pairs (factor, length) of factors that are no whole dimension.
    """

    text: str
    operands: tuple[ArrayRule, ...]
    results: tuple[ArrayRule, ...]
    reductions: tuple[tuple[str, Reduction], ...] = ()
    replicated: tuple[str, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def arrays(self) -> tuple[ArrayRule, ...]:
        return (*self.operands, *self.results)

    def names(self) -> dict[str, None]:
        """The names of all factors, without those of `...`, in order."""
        return dict.fromkeys(name for array in self.arrays for dim in array.dims for name in dim)

    def inner_names(self) -> frozenset[str]:
        """The names of the factors that come after another one in some dimension."""
        return frozenset(name for array in self.arrays for dim in array.dims for name in dim[1:])

    def array_name(self, i: int) -> str:
        """The name of array i in messages, operands first."""
        return f"operand {i}" if i < len(self.operands) else f"result {i - len(self.operands)}"

    def named_factors(self, operands: Shapes, results: Shapes, operation: str) -> NamedFactors:
        """The factors of a call with these shapes. Raises a ShardingError with `operation` if they do not fit."""
        named = self._named(operands, results, operation)
        shapes = (*operands, *results)
        sizes = self._sizes(named, shapes, operation)

        # All shards use an array of length 1 in a dimension, as in a broadcast.
        arrays = tuple(
            tuple(() if size == 1 else dim for dim, size in zip(dims, shape, strict=True))
            for dims, shape in zip(named, shapes, strict=True)
        )
        return NamedFactors(sizes=sizes, operands=arrays[: len(operands)], results=arrays[len(operands) :], rule=self)

    def _named(self, operands: Shapes, results: Shapes, operation: str) -> list[tuple[Names, ...]]:
        """The factors of each dimension of each array. Raises ShardingError for wrong ranks or numbers of arrays."""
        for kind, rules, shapes in (("operand", self.operands, operands), ("result", self.results, results)):
            if len(rules) != len(shapes):
                raise ShardingError(
                    f"The sharding rule of `{operation}`, `{self.text}`, has {len(rules)} {kind}s, and the call has "
                    f"{len(shapes)}."
                )

        named, n_leading = [], dict[str, int]()
        for i, (array, shape) in enumerate(zip(self.arrays, (*operands, *results), strict=True)):
            dims = array.named(shape)
            if dims is None:
                raise ShardingError(
                    f"The sharding rule of `{operation}`, `{self.text}`, has {len(array.dims)} dimensions for "
                    f"{self.array_name(i)}, whose shape is {tuple(shape)}."
                )
            named.append(dims)

            # `...` is the same factors in all arrays that have it, so the same number of dimensions.
            if array.leading is not None:
                rank = len(dims) - len(array.dims)
                if n_leading.setdefault(array.leading, rank) != rank:
                    raise ShardingError(
                        f"In the sharding rule of `{operation}`, `{self.text}`, `...{array.leading}` stands for "
                        f"{n_leading[array.leading]} dimensions, and for {rank} in {self.array_name(i)}. Write `...1` "
                        "for leading dimensions that differ from `...`."
                    )
        return named

    def _sizes(self, named: Sequence[tuple[Names, ...]], shapes: Shapes, operation: str) -> dict[str, int]:
        """The length of each factor. Raises ShardingError if the shapes do not determine it, or contradict it."""
        dimensions = [
            _Dimension(array=i, axis=axis, names=names, length=length)
            for i, (dims, shape) in enumerate(zip(named, shapes, strict=True))
            for axis, (names, length) in enumerate(zip(dims, shape, strict=True))
        ]
        sizes = _lengths(dimensions, dict(self.sizes))
        for dimension in dimensions:
            self._check_length(dimension, sizes, operation)

        # A factor of unknown length is in dimensions of length 1 only: `_check_length` raises for others.
        return {name: sizes.get(name, 1) for dimension in dimensions for name in dimension.names}

    def _check_length(self, dimension: _Dimension, sizes: Mapping[str, int], operation: str) -> None:
        """Raise ShardingError unless a length is the product of the dimension's factors, or 1 as in a broadcast."""
        if dimension.length == 1:
            return
        where = f"dimension {dimension.axis} of {self.array_name(dimension.array)}"
        unknown = [name for name in dimension.names if name not in sizes]
        if unknown:
            raise ShardingError(
                f"In the sharding rule of `{operation}`, `{self.text}`, the length of `{unknown[-1]}` is unknown, in "
                f"{where}, of length {dimension.length}. Give `factor_sizes={{'{unknown[-1]}': ...}}`."
            )
        if math.prod(sizes[name] for name in dimension.names) != dimension.length:
            lengths = " * ".join(f"{sizes[name]} ({name})" for name in dimension.names)
            raise ShardingError(
                f"The sharding rule of `{operation}`, `{self.text}`, does not fit the call: {where} has length "
                f"{dimension.length} instead of {lengths}."
            )


def _lengths(dimensions: Sequence[_Dimension], given: Mapping[str, int]) -> dict[str, int]:
    """The lengths of factors: given ones, of whole dimensions, and quotients: with k = 3, `(k g)` of 12 gives g = 4."""
    sizes = dict(given)
    # A length of 1 may be a broadcast, so any other length wins.
    whole = (dimension for dimension in dimensions if len(dimension.names) == 1)
    for dimension in sorted(whole, key=lambda dimension: dimension.length == 1):
        sizes.setdefault(dimension.names[0], dimension.length)

    # A length from one dimension may complete another. Each dimension gives at most one length, so there are at most as
    # many rounds as dimensions.
    compound = [dimension for dimension in dimensions if len(dimension.names) > 1 and dimension.length != 1]
    for _ in compound:
        for dimension in compound:
            unknown = [name for name in dimension.names if name not in sizes]
            known = math.prod(sizes[name] for name in dimension.names if name in sizes)
            if len(unknown) == 1 and known and dimension.length % known == 0:
                sizes[unknown[0]] = dimension.length // known
    return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFactors:
    """The factors of one call by name.

    Attributes:
        sizes: the length of each factor.
        operands: for each operand and dimension the factors, outermost first; empty if the length is 1.
        results: the same for each result.
        rule: the rule of the operation.
    """

    sizes: dict[str, int]
    operands: tuple[tuple[Names, ...], ...]
    results: tuple[tuple[Names, ...], ...]
    rule: ShardingRule

    def blocked(self) -> frozenset[str]:
        """Factors that may not be split."""
        read = {name for dims in self.operands for dim in dims for name in dim}
        # A result without a factor may differ between shards, unless its parts are combined.
        lost = self._absent_from_results().difference(dict(self.rule.reductions))

        def is_blocked(name: str) -> bool:
            # Blocks along two dimensions of an array would lie on its diagonal.
            is_twice = any(sum(name in dim for dim in dims) > 1 for dims in (*self.operands, *self.results))
            return name in self.rule.replicated or name not in read or name in lost or is_twice

        return frozenset(filter(is_blocked, self.sizes))

    def factors(self, flops: float) -> Factors:
        """The factors by number."""
        numbers = {name: f for f, name in enumerate(self.sizes)}

        def numbered(arrays: tuple[tuple[Names, ...], ...]) -> tuple[Dims, ...]:
            return tuple(tuple(tuple(numbers[name] for name in dim) for dim in dims) for dims in arrays)

        blocked = self.blocked()
        combined = self._absent_from_results() - blocked
        return Factors(
            sizes=tuple(self.sizes.values()),
            operands=numbered(self.operands),
            results=numbered(self.results),
            reductions={numbers[name]: how for name, how in self.rule.reductions if name in combined},
            blocked=frozenset(numbers[name] for name in blocked),
            flops=flops,
        )

    def _absent_from_results(self) -> set[str]:
        """Factors that some result lacks."""
        return {name for name in self.sizes if not all(any(name in dim for dim in dims) for dims in self.results)}


def shapes_of(atoms: Iterable[Any]) -> Shapes:
    """The shapes of arrays, atoms or avals."""
    return tuple(tuple(getattr(getattr(atom, "aval", atom), "shape", ())) for atom in atoms)


# ---- rules from rules ------------------------------------------------------------------------------------------------


def batched_rule(rule: ShardingRule, is_batched: Sequence[bool], operands: Shapes, results: Shapes) -> ShardingRule:
    """The rule under `vmap`: one more leading factor of the batched operands and of all results.

    operands, results: the shapes without the new dimension.
    """
    named = rule.named_factors(operands, results, rule.text)
    new = next(name for name in (f"batch{i}" for i in range(len(named.sizes) + 1)) if name not in named.sizes)

    def array(own: ArrayRule, shape: Sequence[int], batched: bool) -> ArrayRule:
        dims = own.of_shape(shape).dims
        return ArrayRule(None, ((new,), *dims) if batched else dims)

    return replace(
        rule,
        operands=tuple(map(array, rule.operands, operands, is_batched)),
        results=tuple(array(own, shape, True) for own, shape in zip(rule.results, results, strict=True)),
    )


def derivative_rule(
    rule: ShardingRule, operands: Shapes, results: Shapes, inexact: tuple[Sequence[int], Sequence[int]]
) -> ShardingRule:
    """The rule of the derivative of an operation: operands and cotangents of results in, cotangents of operands out.

    If shards of the operands give shards or summands of the results, each shard computes the cotangents of its own
    operands, and an operand of all shards has the sum of their cotangents. Other reductions have no such rule.

    inexact: numbers of the operands and of the results with cotangents.
    """
    named = rule.named_factors(operands, results, rule.text)
    how = dict(rule.reductions)
    blocked = named.blocked() | {name for name in named.sizes if how.get(name, "sum") != "sum"}

    read = tuple(map(ArrayRule.of_shape, rule.operands, operands))
    made = tuple(map(ArrayRule.of_shape, rule.results, results))
    of_operands, of_results = inexact
    return ShardingRule(
        text=f"derivative of {rule.text}",
        operands=(*read, *(made[r] for r in of_results)),
        results=tuple(read[k] for k in of_operands),
        reductions=tuple((name, "sum") for name in named.sizes if name not in blocked),
        replicated=tuple(sorted(blocked)),
        sizes=rule.sizes,
    )
