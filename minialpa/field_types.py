"""`check_fields` raises an error for the first field of a dataclass of options whose value does not fit its annotation.

Annotations may be classes, unions, literals, pairs, sequences and mappings of these, and numbers within limits:
`Annotated[int, Within(1)]`.
"""

from __future__ import annotations

import functools
import math
import os
import types
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from numbers import Integral, Real
from typing import Annotated, Any, cast

from jax.sharding import PartitionSpec

from minialpa.errors import MinialpaError, ShardingError, meant


@dataclass(frozen=True, slots=True)
class Within:
    """The least and the largest value of a number, or the most and least length of a tuple.

    Attributes:
        is_open: whether `least` itself is too small.
    """

    least: float
    most: float = math.inf
    is_open: bool = False

    def __contains__(self, number: float) -> bool:
        return (self.least < number if self.is_open else self.least <= number) and number <= self.most


#: A number of things, at least 1.
Count = Annotated[int, Within(1)]
NotNegative = Annotated[float, Within(0)]
Positive = Annotated[float, Within(0, is_open=True)]
#: The lengths of a mesh along its axes.
MeshLengths = Annotated[tuple[Count, ...], Within(1, 3)]


def check_fields(options: Any, *, but: Sequence[str] = (), error: type[MinialpaError] = ShardingError) -> None:
    """Raise `error` for the first field whose value does not fit its annotation.

    but: names of unchecked fields.
    """
    for name, fits, hint in _checks(cast(Hashable, type(options))):
        if name not in but and not fits(getattr(options, name)):
            check_value(name, getattr(options, name), hint, error)


def check_value(name: str, value: Any, hint: Any, error: type[MinialpaError] = ShardingError) -> None:
    """Raise `error` if the value of the option `name` does not fit `hint`."""
    kind = _kind(hint)
    if not kind.fits(value):
        near = meant(value, kind.names) if isinstance(value, str) else _advice(value, hint)
        raise error(f"`{name}` must be {_alternatives(kind.one)}; got {value!r}.{near}")


@functools.cache
def _checks(options: Hashable) -> tuple[tuple[str, Callable[[Any], bool], Any], ...]:
    """Name, test and annotation of each field of a dataclass. Options are made often, annotations have slow hashes."""
    hints = typing.get_type_hints(cast(type, options), include_extras=True)
    return tuple((name, _kind(hint).fits, hint) for name, hint in hints.items())


def _advice(value: Any, hint: Any) -> str:
    """How to write a dict of fields as the dataclass of the annotation, if it has one."""
    kinds = [kind for kind in (hint, *typing.get_args(hint)) if is_dataclass(kind)]
    if not isinstance(value, dict) or len(kinds) != 1 or not all(isinstance(name, str) for name in value):
        return ""
    fields = ", ".join(f"{name}={one!r}" for name, one in value.items())
    return f" Write `{getattr(kinds[0], '__name__', '')}({fields})`."


# ---- kinds of annotations -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kind:
    """The values of an annotation.

    Attributes:
        one: words for one value, for each alternative: "an integer >= 1", "None".
        several: the same for several values.
        names: the strings among the values of a literal.
    """

    fits: Callable[[Any], bool]
    one: tuple[str, ...]
    several: tuple[str, ...]
    names: tuple[str, ...] = ()


# Each function makes the `_Kind` of one form of annotation, from the arguments of the annotation.


@functools.cache
def _kind(hint: Any) -> _Kind:
    make = _MAKERS.get(typing.get_origin(hint))
    return _class(hint) if make is None else make(*typing.get_args(hint))


def _class(hint: Any) -> _Kind:
    if hint in _NAMED:
        return _NAMED[hint]
    article = "an" if hint.__name__[0] in "AEIOU" else "a"
    return _Kind(lambda x: isinstance(x, hint), (f"{article} {hint.__name__}",), (f"{hint.__name__}s",))


def _union(*hints: Any) -> _Kind:
    kinds = [_kind(hint) for hint in hints]
    return _Kind(
        fits=lambda x: any(kind.fits(x) for kind in kinds),
        one=tuple(words for kind in kinds for words in kind.one),
        several=tuple(words for kind in kinds for words in kind.several),
        names=tuple(name for kind in kinds for name in kind.names),
    )


