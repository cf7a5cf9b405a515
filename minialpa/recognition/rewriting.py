"""`rewrite` replaces the attentions in a list of equations by the primitives, and drops equations without readers.

A primitive computes each result of an attention that the rest of the program reads. The rest may also read other
values, such as the probabilities, but if the product of the scores keeps a reader, the attention stays as written. A
list may have two sections: the bodies of a scan and of its derivative.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from minialpa.ir.equations import Atom, is_literal, operand_vars, reading
from minialpa.recognition.emission import (
    Operands,
    VariableRequest,
    emit_attention,
    emit_gradient,
    operands_of,
    shared_dtype,
    with_cotangent,
)
from minialpa.recognition.forms import find_forms
from minialpa.recognition.masks import MaskReader
from minialpa.recognition.terms import Form, NoFormula, Role, Softmax, SoftmaxArray, find_role
from minialpa.support.private_jax import with_source_of
from minialpa.tracing.new_equations import equations_for


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEquation:
    """It is, or replaces, the old equation number `place`.

    forward: for the gradient of an attention, the `place` of the attention.
    """

    eqn: JaxprEqn
    place: int
    forward: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Equations around or before the rewritten ones, by result, and values of captured arrays."""

    producers: Mapping[Var, JaxprEqn] = field(default_factory=dict)
    consts: Mapping[Var, object] = field(default_factory=dict)


@dataclass(slots=True)
class _AttentionRequests:
    """What the program reads from one attention."""

    results: list[VariableRequest] = field(default_factory=list)
    gradients: list[VariableRequest] = field(default_factory=list)


Accept = Callable[[Operands, Sequence[int]], bool]


def rewrite(
    eqns: Sequence[JaxprEqn],
    outvars: Sequence[Atom],
    written: Written,
    accept: Accept,
    section: Sequence[int] = (),
) -> list[NewEquation] | None:
    """With attentions as operations; None without attentions.

    accept: whether an attention with these operands may replace the equations with these numbers.
    section: of each equation; empty for one section.
    """
    producers = {**written.producers, **{var: eqn for eqn in eqns for var in eqn.outvars}}
    forms = find_forms(eqns, producers)
    if not forms:
        return None
    rewriter = _Rewriter(eqns, outvars, forms, replace(written, producers=producers), accept)
    return rewriter.run(section or (0,) * len(eqns))


def _parts_by_softmax(eqns: Sequence[JaxprEqn], forms: Mapping[Var, Form]) -> dict[Softmax, list[int]]:
    """The product of the scores of each attention, and its values after the exponential."""
    parts: dict[Softmax, set[int]] = defaultdict(set)
    maker = {var: i for i, eqn in enumerate(eqns) for var in eqn.outvars}
    for var, form in forms.items():
        assert isinstance(form.term, SoftmaxArray), form
        softmax = form.term.softmax
        parts[softmax] |= {maker[one] for one in (var, softmax.scores.var) if one in maker}
    return {softmax: sorted(own) for softmax, own in parts.items()}


