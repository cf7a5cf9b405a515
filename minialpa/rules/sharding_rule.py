"""The sharding rule of an operation and the shapes of a call in, the `Factors` of the call out.

    ShardingRule    for all calls    b i, i j -> b j
    NamedFactors    for one call     b = 32, i = 64, j = 16

A factor may be split if some operand has it, every result has it or its partial results are combined, and the rule does
not list it for replication.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from minialpa.errors import ShardingError
from minialpa.rules.factors import Dims, Factors, Reduction, Shapes

#: Factors of one dimension, outermost first.
Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ArrayRule:
    """One array of a rule.

    leading: the name of its leading dimensions, "0" for `...` and "1" for `...1`; None if it has no `...`.
    dims: other dimensions.
    """

    leading: str | None
    dims: tuple[Names, ...]

    def named(self, shape: Sequence[int]) -> tuple[Names, ...] | None:
        """None if the rank does not fit."""
        n_leading = len(shape) - len(self.dims)
        if n_leading < 0 or (n_leading and self.leading is None):
            return None
        return (*((f"...{self.leading}.{i}",) for i in range(n_leading)), *self.dims)

    def of_shape(self, shape: Sequence[int]) -> ArrayRule:
        """Each dimension of `...` gets a name."""
        dims = self.named(shape)
        assert dims is not None, (self, shape)
        return ArrayRule(None, dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dimension:
    """Dimension `axis` of array number `array` of a call, operands first."""

    array: int
    axis: int
    names: Names
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingRule:
    """The named factors of an operation, for any shapes.

    text: for messages.
    reductions: pairs (factor, reduction of partial results).
    replicated: factors that may not be split.
    sizes: pairs (factor, length) of inner factors with a fixed length.
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
        """In order of appearance, without dimensions of `...`."""
        return dict.fromkeys(name for array in self.arrays for dim in array.dims for name in dim)

    def inner_names(self) -> frozenset[str]:
        """Factors after another one in some dimension, such as g in `(k g)`."""
        return frozenset(name for array in self.arrays for dim in array.dims for name in dim[1:])

    def array_name(self, i: int) -> str:
        return f"operand {i}" if i < len(self.operands) else f"result {i - len(self.operands)}"

    def named_factors(self, operands: Shapes, results: Shapes, operation: str) -> NamedFactors:
        """Raises ShardingError if the shapes do not fit the rule."""
        named = self._named_dims(operands, results, operation)
        shapes = (*operands, *results)
        sizes = self._sizes(named, shapes, operation)

        arrays = tuple(
            tuple(() if size == 1 else dim for dim, size in zip(dims, shape, strict=True))
            for dims, shape in zip(named, shapes, strict=True)
        )
        return NamedFactors(sizes=sizes, operands=arrays[: len(operands)], results=arrays[len(operands) :], rule=self)

    def _named_dims(self, operands: Shapes, results: Shapes, operation: str) -> list[tuple[Names, ...]]:
        """By array and dimension. Raises ShardingError for wrong numbers or ranks."""
        for kind, rules, shapes in (("operand", self.operands, operands), ("result", self.results, results)):
            if len(rules) != len(shapes):
                raise ShardingError(
                    f"The sharding rule of `{operation}`, `{self.text}`, has {len(rules)} {kind}s, but the call has "
                    f"{len(shapes)}. Write {len(shapes)} {kind}s in the rule."
                )

        named, n_leading = [], dict[str, int]()
        for i, (array, shape) in enumerate(zip(self.arrays, (*operands, *results), strict=True)):
            dims = array.named(shape)
            if dims is None:
                raise ShardingError(
                    f"The sharding rule of `{operation}`, `{self.text}`, has {len(array.dims)} dimensions for "
                    f"{self.array_name(i)}, whose shape is {tuple(shape)}. Name each dimension, or begin with `...`."
                )
            named.append(dims)

            # `...` stands for the same dimensions in all arrays that have it.
            if array.leading is not None:
                rank = len(dims) - len(array.dims)
                if n_leading.setdefault(array.leading, rank) != rank:
                    raise ShardingError(
                        f"In the sharding rule of `{operation}`, `{self.text}`, `...{array.leading.removeprefix('0')}` "
                        f"stands for {n_leading[array.leading]} dimensions in one array and for {rank} in "
                        f"{self.array_name(i)}. Write `...1` in one of the two."
                    )
        return named

    def _sizes(self, named: Sequence[tuple[Names, ...]], shapes: Shapes, operation: str) -> dict[str, int]:
        """Raises ShardingError if the shapes leave a length open or contradict it."""
        dimensions = [
            _Dimension(array=i, axis=axis, names=names, length=length)
            for i, (dims, shape) in enumerate(zip(named, shapes, strict=True))
            for axis, (names, length) in enumerate(zip(dims, shape, strict=True))
        ]
        sizes = _lengths(dimensions, dict(self.sizes))
        for dimension in dimensions:
            self._check_length(dimension, sizes, operation)

        # Other factors are in dimensions of length 1 only.
        return {name: sizes.get(name, 1) for dimension in dimensions for name in dimension.names}

    def _check_length(self, dimension: _Dimension, sizes: Mapping[str, int], operation: str) -> None:
        """Raise ShardingError unless a length is the product of the factors, or 1 as in a broadcast."""
        if dimension.length == 1:
            return
        where = f"dimension {dimension.axis} of {self.array_name(dimension.array)}"
        unknown = [name for name in dimension.names if name not in sizes]
        if unknown:
            raise ShardingError(
                f"The sharding rule of `{operation}`, `{self.text}`, does not determine the length of `{unknown[-1]}` "
                f"in {where}, of length {dimension.length}. Set `factor_sizes={{'{unknown[-1]}': ...}}`."
            )
        if math.prod(sizes[name] for name in dimension.names) != dimension.length:
            lengths = " * ".join(f"{sizes[name]} ({name})" for name in dimension.names)
            raise ShardingError(
                f"The sharding rule of `{operation}`, `{self.text}`, does not fit the call, because {where} has the "
                f"length {dimension.length} instead of {lengths}. Correct the rule or the shapes of the arrays."
            )


