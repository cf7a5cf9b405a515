"""Rules as text: `"b q (k g) d, b s k d -> b q (k g) d"` in, the factors of an equation out.

The notation is that of Shardy and of `jax.experimental.custom_partitioning`: operands before `->`, results behind it,
arrays separated by commas, a name for each dimension. `(k g)` is one dimension made of two factors, the first
outermost; `...` is any number of leading dimensions. A factor may be split if

    some operand has it,  every result has it or its parts are combined,  and nobody said that it needs replication.

`parse_rule` reads the text once, and `ShardingRule.factors` gives the factors for the shapes of one call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from minialpa.errors import ShardingError
from minialpa.rules.factors import Dims, Factors, Reduction, Shapes

#: The factors of one dimension by name, outermost first.
Names = tuple[str, ...]
_TOKEN = re.compile(r"\s*(\.\.\.\d*|[^\W\d]\w*|[()])")


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
        """The factors of each dimension of an array of this shape; None if the ranks do not fit."""
        n_leading = len(shape) - len(self.dims)
        if n_leading < 0 or (n_leading and self.leading is None):
            return None
        return (*((f"...{self.leading}.{i}",) for i in range(n_leading)), *self.dims)

    def of_shape(self, shape: Sequence[int]) -> ArrayRule:
        """The rule for arrays of this one shape, which must fit: `...` becomes a name for each leading dimension."""
        dims = self.named(shape)
        assert dims is not None, (self, shape)
        return ArrayRule(None, dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dimension:
    """One dimension of an array of a call.

    Attributes:
        array: number of the array; results are counted on from the operands.
        axis: number of the dimension in the array.
        names: its factors.
        length: number of elements.
    """

    array: int
    axis: int
    names: Names
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingRule:
    """What may be split in an operation, in terms of named factors.

    Attributes:
        text: the rule as it was written, for messages.
        operands: the dimensions of each operand.
        results: the dimensions of each result.
        reductions: pairs (factor, how partial results are combined if it is split).
        replicated: factors that may not be split.
        sizes: pairs (factor, length) of factors that no array has as a whole dimension.
    """

    text: str
    operands: tuple[ArrayRule, ...]
    results: tuple[ArrayRule, ...]
    reductions: tuple[tuple[str, Reduction], ...] = ()
    replicated: tuple[str, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def arrays(self) -> tuple[ArrayRule, ...]:
        """The dimensions of each operand, then of each result."""
        return (*self.operands, *self.results)

    def names(self) -> dict[str, None]:
        """The names of all factors but those that `...` stands for, in order."""
        return dict.fromkeys(name for array in self.arrays for dim in array.dims for name in dim)

    def inner_names(self) -> frozenset[str]:
        """The names of the factors that some dimension has behind another one."""
        return frozenset(name for array in self.arrays for dim in array.dims for name in dim[1:])

    def array_name(self, i: int) -> str:
        """What messages call an array; results are counted on from the operands."""
        return f"operand {i}" if i < len(self.operands) else f"result {i - len(self.operands)}"

    def named_factors(self, operands: Shapes, results: Shapes, operation: str) -> NamedFactors:
        """The factors of a call with these shapes. Raises ShardingError that names `operation` if they do not fit."""
        named = self._named(operands, results, operation)
        shapes = (*operands, *results)
        sizes = self._sizes(named, shapes, operation)

        # An array of length 1 in a dimension is used by all shards, as in a broadcast.
        arrays = tuple(
            tuple(() if size == 1 else dim for dim, size in zip(dims, shape, strict=True))
            for dims, shape in zip(named, shapes, strict=True)
        )
        return NamedFactors(sizes=sizes, operands=arrays[: len(operands)], results=arrays[len(operands) :], rule=self)

    def _named(self, operands: Shapes, results: Shapes, operation: str) -> list[tuple[Names, ...]]:
        """The factors of each dimension of each array. Raises ShardingError if ranks or numbers of arrays are wrong."""
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

            # `...` stands for the same factors in all arrays that have it, so for as many dimensions in each.
            if array.leading is not None:
                rank = len(dims) - len(array.dims)
                if n_leading.setdefault(array.leading, rank) != rank:
                    raise ShardingError(
                        f"In the sharding rule of `{operation}`, `{self.text}`, `...{array.leading}` stands for "
                        f"{n_leading[array.leading]} dimensions, and for {rank} in {self.array_name(i)}. Write `...1` "
                        "for other leading dimensions than those of `...`."
                    )
        return named

    def _sizes(self, named: Sequence[tuple[Names, ...]], shapes: Shapes, operation: str) -> dict[str, int]:
        """The length of each factor. Raises ShardingError if the shapes do not say it, or not the same everywhere."""
        dimensions = [
            _Dimension(array=i, axis=axis, names=names, length=length)
            for i, (dims, shape) in enumerate(zip(named, shapes, strict=True))
            for axis, (names, length) in enumerate(zip(dims, shape, strict=True))
        ]
        sizes = _with_quotients(dimensions, _with_whole_lengths(dimensions, dict(self.sizes)))
        for dimension in dimensions:
            self._check_length(dimension, sizes, operation)

        # A factor without a known length is in dimensions of length 1 only: `_check_length` raises for any other.
        return {name: sizes.get(name, 1) for dimension in dimensions for name in dimension.names}

    def _check_length(self, dimension: _Dimension, sizes: Mapping[str, int], operation: str) -> None:
        """Raise ShardingError unless a dimension is as long as its factors together, or 1 as in a broadcast."""
        if dimension.length == 1:
            return
        where = f"dimension {dimension.axis} of {self.array_name(dimension.array)}"
        unknown = [name for name in dimension.names if name not in sizes]
        if unknown:
            raise ShardingError(
                f"In the sharding rule of `{operation}`, `{self.text}`, nothing says how long `{unknown[-1]}` is, in "
                f"{where}, of length {dimension.length}. Give `factor_sizes={{'{unknown[-1]}': ...}}`."
            )
        if math.prod(sizes[name] for name in dimension.names) != dimension.length:
            lengths = " * ".join(f"{sizes[name]} ({name})" for name in dimension.names)
            raise ShardingError(
                f"The sharding rule of `{operation}`, `{self.text}`, does not fit the call: {where} has length "
                f"{dimension.length} instead of {lengths}."
            )


def _with_whole_lengths(dimensions: Sequence[_Dimension], given: Mapping[str, int]) -> dict[str, int]:
    """The given lengths of factors, and those of factors that are a whole dimension by themselves."""
    sizes = dict(given)
    for dimension in dimensions:
        # A length of 1 may be that of a broadcast, so any other comes before it.
        if len(dimension.names) == 1 and sizes.get(dimension.names[0], 1) == 1:
            sizes[dimension.names[0]] = dimension.length
    return sizes


def _with_quotients(dimensions: Sequence[_Dimension], given: Mapping[str, int]) -> dict[str, int]:
    """The given lengths of factors, and those that follow: `(k g)` of length 12, where k has 3, says that g has 4."""
    sizes = dict(given)
    compound = [dimension for dimension in dimensions if len(dimension.names) > 1 and dimension.length != 1]

    # A length that is found in one round may be what another dimension lacks in the next one. A dimension gives one
    # length at most, so as many rounds as dimensions are enough.
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
        operands: for each operand and dimension the factors, outermost first; none where the length is 1.
        results: the same for each result.
        rule: where they are from.
    """

    sizes: dict[str, int]
    operands: tuple[tuple[Names, ...], ...]
    results: tuple[tuple[Names, ...], ...]
    rule: ShardingRule

    def blocked(self) -> frozenset[str]:
        """Factors that may not be split."""
        read = {name for dims in self.operands for dim in dims for name in dim}
        # A result that lacks a factor is known to be the same in all shards only if its parts are combined.
        lost = self._absent_from_results().difference(dict(self.rule.reductions))

        def is_blocked(name: str) -> bool:
            # Blocks along two dimensions of one array would lie on its diagonal.
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


