"""Integer functions of one integer, as tables of their values: what an index is for each place in an order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.ir.equations import Atom, aval_of, is_literal, shape_of
from minialpa.rules.known_integers import FUNCTIONS
from minialpa.tracing.fingerprint import program_key

Array = np.ndarray[Any, Any]

#: The same elements.
_IDENTITIES = ("copy", "stop_gradient")
#: Most values of a table. Functions of more elements are compared part by part.
MOST_VALUES = 1 << 18


class Tables:
    """Attributes:
    bases: by variable, the name of its elements: 0, 1, ..., n - 1.
    first, size: of the elements in these tables, by default the first ones.
    proofs: by text of a function, number of elements and divisor, the results of `is_quotient`.
    """

    def __init__(
        self,
        producers: Mapping[Atom, JaxprEqn],
        bases: Callable[[Var], str | None],
        n: int,
        *,
        first: int = 0,
        proofs: dict[Hashable, bool] | None = None,
    ) -> None:
        self.producers, self.bases, self.n = producers, bases, n
        self.first, self.size = first, min(MOST_VALUES, n - first)
        self._known: dict[Atom, tuple[str | None, Array] | None] = {}
        self._proofs = {} if proofs is None else proofs

    def read(self, atom: Atom) -> tuple[str | None, Array] | None:
        """Name of the base, and values; dimensions of equal elements have length 1. None if unknown."""
        if is_literal(atom):
            value = np.asarray(atom.val)
            return (None, value) if value.dtype.kind in "biu" else None
        if atom not in self._known:
            base = self.bases(atom)
            dtype = getattr(aval_of(atom), "dtype", None)
            if base is not None:
                self._known[atom] = base, np.arange(self.first, self.first + self.size, dtype=dtype)
            elif atom not in self.producers or np.dtype(dtype).kind not in "biu":
                self._known[atom] = None
            else:
                self._known[atom] = self._computed(self.producers[atom])
        return self._known[atom]

    def constant(self, atom: Atom) -> int | None:
        """The integer that an array is everywhere; None if unknown."""
        found = self.read(atom)
        return int(found[1].item()) if found is not None and found[0] is None and found[1].size == 1 else None

    def is_quotient(self, atom: Atom, base: str, divisor: int) -> bool:
        """Whether it is base // divisor, in an array [n] or [n 1]."""
        if self.base_of(atom) != base:
            return False
        key = self._text(atom), self.n, divisor
        if key not in self._proofs:
            parts = (
                self if first == 0 else Tables(self.producers, self.bases, self.n, first=first)
                for first in range(0, self.n, MOST_VALUES)
            )
            self._proofs[key] = all(part._has_quotients(atom, base, divisor) for part in parts)
        return self._proofs[key]

    def base_of(self, atom: Atom) -> str | None:
        """The name of the elements of which an array [n] or [n 1] is a function; None for other arrays."""
        found = self.read(atom)
        return found[0] if found is not None and found[1].size == self.size else None

    def _has_quotients(self, atom: Atom, base: str, divisor: int) -> bool:
        found = self.read(atom)
        values = np.arange(self.first, self.first + self.size) // divisor
        return found is not None and self.base_of(atom) == base and np.array_equal(found[1].reshape(-1), values)

    def _text(self, atom: Atom) -> Hashable:
        """Equal for equal functions."""
        eqns: dict[JaxprEqn, None] = {}
        inputs: dict[Atom, None] = {}

        def add(atom: Atom) -> None:
            if is_literal(atom) or atom in inputs:
                return
            if self.bases(atom) is not None:
                inputs[atom] = None
            elif (eqn := self.producers[atom]) not in eqns:
                for operand in eqn.invars:
                    add(operand)
                eqns[eqn] = None

        add(atom)
        return program_key(tuple(inputs), tuple(eqns), (atom,))

    def _computed(self, eqn: JaxprEqn) -> tuple[str | None, Array] | None:
        name, params = eqn.primitive.name, eqn.params
        if name == "iota":
            shape = [size if d == params["dimension"] else 1 for d, size in enumerate(params["shape"])]
            # Beside a part of the base, other elements would be in the same places.
            if max(shape) > (MOST_VALUES if self.size == self.n else 1):
                return None
            return None, np.arange(max(shape), dtype=params["dtype"]).reshape(shape)

        if name == "gather" and len(shape_of(eqn.outvars[0])) == 1:
            return self._looked_up(*eqn.invars)
        operands = [self.read(atom) for atom in eqn.invars]
        if not operands or None in operands:
            return None
        bases = {one[0] for one in operands if one is not None} - {None}
        arrays = [one[1] for one in operands if one is not None]
        values = self._applied(eqn, arrays) if len(bases) < 2 else None
        return None if values is None else (next(iter(bases), None), values)

    def _looked_up(self, array: Atom, index: Atom) -> tuple[str | None, Array] | None:
        """Elements [n] of an array [n], whose elements do not depend on a base."""
        places = self.read(index)
        is_whole = shape_of(array) == (self.n,) and shape_of(index) == (self.n, 1) and places is not None
        if not is_whole or places is None or places[1].size != self.size:
            return None
        values, at = None, places[1].reshape(-1).astype(np.int64)
        if np.all((at >= 0) & (at < self.n)):
            values = self._elements(array, at)
        return None if values is None else (places[0], values)

    def _elements(self, atom: Atom, at: Array) -> Array | None:
        """The elements at these places of the array as a vector; None if unknown."""
        if is_literal(atom):
            return np.broadcast_to(np.asarray(atom.val), at.shape) if not shape_of(atom) else None
        eqn = self.producers.get(atom)
        if eqn is None or aval_of(atom).dtype.kind not in "biu" or not shape_of(atom):
            return None
        name, shape = eqn.primitive.name, shape_of(atom)
        if name == "iota":
            return np.asarray(np.unravel_index(at, shape)[eqn.params["dimension"]], eqn.params["dtype"])
        if name in ("reshape", "squeeze", *_IDENTITIES):
            return self._elements(eqn.invars[0], at)
        if name == "broadcast_in_dim" and shape_of(eqn.invars[0]):
            dims, old = eqn.params["broadcast_dimensions"], shape_of(eqn.invars[0])
            where = np.unravel_index(at, shape)
            at = np.ravel_multi_index([where[d] if n > 1 else 0 * at for d, n in zip(dims, old, strict=True)], old)
            return self._elements(eqn.invars[0], at)
        arrays = [self._elements(one, at) for one in eqn.invars]
        known = [one for one in arrays if one is not None]
        is_elementwise = name in FUNCTIONS or name == "convert_element_type"
        return self._applied(eqn, known) if is_elementwise and len(known) == len(arrays) else None

    def _applied(self, eqn: JaxprEqn, arrays: list[Array]) -> Array | None:
        name, out, first = eqn.primitive.name, aval_of(eqn.outvars[0]), arrays[0]
        if name in ("div", "rem") and not np.all(arrays[1]):
            return None
        if name in _IDENTITIES:
            return first
        if name in FUNCTIONS:
            with np.errstate(all="ignore"):  # integers wrap, as on devices
                return np.asarray(FUNCTIONS[name](*arrays)).astype(out.dtype)
        if name == "convert_element_type":
            return first.astype(out.dtype) if out.dtype.kind in "biu" else None
        return _in_layout(eqn, first)


def _in_layout(eqn: JaxprEqn, first: Array) -> Array | None:
    """The result of an equation that changes the layout; dimensions of equal elements have length 1."""
    name, out = eqn.primitive.name, aval_of(eqn.outvars[0])
    if not first.ndim:
        return first if name in ("broadcast_in_dim", "reshape") else None
    shape = [1] * len(out.shape)
    if name == "broadcast_in_dim":
        for size, dim in zip(first.shape, eqn.params["broadcast_dimensions"], strict=True):
            shape[dim] = size
        return first.reshape(shape)
    if name in ("reshape", "squeeze"):
        old = [d for d, size in enumerate(shape_of(eqn.invars[0])) if size > 1]
        new = [d for d, size in enumerate(out.shape) if size > 1]
        if [shape_of(eqn.invars[0])[d] for d in old] != [out.shape[d] for d in new]:
            return None
        for d, e in zip(old, new, strict=True):
            shape[e] = first.shape[d]
        return first.reshape(shape)
    return None