def _limited(hint: Any, limits: Within) -> _Kind:
    kind = _kind(hint)
    if typing.get_origin(hint) is tuple:
        length = f" of {limits.least} to {limits.most} "
        return _Kind(
            fits=lambda x: kind.fits(x) and len(x) in limits,
            one=tuple(words.replace(" of ", length, 1) for words in kind.one),
            several=tuple(words.replace(" of ", length, 1) for words in kind.several),
        )
    above = ">" if limits.is_open else ">="
    text = f" from {limits.least:,} to {limits.most:,}" if limits.most < math.inf else f" {above} {limits.least:,}"
    return _Kind(
        fits=lambda x: kind.fits(x) and x in limits,
        one=(kind.one[0] + text,),
        several=(kind.several[0] + text,),
    )


def _literal(*values: Any) -> _Kind:
    words, names = tuple(map(repr, values)), tuple(one for one in values if isinstance(one, str))
    return _Kind(lambda x: any(type(x) is type(one) and x == one for one in values), words, words, names)


def _tuple(*hints: Any) -> _Kind:
    if Ellipsis in hints:
        return _sequence(hints[0])
    first, second = map(_kind, hints)
    is_alike = hints[0] == hints[1]
    each = _alternatives(first.several) if is_alike else f"{_alternatives(first.one)} and {_alternatives(second.one)}"
    return _Kind(
        fits=lambda x: isinstance(x, tuple | list) and len(x) == 2 and first.fits(x[0]) and second.fits(x[1]),
        one=(f"a pair of {each}",),
        several=(f"pairs of {each}",),
    )


def _sequence(hint: Any) -> _Kind:
    kind = _kind(hint)
    each = _alternatives(kind.several)
    return _Kind(
        fits=lambda x: isinstance(x, tuple | list) and all(map(kind.fits, x)),
        one=(f"a tuple of {each}",),
        several=(f"tuples of {each}",),
    )


def _mapping(key_hint: Any, entry_hint: Any) -> _Kind:
    key, entry = _kind(key_hint), _kind(entry_hint)
    each = f"from {_alternatives(key.several)} to {_alternatives(entry.several)}"
    return _Kind(
        fits=lambda x: isinstance(x, Mapping) and all(map(key.fits, x)) and all(map(entry.fits, x.values())),
        one=(f"a mapping {each}",),
        several=(f"mappings {each}",),
    )


def _number(kind: type, usual: type, one: str, several: str) -> _Kind:
    """`usual` is a class of `kind`, tested first, since the test for an abstract class is slow."""
    return _Kind(lambda x: type(x) is usual or (isinstance(x, kind) and type(x) is not bool), (one,), (several,))


def _alternatives(words: Sequence[str]) -> str:
    """Alternatives as text: "an integer >= 1 or None"."""
    if len(words) < 3:
        return " or ".join(words)
    return f"{', '.join(words[:-1])}, or {words[-1]}"


def _function(*_: Any) -> _Kind:
    return _Kind(callable, ("a function",), ("functions",))


def _path(_: Any) -> _Kind:
    return _Kind(lambda x: isinstance(x, os.PathLike), ("a path",), ("paths",))


#: From the origin of an annotation to a function of its arguments.
_MAKERS: Mapping[Any, Callable[..., _Kind]] = {
    types.UnionType: _union,
    typing.Union: _union,
    Annotated: _limited,
    typing.Literal: _literal,
    tuple: _tuple,
    Sequence: _sequence,
    dict: _mapping,
    Mapping: _mapping,
    Callable: _function,
    os.PathLike: _path,
}
#: Classes whose words do not follow from their name.
_NAMED: Mapping[Any, _Kind] = {
    Any: _Kind(lambda x: True, ("anything",), ("anything",)),
    bool: _Kind(lambda x: isinstance(x, bool), ("True", "False"), ("True", "False")),
    int: _number(Integral, int, "an integer", "integers"),
    float: _number(Real, float, "a number", "numbers"),
    str: _Kind(lambda x: isinstance(x, str), ("a string",), ("strings",)),
    types.NoneType: _Kind(lambda x: x is None, ("None",), ("None",)),
    PartitionSpec: _Kind(lambda x: isinstance(x, PartitionSpec), ("a PartitionSpec",), ("PartitionSpecs",)),
}