# ---- text -----------------------------------------------------------------------------------------------------------


def parse_rule(
    text: str,
    *,
    reductions: Mapping[str, Reduction] | Iterable[str] = (),
    need_replication: Iterable[str] = (),
    factor_sizes: Mapping[str, int] | None = None,
) -> ShardingRule:
    """The rule that a text says. Raises ShardingError if it says none, or if a factor is not in it.

    reductions: how the parts of results are combined, by factor; names alone mean "sum".
    need_replication: factors that may not be split.
    factor_sizes: the lengths of factors that follow from no dimension.
    """
    sides = text.split("->") if isinstance(text, str) else []
    if len(sides) != 2:
        raise ShardingError(f"A sharding rule reads `operands -> results`, as in `b i, i j -> b j`. Got {text!r}.")

    operands, results = (_arrays(side, text) for side in sides)
    by_factor = dict(reductions) if isinstance(reductions, Mapping) else dict.fromkeys(_names(reductions), "sum")
    rule = ShardingRule(
        text=" ".join(text.split()),
        operands=operands,
        results=results,
        reductions=tuple(by_factor.items()),  # type: ignore[arg-type]
        replicated=_names(need_replication),
        sizes=tuple((factor_sizes or {}).items()),
    )
    _check(rule)
    return rule


def _names(names: Iterable[str]) -> tuple[str, ...]:
    """Names in a tuple or, separated by spaces, in a text."""
    return tuple(names.split()) if isinstance(names, str) else tuple(names)


