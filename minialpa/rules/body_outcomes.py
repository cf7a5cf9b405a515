"""Outcomes: what a region computes on shards if one of its groups is split.

A region, its groups and one of these go in. What each result becomes comes out: split as well, a partial sum, or the
same in every shard; or None if an equation on shards would compute anything else than the shards of what it computes on
whole arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.ir.equations import Atom, dtype_name, is_literal, operand_vars, shape_of
from minialpa.rules.body_groups import Groups, is_made_whole
from minialpa.rules.body_region import Node, Region
from minialpa.rules.endings import Ending, conditions, counters
from minialpa.rules.factors import Factors, Reduction

#: What an array is in each shard: a part of the array, the same in all shards, zeros in all shards, or a partial
#: result of a reduction.
State = Literal["split", "same", "zero"] | Reduction
_REPLICATED = ("same", "zero")
#: Primitives that pass each array unchanged, and so in any state.
_TRANSPARENT = ("optimization_barrier", "minialpa_gradient")
_LOGIC = ("and", "not", "or")


def _is_partial(state: State) -> bool:
    return state not in ("split", "same", "zero")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a region computes on shards when one group is split.

    Attributes:
        results: the state of each result.
        sums: numbers of the inputs that carry partial sums, and count once over all shards.
    """

    results: tuple[State, ...]
    sums: frozenset[int]

    @property
    def replicated(self) -> tuple[int, ...]:
        """Results that are the same in every shard."""
        return tuple(r for r, state in enumerate(self.results) if state in _REPLICATED)

    @property
    def reduction(self) -> Reduction | None:
        """How the partial results are combined, if there are any."""
        found = {state for state in self.results if _is_partial(state)}
        return found.pop() if found else None  # type: ignore[return-value]


def follow(region: Region, groups: Groups, group: Node, zeros: frozenset[Atom]) -> Outcome | None:
    """Split one group, and nothing else. None if an equation on shards would compute anything else.

    Carried sums are found by iteration: an input whose next value is partial is partial itself. An equation may break
    its rule in a round that does not know all of these inputs yet, so only the last round counts.

    zeros: arrays that are zero by construction, see `zero_arrays`.
    """
    sums: frozenset[int] = frozenset()
    while True:
        followed = _follow_once(region, groups, group, zeros, sums)
        outcome = followed.outcome
        grown = {i for r, i in region.carried if _is_partial(outcome.results[r])}
        if grown <= sums:
            is_sound = followed.is_sound and _are_carries_sums(outcome, region)
            return _ended(region, followed) if is_sound else None
        sums |= grown


def zero_arrays(region: Region) -> frozenset[Atom]:
    """Arrays of a region that are zero by construction: what linear equations make of the literal 0."""
    zeros: set[Atom] = set()
    for eqn in region.eqns:
        factors = region.factors[eqn]
        linear = [eqn.invars[k] for k in factors.linear_operands]
        is_zero = [np.all(np.asarray(atom.val) == 0) if is_literal(atom) else atom in zeros for atom in linear]
        if factors.linear == "joint" and all(is_zero):
            zeros.update(eqn.outvars)
    return frozenset(zeros)


def _are_carries_sums(outcome: Outcome, region: Region) -> bool:
    """Whether all partial results have one reduction, and carries no other than a sum."""
    carried = {r for r, _ in region.carried}
    partial = {state for state in outcome.results if _is_partial(state)}
    return len(partial) <= 1 and all(outcome.results[r] in ("split", "sum", *_REPLICATED) for r in carried)


def _ended(region: Region, followed: _Followed) -> Outcome | None:
    """The outcome of all iterations, if every shard ends as the whole loop does. None if that is not known.

    A test for each example ends each of them by itself: `while` keeps the carries of an example whose test is false.
    """
    tests = {followed.states[test] for test in region.tests}
    if tests <= {"split", *_REPLICATED}:
        return followed.outcome

    # One condition is true if it is true in any shard; all others are the same in every shard.
    (test,) = region.tests
    partial = [atom for atom in conditions(region.parts[0]) if _is_partial(followed.states[atom])]
    if len(partial) != 1 or followed.states[partial[0]] != "or" or followed.outcome.sums or is_literal(test):
        return None

    return _ended_apart(region, followed.outcome, region.endings[partial[0]])


def _ended_apart(region: Region, outcome: Outcome, ending: Ending) -> Outcome | None:
    """The outcome if each shard ends with its own part of a condition: what changes after that is a counter."""
    raised = counters(region.parts[1], len(region.carried))
    results = list(outcome.results)
    for carry, (r, _) in enumerate(region.carried):
        if carry in ending.kept:
            continue
        # The condition stays false only if nothing that it reads changes.
        if results[r] not in _REPLICATED or carry in ending.read or carry not in raised:
            return None
        results[r] = "max"
    return replace(outcome, results=tuple(results))


# ---- one iteration --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _States:
    """The states of all arrays of a region when one group is split.

    Attributes:
        groups: the groups of the region.
        group: the one that is split.
        zeros: arrays that are zero by construction.
        partial: arrays that are partial results of a reduction; grows while the equations are followed.
    """

    groups: Groups
    group: Node
    zeros: frozenset[Atom]
    partial: dict[Atom, State]

    def __getitem__(self, atom: Atom) -> State:
        if self.group in self.groups.of(atom):
            return "split"
        if is_literal(atom):
            return "zero" if not shape_of(atom) and np.all(np.asarray(atom.val) == 0) else "same"
        return self.partial.get(atom, "zero" if atom in self.zeros else "same")


