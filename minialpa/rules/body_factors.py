"""Factors of a region: equations that run together, such as the body of a loop, seen from its inputs and results.

`link` joins the dimensions of all arrays of a region that are split together, by the rules of its equations, into
*groups*: in `h' = tanh(h @ w + x)` the examples of `h`, `x` and `h'` are one group, and the features of `h`, both
dimensions of `w` and the features of `h'` another one. `follow` then lets one group be split and says what each result
becomes: split as well, a partial sum, or the same in every shard. A group is blocked where an equation would see
something else than in the whole region.

In: a `Region`. Out: `Groups`, from which a rule makes `Factors`; and `local_jaxpr` for shards.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from minialpa.rules.factors import Factors, Reduction, factors_of, localize
from minialpa.tracing.jaxprs import Atom, FlatJaxpr, eval_on_shards, is_literal, operand_vars, shape_of

#: One dimension of an array of a region.
Node = tuple[Any, int]
#: What an array is in a shard: split, the same as whole, known zeros, or a partial result of a reduction.
State = Literal["split", "same", "zero"] | Reduction
_WHOLE = ("same", "zero")


@dataclass(frozen=True)
class Region:
    """Equations with the inputs and results that the surrounding equation sees.

    parts: the programs of the region, over shared variables: a body, a condition, branches.
    inputs: a variable for each operand.
    results: for each result the atoms that it may come from, one for each branch.
    carried: (result, input) pairs: the result of one iteration is the input of the next.
    whole: atoms that decide what runs, and so have to be the same in every shard.
    """

    parts: tuple[FlatJaxpr, ...]
    inputs: tuple[Atom, ...]
    results: tuple[tuple[Atom, ...], ...]
    carried: tuple[tuple[int, int], ...] = ()
    whole: tuple[Atom, ...] = ()

    @functools.cached_property
    def eqns(self) -> tuple[JaxprEqn, ...]:
        return tuple(eqn for part in self.parts for eqn in part.eqns)

    @functools.cached_property
    def factors(self) -> dict[int, Factors]:
        """The factors of each equation, by its id."""
        return {id(eqn): factors_of(eqn) for eqn in self.eqns}


@dataclass(slots=True)
class Links:
    """A partition of the dimensions of a region. `sizes`: into how many blocks a group can be cut at most.

    members: for each equation, by its number, the factors that belong to a group, by group.
    """

    parents: dict[Node, Node] = field(default_factory=dict)
    sizes: dict[Node, int] = field(default_factory=dict)
    blocked: set[Node] = field(default_factory=set)
    members: dict[Node, dict[int, set[int]]] = field(default_factory=dict)

    def find(self, node: Node) -> Node:
        parent = self.parents.setdefault(node, node)
        while parent != self.parents[parent]:
            self.parents[node] = parent = self.parents[parent]
        return parent

    def join(self, a: Node, b: Node) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self.parents[b] = a
            self.sizes[a] = math.gcd(self.sizes.pop(a, 0), self.sizes.pop(b, 0))
            if b in self.blocked:
                self.blocked.add(a)

    def limit(self, node: Node, size: int) -> None:
        root = self.find(node)
        self.sizes[root] = math.gcd(self.sizes.get(root, 0), size)

    def block(self, node: Node) -> None:
        self.blocked.add(self.find(node))

    def groups(self, atom: Atom) -> list[Node]:
        """The group of each dimension of an array that is longer than 1."""
        return [self.find(node_of(atom, d)) for d, size in enumerate(shape_of(atom)) if size > 1]


def node_of(atom: Atom, dim: int) -> Node:
    return (id(atom) if is_literal(atom) else atom, dim)


def link(region: Region) -> Links:
    """The groups of a region."""
    links = Links()
    for eqn in region.eqns:
        if eqn.outvars:  # a callback takes what it gets
            _link_equation(links, eqn, region.factors[id(eqn)])
    for atoms in region.results:
        _link_arrays(links, atoms)
    for result, source in region.carried:
        _link_arrays(links, (*region.results[result], region.inputs[source]))
        for test in region.whole:  # under vmap, each example goes on or stays as it is
            _link_arrays(links, (region.inputs[source], test))
    arrays = [*region.inputs, *(v for e in region.eqns for v in e.outvars), *(v for vs in region.results for v in vs)]
    for atom in arrays:
        for d, size in enumerate(shape_of(atom)):
            links.limit(node_of(atom, d), size)
        groups = links.groups(atom)
        # Two dimensions of one array that are split together would leave blocks of its diagonal.
        links.blocked.update(g for g in groups if groups.count(g) > 1)
    _block_constants(links, region)
    for i, eqn in enumerate(region.eqns):
        for f, nodes in _leading(eqn, region.factors[id(eqn)]).items():
            links.members.setdefault(links.find(nodes[0]), {}).setdefault(i, set()).add(f)
    return links


def _arrays(eqn: JaxprEqn, factors: Factors) -> list[tuple[Atom, Any]]:
    return list(zip((*eqn.invars, *eqn.outvars), (*factors.operands, *factors.results), strict=True))


def _leading(eqn: JaxprEqn, factors: Factors) -> dict[int, list[Node]]:
    """The dimensions that are cut when a factor is split, for each factor that is the outermost one somewhere."""
    nodes: dict[int, list[Node]] = defaultdict(list)
    for atom, dims in _arrays(eqn, factors):
        for d, dim in enumerate(dims):
            first = next((f for f in dim if factors.sizes[f] > 1), None)
            if first is not None:
                nodes[first].append(node_of(atom, d))
    return nodes


def _link_equation(links: Links, eqn: JaxprEqn, factors: Factors) -> None:
    inner = {f for _, dims in _arrays(eqn, factors) for dim in dims for f in _inner(dim, factors)}
    for f, nodes in _leading(eqn, factors).items():
        for node in nodes:
            links.join(nodes[0], node)
        links.limit(nodes[0], factors.sizes[f])
        if f in factors.blocked or f in inner:
            links.block(nodes[0])


def _inner(dim: Sequence[int], factors: Factors) -> list[int]:
    return [f for f in dim if factors.sizes[f] > 1][1:]


def _link_arrays(links: Links, atoms: Sequence[Atom]) -> None:
    for atom in atoms[1:]:
        for d in range(len(shape_of(atom))):
            links.join(node_of(atoms[0], d), node_of(atom, d))


def _block_constants(links: Links, region: Region) -> None:
    """Arrays that the region brings along cannot be given in shards."""
    read = [v for eqn in region.eqns for v in eqn.invars] + [v for atoms in region.results for v in atoms]
    captured = [v for part in region.parts for v in part.constvars] + [v for v in read if is_literal(v)]
    for atom in captured:
        for d in range(len(shape_of(atom))):
            links.block(node_of(atom, d))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What splitting one group makes of a region.

    results: the state of each result. sums: inputs that carry partial sums, and count once over all shards.
    """

    results: tuple[State, ...]
    sums: frozenset[int]

    @property
    def whole(self) -> tuple[int, ...]:
        """Results that are the same in every shard."""
        return tuple(r for r, state in enumerate(self.results) if state in _WHOLE)

    @property
    def reduction(self) -> Reduction | None:
        """How the partial results are combined, if there are any."""
        found = {state for state in self.results if state not in ("split", *_WHOLE)}
        return found.pop() if found else None  # type: ignore[return-value]


