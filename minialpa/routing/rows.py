"""Rows sorted by expert in; the same step with rows in slots (`slots.py`) out.

A row is in the same group in both orders. Equations that treat all rows alike, without regard to their order, compute
the same rows in slots: elementwise ones, products with a matrix, and grouped products. Rows enter and leave with the
proof that an index is the place in the order, or its quotient by the experts of a token:

    rows in     gather(tokens, order // k), scatter-add(0, inverse, rows)
    rows out    gather(rows, inverse), scatter(_, order, rows), scatter-add(0, order // k, rows)

If the groups count the sorted ids, which are below the number of groups, blocks of rows are sorted on their own.
Otherwise the place of a row in the order tells its group, for any permutation and any sizes.

Bodies of scans over layers are rewritten together with those of their derivatives (`recognition.bodies`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Var

from minialpa.grouped import grouped_product_p, grouped_sum_p
from minialpa.ir.block import Block
from minialpa.ir.equations import (
    Atom,
    all_equations,
    aval_of,
    is_literal,
    live_equations,
    maker_of,
    operand_vars,
    reading,
    shape_of,
)
from minialpa.ir.op import Op
from minialpa.recognition.bodies import with_rewritten_bodies
from minialpa.recognition.rewriting import NewEquation, Written, with_named_results
from minialpa.recognition.step import with_equations
from minialpa.routed import routed_product_p, routed_sum_p
from minialpa.routing.orders import Orders, Unrepeated, filled, is_lookup, sorted_by_gathers
from minialpa.routing.slots import Slots, SlotShape, from_slots, slots_of, to_slots
from minialpa.routing.tables import Tables
from minialpa.rules import table as _rules  # noqa: F401  (registers the rules)
from minialpa.rules.factors import Factors
from minialpa.rules.known_rules import factors_of, is_kernel
from minialpa.rules.shards import run_rows
from minialpa.support.identity import ById
from minialpa.support.private_jax import with_source_of
from minialpa.tracing.new_equations import EquationMaker
from minialpa.tracing.trace import TracedStep
from minialpa.tracing.values import ValueNumbering

_GROUPED = (grouped_product_p, grouped_sum_p)
#: Primitives that keep the bounds of integers.
_SAME_ELEMENTS = ("convert_element_type", "copy", "reshape", "slice", "squeeze", "stop_gradient", "transpose")


def has_grouped_products(step: TracedStep) -> bool:
    return any(one.primitive in _GROUPED for one in all_equations(step.flat))


@dataclass(frozen=True, slots=True)
class RowSharing:
    """Devices that share the rows of a micro-batch. skew: slots over rows."""

    n_micro_batches: int
    n_devices: int
    skew: float


#: Of which elements an index is a function, and whether it is a certain one, by text of the function.
Proofs = dict[Hashable, str | bool | None]


def with_rows_in_slots(step: TracedStep, sharing: RowSharing, proofs: Proofs | None = None) -> TracedStep:
    """The same step if neither devices nor micro-batches can share its rows. Groups keep their numbers.

    proofs: of other calls, to which this call adds.
    """
    if sharing.n_devices * sharing.n_micro_batches == 1 or not has_grouped_products(step):
        return step
    proofs = {} if proofs is None else proofs
    outvars = (*step.flat.outvars, *step.gradients)

    def rewrite(
        eqns: Sequence[JaxprEqn], outvars: Sequence[Atom], written: Written, section: Sequence[int]
    ) -> list[NewEquation] | None:
        return _rewritten(eqns, outvars, written, section or (0,) * len(eqns), sharing, proofs)

    own = rewrite(step.flat.eqns, outvars, Written(), ())
    step = step if own is None else with_equations(step, own)
    bodies = with_rewritten_bodies(step.flat, outvars, rewrite)
    return step if bodies is None else with_equations(step, bodies)


def _rewritten(
    eqns: Sequence[JaxprEqn],
    outvars: Sequence[Atom],
    written: Written,
    section: Sequence[int],
    sharing: RowSharing,
    proofs: Proofs,
) -> list[NewEquation] | None:
    n_rows = {math.prod(shape_of(eqn.invars[0])[1:3]) for eqn in eqns if eqn.primitive in _GROUPED}
    if not n_rows:
        return None
    producers = {**written.producers, **{var: eqn for eqn in eqns for var in eqn.outvars}}
    placed = _with_gathered_sorts(eqns, outvars, producers, n_rows)
    producers |= {var: one.eqn for one in placed for var in one.eqn.outvars}
    placed = _with_unique_places(placed, producers, proofs)
    writer = _Writer([one.eqn for one in placed], [section[one.place] for one in placed], producers, sharing, proofs)
    found = [replace(one, eqn=new) for one in placed for new in writer.write(one.eqn)]
    is_live = live_equations([one.eqn for one in found], outvars)
    found = list(itertools.compress(found, is_live))
    # Products that remain as written would be computed twice.
    return None if not writer.products or writer.products & {one.eqn for one in found} else found


def _with_gathered_sorts(
    eqns: Sequence[JaxprEqn], outvars: Sequence[Atom], producers: Mapping[Atom, JaxprEqn], n_rows: AbstractSet[int]
) -> list[NewEquation]:
    """Sorts of so many rows make an order alone, which gathers their other results."""
    read = {var for eqn in eqns for var in operand_vars(eqn)} | {atom for atom in outvars if not is_literal(atom)}
    shapes, maker = {(n,) for n in n_rows}, EquationMaker()
    placed: list[NewEquation] = []
    for i, eqn in enumerate(eqns):
        is_sort = eqn.primitive.name == "sort" and shape_of(eqn.invars[0]) in shapes
        new = sorted_by_gathers(eqn, producers, read, maker) if is_sort else [eqn]
        placed += [NewEquation(eqn=one, place=i) for one in new]
    return placed


def _with_unique_places(
    placed: Sequence[NewEquation], producers: Mapping[Atom, JaxprEqn], proofs: Proofs
) -> list[NewEquation]:
    """See `Unrepeated`."""
    numbers = {order: f"order {i}" for i, order in enumerate(Orders([one.eqn for one in placed], producers).of)}

    def is_permutation(index: Atom) -> bool:
        tables = Tables(producers, numbers.get, shape_of(index)[0], proofs=proofs)
        base = tables.base_of(index)
        return base is not None and tables.is_quotient(index, base, 1)

    unrepeated = Unrepeated(producers, is_permutation)
    return [replace(one, eqn=unrepeated.write(one.eqn)) for one in placed]


@dataclass(frozen=True, slots=True, eq=False)
class _Route:
    """order: its number. slots: variables."""

    order: int
    shape: SlotShape
    slots: Slots

    @property
    def n_rows(self) -> int:
        return self.shape.n_blocks * self.shape.n_rows


@dataclass(frozen=True, slots=True)
class _RowsInSlots:
    """array: [y x ...], with slots in dimension `dim` of the rest; rows are in this dimension of the original."""

    route: _Route
    dim: int
    array: Atom


class _Writer:
    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        section: Sequence[int],
        producers: Mapping[Atom, JaxprEqn],
        sharing: RowSharing,
        proofs: Proofs,
    ) -> None:
        self.sharing = sharing
        self.section = dict(zip(eqns, section, strict=True))
        self.producers = {**producers, **{var: eqn for eqn in eqns for var in eqn.outvars}}
        self.values, self.own_values = _numbered(_without_barriers(eqns)), _numbered(eqns)
        for eqn in eqns:
            if eqn.primitive.name == "optimization_barrier":
                self.values.of.update(
                    (var, self.values.read(atom)) for atom, var in zip(eqn.invars, eqn.outvars, strict=True)
                )
        self.maker = EquationMaker()
        self.rows: dict[Atom, _RowsInSlots] = {}
        #: By number of an order or inverse: its route, and "order" or "inverse".
        self.places: dict[int, tuple[_Route, str]] = {}
        self.proofs = proofs
        #: Of functions of the order, or its inverse.
        self.tables: dict[_Route, Tables] = {}
        #: By array of rows, the operand of products.
        self.plain: dict[Atom, Atom] = {}
        self.rows_of_number: dict[Hashable, _RowsInSlots] = {}
        #: Products in slots.
        self.products: set[JaxprEqn] = set()
        self.lookups = [
            eqn
            for eqn in eqns
            if (eqn.primitive.name == "gather" and is_lookup(eqn, gathers=True))
            or (eqn.primitive.name == "scatter-add" and is_lookup(eqn, gathers=False))
        ]
        self.orders = Orders(eqns, self.producers)
        #: By number of the sizes, the number of the order of their groups; by number of an order, the sizes.
        self.order_of: dict[int, int] = {}
        self.sizes_of: dict[int, Atom] = {}
        self._find_groups(eqns)
        #: Equations before their place, because slots depend on them.
        self.early: set[JaxprEqn] = set()

    def write(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """Equations in place of `eqn`, which are it and others where rows stay in the order."""
        if eqn in self.early:
            self.early.remove(eqn)
            return [one for one in self._written(eqn) if one is not eqn and one.outvars != eqn.outvars]
        return self._written(eqn)

    def _written(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        name = eqn.primitive.name
        if name in ("sort", "rev"):
            return [eqn, *self._order(eqn)]
        written = None
        if name == "gather":
            written = self._gather(eqn)
        if name in ("scatter-add", "scatter"):
            written = self._scatter(eqn)
        if written is not None or not any(not is_literal(atom) and atom in self.rows for atom in eqn.invars):
            return written or [eqn]
        if eqn.primitive in _GROUPED:
            return self._grouped(eqn)
        return self._row_by_row(eqn)

    def _tables(self, bases: Callable[[Var], str | None], n: int) -> Tables:
        return Tables(self.producers, bases, n, proofs=self.proofs)

    # ---- orders ------------------------------------------------------------------------------------------------------

    def _n_tokens(self, place: int, n: int) -> int:
        """The common divisor of the arrays that are indexed by an order of n rows. place: the number of the order."""
        tables = self._tables(lambda var: "order" if self.values.of.get(var) == place else None, n)
        found = n
        for eqn in self.lookups:
            size, index = shape_of(eqn.invars[0])[0], eqn.invars[1]
            if shape_of(index)[0] == n and n % size == 0 and tables.is_quotient(index, "order", n // size):
                found = math.gcd(found, size)
        return found

    def _find_groups(self, eqns: Sequence[JaxprEqn]) -> None:
        for eqn in eqns:
            sizes = self._sizes(*eqn.invars[2:4]) if eqn.primitive in _GROUPED else None
            if sizes is None or self.values.read(sizes) in self.order_of:
                continue
            order = self.orders.latest(eqn.invars[0], math.prod(shape_of(eqn.invars[0])[1:3]))
            if order is not None:
                number = self.values.of[order]
                self.order_of[self.values.read(sizes)] = number
                self.sizes_of.setdefault(number, sizes)

    def _order(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """The slots of an order; none for another sort."""
        order = eqn.outvars[-1]
        number, key = self.values.of[order], self.places.get(self.values.read(eqn.invars[0]))
        if number in self.places:
            return []
        if key is not None and key[1] == "order" and eqn.primitive.name == "sort":
            if len(eqn.invars) == 2 and maker_of(eqn.invars[1], self.producers, "iota") is not None:
                self.places[number] = key[0], "inverse"
            return []
        shape = self._shape(number, shape_of(order)[0]) if order in self.orders.of else None
        if shape is None:
            return []

        def of_ids(ids: Any) -> Any:
            return slots_of(ids.reshape(shape.n_blocks, shape.n_rows), shape)

        def of_order(order: Any, sizes: Any) -> Any:
            _, position = lax.sort((order, lax.iota(np.int32, len(order))), num_keys=1)
            ends = jnp.cumsum(sizes.astype(np.int32))
            position = position.reshape(shape.n_blocks, shape.n_rows, 1)
            return slots_of(jnp.sum(position >= ends[None, None], axis=-1, dtype=np.int32), shape)

        sizes = self.sizes_of[number]
        if self._sorts_counted_ids(eqn, sizes):
            eqns, atoms = self._equations(eqn, of_ids, ("slots", shape), eqn.invars[0])
        else:
            early = self.orders.needed_after(eqn, sizes)
            if any(self.section[one] != self.section[eqn] or one.effects for one in early):
                return []
            self.early.update(early)
            eqns, atoms = self._equations(eqn, of_order, ("slots of order", shape), order, sizes)
            eqns = [*early, *eqns]
        route = _Route(number, shape, Slots(*atoms))
        self.tables[route] = self._tables(functools.partial(self._base, route), route.n_rows)
        self.places[number] = route, "order"
        return eqns

    def _sorts_counted_ids(self, eqn: JaxprEqn, sizes: Atom) -> bool:
        """Whether it sorts integers below the number of groups, ascending, and the groups count them."""
        ids = eqn.invars[0]
        if eqn.primitive.name != "sort" or len(eqn.invars) != 2 or aval_of(ids).dtype.kind not in "iu":
            return False
        bound = self._bound(ids)
        return bound is not None and self._counts(sizes, self.values.read(ids), bound, shape_of(ids)[0])

    def _base(self, route: _Route, var: Var) -> str | None:
        number = self.values.of.get(var)
        found = None if number is None else self.places.get(number)
        return found[1] if found is not None and found[0] is route else None

    def _shape(self, order: int, n: int) -> SlotShape | None:
        if order not in self.sizes_of:
            return None
        n_groups, n_tokens = shape_of(self.sizes_of[order])[0], self._n_tokens(order, n)
        n_micro_batches, n_devices = self.sharing.n_micro_batches, self.sharing.n_devices
        if n_tokens % n_micro_batches:
            return None
        # Each micro-batch has a block for each device.
        n_blocks = n_micro_batches * math.gcd(n_tokens // n_micro_batches, n_devices)
        n_owners, n_rows = math.gcd(n_groups, n_devices), n // n_blocks
        capacity = min(n_rows, math.ceil(self.sharing.skew * n_rows / n_owners))
        return None if n_blocks == 1 else SlotShape(n_blocks, n_rows, n_groups, n_owners, capacity)

    def _route_of(self, index: Atom, base: str, n: int) -> _Route | None:
        """The route whose order, or inverse, has the index as quotient, for equally many of its rows in each of n."""
        for route, name in self.places.values():
            if n and name == base and self.tables[route].base_of(index) == base:
                k, rest = divmod(route.n_rows, n)
                return route if not rest and self.tables[route].is_quotient(index, base, k) else None
        return None

    # ---- groups ------------------------------------------------------------------------------------------------------

    def _sizes(self, starts: Atom, ends: Atom) -> Atom | None:
        """The sizes [g] whose sums are these bounds [1 1 g] (`tracing.ragged_products`)."""
        after = maker_of(self._without_shape(ends), self.producers, "cumsum")
        before = maker_of(self._without_shape(starts), self.producers, "sub")
        if after is None or before is None or after.params["reverse"]:
            return None
        sums, sizes = before.invars
        if self.values.read(sizes) != self.values.read(after.invars[0]):
            return None
        return sizes if self.values.read(sums) == self.values.of[after.outvars[0]] else None

    def _without_shape(self, atom: Atom) -> Atom:
        shape = shape_of(atom)
        made = maker_of(atom, self.producers, "broadcast_in_dim")
        if made is not None and shape[:-1] == (1, 1) and shape_of(made.invars[0]) == shape[-1:]:
            atom = made.invars[0]
        made = maker_of(atom, self.producers, "mul")
        if made is not None and is_literal(made.invars[0]) and made.invars[0].val == 1:
            return made.invars[1]
        return atom

    def _counts(self, sizes: Atom, ids: int, bound: int, n: int) -> bool:
        """Whether element e of `sizes` is how many of n ids are e. ids: their number; they are below `bound`."""
        n_groups = shape_of(sizes)[0]
        while _has_integers(aval_of(sizes).dtype, n):
            made = maker_of(sizes, self.producers, "convert_element_type")
            if made is None:
                break
            sizes = made.invars[0]
        if bound > n_groups or not _has_integers(aval_of(sizes).dtype, n):
            return False
        tables = self._tables(lambda var: "ids" if self.values.of.get(var) == ids else None, bound)
        if (made := maker_of(sizes, self.producers, "reduce_sum")) is not None:
            return self._sums_units(made, tables, bound, n_groups)
        made = maker_of(sizes, self.producers, "scatter-add")
        return made is not None and self._adds_ones(made, tables, n_groups)

    def _sums_units(self, eqn: JaxprEqn, tables: Tables, bound: int, n_groups: int) -> bool:
        """Whether the sum is over the unit vector of each id."""
        one_hot = maker_of(eqn.invars[0], self.producers, "convert_element_type")
        units = tables.read(one_hot.invars[0] if one_hot is not None else eqn.invars[0])
        is_matrix = eqn.params["axes"] == (0,) and len(shape_of(eqn.invars[0])) == 2
        return bool(is_matrix and units and units[::2] == ("ids", 0) and _is_unit(units.values, bound, n_groups))

    def _adds_ones(self, eqn: JaxprEqn, tables: Tables, n_groups: int) -> bool:
        """Whether 1 is added to an element of zeros for each id."""
        if not is_lookup(eqn, gathers=False) or shape_of(eqn.invars[0]) != (n_groups,):
            return False
        zero, one = (filled(eqn.invars[k], self.producers) for k in (0, 2))
        return zero == 0 and one == 1 and tables.is_quotient(eqn.invars[1], "ids", 1)

    def _bound(self, atom: Atom) -> int | None:
        """All elements are in range(bound)."""
        eqn = maker_of(atom, self.producers)
        if eqn is None:
            return None
        name, shape = eqn.primitive.name, shape_of(eqn.invars[0]) if eqn.invars else ()
        if name == "optimization_barrier":
            return self._bound(eqn.invars[eqn.outvars.index(atom)])
        found: int | None = None
        if name in _SAME_ELEMENTS:
            found = self._bound(eqn.invars[0])
        elif name == "top_k" and atom is eqn.outvars[1]:
            found = shape[eqn.params.get("axis", -1)]
        elif name == "argmax":
            found = math.prod(shape[axis] for axis in eqn.params["axes"])
        dtype = aval_of(atom).dtype
        is_kept = found is not None and np.issubdtype(dtype, np.integer) and found <= np.iinfo(dtype).max
        return found if is_kept else None

    # ---- rows in and out ---------------------------------------------------------------------------------------------

    def _gather(self, eqn: JaxprEqn) -> list[JaxprEqn] | None:
        array, index = eqn.invars
        if not is_lookup(eqn, gathers=True) or is_literal(array):
            return None
        rows = self.rows.get(array)
        route = self._route_of(index, "order" if rows is None else "inverse", shape_of(array)[0])
        if rows is None:
            return None if route is None else [eqn, *self._rows_in(eqn, route, array)]
        return self._rows_out(eqn, rows, lambda out: out) if route is rows.route and rows.dim == 0 else None

    def _scatter(self, eqn: JaxprEqn) -> list[JaxprEqn] | None:
        base, index, updates = eqn.invars
        if not is_lookup(eqn, gathers=False) or is_literal(updates):
            return None
        is_sum, n = eqn.primitive.name == "scatter-add", shape_of(base)[0]
        if is_sum and filled(base, self.producers) != 0:
            return None
        if maker_of(updates, self.producers, "iota") is not None:
            # In the order, it puts 0, 1, ...: its result is the inverse.
            route = self._route_of(index, "order", n)
            if route is not None and shape_of(base) == shape_of(updates) == (route.n_rows,):
                self.places[self.values.of[eqn.outvars[0]]] = route, "inverse"
                return [eqn]
        if updates not in self.rows:
            route = self._route_of(index, "inverse", n)
            return None if route is None or n != route.n_rows else [eqn, *self._rows_in(eqn, route, updates)]

        rows, route = self.rows[updates], self._route_of(index, "order", n)
        if route is not rows.route or rows.dim != 0 or not (is_sum or n == route.n_rows):
            return None
        k = route.n_rows // n
        return self._rows_out(eqn, rows, lambda out: out if k == 1 else _sum_of(out.reshape(n, k, *out.shape[1:])))

    def _rows_in(self, eqn: JaxprEqn, route: _Route, array: Atom) -> list[JaxprEqn]:
        """`array` has a row for each, or for several, rows of the order."""
        n_blocks, k = route.shape.n_blocks, route.n_rows // shape_of(array)[0]

        def compute(array: Any, row_of_slot: Any) -> Any:
            blocks = array.reshape(n_blocks, array.shape[0] // n_blocks, *array.shape[1:])
            return to_slots(blocks, row_of_slot // k if k > 1 else row_of_slot)

        eqns, (made,) = self._equations(eqn, compute, ("in", n_blocks, k), array, route.slots.row_of_slot)
        self.rows[eqn.outvars[0]] = _RowsInSlots(route, 0, made)
        return eqns

    def _rows_out(self, eqn: JaxprEqn, rows: _RowsInSlots, finish: Callable[[Any], Any]) -> list[JaxprEqn]:
        def compute(array: Any, slot_of_row: Any) -> Any:
            out = from_slots(array, slot_of_row)
            return finish(out.reshape(-1, *out.shape[2:]))

        result = eqn.outvars[0]
        key = ("out", shape_of(result))
        eqns, made = self._equations(eqn, compute, key, rows.array, rows.route.slots.slot_of_row)
        return with_named_results(eqns, made, [result])[0]

    # ---- rows in slots -----------------------------------------------------------------------------------------------

    def _row_by_row(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """`eqn` alone if it does not treat all rows alike."""
        numbers = [(self.section[eqn], self.own_values.of[var]) for var in eqn.outvars]
        if eqn.effects or is_kernel(eqn):
            return [eqn]
        if all(number in self.rows_of_number for number in numbers):
            self.rows.update((var, self.rows_of_number[n]) for var, n in zip(eqn.outvars, numbers, strict=True))
            return [eqn]
        factors = factors_of(eqn)
        found = self._factor(eqn, factors)
        if found is None:
            return [eqn]
        factor, route = found
        if factor in factors.reductions:
            return self._reduced(eqn, factors, factor)
        dims = [dim for one in factors.results if (dim := _dim_with(one, factor)) is not None]
        c = route.shape.capacity
        in_slots = self._operands_in_slots(eqn, factors, factor, c) if len(dims) == len(factors.results) else None
        if in_slots is None:
            return [eqn]

        eqns, operands = in_slots
        axes = [0 if not is_literal(atom) and atom in self.rows else None for atom in eqn.invars]

        def compute(*arrays: Any) -> Any:
            def run(*one: Any) -> Any:
                return run_rows(eqn, factors, one, factor, (0, c))

            return jax.vmap(jax.vmap(run, axes), axes)(*arrays)

        made_eqns, made = self._equations(eqn, compute, None, *operands)
        for var, number, dim, array in zip(eqn.outvars, numbers, dims, made, strict=True):
            self.rows[var] = self.rows_of_number[number] = _RowsInSlots(route, dim, array)
        return [eqn, *eqns, *made_eqns]

    def _operands_in_slots(
        self, eqn: JaxprEqn, factors: Factors, factor: int, c: int
    ) -> tuple[list[JaxprEqn], list[Atom]] | None:
        """Arrays in slots, and others with `c` equal rows. None for an array with other rows."""
        eqns: list[JaxprEqn] = []
        operands: list[Atom] = []
        for atom, one in zip(eqn.invars, factors.operands, strict=True):
            if not is_literal(atom) and atom in self.rows:
                operands.append(self.rows[atom].array)
                continue
            dim = _dim_with(one, factor)
            cut = ([], atom) if dim is None else self._cut(eqn, atom, dim, c)
            if cut is None:
                return None
            eqns += cut[0]
            operands.append(cut[1])
        return eqns, operands

    def _reduced(self, eqn: JaxprEqn, factors: Factors, factor: int) -> list[JaxprEqn]:
        """A sum, or another reduction, of rows in the order of the tokens."""
        with_rows = [_dim_with(dims, factor) is not None for dims in factors.operands]
        is_known = all(
            not is_literal(atom) and atom in self.rows for atom, has in zip(eqn.invars, with_rows, strict=True) if has
        )
        if not is_known or any(_dim_with(dims, factor) is not None for dims in factors.results):
            return [eqn]
        eqns: list[JaxprEqn] = []
        operands = list(eqn.invars)
        for k, atom in enumerate(eqn.invars):
            if with_rows[k]:
                rows = self.rows[atom]
                dim = rows.dim

                def compute(array: Any, slot_of_row: Any, dim: int = dim) -> Any:
                    out = from_slots(jnp.moveaxis(array, dim + 2, 2), slot_of_row)
                    return jnp.moveaxis(out.reshape(-1, *out.shape[2:]), 0, dim)

                new, (operands[k],) = self._equations(eqn, compute, None, rows.array, rows.route.slots.slot_of_row)
                eqns += new
        return [*eqns, eqn.replace(invars=operands)]

    def _factor(self, eqn: JaxprEqn, factors: Factors) -> tuple[int, _Route] | None:
        """The factor of the rows, and their route."""
        found = set()
        for atom, dims in zip(eqn.invars, factors.operands, strict=True):
            rows = None if is_literal(atom) else self.rows.get(atom)
            if rows is not None:
                own = [f for f in dims[rows.dim] if factors.sizes[f] > 1]
                found.add((own[0] if len(own) == 1 else -1, rows.route))
        if len(found) != 1:
            return None
        factor, route = found.pop()
        is_alike = factor >= 0 and factor not in factors.blocked and factor not in factors.ramps
        return (factor, route) if is_alike else None

    def _cut(self, eqn: JaxprEqn, atom: Atom, dim: int, c: int) -> tuple[list[JaxprEqn], Atom] | None:
        """An array whose rows are all alike, with `c` rows."""
        producer = maker_of(atom, self.producers, "broadcast_in_dim")
        if producer is None:
            return None
        if dim in producer.params["broadcast_dimensions"]:
            source = shape_of(producer.invars[0])[producer.params["broadcast_dimensions"].index(dim)]
            if source != 1:
                return None
        shape = tuple(c if d == dim else size for d, size in enumerate(shape_of(atom)))
        broadcast_dims = producer.params["broadcast_dimensions"]

        def compute(x: Any) -> Any:
            return lax.broadcast_in_dim(x, shape, broadcast_dims)

        eqns, (made,) = self._equations(eqn, compute, ("cut", shape, tuple(broadcast_dims)), producer.invars[0])
        return eqns, made

    def _rows_of_grouped(self, eqn: JaxprEqn) -> list[_RowsInSlots]:
        """Its operands in slots of one route, whose ids its groups count; empty if they are not."""
        rows = [self.rows.get(atom) for atom in eqn.invars[: 2 if eqn.primitive is grouped_sum_p else 1]]
        found = [one for one in rows if one is not None and one.dim == 2]
        routes = {one.route for one in found}
        sizes, positions = self._sizes(*eqn.invars[2:4]), maker_of(eqn.invars[4], self.producers, "iota")
        is_whole = sizes is not None and positions is not None and shape_of(eqn.invars[0])[:2] == (1, 1)
        if len(found) < len(rows) or len(routes) != 1 or sizes is None or not is_whole:
            return []
        return found if self.order_of.get(self.values.read(sizes)) == found[0].route.order else []

    def _plain_rows(self, eqn: JaxprEqn, rows: _RowsInSlots) -> tuple[list[JaxprEqn], Atom]:
        """[y x c features], once for all readers, so that devices exchange it once."""
        if rows.array in self.plain:
            return [], self.plain[rows.array]
        shape = rows.route.shape
        y, x, c = shape.n_owners, shape.n_blocks, shape.capacity
        eqns, (array,) = self._equations(eqn, lambda rows: rows.reshape(y, x, c, -1), "plain", rows.array)
        self.plain[rows.array] = array
        return eqns, array

    def _grouped(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        is_sum, rows = eqn.primitive is grouped_sum_p, self._rows_of_grouped(eqn)
        if not rows:
            return [eqn]
        route = rows[0].route
        shape, slots, params = route.shape, route.slots, dict(eqn.params)
        params |= {"n_rows": shape.n_rows // shape.n_owners or 1, "n_groups": shape.n_groups // shape.n_owners}
        in_slots_p = (routed_sum_p if is_sum else routed_product_p) if shape.has_foreign_rows else eqn.primitive

        y, x, c = shape.n_owners, shape.n_blocks, shape.capacity

        def compute(lhs: Any, rhs: Any, starts: Any, ends: Any, *foreign: Any) -> Any:
            rhs = rhs if is_sum else rhs.reshape(y, -1, *rhs.shape[2:])
            of_foreign = foreign if shape.has_foreign_rows else ()
            (out,) = in_slots_p.bind(lhs, rhs, starts, ends, lax.iota(np.int32, c), *of_foreign, **params)
            return out.reshape(1, -1, *out.shape[2:]) if is_sum else out.reshape(y, x, 1, 1, c, -1)

        operands: list[Atom] = []
        plain: list[JaxprEqn] = []
        for one in rows:
            made_eqns, array = self._plain_rows(eqn, one)
            plain += made_eqns
            operands.append(array)
        operands += [] if is_sum else [eqn.invars[1]]
        bounds = (slots.starts, slots.ends, slots.foreign_starts, slots.foreign_ends)
        key = ("grouped", eqn.primitive, shape, tuple(params.items()))
        eqns, made = self._equations(eqn, compute, key, *operands, *bounds)
        self.products.add(eqn)
        if is_sum:
            return [*plain, *with_named_results(eqns, made, eqn.outvars)[0]]
        self.rows[eqn.outvars[0]] = _RowsInSlots(route, 2, made[0])
        return [eqn, *plain, *eqns]

    def _equations(
        self, eqn: JaxprEqn, fun: Callable[..., Any], key: Any, *operands: Atom
    ) -> tuple[list[JaxprEqn], list[Atom]]:
        eqns, atoms = self.maker.compute(key if key is not None else object(), fun, *operands)
        return [with_source_of(one, eqn) for one in eqns], atoms


def _numbered(eqns: Sequence[JaxprEqn]) -> ValueNumbering:
    values = ValueNumbering()
    made = {var for eqn in eqns for var in eqn.outvars}
    inputs = dict.fromkeys(var for eqn in eqns for var in operand_vars(eqn) if var not in made)
    for var in inputs:
        values.name(var, ("argument", ById(var)))
    values.run(Block(invars=tuple(inputs), ops=tuple(map(Op, eqns)), outvars=()))
    return values


def _without_barriers(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """Equations read the operands of barriers, so that a recomputed value has the number of the first one."""
    names: dict[Var, Atom] = {}
    new = []
    for eqn in eqns:
        new.append(reading(eqn, names))
        if eqn.primitive.name == "optimization_barrier":
            names.update(zip(eqn.outvars, new[-1].invars, strict=True))
    return new


def _sum_of(rows: Any) -> Any:
    """[n k ...] to [n ...]."""
    return jnp.sum(rows, axis=1, dtype=rows.dtype)


def _has_integers(dtype: Any, n: int) -> bool:
    """Whether it has all integers up to n."""
    if jnp.issubdtype(dtype, jnp.floating):
        return bool(n <= 2 ** (jnp.finfo(dtype).nmant + 1))
    return dtype.kind in "iu" and n <= np.iinfo(dtype).max


def _is_unit(table: Any, n: int, n_groups: int) -> bool:
    return table.ndim == 2 and bool(np.array_equal(np.broadcast_to(table, (n, n_groups)), np.eye(n, n_groups)))


def _dim_with(dims: Sequence[tuple[int, ...]], factor: int) -> int | None:
    return next((d for d, dim in enumerate(dims) if factor in dim), None)
