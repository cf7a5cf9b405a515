"""Rematerialisation: a step and a choice per layer in, the step whose backward passes recompute dropped values out.

Values are recomputed from kept values and the inputs of the layer, right before the layer's backward pass first reads
them (Chen et al., 2016). Layers are known only after tracing, so this rewrites programs; `jax.checkpoint` in the model
acts earlier.

The README of the package has the values that a layer keeps, and the reasons for the barriers.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from jax import lax
from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.batching import AGGREGATE, Kinds, batch_kinds
from minialpa.ir.equations import aval_of, fresh_var, is_extended, is_literal, operand_vars, reading
from minialpa.ir.op import Op
from minialpa.options import Remat
from minialpa.rules.expensive import has_contraction, is_view, reads_in_place
from minialpa.tracing.new_equations import equations_for
from minialpa.tracing.trace import TracedStep

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def rematerialise(
    traced: TracedStep,
    layer_of_group: Sequence[int],
    remat: Sequence[Remat],
    programs: Sequence[Sequence[int]] | None = None,
) -> TracedStep:
    """`traced`, with the rematerialisation `remat[layer]` of each layer.

    programs: layers that run in one program; by default all.
    Layers with `full` and `offload_inputs` keep no values; with `dots` and `offload` they keep the results of matrix
    products and convolutions; with `none` they keep all values.
    """
    if all(choice == "none" for choice in remat):
        return traced

    values = facts_of_values(traced)
    parts: list[tuple[Layer, _Recomputed, list[int]]] = []
    for number, layer in layers_of(traced, layer_of_group):
        for part in _separate_passes(layer) if remat[number] != "none" else ():
            recomputed = _equations_to_recompute(traced, part, remat[number], values)
            copied = recomputed.copied(traced.flat.eqns)
            readers = [i for i in part.backward if not copied.isdisjoint(operand_vars(traced.flat.eqns[i]))]
            if readers:
                parts.append((part, recomputed, readers))

    # In the order of backward passes: gradient by gradient, from the last layer to the first.
    rewrite = StepRewrite(traced, values.gradients, programs_of(traced, layer_of_group, programs))
    for part, recomputed, readers in sorted(parts, key=lambda each: each[2][0]):
        rewrite.recompute(part, recomputed, readers)
    return rewrite.step()


def programs_of(
    traced: TracedStep, layer_of_group: Sequence[int], programs: Sequence[Sequence[int]] | None
) -> list[tuple[int, int] | None]:
    """The program of each equation, by its layer and gradient: other gradients may be in another loop."""
    of_layer = {layer: number for number, layers in enumerate(programs or ()) for layer in layers}
    apart = 0 if programs is None else -1
    layers = [None if origin.group is None else layer_of_group[origin.group] for origin in traced.origins]
    return [
        None if layer is None else (of_layer.get(layer, apart * (1 + layer)), origin.call)
        for layer, origin in zip(layers, traced.origins, strict=True)
    ]


class StepRewrite:
    """programs: of each equation. gradients: see `ValueFacts`; a barrier waits once for each."""

    def __init__(
        self, traced: TracedStep, gradients: Mapping[int, Sequence[Var]], programs: Sequence[tuple[int, int] | None]
    ) -> None:
        self.traced, self.programs, self.gradients = traced, programs, dict(gradients)
        self.eqns = list(traced.flat.eqns)
        self.inserted: dict[int, list[Op]] = defaultdict(list)  # by the operation before which they run

    def is_cotangent(self, v: Var, layer: set[int], start: int) -> bool:
        """Whether an earlier backward equation than `start`, of another layer, makes it. layer: backward equations."""
        made = self.traced.flat.made_by.get(v, start)
        return made < start and made not in layer and self.traced.origins[made].direction == "backward"

    def awaited(self, layer: Layer, start: int) -> list[Var]:
        """What a barrier before equation `start` waits for: cotangents of the layer, gradients of its program."""
        own, program = set(layer.backward), self.programs[layer.backward[0]]
        operands = (v for i in layer.backward for v in operand_vars(self.traced.flat.eqns[i]))
        cotangents = [v for v in operands if self.is_cotangent(v, own, start)]
        ended = [i for i in self.gradients if i < start and self.programs[i] == program]
        return list(dict.fromkeys([*cotangents, *(gradient for i in ended for gradient in self.gradients.pop(i))]))

    def rename(self, equations: Sequence[int], names: Mapping[Var, Var]) -> None:
        for i in equations:
            self.eqns[i] = reading(self.eqns[i], names)

    def recompute(self, layer: Layer, recomputed: _Recomputed, readers: Sequence[int]) -> None:
        """readers: the backward equations that read the copies."""
        eqns = [self.eqns[i] for i in recomputed.equations]
        in_place = _weights_read_in_place(eqns, set(self.traced.flat.invars) - self.traced.examples)
        required = self.awaited(layer, readers[0])
        copies, names = _copies(eqns, recomputed.copied(self.eqns), required, in_place)
        for copy, k in copies:
            original = self.traced.flat.ops[recomputed.equations[k]]
            origin = replace(original.origin, direction="backward")
            self.inserted[readers[0]].append(replace(original, eqn=copy, origin=origin))
        self.rename(readers, names)

    def step(self) -> TracedStep:
        ops: list[Op] = []
        for i, op in enumerate(self.traced.flat.with_eqns(self.eqns).ops):
            ops += [*self.inserted.get(i, ()), op]
        return replace(self.traced, flat=replace(self.traced.flat, ops=tuple(ops)))


# ---- values to recompute ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ValueFacts:
    """Facts about the values of a step.

    Attributes:
        kinds: of a batch of all examples.
        readers: the equations that read each value.
        always_kept: reductions over the examples, and the operands of a maximum or minimum over them.
        gradients: by equation, the sums over examples that backward passes compute from per-example values.
    """

    kinds: Kinds
    readers: dict[Var, list[int]]
    always_kept: frozenset[Var]
    gradients: dict[int, list[Var]]


def facts_of_values(traced: TracedStep) -> ValueFacts:
    readers: dict[Var, list[int]] = defaultdict(list)
    for i, eqn in enumerate(traced.flat.eqns):
        for operand in dict.fromkeys(operand_vars(eqn)):
            readers[operand].append(i)

    kinds = batch_kinds(traced, 1)
    aggregates = {value for value, kind in kinds.items() if kind == AGGREGATE}
    always_kept = frozenset(aggregates | _compared_with_extremes(traced.flat.eqns, kinds))
    return ValueFacts(kinds, readers, always_kept, _gradient_sums(traced, kinds))


def _gradient_sums(traced: TracedStep, kinds: Kinds) -> dict[int, list[Var]]:
    """A transposed sum counts instead of the sum: compilers make no other."""
    gradients: dict[int, list[Var]] = {}
    maker: dict[Var, int] = {}
    for i, (eqn, origin) in enumerate(zip(traced.flat.eqns, traced.origins, strict=True)):
        if origin.direction != "backward":
            continue
        reads_rows = any(isinstance(kinds.get(operand), int) for operand in operand_vars(eqn))
        sums = [result for result in eqn.outvars if kinds.get(result) == AGGREGATE]
        if eqn.primitive.name == "transpose" and eqn.invars[0] in maker:
            gradients.pop(maker[eqn.invars[0]], None)
        elif not (reads_rows and sums) or eqn.primitive.name == "optimization_barrier":
            continue
        gradients[i] = sums
        maker.update((v, i) for v in sums)
    return gradients


def _compared_with_extremes(eqns: Sequence[JaxprEqn], kinds: Kinds) -> set[Var]:
    """The operands of a maximum or minimum over the examples; see `_compared_with_copies`."""
    extremes = (eqn for eqn in eqns if eqn.primitive.name in ("reduce_max", "reduce_min"))
    over_examples = (eqn for eqn in extremes if any(kinds.get(v) == AGGREGATE for v in eqn.outvars))
    return {operand for eqn in over_examples for operand in operand_vars(eqn)}


@dataclass(frozen=True, slots=True)
class Layer:
    """The numbers of a layer's equations."""

    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)


