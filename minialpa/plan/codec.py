"""Frozen dataclasses and named tuples in, JSON data out, and back, by the types of their fields.

`decode` accepts only results of `encode`. Its error names the first field that is missing, unknown, or NaN, or has
another type.

    Spec             "S0,R"
    PartitionSpec    axis names: ["x", null]
    EquationSpecs    without names, because a plan has thousands: [operands, made, results, body]
    dataclass        object with all fields

msgspec does not fit: it accepts NaN, unknown fields and missing fields with defaults.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import reprlib
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union

from jax.sharding import PartitionSpec

from minialpa.errors import MinialpaError, VerifyError
from minialpa.plan.record import PlanRecord
from minialpa.sharding import EquationSpecs, Spec

T = TypeVar("T")

VERSION = 12
#: Most characters of a plan's text. Parsed JSON may take 25 times its length in memory.
MOST_CHARACTERS = 16 * 2**20

_UNCONSTRAINED = "?"  # PartitionSpec.UNCONSTRAINED; no mesh axis has this name
_MOST_LOOPS = 32  # depth of nested loops

#: Bounds the text of a wrong value in an error.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 3, 60, 60, 60


def encode(value: Any) -> Any:
    if isinstance(value, Spec):
        return str(value)
    if isinstance(value, EquationSpecs):
        fields = [encode(value.operands), encode(value.made), encode(value.results), encode(value.body)]
        return [*fields, True] if value.is_balanced else fields
    if isinstance(value, PartitionSpec):
        return [_UNCONSTRAINED if entry is PartitionSpec.UNCONSTRAINED else encode(entry) for entry in value]
    if dataclasses.is_dataclass(value):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [encode(v) for v in value]
    return value


def decode(kind: type[T], data: Any, where: str) -> T:
    """Raises VerifyError, with the path `where`, unless `data` encodes a value of type `kind`."""
    value: T = _decode(kind, data, where)
    return value


def _decode(kind: Any, data: Any, where: str) -> Any:
    if kind is Spec:
        return _decode_spec(data, where)
    if kind is EquationSpecs:
        return _decode_equation_specs(data, where)
    if kind is PartitionSpec:
        return _decode_partition_spec(data, where)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _decode_record(kind, data, where)
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*_decode_tuple(tuple(typing.get_type_hints(kind).values()), data, where))
    origin = typing.get_origin(kind)
    if origin is tuple:
        return _decode_tuple(typing.get_args(kind), data, where)
    if origin is Literal:
        known = typing.get_args(kind)
        is_known = any(type(data) is type(value) and data == value for value in known)
        _expect(is_known, data, f"one of {', '.join(f'`{value}`' for value in known)}", where)
        return data
    if origin in (Union, types.UnionType):
        return _decode_union(typing.get_args(kind), data, where)
    return _decode_scalar(kind, data, where)


def _expect(holds: bool, data: Any, expected: str, where: str) -> None:
    if not holds:
        text = _SHORT.repr(data)
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        raise VerifyError(f"Not a plan: `{where}` is {shown}; expected {expected}. Write plans with `Plan.save`.")


def _decode_scalar(kind: Any, data: Any, where: str) -> Any:
    if kind is float:
        _expect(_is_number(data), data, "a number", where)
        return data
    names = {int: "an integer", str: "a text", bool: "true or false"}
    _expect(type(data) is kind, data, names[kind], where)
    return data


def _is_number(data: Any) -> bool:
    if not isinstance(data, int | float) or isinstance(data, bool):
        return False
    try:
        return not math.isnan(data)
    except OverflowError:
        return False


def _decode_tuple(kinds: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    _expect(isinstance(data, list), data, "a list", where)
    if kinds[1:] == (...,):
        return tuple(_decode(kinds[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    _expect(len(data) == len(kinds), data, f"a list of {len(kinds)}", where)
    return tuple(_decode(k, item, f"{where}[{i}]") for i, (k, item) in enumerate(zip(kinds, data, strict=True)))


def _decode_union(kinds: tuple[Any, ...], data: Any, where: str) -> Any:
    if data is None and type(None) in kinds:
        return None
    others = [k for k in kinds if k is not type(None) and typing.get_origin(k) is not Mapping]
    assert len(others) == 1, kinds
    return _decode(others[0], data, where)


@functools.cache
def _field_types(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def _decode_record(kind: type, data: Any, where: str) -> Any:
    fields = _field_types(kind)
    _expect(isinstance(data, dict), data, f"the fields of a {kind.__name__}", where)
    for name in fields:
        if name not in data:
            raise VerifyError(f"Not a plan: `{where}.{name}` is missing. Write plans with `Plan.save`.")
    for name in data:
        if name not in fields:
            raise VerifyError(
                f"Not a plan: `{where}` has the unknown field `{name}`. Remove the field, or write the plan with "
                "`Plan.save`."
            )
    values = {name: _decode(k, data[name], f"{where}.{name}") for name, k in fields.items()}
    try:
        return kind(**values)
    except (MinialpaError, TypeError, ValueError) as error:
        raise VerifyError(
            f"Not a plan: `{where}` is wrong. {str(error).rstrip('.')}. Write plans with `Plan.save`."
        ) from error


@functools.lru_cache(maxsize=4096)
def _parsed_spec(text: str) -> Spec | None:
    """The spec, if `text` is its only form."""
    try:
        spec = Spec.parse(text)
    except (MinialpaError, ValueError):
        return None
    return spec if str(spec) == text else None


def _decode_spec(data: Any, where: str) -> Spec:
    spec = _parsed_spec(data) if isinstance(data, str) else None
    _expect(spec is not None, data, "a sharding spec such as `S0,R`", where)
    assert spec is not None
    return spec


def _decode_equation_specs(data: Any, where: str, n_outside: int = 0) -> EquationSpecs:
    """n_outside: number of loops around the equation, which bounds the recursion."""
    is_whole = isinstance(data, list) and (len(data) == 4 or (len(data) == 5 and data[4] is True))
    _expect(is_whole, data, "a list of operands, made, results, body, and `true` if it is balanced", where)
    specs = [_decode_tuple((Spec, ...), data[i], f"{where}[{i}]") for i in range(3)]
    body, inside = data[3], f"{where}[3]"
    _expect(isinstance(body, list), body, "a list", inside)
    _expect(not body or n_outside < _MOST_LOOPS, body, f"at most {_MOST_LOOPS} loops inside each other", inside)
    equations = tuple(_decode_equation_specs(item, f"{inside}[{i}]", n_outside + 1) for i, item in enumerate(body))
    return EquationSpecs(specs[0], specs[1], specs[2], equations, len(data) == 5)


def _decode_partition_spec(data: Any, where: str) -> PartitionSpec:
    _expect(isinstance(data, list), data, "a list of axis names", where)
    entries: list[Any] = []
    for i, entry in enumerate(data):
        if entry == _UNCONSTRAINED:
            entries.append(PartitionSpec.UNCONSTRAINED)
        elif isinstance(entry, list):
            entries.append(_decode_tuple((str, ...), entry, f"{where}[{i}]"))
        else:
            _expect(entry is None or isinstance(entry, str), entry, "an axis name, a list of names, or null", where)
            entries.append(entry)
    try:
        return PartitionSpec(*entries)
    except (TypeError, ValueError) as error:
        raise VerifyError(
            f"Not a plan: `{where}` is wrong. {str(error).rstrip('.')}. Write plans with `Plan.save`."
        ) from error


# ---- text -----------------------------------------------------------------------------------------------------------


def file_text(plan: PlanRecord) -> str:
    return json.dumps({"version": VERSION, "plan": encode(plan)}, sort_keys=True, separators=(",", ":"))


def fields_in(text: str) -> Any:
    """The plan's JSON data in a text of `file_text`. Raises VerifyError for any other text."""
    if len(text) > MOST_CHARACTERS:
        raise VerifyError(
            f"Not a plan: the file has more than {MOST_CHARACTERS:,} characters, but plans of large models have a few "
            "million. Write plans with `Plan.save`."
        )
    try:
        data = json.loads(text, object_pairs_hook=_unique_fields)
    except VerifyError:
        raise
    except (ValueError, RecursionError) as error:
        raise VerifyError(f"Not a plan: the text is no JSON ({error}). Write plans with `Plan.save`.") from error

    # The version comes first: a valid file of another version has other fields.
    if not isinstance(data, dict) or "version" not in data:
        raise VerifyError("Not a plan: the JSON has no field `version`. Write plans with `Plan.save`.")
    version = data["version"]
    if version != VERSION or isinstance(version, bool):
        raise VerifyError(
            f"The plan has version {version!r}, but this minialpa reads version {VERSION}. Make a new plan of the step."
        )
    if data.keys() != {"version", "plan"}:
        raise VerifyError(
            f"Not a plan: the JSON has the fields {', '.join(sorted(data)[:8])}; expected `plan` and `version`. Write "
            "plans with `Plan.save`."
        )
    return data["plan"]


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise VerifyError(
            f"Not a plan: a JSON object has the field `{twice[:60]}` twice. Write plans with `Plan.save`."
        )
    return fields