@dataclass(frozen=True, slots=True)
class _Followed:
    """What one iteration makes of given states of its inputs.

    Attributes:
        outcome: the states of the results.
        is_sound: whether the rules of all equations allow it, tests apart.
        states: of all arrays.
    """

    outcome: Outcome
    is_sound: bool
    states: _States


def _follow_once(
    region: Region, groups: Groups, group: Node, zeros: frozenset[Atom], sums: frozenset[int]
) -> _Followed:
    """The outcome when the inputs in `sums` are partial."""
    partial: dict[Atom, State] = {atom: "sum" for i, atom in enumerate(region.inputs) if i in sums}
    states = _States(groups=groups, group=group, zeros=zeros, partial=partial)
    is_sound = True
    members = groups.members.get(group, {})
    for i, eqn in enumerate(region.eqns):
        fits = _follow_equation(eqn, region.factors[eqn], members.get(i, set()), states)
        is_sound = is_sound and fits

    joined = [_joined([states[atom] for atom in atoms]) for atoms in region.results]
    do_branches_agree = all(state is not None for state in joined)
    outcome = Outcome(tuple(state or "sum" for state in joined), sums)
    return _Followed(outcome, is_sound and do_branches_agree, states)


def _joined(states: Sequence[State]) -> State | None:
    """The state of a result that comes from one of several branches, or None if they differ. Zeros fit any state."""
    found = set(states)
    if len(found) > 1:
        found.discard("zero")
    return found.pop() if len(found) == 1 else None


# ---- one equation ---------------------------------------------------------------------------------------------------


def _follow_equation(eqn: JaxprEqn, factors: Factors, split: Collection[int], states: _States) -> bool:
    """Note the results that are partial when the factors `split` are cut. Returns whether the rule allows that."""
    is_affected = bool(split) or any(var in states.partial for var in operand_vars(eqn))
    if not eqn.outvars or not is_affected:
        return True

    # What is made in full needs its operands in full.
    operands = [states[atom] for atom in eqn.invars]
    made_whole = any(is_made_whole(eqn, factors, f) for f in split)
    is_sound = not made_whole or all(state in _REPLICATED for state in operands)

    for r, var in enumerate(eqn.outvars):
        state, fits = _result_state(eqn, factors, split, operands, r)
        is_sound = is_sound and fits
        if _is_partial(state):
            states.partial[var] = state
    return is_sound


def _result_state(
    eqn: JaxprEqn, factors: Factors, split: Collection[int], states: Sequence[State], result: int
) -> tuple[State, bool]:
    """The state of one result of an equation whose factors `split` are cut; and whether the rule allows it.

    states: of the operands.
    """
    if eqn.primitive.name in _TRANSPARENT:
        return states[result], True

    partial = {k for k, state in enumerate(states) if _is_partial(state)}
    affecting = [f for f in split if factors.affects(f, result)]
    if affecting:
        state, fits = _cut(factors, affecting[0], states, partial, result)
        # Two factors that are cut together would leave out what part i of one and part j of the other make.
        return state, fits and len(affecting) == 1
    if not partial:
        return "same", True
    if eqn.primitive.name in _LOGIC:
        return _passed_logic(eqn, states, partial)
    return _passed(factors, states, partial)


def _cut(factors: Factors, factor: int, states: Sequence[State], partial: set[int], result: int) -> tuple[State, bool]:
    """The state of a result of an equation that is cut along a factor that affects it, and whether the rule allows it.

    partial: numbers of the operands that are partial results.
    """
    if not factors.is_partial(factor, result):
        return "split", not partial

    # Operands that count in one shard only may be zero, or partial by the same reduction; others may not be partial.
    reduction = factors.reductions[factor]
    once = {k for k in range(len(states)) if factors.takes_part_once(factor, k)}
    return reduction, partial <= once and all(states[k] in ("zero", reduction) for k in once)


def _passed(factors: Factors, states: Sequence[State], partial: set[int]) -> tuple[State, bool]:
    """The state of a result that only partial operands affect, and whether the equation is linear in them.

    A jointly linear equation, such as an addition, needs its other linear operands to be zero: they would be added
    once in every shard.
    """
    kinds = {states[k] for k in partial}
    state, *_ = kinds
    linear = set(factors.linear_operands)
    fits = kinds == {"sum"} and partial <= linear
    if factors.linear == "joint":
        return state, fits and all(k in partial or states[k] == "zero" for k in linear)
    return state, fits and factors.linear == "each" and len(partial) == 1


def _passed_logic(eqn: JaxprEqn, states: Sequence[State], partial: set[int]) -> tuple[State, bool]:
    """The state of what logic makes of partial booleans, and whether it is a partial result, too.

    `any(p) or q` is the `any` of `p or q`, and so is `any(p) and q` if q is no partial result; as with `all`.
    """
    kinds = {states[k] for k in partial}
    kind, *_ = kinds
    fits = len(kinds) == 1 and kind in ("and", "or") and dtype_name(eqn.outvars[0]) == "bool"
    if eqn.primitive.name == "not":
        return ("or" if kind == "and" else "and"), fits
    return kind, fits and (kind == eqn.primitive.name or len(partial) == 1)
