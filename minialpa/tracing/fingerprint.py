"""Fingerprints of traced programs: whether two programs are equal, and the first equation in which they differ.

A program becomes lines of text without names, equal in every process. A `Fingerprint` holds a digest of all lines and,
for `first_change`, digests of the first n/32, 2n/32, ... of the n equations.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, cast

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from minialpa.ir.equations import dtype_name, is_in_host, is_literal, shape_of
from minialpa.support.private_jax import unusual_settings

#: A change is located within 1/32 of the equations.
_N_PREFIXES = 32


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The identity of a traced program in a plan.

    Attributes:
        digest: of primitives, parameters, shapes, dataflow, batch dimensions and replaced arguments.
        primitives: sorted pairs of a primitive's name and its count.
        prefixes: digests of the inputs and the first equations, for each number of equations in `_ends`.
    """

    digest: str
    primitives: tuple[tuple[str, int], ...]
    prefixes: tuple[str, ...]

    @property
    def n_equations(self) -> int:
        return sum(count for _, count in self.primitives)

    @property
    def n_prefixes(self) -> int:
        return len(_ends(self.n_equations))


def fingerprint_of(inputs: Sequence[Any], eqns: Sequence[JaxprEqn], outputs: Sequence[Any], about: str) -> Fingerprint:
    """The fingerprint of a program. about: additional text that is equal for equal steps."""
    lines = _program_lines(inputs, eqns, outputs)
    counts = Counter(eqn.primitive.name for eqn in eqns)
    return Fingerprint(
        digest=hashlib.sha256("\n".join((*lines, about)).encode()).hexdigest()[:16],
        primitives=tuple(sorted(counts.items())),
        prefixes=_prefixes(lines, _ends(len(eqns))),
    )


def first_change(
    old: Fingerprint, inputs: Sequence[Any], eqns: Sequence[JaxprEqn], outputs: Sequence[Any]
) -> range | None:
    """The range of equations that holds the first difference from the program of `old`; None without one.

    The range is empty if the inputs differ.
    """
    ends = _ends(old.n_equations)
    found = _prefixes(_program_lines(inputs, eqns, outputs), ends)
    for k, (was, now) in enumerate(zip(old.prefixes, found, strict=False)):
        if was != now:
            return range(ends[k - 1], min(ends[k], len(eqns))) if k else range(0)
    return None if len(eqns) <= ends[-1] else range(ends[-1], len(eqns))


def _ends(n_equations: int) -> tuple[int, ...]:
    return tuple(sorted({n_equations * k // _N_PREFIXES for k in range(_N_PREFIXES + 1)}))


def _prefixes(lines: Sequence[str], ends: Sequence[int]) -> tuple[str, ...]:
    """For each number in `ends`, a digest of the inputs and as many equations; a mark stands for missing equations."""
    digest, prefixes, start = hashlib.sha256(), [], 0
    n_equations = len(lines) - 2
    for end in ends:
        digest.update("\n".join(lines[start : end + 1] if end <= n_equations else [*lines[start:-1], "end"]).encode())
        prefixes.append(digest.copy().hexdigest()[:8])
        start = end + 1
    return tuple(prefixes)


def _program_lines(inputs: Sequence[Any], eqns: Sequence[JaxprEqn], outputs: Sequence[Any]) -> list[str]:
    """The program as text, with numbers for variables."""
    numbers: dict[Any, int] = {}

    def name(atom: Any) -> str:
        text = repr(atom.val) if is_literal(atom) else numbers.setdefault(atom, len(numbers))
        return f"{text}:{dtype_name(atom)}{'<host>' if is_in_host(atom.aval) else ''}{shape_of(atom)}"

    lines = [" ".join(map(name, inputs))]
    for eqn in eqns:
        params = _param_text(dict(eqn.params)) + unusual_settings(eqn)
        lines.append(" ".join((eqn.primitive.name, params, *map(name, eqn.invars), "->", *map(name, eqn.outvars))))
    lines.append(" ".join(map(name, outputs)))
    return lines


def program_key(inputs: Sequence[Any], eqns: Sequence[JaxprEqn], outputs: Sequence[Any]) -> Hashable:
    """Equal for programs that are equal up to the names of variables, in one process."""
    opaque = [_name_of(value) for eqn in eqns for value in _opaque_values(dict(eqn.params))]
    return "\n".join(_program_lines(inputs, eqns, outputs)), tuple(opaque)


def _name_of(value: Any) -> Hashable:
    """The value if it can be compared, as the trees of newer jax, else its identity."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return cast(Hashable, value)


def _opaque_values(param: Any) -> Iterator[Any]:
    """Values in a parameter that its text does not show: constants and, for example, functions."""
    if isinstance(jaxpr := getattr(param, "jaxpr", param), Jaxpr):
        yield from getattr(param, "consts", ())
        for eqn in jaxpr.eqns:
            yield from _opaque_values(dict(eqn.params))
    elif isinstance(param, dict | tuple | list):
        for part in param.values() if isinstance(param, dict) else param:
            yield from _opaque_values(part)
    elif _param_text(param) == type(param).__name__:
        yield param


def _param_text(value: Any) -> str:
    """A parameter as text that is equal in every process."""
    jaxpr = getattr(value, "jaxpr", value)
    if isinstance(jaxpr, Jaxpr):
        lines = _program_lines((*jaxpr.constvars, *jaxpr.invars), jaxpr.eqns, jaxpr.outvars)
        return "{" + "\n".join(lines) + "}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}={_param_text(part)}" for key, part in sorted(value.items(), key=str)) + "}"
    if isinstance(value, tuple | list):
        return "(" + ",".join(map(_param_text, value)) + ")"

    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.tolist()}"
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return _param_text({field.name: getattr(value, field.name) for field in fields(value)})
    if value is None or isinstance(value, bool | int | float | complex | str | np.generic | np.dtype):
        return str(value)

    # The text of a function or sharding may contain an address, which differs between processes.
    return type(value).__name__
