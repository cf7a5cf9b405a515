"""Values that wait for the backward pass in host memory: a step and a choice per layer in, the step with copies out.

    forward    copy to the host after the maker; a barrier: the layer after next waits for it
    backward   a barrier: waits for the backward pass of the next layer to start; copy back

Without barriers, XLA would copy to the host right before it copies back. If the neighbour is in another program, both
barriers are in the layer. A layer moves floats of examples that no other backward pass, update or result reads: results
of its own contractions (products), and values of other layers (inputs).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Var

from minialpa.inter.layers.remat import Layer, barrier_of, gradient_sums, layers_of, programs_of, rematerialise
from minialpa.inter.microbatch.batching import batch_kinds
from minialpa.ir.equations import Atom, aval_of, is_in_host, is_inexact, is_literal, operand_vars, reading
from minialpa.ir.op import Op
from minialpa.options import Remat
from minialpa.rules.expensive import has_contraction
from minialpa.tracing.new_equations import equations_for
from minialpa.tracing.trace import TracedStep

#: The choices that move values, and whether they move products.
_MOVES_PRODUCTS: Mapping[Remat, bool] = {"offload": True, "offload_inputs": False}


def with_choices(
    traced: TracedStep, layer_of_group: Sequence[int], remat: Sequence[Remat], programs: Sequence[Sequence[int]]
) -> TracedStep:
    """programs: layers that run in one program. A layer without a program has no neighbours."""
    recomputing = rematerialise(traced, layer_of_group, remat, programs)
    if _MOVES_PRODUCTS.keys().isdisjoint(remat):
        return recomputing
    return _Moves(recomputing, layer_of_group, remat, programs).step()


class _Moves:
    def __init__(
        self,
        traced: TracedStep,
        layer_of_group: Sequence[int],
        remat: Sequence[Remat],
        programs: Sequence[Sequence[int]],
    ) -> None:
        self.traced, self.remat = traced, remat
        self.programs = programs_of(traced, layer_of_group, programs)
        self.eqns = list(traced.flat.eqns)
        self.inserted: dict[int, list[Op]] = defaultdict(list)  # by the operation before which they run
        self.kinds = batch_kinds(traced, 1)
        self.gradients = gradient_sums(traced, self.kinds)
        self.maker = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.readers: dict[Var, list[int]] = defaultdict(list)
        for i, eqn in enumerate(self.eqns):
            for v in dict.fromkeys(operand_vars(eqn)):
                self.readers[v].append(i)
        layers = [
            (number, layer) for number, layer in layers_of(traced, layer_of_group) if layer.backward and layer.forward
        ]
        self.layers = sorted(layers, key=lambda each: self._start(each[1]))
        self.forward = [i for i, origin in enumerate(traced.origins) if origin.direction == "forward"]
        self.outputs = {atom for atom in traced.flat.outvars if not is_literal(atom)}

    def step(self) -> TracedStep:
        for k, (number, layer) in enumerate(self.layers):
            if self.remat[number] in _MOVES_PRODUCTS:
                self._move_values(layer, _MOVES_PRODUCTS[self.remat[number]], k)

        ops: list[Op] = []
        for i, op in enumerate(self.traced.flat.with_eqns(self.eqns).ops):
            ops += [*self.inserted.get(i, ()), op]
        return replace(self.traced, flat=replace(self.traced.flat, ops=tuple(ops)))

    def _values(self, layer: Layer, *, products: bool) -> Iterator[tuple[Var, int]]:
        """Each with the equation after which the copy starts."""
        forward, backward = set(layer.forward), set(layer.backward)
        for v in dict.fromkeys(v for i in layer.backward for v in operand_vars(self.eqns[i])):
            made = self.maker.get(v)
            if made is None or self.traced.origins[made].direction != "forward" or not self._may_move(v, backward):
                continue
            if made in forward:
                if products and has_contraction(self.eqns[made]):
                    yield v, made
            elif (first := next((i for i in self.readers[v] if i in forward), None)) is not None:
                yield v, first

    def _may_move(self, v: Var, backward: set[int]) -> bool:
        is_array = is_inexact(v) and isinstance(self.kinds.get(v), int) and not is_in_host(aval_of(v))
        return (
            is_array
            and v not in self.outputs
            and all(i in backward or self.traced.origins[i].direction == "forward" for i in self.readers[v])
        )

    def _move_values(self, layer: Layer, products: bool, k: int) -> None:
        """k: the place of the layer in the order of backward passes."""
        near = self.layers[k - 1][1] if k else layer
        beside = near if self.programs[near.backward[0]] == self.programs[layer.backward[0]] else layer
        values = dict(self._values(layer, products=products))
        first = next((i for i in layer.backward if not values.keys().isdisjoint(operand_vars(self.eqns[i]))), 0)
        start = min(first, self._start(beside))
        # Later ones are of another forward pass of the layer.
        values = {v: after for v, after in values.items() if after < start}
        if not values:
            return

        in_host: dict[Var, Var] = {}
        for v, after in values.items():
            move, in_host[v] = moved(v, jax.memory.Space.Host)
            self._insert(after + 1, after, [move])
        end = next(
            (e for e in (1 + max(layer.forward[-1], beside.forward[-1]), 1 + layer.forward[-1]) if e <= start), None
        )
        if end is not None:
            in_host = self._after_forward_barrier(in_host, end)

        required = dict.fromkeys(self._cotangents(beside, start))
        program = self.programs[layer.backward[0]]
        for i in [i for i in self.gradients if i < start and self.programs[i] == program]:
            required.update(dict.fromkeys(self.gradients.pop(i)))
        barrier, after_barrier = barrier_of([*in_host.values(), *required])
        moves: list[JaxprEqn] = []
        fetched: dict[Var, Var] = {}
        for v, copy in in_host.items():
            move, fetched[v] = moved(after_barrier[copy], jax.memory.Space.Device)
            moves.append(move)
        self._insert(start, first, [*barrier, *moves])
        self._rename(layer.backward, fetched)
        # XLA drops operands of barriers without readers.
        self._rename([i for i in beside.backward if i >= start], {v: after_barrier[v] for v in required})

    def _start(self, layer: Layer) -> int:
        """The first backward equation that reads a cotangent, or the first one."""
        own = set(layer.backward)
        return next(
            (i for i in layer.backward if any(self._is_cotangent(v, own, i) for v in self._operands(i))),
            layer.backward[0],
        )

    def _cotangents(self, layer: Layer, start: int) -> list[Var]:
        own = set(layer.backward)
        return [v for i in layer.backward for v in self._operands(i) if self._is_cotangent(v, own, start)]

    def _is_cotangent(self, v: Var, own: set[int], start: int) -> bool:
        made = self.maker.get(v, start)
        return made < start and made not in own and self.traced.origins[made].direction == "backward"

    def _operands(self, i: int) -> list[Var]:
        return operand_vars(self.traced.flat.eqns[i])

    def _after_forward_barrier(self, in_host: Mapping[Var, Var], end: int) -> dict[Var, Var]:
        """New names of the copies, for which forward equations from `end` wait."""
        later = [i for i in self.forward if i >= end]
        read = dict.fromkeys(v for i in later for v in operand_vars(self.eqns[i]) if self.maker.get(v, end) < end)
        carried = [v for v in read if isinstance(self.kinds.get(v), int) and is_inexact(v)]
        if not carried:
            return dict(in_host)
        newest = max(carried, key=lambda v: self.maker[v])
        barrier, names = barrier_of([*in_host.values(), newest])
        self._insert(end, end - 1, barrier)
        self._rename(later, {newest: names[newest]})
        for before, ops in self.inserted.items():
            if before > end:
                self.inserted[before] = [replace(op, eqn=reading(op.eqn, {newest: names[newest]})) for op in ops]
        return {v: names[copy] for v, copy in in_host.items()}

    def _insert(self, before: int, of: int, eqns: Sequence[JaxprEqn]) -> None:
        """of: the equation with the origin of the new ones."""
        self.inserted[before] += [replace(self.traced.flat.ops[of], eqn=eqn) for eqn in eqns]

    def _rename(self, equations: Sequence[int], names: Mapping[Var, Var]) -> None:
        for i in equations:
            self.eqns[i] = reading(self.eqns[i], names)


def moved(v: Atom, space: Any) -> tuple[JaxprEqn, Any]:
    (eqn,), (copy,) = equations_for(lambda x: jax.device_put(x, space), v)
    return eqn, copy
