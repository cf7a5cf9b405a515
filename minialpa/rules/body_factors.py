"""Factors of a region: equations that run together, such as the body of a loop, seen from its inputs and results.

`link` partitions the dimensions of all arrays of a region into *groups* that are split together, by the rules of its
equations: in `h' = tanh(h @ w + x)` the examples of `h`, `x` and `h'` are one group, and the features of `h`, both
dimensions of `w` and the features of `h'` are another one. `follow` splits one group and says what each result becomes:
split as well, a partial sum, or the same in every shard. A group is blocked if an equation on shards would compute
anything else than the shards of what it computes on whole arrays.

A group is positional if shards must know where they begin. Arrays that a body makes of nothing that is split, such as
random bits, are made in full, and each shard takes its part; or it makes that part alone, by the rule's `on_shards`.

Rules of control flow make `Factors` from the groups, and programs on shards with `local_jaxpr` and `run_part`.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.rules.endings import Ending, conditions, counters, endings
from minialpa.rules.factors import Factors, Reduction, factors_of, localize, part_of, run_from
from minialpa.support.disjoint_sets import DisjointSets
from minialpa.tracing.jaxprs import (
    Atom,
    FlatJaxpr,
    dtype_name,
    eval_on_shards,
    is_control_flow,
    is_literal,
    operand_vars,
    shape_of,
)

#: One dimension of an array of a region.
Node = tuple[Any, int]
#: What an array is in each shard: a part of the array, the same in all shards, zeros in all shards, or a partial
#: result of a reduction.
State = Literal["split", "same", "zero"] | Reduction
_REPLICATED = ("same", "zero")


@dataclass(frozen=True, kw_only=True)
class Region:
    """Equations with the inputs and results that the surrounding equation sees.

    Attributes:
        parts: the programs of the region, over shared variables: a body, a condition, branches.
        inputs: a variable for each operand.
        results: for each result, the atoms that it may come from, one for each branch.
        carried: (result, input) pairs: the result of one iteration is the input of the next.
        tests: atoms that decide whether another iteration runs. They are the same in every shard, or true or false for
            each element of the first dimensions of all carries; or else each shard may end by itself (see `endings`).
        equal: for each input, the number of the first one that is the same array; only of loops with tests.
    """

    parts: tuple[FlatJaxpr, ...]
    inputs: tuple[Atom, ...]
    results: tuple[tuple[Atom, ...], ...]
    carried: tuple[tuple[int, int], ...] = ()
    tests: tuple[Atom, ...] = ()
    equal: tuple[int, ...] = ()

    @functools.cached_property
    def endings(self) -> dict[Atom, Ending]:
        """The ending of each condition of the test."""
        test, body = self.parts
        return endings(test, body, len(self.carried), self.equal)

    @functools.cached_property
    def eqns(self) -> tuple[JaxprEqn, ...]:
        return tuple(eqn for part in self.parts for eqn in part.eqns)

    @functools.cached_property
    def factors(self) -> dict[int, Factors]:
        """The factors of each equation, by its id."""
        return {id(eqn): factors_of(eqn) for eqn in self.eqns}


@dataclass(slots=True)
class Links:
    """A partition of the dimensions of a region into groups. A group is named by one of its dimensions.

    Attributes:
        dims: the groups as disjoint sets.
        sizes: for each group, the largest number of blocks that it can be cut into.
        blocked: groups that cannot be split; dimensions that no longer name a group may remain here.
        positional: groups of which a shard must know where it begins; as in `blocked`, with names that no longer hold.
        members: for each group, by the number of an equation, the factors of the equation that belong to the group.
    """

    dims: DisjointSets[Node] = field(default_factory=DisjointSets)
    sizes: dict[Node, int] = field(default_factory=dict)
    blocked: set[Node] = field(default_factory=set)
    positional: set[Node] = field(default_factory=set)
    members: dict[Node, dict[int, set[int]]] = field(default_factory=dict)

    def find(self, node: Node) -> Node:
        """The group of a dimension."""
        return self.dims.find(node)

    def join(self, first: Node, second: Node) -> None:
        """Put two dimensions into one group, which has the name of the first one's."""
        joined = self.dims.join(first, second)
        if joined is not None:
            group = self.dims.find(first)
            self.sizes[group] = math.gcd(self.sizes.pop(group, 0), self.sizes.pop(joined, 0))
            for marked in (self.blocked, self.positional):
                if joined in marked:
                    marked.add(group)

    def limit(self, node: Node, size: int) -> None:
        """Let the number of blocks of a group divide `size`."""
        root = self.find(node)
        self.sizes[root] = math.gcd(self.sizes.get(root, 0), size)

    def block(self, node: Node) -> None:
        """Forbid to split the group of a dimension."""
        self.blocked.add(self.find(node))

    def mark_positional(self, node: Node) -> None:
        """Note that shards of the group of a dimension must know where they begin."""
        self.positional.add(self.find(node))

    def groups(self, atom: Atom) -> list[Node]:
        """The group of each dimension of an array that is longer than 1."""
        return [self.find(node_of(atom, d)) for d, size in enumerate(shape_of(atom)) if size > 1]


