"""A region and one of its groups in; out, the state of each result on shards (`Outcome`) when the group is split.

In `carry + x.sum(0), tanh(x)`, splitting dimension 0 of x makes the first result a partial sum and splits the second.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.ir.equations import Atom, dtype_name, is_literal, operand_vars, shape_of
from minialpa.rules.body_groups import Groups, Node, Region, is_made_whole
from minialpa.rules.factors import Factors, Reduction
from minialpa.rules.loop_exits import LoopExit, conditions, counters

#: In each shard: its part, the same array, zeros, or a partial result.
State = Literal["split", "same", "zero"] | Reduction
_REPLICATED = ("same", "zero")
#: Primitives that pass each array unchanged, in any state.
_TRANSPARENT = ("optimization_barrier", "minialpa_gradient")
_LOGIC = ("and", "not", "or")


def _is_partial(state: State) -> bool:
    return state not in ("split", "same", "zero")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a region on shards when one group is split.

    sums: inputs that carry partial sums: only one shard may have their initial values.
    """

    results: tuple[State, ...]
    sums: frozenset[int]

    @property
    def replicated(self) -> tuple[int, ...]:
        return tuple(r for r, state in enumerate(self.results) if state in _REPLICATED)

    @property
    def reduction(self) -> Reduction | None:
        found = {state for state in self.results if _is_partial(state)}
        return found.pop() if found else None  # type: ignore[return-value]


def follow(region: Region, groups: Groups, group: Node, zeros: frozenset[Atom]) -> Outcome | None:
    """The outcome of splitting one group; None if equations on shards would not compute shards of the whole results.

    An input whose next value is partial is partial itself, so carried sums are found by iteration. Only the last round,
    which knows all of them, checks the rules of equations.
    """
    sums: frozenset[int] = frozenset()
    while True:
        followed = _follow_once(region, groups, group, zeros, sums)
        outcome = followed.outcome
        grown = {i for r, i in region.carried if _is_partial(outcome.results[r])}
        if grown <= sums:
            is_sound = followed.is_sound and _are_carries_sums(outcome, region)
            return _outcome_at_exit(region, followed) if is_sound else None
        sums |= grown


def zero_arrays(region: Region) -> frozenset[Atom]:
    """Zero by construction: linear equations of the literal 0."""
    zeros: set[Atom] = set()
    for eqn in region.eqns:
        factors = region.factors[eqn]
        linear = [eqn.invars[k] for k in factors.linear_operands]
        is_zero = [np.all(np.asarray(atom.val) == 0) if is_literal(atom) else atom in zeros for atom in linear]
        if factors.linear == "joint" and all(is_zero):
            zeros.update(eqn.outvars)
    return frozenset(zeros)


def _are_carries_sums(outcome: Outcome, region: Region) -> bool:
    carried = {r for r, _ in region.carried}
    partial = {state for state in outcome.results if _is_partial(state)}
    return len(partial) <= 1 and all(outcome.results[r] in ("split", "sum", *_REPLICATED) for r in carried)


def _outcome_at_exit(region: Region, followed: _Followed) -> Outcome | None:
    """None if shards may exit too early or too late.

    With a test for each example, `while` keeps the carries of examples whose test is false.
    """
    tests = {followed.states[test] for test in region.tests}
    if tests <= {"split", *_REPLICATED}:
        return followed.outcome

    # One condition is true if it is true in any shard; others are equal in all shards.
    (test,) = region.tests
    partial = [atom for atom in conditions(region.parts[0]) if _is_partial(followed.states[atom])]
    if len(partial) != 1 or followed.states[partial[0]] != "or" or followed.outcome.sums or is_literal(test):
        return None

    return _outcome_of_separate_exits(region, followed.outcome, region.loop_exits[partial[0]])


def _outcome_of_separate_exits(region: Region, outcome: Outcome, loop_exit: LoopExit) -> Outcome | None:
    """Shards exit by their own part of a condition: skipped iterations change counters only."""
    raised = counters(region.parts[1], len(region.carried))
    results = list(outcome.results)
    for carry, (r, _) in enumerate(region.carried):
        if carry in loop_exit.kept:
            continue
            # The condition stays false only with its operands.
        if results[r] not in _REPLICATED or carry in loop_exit.read or carry not in raised:
            return None
        results[r] = "max"
    return replace(outcome, results=tuple(results))


