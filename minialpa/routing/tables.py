"""Integer functions of one integer, as tables of their values: what an index is for each place in an order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jax.extend.core import JaxprEqn, Var

from minialpa.ir.equations import Atom, aval_of, is_literal, shape_of
from minialpa.rules.known_integers import FUNCTIONS
from minialpa.tracing.fingerprint import program_key

Array = np.ndarray[Any, Any]

#: The same elements.
_IDENTITIES = ("copy", "stop_gradient")
_LAYOUTS = ("broadcast_in_dim", "reshape", "squeeze")
#: Most values of a table. Functions of more elements are compared part by part.
MOST_VALUES = 1 << 18
#: Primitives that tables know.
_READ = {"iota", "gather", "convert_element_type", *_IDENTITIES, *_LAYOUTS, *FUNCTIONS}
T = TypeVar("T")


class Table(NamedTuple):
    """values: dimensions of equal elements have length 1. dim: of the elements of `base`, if the table has a base."""

    base: str | None
    values: Array
    dim: int | None = None


class Tables:
    """Proofs by tables, which go after each proof: a model of many layers has thousands of large ones.

    bases: by variable, the name of its elements: 0, 1, ..., n - 1.
    proofs: results by text of a function, so that equal layers are proven once.
    """

    def __init__(
        self,
        producers: Mapping[Atom, JaxprEqn],
        bases: Callable[[Var], str | None],
        n: int,
        proofs: dict[Hashable, Any] | None = None,
    ) -> None:
        self.producers, self.bases, self.n = producers, bases, n
        self._proofs = {} if proofs is None else proofs

    def read(self, atom: Atom) -> Table | None:
        """Of the first elements. None if unknown."""
        return _Part(self.producers, self.bases, self.n, 0).read(atom)

    def base_of(self, atom: Atom) -> str | None:
        """The name of the elements of which an array [n] or [n 1] is a function; None for other arrays."""
        return self._proven(atom, (), lambda: _Part(self.producers, self.bases, self.n, 0).base_of(atom))

    def is_quotient(self, atom: Atom, base: str, divisor: int) -> bool:
        """Whether it is base // divisor, in an array [n] or [n 1]."""
        if self.base_of(atom) != base:
            return False
        firsts = range(0, self.n, MOST_VALUES)

        def in_parts() -> bool:
            parts = (_Part(self.producers, self.bases, self.n, first) for first in firsts)
            return all(part.has_quotients(atom, base, divisor) for part in parts)

        return bool(self._proven(atom, (base, divisor), in_parts))

    def _proven(self, atom: Atom, question: Hashable, prove: Callable[[], T]) -> T | None:
        """None if the atom is not a function of bases."""
        text = self._text(atom)
        if text is None:
            return None
        key = text, self.n, question
        if key not in self._proofs:
            self._proofs[key] = prove()
        found: T | None = self._proofs[key]
        return found

    def _text(self, atom: Atom) -> Hashable:
        """Equal for equal functions of bases; None for an atom that a `_Part` cannot read."""
        eqns: dict[JaxprEqn, None] = {}
        inputs: dict[Var, str] = {}

        def add(atom: Atom) -> bool:
            if is_literal(atom) or atom in inputs:
                return True
            base, eqn = self.bases(atom), self.producers.get(atom)
            if base is not None:
                inputs[atom] = base
            elif eqn is None or eqn.primitive.name not in _READ or np.dtype(aval_of(atom).dtype).kind not in "biu":
                return False
            elif eqn not in eqns:
                if not all(map(add, eqn.invars)):
                    return False
                eqns[eqn] = None
            return True

        if not add(atom):
            return None
        return program_key(tuple(inputs), tuple(eqns), (atom,)), tuple(inputs.values())


