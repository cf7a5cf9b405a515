"""Rematerialisation: a traced step and what each layer keeps in, the same step with the rest computed again out.

The backward pass of a layer reads values of its forward pass. What the layer does not keep is computed again, from what
it keeps and from what it was given, right before its backward pass first needs it (Chen et al., 2016). Layers are known
after tracing only, so this rewrites the program; `jax.checkpoint` in the model has its own say and goes first.

What other layers, the update or the results read is kept anyway, and so is what has no examples of its own, such as the
sum of the weights of the batch: it is small, and its copy would be the total of a micro-batch. What is computed again
reads copies behind an `optimization_barrier`, or a compiler would see that the forward pass has it already.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jax import lax
from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.batching import AGGREGATE, Kinds, batch_kinds
from minialpa.intra.strategies.strategies import has_contraction
from minialpa.options import Remat
from minialpa.tracing.jaxprs import Atom, aval_of, equations_for, fresh_var, is_extended, is_literal, operand_vars
from minialpa.tracing.trace import Origin, TracedStep

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def rematerialise(traced: TracedStep, layer_of_group: Sequence[int], remat: Sequence[Remat]) -> TracedStep:
    """`remat[layer]`: `none` keeps all values, `dots` results of matrix products and convolutions, `full` no value."""
    if all(what == "none" for what in remat):
        return traced
    eqns, origins, values = list(traced.flat.eqns), traced.origins, _values(traced)
    inserted: dict[int, list[tuple[JaxprEqn, Origin]]] = {}
    for number, layer in _layers(traced, layer_of_group):
        what = remat[number]
        for part in _gradients_apart(layer) if what != "none" else []:
            again = _computed_again(traced, part, what, values)
            made = {v for i in again for v in eqns[i].outvars}
            readers = [i for i in part.backward if any(v in made for v in operand_vars(eqns[i]))]
            if readers:
                copies, names = _copies([eqns[i] for i in again], _cotangents(traced, part, readers[0]))
                again_origins = [(copy, replace(origins[again[k]], direction="backward")) for copy, k in copies]
                inserted.setdefault(readers[0], []).extend(again_origins)
                for i in readers:
                    eqns[i] = eqns[i].replace(invars=_renamed(eqns[i].invars, names))
    pairs = [pair for i, eqn in enumerate(eqns) for pair in (*inserted.get(i, ()), (eqn, origins[i]))]
    flat = replace(traced.flat, eqns=tuple(eqn for eqn, _ in pairs), scopes=("",) * len(pairs))
    return replace(traced, flat=flat, origins=tuple(origin for _, origin in pairs))


@dataclass(frozen=True, slots=True)
class _Values:
    """readers: the equations that read each value. stay: totals over the examples, and the operands of a maximum or
    minimum over them."""

    readers: dict[Var, list[int]]
    stay: frozenset[Var]


def _values(traced: TracedStep) -> _Values:
    readers: dict[Var, list[int]] = {}
    for i, eqn in enumerate(traced.flat.eqns):
        for v in dict.fromkeys(operand_vars(eqn)):
            readers.setdefault(v, []).append(i)
    kinds = batch_kinds(traced, 1)
    totals = {v for v, kind in kinds.items() if kind == AGGREGATE}
    return _Values(readers, frozenset(totals | _compared(traced.flat.eqns, kinds)))


def _compared(eqns: Sequence[JaxprEqn], kinds: Kinds) -> set[Var]:
    """Rows of which there is a largest or smallest one among the examples. Its derivative compares them with it, and
    what is computed again may differ in the last bit."""
    extremes = (eqn for eqn in eqns if eqn.primitive.name in ("reduce_max", "reduce_min"))
    found = (eqn for eqn in extremes if any(kinds.get(v) == AGGREGATE for v in eqn.outvars))
    return {v for eqn in found for v in operand_vars(eqn)}


@dataclass(frozen=True, slots=True)
class _Layer:
    """Numbers of the equations of a layer, in order."""

    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)


def _layers(traced: TracedStep, layer_of_group: Sequence[int]) -> list[tuple[int, _Layer]]:
    """The equations of each layer, with its number: those of each marked gradient of the step apart."""
    layers: dict[tuple[int, int], _Layer] = {}
    for i, origin in enumerate(traced.origins):
        if origin.group is not None and origin.direction != "other":
            layer = layers.setdefault((layer_of_group[origin.group], origin.call), _Layer())
            (layer.forward if origin.direction == "forward" else layer.backward).append(i)
    return [(number, layer) for (number, _), layer in sorted(layers.items(), key=lambda item: item[0])]


def _gradients_apart(layer: _Layer) -> list[_Layer]:
    """The forward passes of a layer, one for each gradient in a row, each with the backward passes that read it.

    Nothing of a second forward pass is there yet when the first backward pass computes its values again.
    """
    passes: list[list[int]] = []
    n_before = -1
    for i in layer.forward:
        n_backward = bisect(layer.backward, i)
        if n_backward != n_before:
            passes.append([])
        passes[-1].append(i)
        n_before = n_backward
    return [_Layer(forward, layer.backward) for forward in passes]


def _computed_again(traced: TracedStep, layer: _Layer, what: Remat, values: _Values) -> list[int]:
    """Forward equations whose results the backward pass needs, or needs for others, and that are not kept."""
    eqns = traced.flat.eqns
    own = {*layer.forward, *layer.backward}
    results = {v for v in traced.flat.outvars if not is_literal(v)}
    made = [v for i in layer.forward for v in eqns[i].outvars]
    kept = {v for v in made if v in results or any(i not in own for i in values.readers.get(v, ()))} - values.stay
    while True:
        again = _needed_again(eqns, layer, what, kept | values.stay)
        apart = _compared_with_copies(eqns, layer, again) & kept
        if not apart:
            return again
        kept -= apart


def _needed_again(eqns: Sequence[JaxprEqn], layer: _Layer, what: Remat, kept: set[Var]) -> list[int]:
    needed = {v for i in layer.backward for v in operand_vars(eqns[i])}
    again: list[int] = []
    for i in reversed(layer.forward):
        eqn = eqns[i]
        stays = bool(eqn.effects) or (what == "dots" and has_contraction(eqn)) or any(v in kept for v in eqn.outvars)
        if not stays and any(v in needed for v in eqn.outvars):
            again.append(i)
            needed.update(operand_vars(eqn))
    return again[::-1]


def _compared_with_copies(eqns: Sequence[JaxprEqn], layer: _Layer, again: Sequence[int]) -> set[Var]:
    """Values that are compared with what is computed again: both have to be, since copies may differ in the last bit.

    The derivative of a maximum looks for the operand that is equal to it.
    """
    copied = {v for i in again for v in eqns[i].outvars}
    out: set[Var] = set()
    for i in (*again, *layer.backward):
        operands = set(operand_vars(eqns[i]))
        if eqns[i].primitive.name in _COMPARISONS and operands & copied:
            out |= operands - copied
    return out


def _cotangents(traced: TracedStep, layer: _Layer, first: int) -> list[Var]:
    """What the backward pass of a layer is given, as far as it is made before equation `first`."""
    own = set(layer.backward)
    made = {
        v
        for i, (eqn, origin) in enumerate(zip(traced.flat.eqns[:first], traced.origins, strict=False))
        if origin.direction == "backward" and i not in own
        for v in eqn.outvars
    }
    read = (v for i in layer.backward for v in operand_vars(traced.flat.eqns[i]))
    return [v for v in dict.fromkeys(read) if v in made]


def _copies(eqns: Sequence[JaxprEqn], cotangents: Sequence[Var]) -> tuple[list[tuple[JaxprEqn, int]], dict[Var, Var]]:
    """A barrier and, behind it, copies of equations, each with the number of its equation; the new names.

    The barrier waits for `cotangents`: nothing is computed again before the backward pass has come that far.
    """
    made = {v for eqn in eqns for v in eqn.outvars}
    read = dict.fromkeys(v for eqn in eqns for v in operand_vars(eqn) if v not in made)
    arrays = [v for v in (*read, *cotangents) if not is_extended(aval_of(v).dtype)]
    barrier, results = equations_for(lambda *xs: lax.optimization_barrier(xs), *arrays) if arrays else ([], [])
    behind = dict(zip(arrays, results, strict=True))
    out = [(eqn, 0) for eqn in barrier]
    names: dict[Var, Var] = {}
    for k, eqn in enumerate(eqns):
        outvars = [fresh_var(aval_of(v)) for v in eqn.outvars]
        out.append((eqn.replace(invars=_renamed(_renamed(eqn.invars, behind), names), outvars=outvars), k))
        names.update(zip(eqn.outvars, outvars, strict=True))
    return out, names


def _renamed(atoms: Sequence[Atom], names: Mapping[Var, Var]) -> list[Atom]:
    return [v if is_literal(v) else names.get(v, v) for v in atoms]