def node_of(atom: Atom, dim: int) -> Node:
    """A dimension of an array; equal literals are different arrays."""
    return (id(atom) if is_literal(atom) else atom, dim)


def link(region: Region) -> Links:
    """The groups of a region."""
    links = Links()
    for eqn in region.eqns:
        if eqn.outvars:  # equations without results, such as callbacks, accept any shard
            _link_equation(links, eqn, region.factors[id(eqn)])
    _link_boundary(links, region)

    # All arrays are linked by now, so the groups of each array are final.
    intermediate = (var for eqn in region.eqns for var in eqn.outvars)
    for atom in (*region.inputs, *intermediate, *_result_atoms(region)):
        _limit_array(links, atom)
    _link_constants(links, region)

    for i, eqn in enumerate(region.eqns):
        for f, nodes in _leading(eqn, region.factors[id(eqn)]).items():
            links.members.setdefault(links.find(nodes[0]), {}).setdefault(i, set()).add(f)
    return links


def _arrays(eqn: JaxprEqn, factors: Factors) -> list[tuple[Atom, Any]]:
    """Operands and results of an equation with the factors of their dimensions."""
    return list(zip((*eqn.invars, *eqn.outvars), (*factors.operands, *factors.results), strict=True))


def _leading(eqn: JaxprEqn, factors: Factors) -> dict[int, list[Node]]:
    """The dimensions that are cut when a factor is split, for each factor that is the outermost one of a dimension."""
    nodes: dict[int, list[Node]] = defaultdict(list)
    for atom, dims in _arrays(eqn, factors):
        for d, dim in enumerate(dims):
            outermost = next((f for f in dim if factors.sizes[f] > 1), None)
            if outermost is not None:
                nodes[outermost].append(node_of(atom, d))
    return nodes


def _link_equation(links: Links, eqn: JaxprEqn, factors: Factors) -> None:
    """Join the dimensions that one factor of an equation cuts."""
    inner = {f for _, dims in _arrays(eqn, factors) for dim in dims for f in _inner(dim, factors)}
    for f, nodes in _leading(eqn, factors).items():
        for node in nodes:
            links.join(nodes[0], node)
        links.limit(nodes[0], factors.sizes[f])
        if f in inner or (f in factors.blocked and not _knows_position(eqn, factors, f)):
            links.block(nodes[0])
        elif f in factors.blocked:
            links.mark_positional(nodes[0])


def _knows_position(eqn: JaxprEqn, factors: Factors, factor: int) -> bool:
    """Whether a blocked factor of an equation in a body can be split all the same, if the position is known."""
    if _is_made_whole(eqn, factors, factor):
        return True
    return factor in factors.positional and is_control_flow(eqn)