class _Rewriter:
    def __init__(
        self,
        eqns: Sequence[JaxprEqn],
        outvars: Sequence[Atom],
        forms: Mapping[Var, Form],
        written: Written,
        accept: Accept,
    ) -> None:
        self._eqns, self._outvars, self._forms = eqns, outvars, forms
        self._written, self._accept = written, accept
        self._roles: dict[Var, Role | None] = {}
        self._operands: dict[Var, Operands | None] = {}
        self._parts = _parts_by_softmax(eqns, forms)

    def run(self, section: Sequence[int]) -> list[NewEquation] | None:
        """In order; None without attentions. Refused attentions stay as written."""
        as_written: set[Softmax] = set()
        while True:
            attentions, kept = self._choose(as_written)
            refused = {softmax for softmax, asked in attentions.items() if not self._is_accepted(softmax, asked, kept)}
            if not refused:
                break
            as_written |= refused
        if not attentions:
            return None

        new = [
            NewEquation(eqn=self._needed_part(eqn, kept[i]), place=i) for i, eqn in enumerate(self._eqns) if i in kept
        ]
        for attention in attentions.values():
            new += self._emit(attention)
        return in_order(new, section)

    # ---- which attentions ------------------------------------------------------------------------------------------

    def _choose(self, as_written: Set[Softmax]) -> tuple[dict[Softmax, _AttentionRequests], dict[int, set[Var]]]:
        """The requests of each attention except `as_written`, and the needed results of each equation that stays."""
        needed = {atom for atom in self._outvars if not is_literal(atom)}
        attentions: dict[Softmax, _AttentionRequests] = {}
        kept: dict[int, set[Var]] = {}
        for i in range(len(self._eqns) - 1, -1, -1):
            eqn = self._eqns[i]
            requested = needed.intersection(eqn.outvars)
            if not requested and not eqn.effects:
                continue
            role = self._role(eqn.outvars[0]) if len(eqn.outvars) == 1 else None
            if role is None or role.softmax in as_written:
                kept[i] = requested
                needed.update(operand_vars(self._needed_part(eqn, requested)))
                continue

            attention = attentions.setdefault(role.softmax, _AttentionRequests())
            request = VariableRequest(var=eqn.outvars[0], role=role, place=i)
            (attention.results if role.cotangent is None else attention.gradients).append(request)
            needed.update(self._variables(request))
        return attentions, kept

    def _needed_part(self, eqn: JaxprEqn, requested: Set[Var]) -> JaxprEqn:
        """A barrier loses values without a reader."""
        if eqn.primitive.name != "optimization_barrier" or len(requested) == len(eqn.outvars):
            return eqn
        pairs = [pair for pair in zip(eqn.invars, eqn.outvars, strict=True) if pair[1] in requested]
        new: JaxprEqn = eqn.replace(invars=[atom for atom, _ in pairs], outvars=[var for _, var in pairs])
        return new

    def _role(self, var: Var) -> Role | None:
        if var not in self._roles:
            form = self._forms.get(var)
            self._roles[var] = None if form is None else find_role(form)
        return self._roles[var]

    def _variables(self, request: VariableRequest) -> list[Var]:
        role = request.role
        operands = self._operands_of(request)
        if operands is not None:
            return operands.variables
        leaves = [role.softmax.query, role.softmax.key, *([role.cotangent] if role.cotangent is not None else [])]
        return [leaf.var for leaf in leaves]

    def _operands_of(self, request: VariableRequest) -> Operands | None:
        if request.var not in self._operands:
            try:
                found = operands_of(request.role, self._reader)
            except NoFormula:
                found = None
            self._operands[request.var] = found
        return self._operands[request.var]

    def _reader(self, softmax: Softmax) -> MaskReader:
        return MaskReader(self._written.producers, self._written.consts, softmax.key_position, softmax.query_positions)

    def _is_accepted(self, softmax: Softmax, attention: _AttentionRequests, kept: Mapping[int, set[Var]]) -> bool:
        """One call of each primitive computes all requests, and the product of the scores is dropped."""
        forward, backward = self._operands_of_passes(attention)
        if forward is None or (attention.gradients and backward is None):
            return False
        requests = attention.results + attention.gradients
        if not _have_one_call(attention):
            return False
        if any(request.role.value is not None and self._operands_of(request) is None for request in requests):
            return False
        if any(softmax.scores.var in self._eqns[i].outvars for i in self._parts[softmax] if i in kept):
            return False
        return self._accept(forward, [i for i in self._parts[softmax] if i not in kept])

    def _operands_of_passes(self, attention: _AttentionRequests) -> tuple[Operands | None, Operands | None]:
        """Forward, backward."""
        found = [self._operands_of(request) for request in attention.results + attention.gradients]
        backward = [operands for operands in found if operands is not None and operands.cotangent is not None]
        known = [operands for operands in found if operands is not None]
        if not known:
            return None, None
        forward = replace(known[0], cotangent=None, has_float16_bar=False)
        if attention.gradients and not backward:
            # The gradient of the values alone does not depend on them.
            return forward, with_cotangent(forward, attention.gradients[0].role)
        return forward, (backward[0] if backward else None)

    # ---- the new equations -----------------------------------------------------------------------------------------

    def _emit(self, attention: _AttentionRequests) -> list[NewEquation]:
        forward, backward = self._operands_of_passes(attention)
        assert forward is not None, attention
        dtype = shared_dtype(forward, attention.results)
        results = sorted(attention.results, key=lambda request: request.place)
        place = results[0].place if results else min(request.place for request in attention.gradients)
        emitted = emit_attention(forward, results, dtype)
        new, names = self._new_equations(emitted.eqns, emitted.results, results, place)
        if attention.gradients:
            assert backward is not None, attention
            gradients = sorted(attention.gradients, key=lambda request: request.place)
            raw = [names.get(atom, atom) for atom in emitted.raw]
            after = emit_gradient(backward, raw, gradients, dtype)
            new += self._new_equations(after.eqns, after.results, gradients, gradients[0].place, place)[0]
        return new

    def _new_equations(
        self,
        eqns: Sequence[JaxprEqn],
        results: Sequence[Atom],
        requests: Sequence[VariableRequest],
        place: int,
        forward: int | None = None,
    ) -> tuple[list[NewEquation], dict[Var, Var]]:
        """Also the renamed variables."""
        named, names = with_named_results(eqns, results, [request.var for request in requests])
        line = self._eqns[place]
        out = [NewEquation(eqn=with_source_of(eqn, line), place=place, forward=forward) for eqn in named]
        return out, names