class _Part:
    """Tables of the elements from `first` on, as many as a table holds."""

    def __init__(
        self, producers: Mapping[Atom, JaxprEqn], bases: Callable[[Var], str | None], n: int, first: int
    ) -> None:
        self.producers, self.bases, self.n = producers, bases, n
        self.first, self.size = first, min(MOST_VALUES, n - first)
        self._known: dict[Atom, Table | None] = {}

    def read(self, atom: Atom) -> Table | None:
        """None if unknown."""
        if is_literal(atom):
            value = np.asarray(atom.val)
            return Table(None, value) if value.dtype.kind in "biu" else None
        if atom not in self._known:
            base = self.bases(atom)
            dtype = getattr(aval_of(atom), "dtype", None)
            if base is not None:
                self._known[atom] = Table(base, np.arange(self.first, self.first + self.size, dtype=dtype), 0)
            elif atom not in self.producers or np.dtype(dtype).kind not in "biu":
                self._known[atom] = None
            else:
                self._known[atom] = self._computed(self.producers[atom])
        return self._known[atom]

    def base_of(self, atom: Atom) -> str | None:
        """As `Tables.base_of`."""
        found = self.read(atom)
        return found.base if found is not None and found.values.size == self.size else None

    def has_quotients(self, atom: Atom, base: str, divisor: int) -> bool:
        """As `Tables.is_quotient`, of these elements."""
        found = self.read(atom)
        values = np.arange(self.first, self.first + self.size) // divisor
        return found is not None and self.base_of(atom) == base and np.array_equal(found.values.reshape(-1), values)

    def _computed(self, eqn: JaxprEqn) -> Table | None:
        name, params = eqn.primitive.name, eqn.params
        if name == "iota":
            shape = [size if d == params["dimension"] else 1 for d, size in enumerate(params["shape"])]
            if max(shape) > MOST_VALUES:
                return None
            return Table(None, np.arange(max(shape), dtype=params["dtype"]).reshape(shape))

        if name == "gather" and len(shape_of(eqn.outvars[0])) == 1:
            return self._looked_up(*eqn.invars)
        operands = [self.read(atom) for atom in eqn.invars]
        known = [one for one in operands if one is not None]
        if not known or len(known) < len(operands):
            return None
        return _in_layout(eqn, known[0]) if name in _LAYOUTS else _combined(eqn, known)

    def _looked_up(self, array: Atom, index: Atom) -> Table | None:
        """Elements [n] of an array [n], whose elements do not depend on a base."""
        places = self.read(index)
        is_whole = shape_of(array) == (self.n,) and shape_of(index) == (self.n, 1) and places is not None
        if not is_whole or places is None or places.values.size != self.size:
            return None
        values, at = None, places.values.reshape(-1).astype(np.int64)
        if np.all((at >= 0) & (at < self.n)):
            values = self._elements(array, at)
        return None if values is None else Table(places.base, values, places.dim)

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
            return self._elements(eqn.invars[0], _places_before_broadcast(eqn, at))
        arrays = [self._elements(one, at) for one in eqn.invars]
        known = [one for one in arrays if one is not None]
        is_elementwise = name in FUNCTIONS or name == "convert_element_type"
        return _applied(eqn, known) if is_elementwise and len(known) == len(arrays) else None


def _places_before_broadcast(eqn: JaxprEqn, at: Array) -> Array:
    """The places in the operand of `broadcast_in_dim` of these places in its result."""
    dims, shape = eqn.params["broadcast_dimensions"], shape_of(eqn.invars[0])
    where = np.unravel_index(at, shape_of(eqn.outvars[0]))
    return np.ravel_multi_index([where[d] if n > 1 else 0 * at for d, n in zip(dims, shape, strict=True)], shape)


def _combined(eqn: JaxprEqn, operands: list[Table]) -> Table | None:
    """The result of an elementwise equation."""
    of_base = {one[::2] for one in operands if one.base is not None}
    if len(of_base) > 1:
        return None
    base, dim = next(iter(of_base), (None, None))
    # Beside the base, whose elements have any order, other elements would be in the same places.
    others = [one.values for one in operands if one.base is None]
    if dim is not None and any(values.ndim and values.shape[dim] > 1 for values in others):
        return None
    values = _applied(eqn, [one.values for one in operands])
    return None if values is None else Table(base, values, dim)


def _applied(eqn: JaxprEqn, arrays: list[Array]) -> Array | None:
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
    return None


def _in_layout(eqn: JaxprEqn, table: Table) -> Table | None:
    """The result of an equation that changes the layout."""
    name, out, first = eqn.primitive.name, aval_of(eqn.outvars[0]), table.values
    if not first.ndim:
        return table if name != "squeeze" else None
    if name == "broadcast_in_dim":
        new_dims = dict(enumerate(eqn.params["broadcast_dimensions"]))
    else:
        old = [d for d, size in enumerate(shape_of(eqn.invars[0])) if size > 1]
        new = [d for d, size in enumerate(out.shape) if size > 1]
        if [shape_of(eqn.invars[0])[d] for d in old] != [out.shape[d] for d in new]:
            return None
        new_dims = dict(zip(old, new, strict=True))
    shape = [1] * len(out.shape)
    for old_dim, dim in new_dims.items():
        shape[dim] = first.shape[old_dim]
    dim = None if table.dim is None else new_dims.get(table.dim)
    return Table(table.base, first.reshape(shape), dim) if (dim is None) == (table.base is None) else None
