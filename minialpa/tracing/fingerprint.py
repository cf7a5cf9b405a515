"""What tells one traced step from another: a flat program in, a `Fingerprint` out, and where two programs differ.

A program is written as lines of text without names: first what it reads, then its equations. Equal programs have equal
lines in every process. The fingerprint holds a digest of all lines, and digests of the first n/32, 2n/32, ... of them,
by which the place of a change is found without the lines of the other program.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from minialpa.tracing.jaxprs import dtype_name, is_literal, shape_of

_N_PREFIXES = 32


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """digest: of primitives, parameters, shapes and dataflow, and of what the step says about its arguments.

    primitives: how often each primitive occurs, by name. prefixes: digests of what the program reads, and of that with
    its first equations, see `_ends`.
    """

    digest: str
    primitives: tuple[tuple[str, int], ...]
    prefixes: tuple[str, ...]

    @property
    def n_equations(self) -> int:
        return sum(n for _, n in self.primitives)

    @property
    def n_prefixes(self) -> int:
        """How many prefixes a program with so many equations has."""
        return len(_ends(self.n_equations))


def fingerprint_of(inputs: Sequence[Any], eqns: Sequence[JaxprEqn], outputs: Sequence[Any], about: str) -> Fingerprint:
    """The fingerprint of a program. `about`: what else makes a step another one."""
    lines = _program_lines(inputs, eqns, outputs)
    ends = _ends(len(eqns))
    counts = Counter(eqn.primitive.name for eqn in eqns)
    whole = hashlib.sha256("\n".join((*lines, about)).encode()).hexdigest()[:16]
    return Fingerprint(whole, tuple(sorted(counts.items())), _prefixes(lines, ends))


def first_change(
    old: Fingerprint, inputs: Sequence[Any], eqns: Sequence[JaxprEqn], outputs: Sequence[Any]
) -> range | None:
    """Numbers of the equations among which the first one is that `old` does not have; None where it has them all.

    The range is empty where the programs read other values.
    """
    ends = _ends(old.n_equations)
    found = _prefixes(_program_lines(inputs, eqns, outputs), ends)
    for k, (was, now) in enumerate(zip(old.prefixes, found, strict=False)):
        if was != now:
            return range(ends[k - 1], min(ends[k], len(eqns))) if k else range(0)
    return None if len(eqns) <= ends[-1] else range(ends[-1], len(eqns))


def _ends(n: int) -> tuple[int, ...]:
    """How many equations each prefix of a program of `n` has."""
    return tuple(sorted({n * k // _N_PREFIXES for k in range(_N_PREFIXES + 1)}))


def _prefixes(lines: Sequence[str], ends: Sequence[int]) -> tuple[str, ...]:
    """Digests of the first line and the first equations. Shorter programs repeat their last one with a mark."""
    digest, out, start = hashlib.sha256(), [], 0
    n = len(lines) - 2
    for end in ends:
        digest.update("\n".join(lines[start : end + 1] if end <= n else [*lines[start:-1], "end"]).encode())
        out.append(digest.copy().hexdigest()[:8])
        start = end + 1
    return tuple(out)


def _program_lines(inputs: Sequence[Any], eqns: Sequence[JaxprEqn], outputs: Sequence[Any]) -> list[str]:
    """What is read, a line for each equation, and what is returned, with values by number."""
    numbers: dict[Any, int] = {}

    def name(atom: Any) -> str:
        text = repr(atom.val) if is_literal(atom) else numbers.setdefault(atom, len(numbers))
        return f"{text}:{dtype_name(atom)}{shape_of(atom)}"

    lines = [" ".join(map(name, inputs))]
    for eqn in eqns:
        params = _param_text(dict(eqn.params))
        lines.append(" ".join((eqn.primitive.name, params, *map(name, eqn.invars), "->", *map(name, eqn.outvars))))
    lines.append(" ".join(map(name, outputs)))
    return lines


def _param_text(value: Any) -> str:
    """Text of an equation's parameter; functions, shardings and the like by type, as their texts may hold addresses."""
    jaxpr = getattr(value, "jaxpr", value)
    if isinstance(jaxpr, Jaxpr):
        lines = _program_lines((*jaxpr.constvars, *jaxpr.invars), jaxpr.eqns, jaxpr.outvars)
        return "{" + "\n".join(lines) + "}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}={_param_text(v)}" for key, v in sorted(value.items(), key=str)) + "}"
    if isinstance(value, tuple | list):
        return "(" + ",".join(map(_param_text, value)) + ")"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.tolist()}"
    if isinstance(value, Enum):
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        return _param_text({f.name: getattr(value, f.name) for f in fields(value)})
    if value is None or isinstance(value, bool | int | float | complex | str | np.generic | np.dtype):
        return str(value)
    return type(value).__name__
