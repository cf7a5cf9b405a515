"""The body of a Pallas kernel in; out, whether it allows cutting an axis of its grid.

    computes_on_blocks(body)      it neither communicates nor draws random numbers of a device
    positions_read(body)          the axes whose position it reads
    carries(body, ...)            scratch memory carries values from one position along an axis to the next

Iterations of a grid run in order, the last axis fastest, and share scratch memory. A body carries no values if, at
position 0 of the inner axes, it writes scratch memory before it reads it: `@pl.when(pl.program_id(2) == 0)` initialises
a sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.ir.equations import is_literal, sub_jaxprs
from minialpa.rules.known_integers import CALLS, UNKNOWN, KnownScalar, compute, constant, read

#: Prefixes of primitives beyond the blocks of one iteration.
_BEYOND_BLOCKS = (
    "all_", "axis_index", "barrier", "debug", "delay", "device_id", "dma", "get_barrier", "io_callback", "ppermute",
    "prng", "psum", "pure_callback", "semaphore",
)  # fmt: skip
_MEMORY_EFFECTS = ("ReadEffect", "WriteEffect", "AccumEffect")
_POSITIONS = ("program_id", "num_programs")


def _equations(jaxpr: Any) -> list[JaxprEqn]:
    eqns = list(getattr(jaxpr, "jaxpr", jaxpr).eqns)
    return eqns + [inner for eqn in eqns for body in sub_jaxprs(eqn) for inner in _equations(body)]


def computes_on_blocks(body: Any) -> bool:
    return all(type(effect).__name__ in _MEMORY_EFFECTS for effect in body.effects) and not any(
        eqn.primitive.name.startswith(_BEYOND_BLOCKS) for eqn in _equations(body)
    )


def positions_read(body: Any) -> set[int]:
    return {eqn.params["axis"] for eqn in _equations(body) if eqn.primitive.name in _POSITIONS}


class _CarriedError(Exception):
    """A read of scratch memory may precede its write."""


#: The number of the scratch memory of each variable; for each number, a mask of written elements.
_Names = Mapping[Var, int]
_Written = dict[int, np.ndarray]


def carries(body: Any, n_scratch: int, inner_axes: set[int]) -> bool:
    """Whether an iteration at position 0 of all `inner_axes` may read values of an earlier one from scratch memory.

    body: a jaxpr whose last `n_scratch` operands are the scratch memory.
    """
    scratch = body.invars[len(body.invars) - n_scratch :]
    written = {i: np.zeros(var.aval.shape, bool) for i, var in enumerate(scratch)}
    run = _FirstIteration(frozenset(inner_axes))
    try:
        run.body(body, {}, dict(zip(scratch, range(n_scratch), strict=True)), written)
    except _CarriedError:
        return True
    return False


@dataclass(frozen=True, slots=True)
class _FirstIteration:
    """At position 0 along `inner_axes`; other positions are unknown."""

    inner_axes: frozenset[int]

    def body(self, jaxpr: Any, values: dict[Var, KnownScalar], names: _Names, written: _Written) -> list[KnownScalar]:
        """Marks in `written` the elements that the jaxpr certainly writes."""
        uses = Counter(atom for eqn in jaxpr.eqns for atom in eqn.invars if not is_literal(atom))
        uses.update(atom for atom in jaxpr.outvars if not is_literal(atom))
        for eqn in jaxpr.eqns:
            touched = {var: names[var] for var in eqn.invars if not is_literal(var) and var in names}
            if eqn.primitive.name == "program_id":
                results = [constant(0) if eqn.params["axis"] in self.inner_axes else UNKNOWN]
            elif not touched:
                results = compute(eqn, [read(values, atom) for atom in eqn.invars])
            else:
                self._touch(eqn, values, names, written, is_read=any(uses[var] for var in eqn.outvars))
                results = [UNKNOWN] * len(eqn.outvars)
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(values, atom) for atom in jaxpr.outvars]

    def _touch(
        self, eqn: JaxprEqn, values: Mapping[Var, KnownScalar], names: _Names, written: _Written, *, is_read: bool
    ) -> None:
        """is_read: whether the result has a reader."""
        match eqn.primitive.name:
            case "get":
                self._read(eqn, values, names, written, n_before=1)
            case "swap":
                if is_read:
                    self._read(eqn, values, names, written, n_before=2)
                self._write(eqn, values, names, written)
            case "addupdate":
                self._read(eqn, values, names, written, n_before=2)
            case "cond":
                self._branches(eqn, values, names, written)
            case "scan":
                (inner,) = sub_jaxprs(eqn)
                self._follow_inside(inner, eqn.invars, names, _copy(written))
            case name if name in CALLS:
                inner, *_ = sub_jaxprs(eqn)
                self._follow_inside(inner, eqn.invars, names, written, values)
            case _:
                raise _CarriedError

    def _follow_inside(
        self,
        closed: Any,
        operands: Sequence[Any],
        names: _Names,
        written: _Written,
        values: Mapping[Var, KnownScalar] | None = None,
    ) -> None:
        jaxpr = getattr(closed, "jaxpr", closed)
        if len(jaxpr.invars) != len(operands):
            raise _CarriedError
        pairs = list(zip(jaxpr.invars, operands, strict=True))
        inner = {var: names[atom] for var, atom in pairs if not is_literal(atom) and atom in names}
        known = {} if values is None else {var: read(values, atom) for var, atom in pairs if var not in inner}
        self.body(jaxpr, known, inner, written)

    def _branches(self, eqn: JaxprEqn, values: Mapping[Var, KnownScalar], names: _Names, written: _Written) -> None:
        """If the branch is unknown, all must write an element."""
        branches = eqn.params["branches"]
        index = read(values, eqn.invars[0]).known
        if index is not None:
            taken = min(max(int(index), 0), len(branches) - 1)
            self._follow_inside(branches[taken], eqn.invars[1:], names, written, values)
            return

        after = []
        for branch in branches:
            inner = _copy(written)
            self._follow_inside(branch, eqn.invars[1:], names, inner, values)
            after.append(inner)
        for i in written:
            written[i] = np.all([inner[i] for inner in after], axis=0)

    def _read(
        self, eqn: JaxprEqn, values: Mapping[Var, KnownScalar], names: _Names, written: _Written, *, n_before: int
    ) -> None:
        """Raise unless all read elements are written. n_before: operands before indices."""
        if any(not is_literal(atom) and atom in names for atom in eqn.invars[1:]):
            raise _CarriedError
        region = self._region(eqn, values, n_before)
        known = written[names[_accessed_memory(eqn)]]
        if not np.all(known if region is None else known[region]):
            raise _CarriedError

    def _write(self, eqn: JaxprEqn, values: Mapping[Var, KnownScalar], names: _Names, written: _Written) -> None:
        if _accessed_memory(eqn) not in names:
            raise _CarriedError
        region = self._region(eqn, values, n_before=2)
        if region is not None:
            written[names[_accessed_memory(eqn)]][region] = True

    def _region(self, eqn: JaxprEqn, values: Mapping[Var, KnownScalar], n_before: int) -> tuple[Any, ...] | None:
        """Of a `get` or `swap`, as a NumPy index; None if unknown."""
        transforms = jax.tree.unflatten(eqn.params["tree"], eqn.invars[n_before:])
        if not transforms:
            return (...,)
        if len(transforms) > 1 or not hasattr(transforms[0], "indices"):
            return None

        index: list[Any] = []
        for inner in transforms[0].indices:
            start = self._integer(getattr(inner, "start", inner), values)
            if start is None:
                return None
            if not hasattr(inner, "size"):
                index.append(start)
            elif isinstance(inner.size, int):
                index.append(slice(start, start + inner.size * inner.stride, inner.stride))
            else:
                return None
        return tuple(index)

    @staticmethod
    def _integer(value: Any, values: Mapping[Var, KnownScalar]) -> int | None:
        if isinstance(value, int | np.integer):
            return int(value)
        known = read(values, value).known if is_literal(value) or isinstance(value, Var) else None
        return int(known) if known is not None and known.ndim == 0 else None


def _accessed_memory(eqn: JaxprEqn) -> Var:
    memory = eqn.invars[0]
    assert not is_literal(memory), eqn
    return memory


def _copy(written: _Written) -> _Written:
    return {i: mask.copy() for i, mask in written.items()}
