"""Rows sorted by expert in; the same step with rows in slots (`slots.py`) out.

A row is in the same group in both orders. Equations that treat all rows alike, without regard to their order, compute
the same rows in slots: elementwise ones, products with a matrix, and grouped products. Rows enter and leave with the
proof that an index is the place in the order, or its quotient by the experts of a token:

    rows in     gather(tokens, order // k), scatter-add(0, inverse, rows)
    rows out    gather(rows, inverse), scatter(_, order, rows), scatter-add(0, order // k, rows)

The groups must count the ids that are sorted, which must be below the number of groups.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Var

from minialpa.grouped import grouped_product_p, grouped_sum_p
from minialpa.ir.block import Block
from minialpa.ir.equations import Atom, aval_of, is_literal, live_equations, reading, shape_of
from minialpa.routed import routed_product_p, routed_sum_p
from minialpa.routing.slots import Slots, SlotShape, from_slots, slots_of, to_slots
from minialpa.routing.tables import Tables
from minialpa.rules import table as _rules  # noqa: F401  (registers the rules)
from minialpa.rules.factors import Factors
from minialpa.rules.known_rules import factors_of, is_kernel
from minialpa.rules.shards import run_rows
from minialpa.support.private_jax import with_source_of
from minialpa.tracing.new_equations import EquationMaker
from minialpa.tracing.trace import TracedStep
from minialpa.tracing.values import ValueNumbering, producers_of

_GROUPED = (grouped_product_p, grouped_sum_p)
#: Primitives that keep the bounds of integers.
_SAME_ELEMENTS = ("convert_element_type", "copy", "reshape", "slice", "squeeze", "stop_gradient", "transpose")


def has_grouped_products(step: TracedStep) -> bool:
    return any(eqn.primitive in _GROUPED for eqn in step.flat.eqns)


@dataclass(frozen=True, slots=True)
class RowSharing:
    """Devices that share the rows of a micro-batch. skew: slots over rows."""

    n_micro_batches: int
    n_devices: int
    skew: float


#: Whether an index is a certain function of an order; equal for equal programs.
Proofs = dict[Hashable, bool]


def with_rows_in_slots(step: TracedStep, sharing: RowSharing, proofs: Proofs | None = None) -> TracedStep:
    """The same step if neither devices nor micro-batches can share its rows. Groups keep their numbers.

    proofs: of other calls, to which this call adds.
    """
    if sharing.n_devices * sharing.n_micro_batches == 1 or not has_grouped_products(step):
        return step
    writer = _Writer(step, sharing, {} if proofs is None else proofs)
    written = [writer.write(eqn) for eqn in step.flat.eqns]
    flat = step.flat.with_each_written_as(written)
    is_live = live_equations(flat.eqns, (*flat.outvars, *step.gradients))
    ops = tuple(itertools.compress(flat.ops, is_live))
    # Products that remain as written would be computed twice.
    remaining = {op.eqn for op in ops} & {eqn for eqn in step.flat.eqns if eqn in writer.products}
    if remaining or not writer.products:
        return step
    return replace(step, flat=replace(flat, ops=ops))


@dataclass(frozen=True, slots=True, eq=False)
class _Route:
    """A sort of ids [m]. ids: their number. slots: variables."""

    ids: int
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
    def __init__(self, step: TracedStep, sharing: RowSharing, proofs: Proofs) -> None:
        flat = step.flat
        self.sharing = sharing
        self.producers = producers_of(flat)
        self.values = ValueNumbering()
        for i, var in enumerate(flat.invars):
            self.values.name(var, ("argument", i))
        self.values.run(_without_barriers(flat))
        for eqn in flat.eqns:
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
        self.rows_of_number: dict[int, _RowsInSlots] = {}
        #: Products in slots.
        self.products: set[JaxprEqn] = set()
        self.lookups = [
            eqn
            for eqn in flat.eqns
            if (eqn.primitive.name == "gather" and _is_lookup(eqn, gathers=True))
            or (eqn.primitive.name == "scatter-add" and _is_lookup(eqn, gathers=False))
        ]
        #: By number of the sizes, their groups; by number of ids, the number of groups that count them.
        self.counted: dict[int, int] = {}
        self.n_groups = self._find_groups(flat.eqns)

    def write(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """Equations in place of `eqn`, which are it and others where rows stay in the order."""
        name = eqn.primitive.name
        if name == "sort":
            return [eqn, *self._sort(eqn)]
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
        tables = self._tables(lambda var: "order" if self.values.of[var] == place else None, n)
        found = n
        for eqn in self.lookups:
            size, index = shape_of(eqn.invars[0])[0], eqn.invars[1]
            if shape_of(index)[0] == n and n % size == 0 and tables.is_quotient(index, "order", n // size):
                found = math.gcd(found, size)
        return found

    def _find_groups(self, eqns: Sequence[JaxprEqn]) -> dict[int, int]:
        ids = {}
        for eqn in eqns:
            if self._is_argsort(eqn):
                ids[self.values.read(eqn.invars[0])] = eqn
                ids[self.values.of[eqn.outvars[0]]] = eqn
        found: dict[int, int] = {}
        for eqn in eqns:
            if eqn.primitive in _GROUPED:
                sizes = self._sizes(*eqn.invars[2:4])
                if sizes is None:
                    continue
                number = self.values.read(sizes)
                if number not in self.counted:
                    for base, sort in ids.items():
                        bound = self._bound(sort.invars[0])
                        if bound is not None and self._counts(sizes, base, bound, shape_of(sort.invars[0])[0]):
                            self.counted[number] = self.values.read(sort.invars[0])
                            break
                if number in self.counted:
                    found[self.counted[number]] = shape_of(sizes)[0]
        return found

    def _is_argsort(self, eqn: JaxprEqn) -> bool:
        """Of one dimension, ascending, with places as second operand."""
        if eqn.primitive.name != "sort" or len(eqn.invars) != 2 or len(shape_of(eqn.invars[0])) != 1:
            return False
        is_integer = np.issubdtype(aval_of(eqn.invars[0]).dtype, np.integer)
        return is_integer and eqn.params["num_keys"] == 1 and self._maker_of(eqn.invars[1], "iota") is not None

    def _sort(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        if not self._is_argsort(eqn):
            return []
        keys, places = self.values.read(eqn.invars[0]), self.values.of[eqn.outvars[1]]
        if places in self.places:
            return []
        if keys in self.places:
            route, base = self.places[keys]
            if base == "order":
                self.places[places] = route, "inverse"
            return []
        shape = self._shape(keys, places, shape_of(eqn.invars[0])[0])
        if shape is None:
            return []

        def compute(ids: Any) -> Any:
            return slots_of(ids.reshape(shape.n_blocks, shape.n_rows), shape)

        eqns, atoms = self._equations(eqn, compute, ("slots", shape), eqn.invars[0])
        route = _Route(keys, shape, Slots(*atoms))
        self.tables[route] = self._tables(functools.partial(self._base, route), route.n_rows)
        self.places[places] = route, "order"
        return eqns

    def _base(self, route: _Route, var: Var) -> str | None:
        of, base = self.places.get(self.values.of[var], (None, None))
        return base if of is route else None

    def _shape(self, ids: int, place: int, n: int) -> SlotShape | None:
        if ids not in self.n_groups:
            return None
        n_groups, n_tokens = self.n_groups[ids], self._n_tokens(place, n)
        n_micro_batches, n_devices = self.sharing.n_micro_batches, self.sharing.n_devices
        if n_tokens % n_micro_batches:
            return None
        # Each micro-batch has a block for each device.
        n_blocks = n_micro_batches * math.gcd(n_tokens // n_micro_batches, n_devices)
        n_owners, n_rows = math.gcd(n_groups, n_devices), n // n_blocks
        capacity = min(n_rows, math.ceil(self.sharing.skew * n_rows / n_owners))
        return None if n_blocks == 1 else SlotShape(n_blocks, n_rows, n_groups, n_owners, capacity)

    def _route_of(self, index: Atom, base: str) -> _Route | None:
        """Whose order, or inverse, the index is a function of."""
        for route, name in self.places.values():
            if name == base and self.tables[route].base_of(index) == base:
                return route
        return None

    # ---- groups ------------------------------------------------------------------------------------------------------

    def _sizes(self, starts: Atom, ends: Atom) -> Atom | None:
        """The sizes [g] whose sums are these bounds [1 1 g] (`tracing.ragged_products`)."""
        after = self._maker_of(self._without_shape(ends), "cumsum")
        before = self._maker_of(self._without_shape(starts), "sub")
        if after is None or before is None or after.params["reverse"]:
            return None
        sums, sizes = before.invars
        if self.values.read(sizes) != self.values.read(after.invars[0]):
            return None
        return sizes if self.values.read(sums) == self.values.of[after.outvars[0]] else None

    def _without_shape(self, atom: Atom) -> Atom:
        shape = shape_of(atom)
        made = self._maker_of(atom, "broadcast_in_dim")
        if made is not None and shape[:-1] == (1, 1) and shape_of(made.invars[0]) == shape[-1:]:
            atom = made.invars[0]
        made = self._maker_of(atom, "mul")
        if made is not None and is_literal(made.invars[0]) and made.invars[0].val == 1:
            return made.invars[1]
        return atom

    def _maker_of(self, atom: Atom, name: str) -> JaxprEqn | None:
        eqn = None if is_literal(atom) else self.producers.get(atom)
        return eqn if eqn is not None and eqn.primitive.name == name else None

    def _counts(self, sizes: Atom, ids: int, bound: int, n: int) -> bool:
        """Whether element e of `sizes` is how many of n ids are e. ids: their number; they are below `bound`."""
        n_groups = shape_of(sizes)[0]
        while (made := self._maker_of(sizes, "convert_element_type")) is not None:
            sizes = made.invars[0]
        dtype = aval_of(sizes).dtype
        if bound > n_groups or dtype.kind != "i" or np.iinfo(dtype).max < n:
            return False
        tables = self._tables(lambda var: "ids" if self.values.of[var] == ids else None, bound)
        if (made := self._maker_of(sizes, "reduce_sum")) is not None:
            return _sums_units(made, tables, bound, n_groups)
        made = self._maker_of(sizes, "scatter-add")
        return made is not None and _adds_ones(made, tables, n_groups)

    def _bound(self, atom: Atom) -> int | None:
        """All elements are in range(bound)."""
        eqn = None if is_literal(atom) else self.producers.get(atom)
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
        return found if found is not None and found <= np.iinfo(aval_of(atom).dtype).max else None

    # ---- rows in and out ---------------------------------------------------------------------------------------------

    def _gather(self, eqn: JaxprEqn) -> list[JaxprEqn] | None:
        array, index = eqn.invars
        if not _is_lookup(eqn, gathers=True) or is_literal(array):
            return None
        if array in self.rows:
            route = self._route_of(index, "inverse")
            rows = self.rows[array]
            if route is not rows.route or rows.dim != 0 or not self.tables[route].is_quotient(index, "inverse", 1):
                return None
            return self._rows_out(eqn, rows, lambda out: out)
        route = self._route_of(index, "order")
        n = shape_of(array)[0]
        if route is None or route.n_rows % n or not self.tables[route].is_quotient(index, "order", route.n_rows // n):
            return None
        return [eqn, *self._rows_in(eqn, route, array)]

    def _scatter(self, eqn: JaxprEqn) -> list[JaxprEqn] | None:
        base, index, updates = eqn.invars
        if not _is_lookup(eqn, gathers=False) or is_literal(updates):
            return None
        is_sum, n = eqn.primitive.name == "scatter-add", shape_of(base)[0]
        if is_sum and not self._is_zero(base):
            return None
        if updates in self.rows:
            return self._scatter_out(eqn, is_sum=is_sum)
        route = self._route_of(index, "inverse")
        if route is None or n != route.n_rows or not self.tables[route].is_quotient(index, "inverse", 1):
            return None
        return [eqn, *self._rows_in(eqn, route, updates)]

    def _scatter_out(self, eqn: JaxprEqn, *, is_sum: bool) -> list[JaxprEqn] | None:
        base, index, updates = eqn.invars
        rows, route, n = self.rows[updates], self._route_of(index, "order"), shape_of(base)[0]
        if route is not rows.route or rows.dim != 0 or route.n_rows % n:
            return None
        k = route.n_rows // n
        if not self.tables[route].is_quotient(index, "order", k) or not (is_sum or k == 1):
            return None
        return self._rows_out(eqn, rows, lambda out: out if k == 1 else _sum_of(out.reshape(n, k, *out.shape[1:])))

    def _is_zero(self, atom: Atom) -> bool:
        made = self._maker_of(atom, "broadcast_in_dim")
        value = made.invars[0] if made is not None else atom
        return is_literal(value) and not np.any(np.asarray(value.val))

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
        eqns, (made,) = self._equations(eqn, compute, key, rows.array, rows.route.slots.slot_of_row)
        return _named(eqns, made, result)

    # ---- rows in slots -----------------------------------------------------------------------------------------------

    def _row_by_row(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """`eqn` alone if it does not treat all rows alike."""
        numbers = [self.values.of[var] for var in eqn.outvars]
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
        dims = [_dim_with(one, factor) for one in factors.results]
        if None in dims:
            return [eqn]
        c = route.shape.capacity
        in_slots = self._operands_in_slots(eqn, factors, factor, c)
        if in_slots is None:
            return [eqn]
        eqns, operands = in_slots
        axes = [0 if not is_literal(atom) and atom in self.rows else None for atom in eqn.invars]

        def compute(*arrays: Any) -> Any:
            def run(*one: Any) -> Any:
                return run_rows(eqn, factors, one, factor, (0, c))

            return jax.vmap(jax.vmap(run, axes), axes)(*arrays)

        made_eqns, made = self._equations(eqn, compute, None, *operands)
        for var, dim, array in zip(eqn.outvars, dims, made, strict=True):
            assert dim is not None
            self.rows[var] = self.rows_of_number[self.values.of[var]] = _RowsInSlots(route, dim, array)
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
        producer = None if is_literal(atom) else self._maker_of(atom, "broadcast_in_dim")
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
        sizes, positions = self._sizes(*eqn.invars[2:4]), self._maker_of(eqn.invars[4], "iota")
        is_whole = sizes is not None and positions is not None and shape_of(eqn.invars[0])[:2] == (1, 1)
        if len(found) < len(rows) or len(routes) != 1 or sizes is None or not is_whole:
            return []
        return found if self.counted.get(self.values.read(sizes)) == found[0].route.ids else []

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
        eqns, (made,) = self._equations(eqn, compute, key, *operands, *bounds)
        self.products.add(eqn)
        if is_sum:
            return [*plain, *_named(eqns, made, eqn.outvars[0])]
        self.rows[eqn.outvars[0]] = _RowsInSlots(route, 2, made)
        return [eqn, *plain, *eqns]

    def _equations(
        self, eqn: JaxprEqn, fun: Callable[..., Any], key: Any, *operands: Atom
    ) -> tuple[list[JaxprEqn], list[Atom]]:
        eqns, atoms = self.maker.compute(key if key is not None else object(), fun, *operands)
        return [with_source_of(one, eqn) for one in eqns], atoms


def _without_barriers(flat: Block) -> Block:
    """Equations read the operands of barriers, so that a recomputed value has the number of the first one."""
    names: dict[Var, Atom] = {}
    eqns = []
    for eqn in flat.eqns:
        new = reading(eqn, names)
        if eqn.primitive.name == "optimization_barrier":
            names.update(zip(eqn.outvars, new.invars, strict=True))
        eqns.append(new)
    return flat.with_eqns(eqns)


def _named(eqns: Sequence[JaxprEqn], made: Atom, result: Var) -> list[JaxprEqn]:
    """`result` replaces `made`, which the last equations compute."""
    names = {made: result}
    return [reading(eqn, names).replace(outvars=[names.get(var, var) for var in eqn.outvars]) for eqn in eqns]


def _sum_of(rows: Any) -> Any:
    """[n k ...] to [n ...]."""
    return jnp.sum(rows, axis=1, dtype=rows.dtype)


def _sums_units(eqn: JaxprEqn, tables: Tables, bound: int, n_groups: int) -> bool:
    """Whether the sum is over the unit vector of each id."""
    found = tables.read(eqn.invars[0])
    is_matrix = eqn.params["axes"] == (0,) and len(shape_of(eqn.invars[0])) == 2
    return bool(is_matrix and found and found[0] == "ids" and _is_unit(found[1], bound, n_groups))


def _adds_ones(eqn: JaxprEqn, tables: Tables, n_groups: int) -> bool:
    """Whether 1 is added to an element of zeros for each id."""
    if not _is_lookup(eqn, gathers=False) or shape_of(eqn.invars[0]) != (n_groups,):
        return False
    zero, one = (tables.constant(eqn.invars[k]) for k in (0, 2))
    return zero == 0 and one == 1 and tables.is_quotient(eqn.invars[1], "ids", 1)


def _is_unit(table: Any, n: int, n_groups: int) -> bool:
    return table.ndim == 2 and bool(np.array_equal(np.broadcast_to(table, (n, n_groups)), np.eye(n, n_groups)))


def _dim_with(dims: Sequence[tuple[int, ...]], factor: int) -> int | None:
    return next((d for d, dim in enumerate(dims) if factor in dim), None)


def _is_lookup(eqn: JaxprEqn, *, gathers: bool) -> bool:
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