def _lengths(dimensions: Sequence[_Dimension], given: Mapping[str, int]) -> dict[str, int]:
    """Given, of whole dimensions, or quotients: `(k g)` of length 12, k = 3 gives g = 4."""
    sizes = dict(given)
    # A length of 1 may be a broadcast, so any other length wins.
    whole = (dimension for dimension in dimensions if len(dimension.names) == 1)
    for dimension in sorted(whole, key=lambda dimension: dimension.length == 1):
        sizes.setdefault(dimension.names[0], dimension.length)

    # A length may complete another. A dimension gives at most one length, which bounds the rounds.
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

    operands, results: for each array and dimension the factors, outermost first; empty if the length is 1.
    """

    sizes: dict[str, int]
    operands: tuple[tuple[Names, ...], ...]
    results: tuple[tuple[Names, ...], ...]
    rule: ShardingRule

    def blocked(self) -> frozenset[str]:
        read = {name for dims in self.operands for dim in dims for name in dim}
        # A result without a factor may differ between shards.
        lost = self._absent_from_results().difference(dict(self.rule.reductions))

        def is_blocked(name: str) -> bool:
            # Blocks along two dimensions would lie on the diagonal.
            is_twice = any(sum(name in dim for dim in dims) > 1 for dims in (*self.operands, *self.results))
            return name in self.rule.replicated or name not in read or name in lost or is_twice

        return frozenset(filter(is_blocked, self.sizes))

    def factors(self, flops: float) -> Factors:
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
        return {name for name in self.sizes if not all(any(name in dim for dim in dims) for dims in self.results)}


def shapes_of(atoms: Iterable[Any]) -> Shapes:
    return tuple(tuple(getattr(getattr(atom, "aval", atom), "shape", ())) for atom in atoms)


# ---- rules from rules ------------------------------------------------------------------------------------------------


def batched_rule(rule: ShardingRule, is_batched: Sequence[bool], operands: Shapes, results: Shapes) -> ShardingRule:
    """Under `vmap`: one more leading factor of the batched operands and of all results.

    operands, results: the shapes without the new dimension.
    """
    named = rule.named_factors(operands, results, rule.text)
    new = next(name for name in (f"batch{i}" for i in range(len(named.sizes) + 1)) if name not in named.sizes)

    def array(of_array: ArrayRule, shape: Sequence[int], batched: bool) -> ArrayRule:
        dims = of_array.of_shape(shape).dims
        return ArrayRule(None, ((new,), *dims) if batched else dims)

    return replace(
        rule,
        operands=tuple(map(array, rule.operands, operands, is_batched)),
        results=tuple(array(one, shape, batched=True) for one, shape in zip(rule.results, results, strict=True)),
    )


def derivative_rule(
    rule: ShardingRule, operands: Shapes, results: Shapes, inexact: tuple[Sequence[int], Sequence[int]]
) -> ShardingRule:
    """Operands and cotangents of results in, cotangents of operands out.

    `b i, i j -> b j` becomes `b i, i j, b j -> b i, i j`. The cotangent of an operand without a split factor, such as
    `i j` without b, is a sum over shards. Factors with another reduction than "sum" are replicated.

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
