"""Values that wait for the backward pass in host memory: a step and a choice per layer in, the step with copies out.

    forward    copy to the host after the maker; a barrier: the layer after next waits for it
    backward   a barrier: waits for the backward pass of the next layer to start; copy back

Without barriers, XLA would copy to the host right before it copies back. If the neighbour is in another program, both
barriers are in the layer. A layer moves floats of examples that no other backward pass, update or result reads: results
of its own contractions (products), and values of other layers (inputs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Var

from minialpa.inter.layers.remat import (
    Layer,
    StepRewrite,
    barrier_of,
    facts_of_values,
    layers_of,
    programs_of,
    rematerialise,
)
from minialpa.ir.equations import Atom, aval_of, is_in_host, is_inexact, is_literal, operand_vars, reading
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


class _Moves(StepRewrite):
    def __init__(
        self,
        traced: TracedStep,
        layer_of_group: Sequence[int],
        remat: Sequence[Remat],
        programs: Sequence[Sequence[int]],
    ) -> None:
        values = facts_of_values(traced)
        super().__init__(traced, values.gradients, programs_of(traced, layer_of_group, programs))
        self.kinds, self.readers, self.maker, self.remat = values.kinds, values.readers, traced.flat.made_by, remat
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
        return super().step()

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

        required = self.awaited(beside, start)  # in the program of `layer`
        barrier, after_barrier = barrier_of([*in_host.values(), *required])
        moves: list[JaxprEqn] = []
        fetched: dict[Var, Var] = {}
        for v, copy in in_host.items():
            move, fetched[v] = moved(after_barrier[copy], jax.memory.Space.Device)
            moves.append(move)
        self._insert(start, first, [*barrier, *moves])
        self.rename(layer.backward, fetched)
        # XLA drops operands of barriers without readers.
        self.rename([i for i in beside.backward if i >= start], {v: after_barrier[v] for v in required})

    def _start(self, layer: Layer) -> int:
        """The first backward equation that reads a cotangent, or the first one."""
        own, eqns = set(layer.backward), self.traced.flat.eqns
        reads = (i for i in layer.backward if any(self.is_cotangent(v, own, i) for v in operand_vars(eqns[i])))
        return next(reads, layer.backward[0])

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
        self.rename(later, {newest: names[newest]})
        for before, ops in self.inserted.items():
            if before > end:
                self.inserted[before] = [replace(op, eqn=reading(op.eqn, {newest: names[newest]})) for op in ops]
        return {v: names[copy] for v, copy in in_host.items()}

    def _insert(self, before: int, of: int, eqns: Sequence[JaxprEqn]) -> None:
        """of: the equation with the origin of the new ones."""
        self.inserted[before] += [replace(self.traced.flat.ops[of], eqn=eqn) for eqn in eqns]


def moved(v: Atom, space: Any) -> tuple[JaxprEqn, Any]:
    (eqn,), (copy,) = equations_for(lambda x: jax.device_put(x, space), v)
    return eqn, copy