def follow(region: Region, links: Links, group: Node, zeros: frozenset[Atom]) -> Outcome | None:
    """Split one group, and nothing else. None if some equation would then see something else than in the whole.

    Carried sums are found by iteration: an input whose next value turns out to be partial is partial itself.
    """
    sums: frozenset[int] = frozenset()
    while True:
        outcome, is_sound = _follow_once(region, links, group, zeros, sums)
        grown = {i for r, i in region.carried if outcome.results[r] not in ("split", *_WHOLE)}
        if grown <= sums:
            return outcome if is_sound and _are_carries_sums(outcome, region) else None
        sums |= grown


def _are_carries_sums(outcome: Outcome, region: Region) -> bool:
    carried = {r for r, _ in region.carried}
    partial = {state for state in outcome.results if state not in ("split", *_WHOLE)}
    return len(partial) <= 1 and all(outcome.results[r] in ("split", "sum", *_WHOLE) for r in carried)


def _follow_once(
    region: Region, links: Links, group: Node, zeros: frozenset[Atom], sums: frozenset[int]
) -> tuple[Outcome, bool]:
    """States of all arrays when the inputs in `sums` are partial; and whether all equations agree with that."""
    changed: dict[Atom, State] = {v: "sum" for i, v in enumerate(region.inputs) if i in sums}

    def state(atom: Atom) -> State:
        if group in links.groups(atom):
            return "split"
        if is_literal(atom):
            return "zero" if not shape_of(atom) and np.all(np.asarray(atom.val) == 0) else "same"
        return changed.get(atom, "zero" if atom in zeros else "same")

    is_sound = True
    members = links.members.get(group, {})
    for i, eqn in enumerate(region.eqns):
        split = members.get(i, set())
        reads_changed = any(v in changed for v in operand_vars(eqn))
        if not eqn.outvars or not (split or reads_changed):
            continue
        states = [state(v) for v in eqn.invars]
        for r, var in enumerate(eqn.outvars):
            new, fits = _result_state(eqn, region.factors[id(eqn)], split, states, r)
            is_sound = is_sound and fits
            if new not in ("split", *_WHOLE):
                changed[var] = new
    joined = [_joined([state(v) for v in atoms]) for atoms in region.results]
    is_sound = is_sound and all(s is not None for s in joined) and all(state(v) in _WHOLE for v in region.whole)
    return Outcome(tuple(s or "sum" for s in joined), sums), is_sound