def layers_of(traced: TracedStep, layer_of_group: Sequence[int]) -> list[tuple[int, Layer]]:
    """Each gradient of the step has separate layers."""
    layers: dict[tuple[int, int], Layer] = {}
    for i, origin in enumerate(traced.origins):
        if origin.group is not None and origin.direction != "other":
            layer = layers.setdefault((layer_of_group[origin.group], origin.call), Layer())
            (layer.forward if origin.direction == "forward" else layer.backward).append(i)
    return [(number, layer) for (number, _), layer in sorted(layers.items(), key=lambda item: item[0])]


def _separate_passes(layer: Layer) -> list[Layer]:
    """The forward passes of a layer that backward passes separate, each with all backward equations."""
    passes: list[list[int]] = []
    n_before = -1
    for i in layer.forward:
        n_backward = bisect(layer.backward, i)
        if n_backward != n_before:
            passes.append([])
        passes[-1].append(i)
        n_before = n_backward
    return [Layer(forward, layer.backward) for forward in passes]


@dataclass(frozen=True, slots=True)
class _Recomputed:
    """kept: results that a layer keeps, such as the carry of a scan over layers."""

    equations: Sequence[int]
    kept: AbstractSet[Var]

    def copied(self, eqns: Sequence[JaxprEqn]) -> set[Var]:
        return {result for i in self.equations for result in eqns[i].outvars} - self.kept