def _is_made_whole(eqn: JaxprEqn, factors: Factors, factor: int) -> bool:
    """Whether an equation makes the dimensions of a blocked factor of operands that lack it, such as random bits."""
    if factor not in factors.blocked or factor in factors.reductions or eqn.effects:
        return False
    return not any(factor in dim for dims in factors.operands for dim in dims)


def _inner(dim: Sequence[int], factors: Factors) -> list[int]:
    """All factors of a dimension but the outermost one. Splitting one of them would leave strided blocks."""
    return [f for f in dim if factors.sizes[f] > 1][1:]


def _link_boundary(links: Links, region: Region) -> None:
    """Join what the branches of a result have in common, and a carry with its next value."""
    for atoms in region.results:
        _link_arrays(links, atoms)
    for result, source in region.carried:
        _link_arrays(links, (*region.results[result], region.inputs[source]))
        for test in region.tests:  # under vmap, a loop has a test for each example
            _link_arrays(links, (region.inputs[source], test))


def _link_arrays(links: Links, atoms: Sequence[Atom]) -> None:
    """Join equal dimensions of several arrays."""
    for atom in atoms[1:]:
        for d in range(len(shape_of(atom))):
            links.join(node_of(atoms[0], d), node_of(atom, d))


def _limit_array(links: Links, atom: Atom) -> None:
    """The blocks of an array's groups divide its dimensions, and no two of its dimensions are split together."""
    for d, size in enumerate(shape_of(atom)):
        links.limit(node_of(atom, d), size)
    groups = links.groups(atom)
    # Two dimensions in one group would leave the blocks on the array's diagonal.
    links.blocked.update(group for group in groups if groups.count(group) > 1)


def _link_constants(links: Links, region: Region) -> None:
    """Arrays that are part of the region itself are there in full, and a shard takes its part of them."""
    read = (*(atom for eqn in region.eqns for atom in eqn.invars), *_result_atoms(region))
    captured = (var for part in region.parts for var in part.constvars)
    for atom in (*captured, *(atom for atom in read if is_literal(atom))):
        for d in range(len(shape_of(atom))):
            links.mark_positional(node_of(atom, d))


def _result_atoms(region: Region) -> list[Atom]:
    return [atom for atoms in region.results for atom in atoms]


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


def follow(region: Region, links: Links, group: Node, zeros: frozenset[Atom]) -> Outcome | None:
    """Split one group, and nothing else. None if an equation on shards would compute anything else.

    Carried sums are found by iteration: an input whose next value is partial is partial itself.
    """
    sums: frozenset[int] = frozenset()
    while True:
        followed = _follow_once(region, links, group, zeros, sums)
        outcome = followed.outcome
        grown = {i for r, i in region.carried if _is_partial(outcome.results[r])}
        if grown <= sums:
            is_sound = followed.is_sound and _are_carries_sums(outcome, region)
            return _ended(region, followed) if is_sound else None
        sums |= grown


def _are_carries_sums(outcome: Outcome, region: Region) -> bool:
    """Whether all partial results have one reduction, and carries no other than a sum."""
    carried = {r for r, _ in region.carried}
    partial = {state for state in outcome.results if _is_partial(state)}
    return len(partial) <= 1 and all(outcome.results[r] in ("split", "sum", *_REPLICATED) for r in carried)


@dataclass(frozen=True, slots=True)
class _States:
    """The states of all arrays of a region when one group is split.

    Attributes:
        links: the groups of the region.
        group: the one that is split.
        zeros: arrays that are zero by construction.
        partial: arrays that are partial results of a reduction.
    """

    links: Links
    group: Node
    zeros: frozenset[Atom]
    partial: dict[Atom, State]

    def __getitem__(self, atom: Atom) -> State:
        if self.group in self.links.groups(atom):
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