def _joined(states: Sequence[State]) -> State | None:
    """The state of a result that comes from one of several branches: zeros are a partial sum too."""
    found = set(states)
    if len(found) > 1:
        found.discard("zero")
    return found.pop() if len(found) == 1 else None


def _result_state(
    eqn: JaxprEqn, factors: Factors, split: set[int], states: Sequence[State], result: int
) -> tuple[State, bool]:
    """The state of one result of an equation whose factors `split` are cut; and whether the rule allows it."""
    if eqn.primitive.name in ("optimization_barrier", "minialpa_gradient"):
        return states[result], True
    partial = {k for k, s in enumerate(states) if s not in ("split", *_WHOLE)}
    affecting = [f for f in split if factors.affects(f, result)]
    if not affecting:
        return _passed(factors, states, partial) if partial else ("same", True)
    factor = affecting[0]
    if not factors.is_partial(factor, result):
        return "split", len(affecting) == 1 and not partial
    reduction = factors.reductions[factor]
    once = {k for k in range(len(states)) if factors.takes_part_once(factor, k)}
    counts_once = all(states[k] in ("zero", reduction) for k in once) and partial <= once
    return reduction, len(affecting) == 1 and counts_once


def _passed(factors: Factors, states: Sequence[State], partial: set[int]) -> tuple[State, bool]:
    """Partial sums pass through linear equations; f(0) = 0 lets known zeros be added to them."""
    kinds = {states[k] for k in partial}
    state, *_ = kinds
    linear = set(factors.linear_operands)
    fits = kinds == {"sum"} and partial <= linear
    if factors.linear == "joint":
        return state, fits and all(k in partial or states[k] == "zero" for k in linear)
    return state, fits and factors.linear == "each" and len(partial) == 1


def zero_arrays(region: Region) -> frozenset[Atom]:
    """Arrays of a region that are zero by construction: what linear equations make of the literal 0."""
    zeros: set[Atom] = set()
    for eqn in region.eqns:
        factors = region.factors[id(eqn)]
        linear = [eqn.invars[k] for k in factors.linear_operands]
        is_zero = [np.all(np.asarray(v.val) == 0) if is_literal(v) else v in zeros for v in linear]
        if factors.linear == "joint" and all(is_zero):
            zeros.update(eqn.outvars)
    return frozenset(zeros)


def local_jaxpr(part: FlatJaxpr, region: Region, links: Links, n_splits: Mapping[Node, int]) -> Any:
    """One program of a region for shards of its arrays, as a closed jaxpr. `n_splits[group]` as in `localize`."""

    def local(atom: Any) -> jax.ShapeDtypeStruct:
        parts = (n_splits.get(links.find(node_of(atom, d)), 1) for d in range(len(shape_of(atom))))
        shape = tuple(size // n for size, n in zip(shape_of(atom), parts, strict=True))
        return jax.ShapeDtypeStruct(shape, atom.aval.dtype, weak_type=getattr(atom.aval, "weak_type", False))

    def run(*args: Any) -> list[Any]:
        env: dict[Any, Any] = dict(zip(part.constvars, part.consts, strict=True))
        env.update(zip(part.invars, args, strict=True))

        def result(atom: Any) -> Any:
            return np.asarray(atom.val, getattr(atom.aval, "dtype", None)) if is_literal(atom) else env[atom]

        for eqn in part.eqns:
            factors = region.factors[id(eqn)]
            splits = {f: n_splits.get(links.find(nodes[0]), 1) for f, nodes in _leading(eqn, factors).items()}
            operands = [v.val if is_literal(v) else env[v] for v in eqn.invars]
            out = eval_on_shards(eqn, operands, localize(eqn, factors, splits))
            env.update(zip(eqn.outvars, out, strict=True))
        return [result(v) for v in part.outvars]

    return jax.make_jaxpr(run)(*(local(v) for v in part.invars))