def _arrays(side: str, text: str) -> tuple[ArrayRule, ...]:
    # Nothing at all stands for no array, as on the left of an operation without operands.
    return tuple(_array(part, text) for part in side.split(",")) if side.strip() else ()


def _array(part: str, text: str) -> ArrayRule:
    """One array of a rule: `...` or nothing, then for each dimension a name, or several in parentheses.

    Raises ShardingError, which quotes the `text` of the whole rule, at the first token that may not be there.
    """
    leading: str | None = None
    dims: list[Names] = []
    # The factors behind a `(` whose `)` has not come yet.
    inside: list[str] | None = None

    for token in _tokens(part, text):
        if token.startswith("..."):
            if dims or inside is not None or leading is not None:
                raise ShardingError(f"In the sharding rule `{text}`, `...` may only be the first of an array.")
            leading = token[3:] or "0"

        elif token == "(":
            if inside is not None:
                raise ShardingError(f"The sharding rule `{text}` has `(` within parentheses.")
            inside = []

        elif token == ")":
            if not inside:
                raise ShardingError(f"The sharding rule `{text}` has `)` where no factors are in parentheses.")
            dims.append(tuple(inside))
            inside = None

        else:
            dims.append((token,)) if inside is None else inside.append(token)

    if inside is not None:
        raise ShardingError(f"The sharding rule `{text}` has `(` without `)`.")
    return ArrayRule(leading, tuple(dims))


def _tokens(part: str, text: str) -> Iterator[str]:
    """The names, parentheses and `...` of an array, in order."""
    place, part = 0, part.rstrip()
    while place < len(part):
        found = _TOKEN.match(part, place)
        if found is None:
            raise ShardingError(
                f"The sharding rule `{text}` has {part[place:].strip()[:1]!r} where a name, `(`, `)` or `...` may be."
            )
        yield found[1]
        place = found.end()


def _check(rule: ShardingRule) -> None:
    """Raise ShardingError for what no call can mean."""
    names = rule.names()
    for what, given in (
        ("reductions", dict(rule.reductions)),
        ("need_replication", rule.replicated),
        ("factor_sizes", dict(rule.sizes)),
    ):
        for name in given:
            if name not in names:
                raise ShardingError(f"`{what}` names the factor `{name}`, which the sharding rule `{rule.text}` lacks.")
    for name, how in rule.reductions:
        if how not in get_args(Reduction):
            raise ShardingError(f"`{name}` is combined by {how!r}, which is none of {', '.join(get_args(Reduction))}.")
        if name in rule.replicated:
            raise ShardingError(f"The factor `{name}` of `{rule.text}` is in `reductions` and in `need_replication`.")
    _check_factor_sizes(rule)
    _check_diagonals(rule)


def _check_factor_sizes(rule: ShardingRule) -> None:
    """Raise ShardingError unless lengths are given to inner factors only, and are lengths."""
    inner = rule.inner_names()
    whole = {dim[0] for array in rule.arrays for dim in array.dims if len(dim) == 1}
    for name, size in rule.sizes:
        # The outermost factor of a dimension is shorter in shards, so its length is none of the operation's.
        if name in whole or name not in inner:
            raise ShardingError(f"Leave `{name}` out of `factor_sizes`: it follows from the arrays of each call.")
        if not isinstance(size, int) or size < 1:
            raise ShardingError(f"`factor_sizes` gives the factor `{name}` the length {size!r}.")


def _check_diagonals(rule: ShardingRule) -> None:
    """Raise ShardingError if an array has a factor twice that may be split."""
    for i, array in enumerate(rule.arrays):
        names = [name for dim in array.dims for name in dim]
        twice = next((name for name in names if names.count(name) > 1 and name not in rule.replicated), None)
        if twice is not None:
            raise ShardingError(
                f"In the sharding rule `{rule.text}`, {rule.array_name(i)} has the factor `{twice}` twice. Parts of it "
                f"would lie on a diagonal: give the dimensions two names, or say `need_replication=('{twice}',)`."
            )


# ---- rules from rules -----------------------------------------------------------------------------------------------


def batched_rule(rule: ShardingRule, is_batched: Sequence[bool], operands: Shapes, results: Shapes) -> ShardingRule:
    """The rule under `vmap`: one more leading factor, of the operands that are batched and of all results.

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

    If shards of the operands give shards or summands of the results, a shard's cotangents are those of its own
    operands, and an operand that all shards read has the sum of their cotangents. Other reductions have no such rule.

    inexact: the numbers of the operands and of the results that have cotangents.
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


Flops = Callable[..., float]


def shapes_of(atoms: Iterable[Any]) -> Shapes:
    """The shapes of arrays, atoms or avals."""
    return tuple(tuple(getattr(getattr(atom, "aval", atom), "shape", ())) for atom in atoms)
