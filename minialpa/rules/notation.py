"""The text of a sharding rule in, a `ShardingRule` out.

    parse_rule("b q (k g) d, b s k d -> b q (k g) d")

As in Shardy and `jax.experimental.custom_partitioning`, operands stand before `->` and results after it, commas
separate arrays, and each dimension has a name. `(k g)` is one dimension with two factors, k outermost; `...` is any
number of leading dimensions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import get_args

from minialpa.errors import ShardingError, meant
from minialpa.rules.factors import Reduction
from minialpa.rules.sharding_rule import ArrayRule, ShardingRule

_NAME = r"[^\W\d]\w*\b"
_DIMENSION = re.compile(rf"{_NAME}|\((?:\s*{_NAME})+\s*\)")
_ARRAY = re.compile(rf"\s*(\.\.\.\d*)?((?:\s*(?:{_DIMENSION.pattern}))*)\s*")


def parse_rule(
    text: str,
    *,
    reductions: Mapping[str, Reduction] | Iterable[str] = (),
    need_replication: Iterable[str] = (),
    factor_sizes: Mapping[str, int] | None = None,
) -> ShardingRule:
    """Parse a rule. Raises ShardingError for an unreadable text, or for arguments that contradict it.

    reductions: factors whose partial results are combined, with their reductions; names alone mean "sum".
    need_replication: factors that may not be split.
    factor_sizes: the lengths of inner factors, such as g of `(k g)`, that no dimension determines.
    """
    sides = text.split("->") if isinstance(text, str) else []
    if len(sides) != 2:
        raise ShardingError(f"Write a sharding rule as `operands -> results`, such as `b i, i j -> b j`; got {text!r}.")

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
    _check_rule(rule)
    return rule


def _names(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(names.split()) if isinstance(names, str) else tuple(names)


def _arrays(side: str, text: str) -> tuple[ArrayRule, ...]:
    # An empty side is an operation without operands or results.
    return tuple(_array(part, text) for part in side.split(",")) if side.strip() else ()


def _array(part: str, text: str) -> ArrayRule:
    found = _ARRAY.fullmatch(part)
    if found is None:
        raise ShardingError(
            f"The part `{part.strip()}` of the sharding rule `{text}` cannot be read. Write one name for each "
            "dimension of an array, or several names in parentheses, with `...` first for leading dimensions, such as "
            "`... b (h d)`."
        )
    leading = None if found[1] is None else found[1][3:] or "0"
    return ArrayRule(leading, tuple(tuple(dim.strip("()").split()) for dim in _DIMENSION.findall(found[2])))


def _check_rule(rule: ShardingRule) -> None:
    names = rule.names()
    for what, given in (
        ("reductions", dict(rule.reductions)),
        ("need_replication", rule.replicated),
        ("factor_sizes", dict(rule.sizes)),
    ):
        for name in given:
            if name not in names:
                raise ShardingError(
                    f"`{what}` has the name `{name}`, which is not in the sharding rule `{rule.text}`. Use one of "
                    f"{', '.join(f'`{one}`' for one in names)}."
                )

    for name, how in rule.reductions:
        if how not in get_args(Reduction):
            raise ShardingError(
                f"`reductions` has {how!r} for `{name}`.{meant(how, get_args(Reduction))} Choose one of "
                f"{', '.join(get_args(Reduction))}."
            )
        if name in rule.replicated:
            raise ShardingError(
                f"`{name}` of the sharding rule `{rule.text}` is in `reductions` and in `need_replication`. Remove it "
                "from one of the two."
            )

    _check_factor_sizes(rule)
    _check_diagonals(rule)


def _check_factor_sizes(rule: ShardingRule) -> None:
    """Raise ShardingError for the length of an outermost factor, or if it is no positive integer."""
    inner = rule.inner_names()
    whole = {dim[0] for array in rule.arrays for dim in array.dims if len(dim) == 1}
    for name, size in rule.sizes:
        # The outermost factor of a dimension is shorter on shards.
        if name in whole or name not in inner:
            raise ShardingError(
                f"Remove `{name}` from `factor_sizes` of the rule `{rule.text}`: its length follows from the arrays of "
                "each call."
            )
        if not isinstance(size, int) or size < 1:
            raise ShardingError(f"`factor_sizes` has the length {size!r} for `{name}`. Give a positive integer.")


def _check_diagonals(rule: ShardingRule) -> None:
    """Raise ShardingError if an array has a factor twice that may be split."""
    for i, array in enumerate(rule.arrays):
        names = [name for dim in array.dims for name in dim]
        twice = next((name for name in names if names.count(name) > 1 and name not in rule.replicated), None)
        if twice is not None:
            raise ShardingError(
                f"{rule.array_name(i).capitalize()} of the sharding rule `{rule.text}` has the name `{twice}` twice, "
                "so its shards would lie on a diagonal. Give the dimensions two names, or set "
                f"`need_replication=('{twice}',)`."
            )