def _follow_once(region: Region, links: Links, group: Node, zeros: frozenset[Atom], sums: frozenset[int]) -> _Followed:
    """The outcome when the inputs in `sums` are partial."""
    states = _States(links, group, zeros, {atom: "sum" for i, atom in enumerate(region.inputs) if i in sums})
    is_sound = True
    members = links.members.get(group, {})
    for i, eqn in enumerate(region.eqns):
        fits = _follow_equation(eqn, region.factors[id(eqn)], members.get(i, set()), states)
        is_sound = is_sound and fits

    joined = [_joined([states[atom] for atom in atoms]) for atoms in region.results]
    do_branches_agree = all(state is not None for state in joined)
    outcome = Outcome(tuple(state or "sum" for state in joined), sums)
    return _Followed(outcome, is_sound and do_branches_agree, states)


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


def _follow_equation(eqn: JaxprEqn, factors: Factors, split: set[int], states: _States) -> bool:
    """Note the results that are partial when the factors `split` are cut. Returns whether the rule allows that."""
    is_affected = bool(split) or any(var in states.partial for var in operand_vars(eqn))
    if not eqn.outvars or not is_affected:
        return True

    operands = [states[atom] for atom in eqn.invars]
    # What is made in full needs its operands in full.
    made_whole = any(_is_made_whole(eqn, factors, f) for f in split)
    is_sound = not made_whole or all(state in _REPLICATED for state in operands)
    for r, var in enumerate(eqn.outvars):
        state, fits = _result_state(eqn, factors, split, operands, r)
        is_sound = is_sound and fits
        if _is_partial(state):
            states.partial[var] = state
    return is_sound


def _joined(states: Sequence[State]) -> State | None:
    """The state of a result that comes from one of several branches, or None if they differ. Zeros fit any state."""
    found = set(states)
    if len(found) > 1:
        found.discard("zero")
    return found.pop() if len(found) == 1 else None


def _result_state(
    eqn: JaxprEqn, factors: Factors, split: set[int], states: Sequence[State], result: int
) -> tuple[State, bool]:
    """The state of one result of an equation whose factors `split` are cut; and whether the rule allows it.

    states: of the operands.
    """
    # These pass each array unchanged, and so in any state.
    if eqn.primitive.name in ("optimization_barrier", "minialpa_gradient"):
        return states[result], True

    partial = {k for k, state in enumerate(states) if _is_partial(state)}
    affecting = [f for f in split if factors.affects(f, result)]
    if not affecting:
        if partial and eqn.primitive.name in _LOGIC:
            return _passed_logic(eqn, states, partial)
        return _passed(factors, states, partial) if partial else ("same", True)
    factor = affecting[0]
    if not factors.is_partial(factor, result):
        return "split", len(affecting) == 1 and not partial

    # Operands that count in one shard only may be zero, or partial by the same reduction; others may not be partial.
    reduction = factors.reductions[factor]
    once = {k for k in range(len(states)) if factors.takes_part_once(factor, k)}
    counts_once = all(states[k] in ("zero", reduction) for k in once) and partial <= once
    return reduction, len(affecting) == 1 and counts_once


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


_LOGIC = ("and", "not", "or")


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


def zero_arrays(region: Region) -> frozenset[Atom]:
    """Arrays of a region that are zero by construction: what linear equations make of the literal 0."""
    zeros: set[Atom] = set()
    for eqn in region.eqns:
        factors = region.factors[id(eqn)]
        linear = [eqn.invars[k] for k in factors.linear_operands]
        is_zero = [np.all(np.asarray(atom.val) == 0) if is_literal(atom) else atom in zeros for atom in linear]
        if factors.linear == "joint" and all(is_zero):
            zeros.update(eqn.outvars)
    return frozenset(zeros)