def with_named_results(
    eqns: Sequence[JaxprEqn], results: Sequence[Atom], targets: Sequence[Var]
) -> tuple[list[JaxprEqn], dict[Var, Var]]:
    """`targets` replace `results`. Also the renamed variables."""
    made = {var for eqn in eqns for var in eqn.outvars}
    names: dict[Var, Var] = {}
    eqns = list(eqns)
    for atom, target in zip(results, targets, strict=True):
        if not is_literal(atom) and atom in made and atom not in names:
            names[atom] = target
            continue
        # The second name of a result, or an operand: jax returns one if a scan stacks rows that it reads.
        copies, (copy,) = equations_for(jnp.copy, atom)
        eqns += copies
        names[copy] = target

    named = [reading(eqn, names).replace(outvars=[names.get(var, var) for var in eqn.outvars]) for eqn in eqns]
    return named, names


def in_order(new: Sequence[NewEquation], section: Sequence[int]) -> list[NewEquation] | None:
    """By dependencies, then by place; None if sections depend on each other in both directions."""
    maker = {var: k for k, one in enumerate(new) for var in one.eqn.outvars}
    waits = [{maker[var] for var in operand_vars(one.eqn) if var in maker} for one in new]
    readers: list[list[int]] = [[] for _ in new]
    for k, makers in enumerate(waits):
        for other in makers:
            readers[other].append(k)

    def priority(k: int) -> tuple[int, int, int]:
        return section[new[k].place], new[k].place, k

    ready = [priority(k) for k, makers in enumerate(waits) if not makers]
    heapq.heapify(ready)
    out: list[NewEquation] = []
    while ready:
        k = heapq.heappop(ready)[-1]
        out.append(new[k])
        for reader in readers[k]:
            waits[reader].discard(k)
            if not waits[reader]:
                heapq.heappush(ready, priority(reader))
    sections = [section[one.place] for one in out]
    return out if len(out) == len(new) and sections == sorted(sections) else None


def _have_one_call(attention: _AttentionRequests) -> bool:
    """Whether requests share V, the cotangent of the result, and the dtype of p_bar, the cotangent of probabilities."""
    roles = [request.role for request in attention.results + attention.gradients]
    gradients = [request.role for request in attention.gradients]
    values = {role.value.number for role in roles if role.value is not None}
    cotangents = {(role.cotangent.number, role.cotangent.axes) for role in gradients if role.cotangent is not None}
    bars = {role.has_float16_bar for role in gradients if role.value is not None}
    return len(values) == 1 and len(cotangents) <= 1 and len(bars) <= 1