def _equations_to_recompute(traced: TracedStep, layer: Layer, choice: Remat, values: ValueFacts) -> _Recomputed:
    eqns = traced.flat.eqns
    own = {*layer.forward, *layer.backward}
    outputs = {output for output in traced.flat.outvars if not is_literal(output)}
    results = [result for i in layer.forward for result in eqns[i].outvars]
    read_elsewhere = {
        result
        for result in results
        if result in outputs or any(reader not in own for reader in values.readers.get(result, ()))
    }

    # A value that is compared with a copy has to be a copy, too, which may need further values.
    kept = read_elsewhere - values.always_kept
    while True:
        recomputed = _needed_equations(eqns, layer, choice, kept | values.always_kept)
        compared = _compared_with_copies(eqns, layer, recomputed) & kept
        if not compared:
            return recomputed
        kept -= compared


def _needed_equations(eqns: Sequence[JaxprEqn], layer: Layer, choice: Remat, kept: set[Var]) -> _Recomputed:
    needed = {operand for i in layer.backward for operand in operand_vars(eqns[i])}
    recomputed: list[int] = []
    for i in reversed(layer.forward):
        eqn = eqns[i]
        may_copy = not eqn.effects and not (choice in ("dots", "offload") and has_contraction(eqn))
        if may_copy and any(v in needed and v not in kept for v in eqn.outvars):
            recomputed.append(i)
            needed.update(operand_vars(eqn))
    return _Recomputed(recomputed[::-1], kept)


def _compared_with_copies(eqns: Sequence[JaxprEqn], layer: Layer, recomputed: _Recomputed) -> set[Var]:
    """Values that are compared with copies, which may differ in the last bit: both are copies or neither is."""
    copied = recomputed.copied(eqns)
    compared: set[Var] = set()
    for i in (*recomputed.equations, *layer.backward):
        operands = set(operand_vars(eqns[i]))
        if eqns[i].primitive.name in _COMPARISONS and operands & copied:
            compared |= operands - copied
    return compared


# ---- copies of equations ---------------------------------------------------------------------------------------------


def _weights_read_in_place(eqns: Sequence[JaxprEqn], weights: AbstractSet[Var]) -> set[Var]:
    """The weights that only products with, and lookups by, other values read."""
    views = set(weights)
    for eqn in eqns:
        if is_view(eqn) and not views.isdisjoint(operand_vars(eqn)):
            views.update(eqn.outvars)

    after_barrier = set[Var]()
    for eqn in reversed(eqns):
        operands = set(operand_vars(eqn))
        in_place = reads_in_place(eqn) and bool(operands - views)
        if not in_place and (not is_view(eqn) or eqn.outvars[0] in after_barrier):
            after_barrier |= operands
    return set(weights) - after_barrier


def _copies(
    eqns: Sequence[JaxprEqn], copied: AbstractSet[Var], required: Sequence[Var], in_front: AbstractSet[Var]
) -> tuple[list[tuple[JaxprEqn, int]], dict[Var, Var]]:
    """A barrier, as part of equation 0, and copies of `eqns`: pairs (equation, place in `eqns`), new names of `copied`.

    copied: the results whose copies readers get.
    required: values for which the barrier waits, so the copies run when the backward pass needs them.
    in_front: values that the copies read without the barrier.
    """
    made = copied | in_front
    inputs = dict.fromkeys(operand for eqn in eqns for operand in operand_vars(eqn) if operand not in made)
    barrier, after_barrier = barrier_of([*inputs, *(value for value in required if value not in inputs)])

    copies = [(eqn, 0) for eqn in barrier]
    names: dict[Var, Var] = {}
    for k, eqn in enumerate(eqns):
        outvars = [fresh_var(aval_of(result)) for result in eqn.outvars]
        copies.append((reading(reading(eqn, after_barrier), names).replace(outvars=outvars), k))
        names.update((v, copy) for v, copy in zip(eqn.outvars, outvars, strict=True) if v in copied)
    return copies, names


def barrier_of(values: Sequence[Var]) -> tuple[list[JaxprEqn], dict[Var, Var]]:
    """A barrier and the new names of the values; it takes no extended dtypes."""
    arrays = [value for value in values if not is_extended(aval_of(value).dtype)]
    if not arrays:
        return [], {}
    barrier, after_barrier = equations_for(lambda *xs: lax.optimization_barrier(xs), *arrays)
    return barrier, dict(zip(arrays, after_barrier, strict=True))
