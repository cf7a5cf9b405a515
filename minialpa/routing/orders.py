"""Permutations of rows, which sorts make: `sort(keys, iota)[-1]`, or its `rev`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Var

from minialpa.ir.equations import Atom, aval_of, is_literal, maker_of, operand_vars, reading, shape_of
from minialpa.recognition.rewriting import with_named_results
from minialpa.support.private_jax import with_source_of
from minialpa.tracing.new_equations import EquationMaker


def is_iota(atom: Atom, producers: Mapping[Atom, JaxprEqn]) -> bool:
    """0, 1, ..., or the same backwards."""
    if (eqn := maker_of(atom, producers, "rev")) is not None:
        return is_iota(eqn.invars[0], producers)
    return maker_of(atom, producers, "iota") is not None and len(shape_of(atom)) == 1


def sorted_by_gathers(
    eqn: JaxprEqn, producers: Mapping[Atom, JaxprEqn], read: Set[Var], maker: EquationMaker
) -> list[JaxprEqn]:
    """A sort [n] whose last operand is a permutation, and gathers of its other results; a sort of keys alone stays."""
    n_keys, n = eqn.params["num_keys"], shape_of(eqn.invars[0])[0]
    places = [k for k, atom in enumerate(eqn.invars) if k >= n_keys and is_iota(atom, producers)]
    is_argsort = places == [n_keys] and n_keys + 1 == len(eqn.invars) and not read & {*eqn.outvars[:-1]}
    if is_argsort or n_keys == len(eqn.invars):
        return [eqn]

    def compute(*operands: Any) -> Any:
        place = operands[places[0]] if places else lax.iota(np.int32, n)
        params = {"dimension": 0, "is_stable": eqn.params["is_stable"], "num_keys": n_keys}
        order = lax.sort((*operands[:n_keys], place), **params)[-1]
        at = order.astype(np.int32)
        return [order if k in places[:1] else x.at[at].get(mode="promise_in_bounds") for k, x in enumerate(operands)]

    key = ("sort", n_keys, eqn.params["is_stable"], tuple(places))
    named, _ = with_named_results(*maker.compute(key, compute, *eqn.invars), eqn.outvars)
    return [with_source_of(one, eqn) for one in named]


class Orders:
    """of: by permutation, the sort or `rev` that makes it; without sorts of a permutation."""

    def __init__(self, eqns: Sequence[JaxprEqn], producers: Mapping[Atom, JaxprEqn]) -> None:
        self.producers, self.place = producers, {eqn: i for i, eqn in enumerate(eqns)}
        self.of: dict[Atom, JaxprEqn] = {}
        for eqn in eqns:
            name, operands = eqn.primitive.name, eqn.invars
            is_sort = name == "sort" and len(shape_of(operands[0])) == 1
            if (is_sort and is_iota(operands[-1], producers) and operands[0] not in self.of) or (
                name == "rev" and operands[0] in self.of
            ):
                self.of[eqn.outvars[-1]] = eqn

    def latest(self, atom: Atom, n: int) -> Var | None:
        """The last permutation [n] on which the value depends."""
        waiting: dict[int, JaxprEqn] = {}

        def add(atoms: Sequence[Atom]) -> None:
            for one in atoms:
                eqn = maker_of(one, self.producers)
                if eqn in self.place:
                    waiting[self.place[eqn]] = eqn

        add([atom])
        while waiting:
            eqn = waiting.pop(max(waiting))
            found = next((var for var in eqn.outvars if var in self.of and shape_of(var) == (n,)), None)
            if found is not None:
                return found
            add(eqn.invars)
        return None

    def needed_after(self, eqn: JaxprEqn, atom: Atom) -> list[JaxprEqn]:
        """The equations after `eqn` on which the value depends, in order."""
        found: set[JaxprEqn] = set()
        waiting = [atom]
        while waiting:
            made = maker_of(waiting.pop(), self.producers)
            if made is not None and made not in found and self.place.get(made, -1) > self.place[eqn]:
                found.add(made)
                waiting += operand_vars(made)
        return sorted(found, key=self.place.__getitem__)


class Unrepeated:
    """Writes `.at[order].set(rows)` as if its index were stated to be unique: its derivative looks for repeated places.

    That is: which row is at a place (scatter, then gather, of 1, 2, ...), and which places have none.
    """

    def __init__(self, producers: Mapping[Atom, JaxprEqn], is_permutation: Callable[[Atom], bool]) -> None:
        self.producers, self.is_permutation = producers, is_permutation
        self.names: dict[Var, Atom] = {}
        self.known: dict[Atom, bool] = {}
        #: By result, the operands of a scatter to all places.
        self.set: dict[Atom, list[Atom]] = {}

    def write(self, eqn: JaxprEqn) -> JaxprEqn:
        """With other operands, after which some equations have no reader."""
        eqn = reading(eqn, self.names)
        result, operands = eqn.outvars[:1], eqn.invars
        match eqn.primitive.name:
            case "scatter" if is_lookup(eqn, gathers=False) and shape_of(operands[0]) == shape_of(operands[2]):
                if self.is_permutation(operands[1]):
                    self.set[result[0]] = operands
            case "gather" if is_lookup(eqn, gathers=True) and operands[0] in self.set:
                if self.set[operands[0]][1] is operands[1]:
                    self.names[result[0]] = self.set[operands[0]][2]
            case "eq" if (equal := self._equal(*operands)) is not None:
                self.known[result[0]] = equal
            case "select_n" if not is_literal(operands[0]) and operands[0] in self.known:
                self.names[result[0]] = operands[1 + self.known[operands[0]]]
        return eqn

    def _equal(self, x: Atom, y: Atom) -> bool | None:
        """Whether integers are equal everywhere, or nowhere; None if unknown."""
        if aval_of(x).dtype.kind not in "iu":
            return None
        if x is y:
            return True
        is_zero = not is_literal(x) and x in self.set and filled(y, self.producers) == 0
        return False if is_zero and self._is_after_place(self.set[x][2]) else None

    def _is_after_place(self, atom: Atom) -> bool:
        """Whether elements are 1 more than numbers of places, so never 0."""
        eqn = maker_of(atom, self.producers, "add")
        if eqn is None or aval_of(atom).dtype.itemsize < np.dtype(np.int32).itemsize:
            return False
        place, one = eqn.invars
        return filled(one, self.producers) == 1 and self._is_place(place)

    def _is_place(self, atom: Atom) -> bool:
        while (eqn := maker_of(atom, self.producers, "broadcast_in_dim", "reshape")) is not None:
            atom = eqn.invars[0]
        return maker_of(atom, self.producers, "iota") is not None


def filled(atom: Atom, producers: Mapping[Atom, JaxprEqn]) -> Any:
    """The number that an array is everywhere; None if unknown."""
    eqn = maker_of(atom, producers, "broadcast_in_dim")
    value = atom if eqn is None else eqn.invars[0]
    return np.asarray(value.val).item() if is_literal(value) and np.size(value.val) == 1 else None


def is_lookup(eqn: JaxprEqn, *, gathers: bool) -> bool:
    """Whether index [n 1] takes, or adds to, whole rows of dimension 0."""
    numbers, shape = eqn.params["dimension_numbers"], shape_of(eqn.invars[0])
    index = shape_of(eqn.invars[1])
    if len(index) != 2 or index[1] != 1 or not shape or numbers.operand_batching_dims:
        return False
    window = tuple(range(1, len(shape)))
    if gathers:
        is_plain = numbers.collapsed_slice_dims == numbers.start_index_map == (0,)
        is_whole = numbers.offset_dims == window and tuple(eqn.params["slice_sizes"]) == (1, *shape[1:])
        return bool(is_plain and is_whole)
    is_plain = numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims == (0,)
    return bool(is_plain and numbers.update_window_dims == window)
