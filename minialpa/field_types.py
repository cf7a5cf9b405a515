"""Checks the fields of a dataclass of options by their annotations, and raises an error for the first wrong value.

Annotations may be classes, unions, literals, pairs, sequences and mappings of them, and numbers within limits:
`Annotated[int, Within(1)]`.
"""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from numbers import Integral, Real
from typing import Annotated, Any, cast

from jax.sharding import PartitionSpec

from minialpa.errors import ShardingError


@dataclass(frozen=True, slots=True)
class Within:
    """The least and the largest value of a number."""

    least: float
    most: float = math.inf


#: A number of things, at least 1.
Count = Annotated[int, Within(1)]
#: A number that is not negative.
NotNegative = Annotated[float, Within(0)]

#: For types of numbers the class of their values, and the words for one value and for several.
_NUMBERS: Mapping[Any, tuple[type, str, str]] = {
    int: (Integral, "an integer", "integers"),
    float: (Real, "a number", "numbers"),
}
_WORDS: Mapping[Any, tuple[str, str]] = {
    str: ("a string", "strings"),
    types.NoneType: ("None", "None"),
    Any: ("anything", "anything"),
    PartitionSpec: ("a PartitionSpec", "PartitionSpecs"),
}


def check_fields(options: Any, *, but: Sequence[str] = ()) -> None:
    """Raise ShardingError for the first field whose value does not fit its annotation, except the fields `but`."""
    for name, hint in _hints(cast(Hashable, type(options))).items():
        if name not in but:
            check_value(name, getattr(options, name), hint)


def check_value(name: str, value: Any, hint: Any) -> None:
    """Raise ShardingError unless the value of the option `name` has this type."""
    if not _fits(value, hint):
        raise ShardingError(f"`{name}` is {_words(hint)}; got {value!r}.{_advice(value, hint)}")


@functools.cache
def _hints(kind: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(cast(type, kind), include_extras=True)


def _fits(value: Any, hint: Any) -> bool:
    arguments = typing.get_args(hint)
    match typing.get_origin(hint):
        case types.UnionType | typing.Union:
            return any(_fits(value, one) for one in arguments)
        case typing.Annotated:
            return _fits(value, arguments[0]) and arguments[1].least <= value <= arguments[1].most
        case typing.Literal:
            return any(type(value) is type(one) and value == one for one in arguments)
        case kind if kind is tuple and Ellipsis not in arguments:
            is_tuple = isinstance(value, tuple | list) and len(value) == len(arguments)
            return is_tuple and all(map(_fits, value, arguments))
        case kind if kind is tuple or kind is Sequence:
            return isinstance(value, tuple | list) and all(_fits(one, arguments[0]) for one in value)
        case kind if kind is dict or kind is Mapping:
            key, entry = arguments
            return isinstance(value, Mapping) and all(_fits(k, key) and _fits(v, entry) for k, v in value.items())
    if hint in _NUMBERS:
        return isinstance(value, _NUMBERS[hint][0]) and not isinstance(value, bool)
    return hint is Any or isinstance(value, hint)


def _words(hint: Any, several: bool = False) -> str:
    """The values of a type in words, such as "an integer >= 1, or None"; in the plural for `several`."""
    *most, last = _alternatives(hint, several)
    match most:
        case []:
            return last
        case [other]:
            return f"{other} or {last}"
        case _:
            return f"{', '.join(most)}, or {last}"


def _alternatives(hint: Any, several: bool) -> list[str]:
    arguments = typing.get_args(hint)
    match typing.get_origin(hint):
        case types.UnionType | typing.Union:
            return [words for one in arguments for words in _alternatives(one, several)]
        case typing.Annotated:
            number, limits = _words(arguments[0], several), arguments[1]
            is_bounded = limits.most < math.inf
            return [
                f"{number} from {limits.least:,} to {limits.most:,}" if is_bounded else f"{number} >= {limits.least:,}"
            ]
        case typing.Literal:
            return [repr(one) for one in arguments]
        case kind if kind is tuple and Ellipsis not in arguments:
            first, second = arguments
            each = _words(first, several=True) if first == second else f"{_words(first)} and {_words(second)}"
            return [f"pairs of {each}" if several else f"a pair of {each}"]
        case kind if kind is tuple or kind is Sequence:
            return [f"{'tuples' if several else 'a tuple'} of {_words(arguments[0], several=True)}"]
        case kind if kind is dict or kind is Mapping:
            key, entry = (_words(one, several=True) for one in arguments)
            return [f"{'mappings' if several else 'a mapping'} from {key} to {entry}"]
    if hint is bool:
        return ["True", "False"]
    if hint in _NUMBERS:
        _, one, many = _NUMBERS[hint]
        return [many if several else one]
    name: str = getattr(hint, "__name__", str(hint))
    one, many = _WORDS.get(hint, (f"{'an' if name[0] in 'AEIOU' else 'a'} {name}", f"{name}s"))
    return [many if several else one]


def _advice(value: Any, hint: Any) -> str:
    """For a dict of fields, how to write it as the dataclass in the annotation; else empty."""
    kinds = [kind for kind in (hint, *typing.get_args(hint)) if is_dataclass(kind)]
    if not isinstance(value, dict) or len(kinds) != 1 or not all(isinstance(name, str) for name in value):
        return ""
    fields = ", ".join(f"{name}={one!r}" for name, one in value.items())
    return f" Write `{getattr(kinds[0], '__name__', '')}({fields})`."