# ---- one iteration --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _States:
    """The states of all arrays when `group` is split; `partial` grows while equations are followed."""

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
    """One iteration. is_sound: the rules of all equations allow the split."""

    outcome: Outcome
    is_sound: bool
    states: _States


def _follow_once(
    region: Region, groups: Groups, group: Node, zeros: frozenset[Atom], sums: frozenset[int]
) -> _Followed:
    partial: dict[Atom, State] = {atom: "sum" for i, atom in enumerate(region.inputs) if i in sums}
    states = _States(groups=groups, group=group, zeros=zeros, partial=partial)
    is_sound = True
    members = groups.members.get(group, {})
    for i, eqn in enumerate(region.eqns):
        fits = _follow_equation(eqn, region.factors[eqn], members.get(i, set()), states)
        is_sound = is_sound and fits

    joined = [_common_state([states[atom] for atom in atoms]) for atoms in region.results]
    do_branches_agree = all(state is not None for state in joined)
    outcome = Outcome(tuple(state or "sum" for state in joined), sums)
    return _Followed(outcome, is_sound and do_branches_agree, states)


def _common_state(states: Sequence[State]) -> State | None:
    """In all branches; None if they differ. Zeros fit any state."""
    found = set(states)
    if len(found) > 1:
        found.discard("zero")
    return found.pop() if len(found) == 1 else None


# ---- one equation ---------------------------------------------------------------------------------------------------


def _follow_equation(eqn: JaxprEqn, factors: Factors, split: Collection[int], states: _States) -> bool:
    """Add partial results to `states`; returns whether the rule allows it. split: the cut factors."""
    is_affected = bool(split) or any(var in states.partial for var in operand_vars(eqn))
    if not eqn.outvars or not is_affected:
        return True

    # A result that is made in full and cut needs full operands.
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
    """Also whether the rule allows it."""
    if eqn.primitive.name in _TRANSPARENT:
        return states[result], True

    partial = {k for k, state in enumerate(states) if _is_partial(state)}
    affecting = [f for f in split if factors.affects(f, result)]
    if affecting:
        state, fits = _state_if_cut(factors, affecting[0], states, partial, result)
        # Two factors cut together would omit the products of part i of one and part j of the other.
        return state, fits and len(affecting) == 1
    if not partial:
        return "same", True
    if eqn.primitive.name in _LOGIC:
        return _state_of_logic(eqn, states, partial)
    return _state_if_passed(factors, states, partial)


def _state_if_cut(
    factors: Factors, factor: int, states: Sequence[State], partial: set[int], result: int
) -> tuple[State, bool]:
    """partial: the partial operands."""
    if not factors.is_partial(factor, result):
        return "split", not partial

    # Operands that count in one shard must be zero or partial by the same reduction; others must not be partial.
    reduction = factors.reductions[factor]
    counted_once = {k for k in range(len(states)) if factors.takes_part_once(factor, k)}
    return reduction, partial <= counted_once and all(states[k] in ("zero", reduction) for k in counted_once)


def _state_if_passed(factors: Factors, states: Sequence[State], partial: set[int]) -> tuple[State, bool]:
    """`_result_state` of partial operands in which an equation should be linear.

    In a jointly linear equation, such as an addition, other linear operands must be zero, since every shard adds them.
    """
    kinds = {states[k] for k in partial}
    state, *_ = kinds
    linear = set(factors.linear_operands)
    fits = kinds == {"sum"} and partial <= linear
    if factors.linear == "joint":
        return state, fits and all(k in partial or states[k] == "zero" for k in linear)
    return state, fits and factors.linear == "each" and len(partial) == 1


def _state_of_logic(eqn: JaxprEqn, states: Sequence[State], partial: set[int]) -> tuple[State, bool]:
    """`_result_state` of partial booleans.

    `any(p) or q` is `any(p or q)`; `any(p) and q` is `any(p and q)` unless q is partial. The same for `all`.
    """
    kinds = {states[k] for k in partial}
    kind, *_ = kinds
    fits = len(kinds) == 1 and kind in ("and", "or") and dtype_name(eqn.outvars[0]) == "bool"
    if eqn.primitive.name == "not":
        return ("or" if kind == "and" else "and"), fits
    return kind, fits and (kind == eqn.primitive.name or len(partial) == 1)