def summed_carries(region: Region) -> frozenset[int] | None:
    """The carries of a body to which each iteration adds something, if all others pass unchanged; else None.

    Nothing but these sums reads what another iteration has made, so the iterations may run in any order and apart.
    """
    (body,) = region.parts
    readers: dict[Atom, list[JaxprEqn]] = defaultdict(list)
    for eqn in body.eqns:
        for atom in operand_vars(eqn):
            readers[atom].append(eqn)

    sums = set()
    for r, i in region.carried:
        if region.results[r][0] is region.inputs[i]:
            continue
        if not _is_summed(region.inputs[i], region.results[r][0], readers, [atom for (atom,) in region.results]):
            return None
        sums.add(r)
    return frozenset(sums)


def _is_summed(carry: Atom, new: Atom, readers: Mapping[Atom, list[JaxprEqn]], results: Sequence[Atom]) -> bool:
    """Whether a carry is only added to on its way to its next value."""
    value = carry
    while not any(value is result for result in results):
        # One operand of one addition reads it, or it would count twice or for something else.
        if [eqn.primitive.name for eqn in readers.get(value, [])] not in (["add"], ["add_any"]):
            return False
        value = readers[value][0].outvars[0]
    return value is new and value not in readers and sum(value is result for result in results) == 1


def local_jaxpr(part: FlatJaxpr, region: Region, links: Links, n_splits: Mapping[Node, int]) -> Any:
    """One program of a region on shards of its arrays, as a closed jaxpr. `n_splits[group]` as in `localize`."""
    structs = local_structs(part.invars, links, n_splits)
    return jax.make_jaxpr(lambda *args: run_part(part, region, links, n_splits, {}, args))(*structs)


def local_structs(atoms: Sequence[Atom], links: Links, n_splits: Mapping[Node, int]) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the shards of arrays of a region."""

    def struct(atom: Any) -> jax.ShapeDtypeStruct:
        parts = (n_splits.get(links.find(node_of(atom, d)), 1) for d in range(len(shape_of(atom))))
        shape = tuple(size // n for size, n in zip(shape_of(atom), parts, strict=True))
        return jax.ShapeDtypeStruct(shape, atom.aval.dtype, weak_type=getattr(atom.aval, "weak_type", False))

    return [struct(atom) for atom in atoms]


def run_part(
    part: FlatJaxpr,
    region: Region,
    links: Links,
    n_splits: Mapping[Node, int],
    starts: Mapping[Node, Any],
    args: Sequence[Any],
) -> list[Any]:
    """The results of one program of a region on shards of its arrays.

    starts[group]: for each positional group that is split, the number of the block that the shard begins with.
    A group has `links.sizes[group]` blocks.
    """

    def own_part(atom: Atom, value: Any) -> Any:
        """The part of an array that is there in full."""
        for d, size in enumerate(shape_of(atom)):
            group = links.find(node_of(atom, d))
            if size > 1 and group in starts:
                value = part_of(value, d, starts[group] * (size // links.sizes[group]), n_splits[group])
        return value

    env: dict[Any, Any] = {var: own_part(var, value) for var, value in zip(part.constvars, part.consts, strict=True)}
    env.update(zip(part.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return own_part(atom, atom.val) if is_literal(atom) else env[atom]

    def result(atom: Any) -> Any:
        if not is_literal(atom):
            return env[atom]
        return own_part(atom, np.asarray(atom.val, getattr(atom.aval, "dtype", None)))

    for eqn in part.eqns:
        factors = region.factors[id(eqn)]
        groups = {f: links.find(nodes[0]) for f, nodes in _leading(eqn, factors).items()}
        splits = {f: n_splits.get(group, 1) for f, group in groups.items()}
        begins = {
            f: starts[group] * (factors.sizes[f] // links.sizes[group])
            for f, group in groups.items()
            if f in factors.blocked and group in starts
        }

        operands = [read(atom) for atom in eqn.invars]
        if begins:
            shards = run_from(eqn, factors, operands, splits, begins)
        else:
            shards = eval_on_shards(eqn, operands, localize(eqn, factors, splits))
        env.update(zip(eqn.outvars, shards, strict=True))
    return [result(atom) for atom in part.outvars]
