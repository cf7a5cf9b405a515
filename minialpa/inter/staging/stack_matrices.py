"""Updates of several matrices as one: a staged step in; the same step, whose equal updates run on stacks, out.

    y_k = u(x_k) for k = 1, ..., K     becomes     x = stack(x_1, ..., x_K); y = vmap(u)(x); y_1, ..., y_K = unstack(y)

An update u is all that is between the first and the last product of one matrix (README of the package).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.split_step import is_loop
from minialpa.inter.staging.tasks import StagedStep, Task
from minialpa.intra.strategies.sharing import shared_copies
from minialpa.ir.block import Block
from minialpa.ir.equations import all_equations, is_in_host, operand_vars, shape_of, sub_jaxprs
from minialpa.ir.op import Op
from minialpa.recognition.rewriting import with_named_results
from minialpa.rules.expensive import is_contraction, is_decomposition
from minialpa.support.disjoint_sets import DisjointSets
from minialpa.support.divisors import divisors
from minialpa.support.private_jax import compute_place, name_stack, with_source_of
from minialpa.tracing.evaluation import eval_flat
from minialpa.tracing.fingerprint import program_key
from minialpa.tracing.new_equations import equations_for

#: Names of equations that are never stacked: `jax.vmap` may change their numbers, or has no rule for them.
_KEPT_ALONE = ("custom_partitioning", "ffi_call", "minialpa_", "pallas_call", "random_", "rng_", "sharding_constraint")
#: Least products of an update, where a decomposition, or a loop over products, counts as two.
_LEAST_PRODUCTS = 2
#: Most equations that prepare one operand.
_MOST_PREPARATIONS = 8


def stacks_matrices(staged: StagedStep) -> bool:
    return with_stacked_matrices(staged, 1) is not staged


def with_stacked_matrices(staged: StagedStep, n: int) -> StagedStep:
    """The step with stacks for n devices; the same object if no updates are equal."""
    home = _only_tasks(staged.tasks)
    n_reads = Counter(v for op in staged.split.ops for v in operand_vars(op.eqn))
    n_reads.update(v for task in staged.tasks for v in task.outvars)
    ops: list[Op] = []
    new_tasks: dict[JaxprEqn, int] = {}
    for segment, group in itertools.groupby(staged.split.ops, key=lambda op: op.segment):
        old = list(group)
        new = old if segment == 0 or is_loop(segment) else _stacked(old, n, home, n_reads, new_tasks)
        ops += new
    if not new_tasks:
        return staged

    split = replace(staged.split, ops=tuple(ops))
    return replace(staged, split=split, tasks=_with_new_equations(staged.tasks, ops, new_tasks))


def _with_new_equations(
    tasks: Sequence[Task], ops: Sequence[Op], new_tasks: Mapping[JaxprEqn, int]
) -> tuple[Task, ...]:
    """Tasks with their new equations, in the order of `ops`."""
    members = {number: set(tasks[number].eqns) for number in new_tasks.values()}
    for eqn, number in new_tasks.items():
        members[number].add(eqn)
    return tuple(
        replace(task, eqns=tuple(op.eqn for op in ops if op.eqn in members[number])) if number in members else task
        for number, task in enumerate(tasks)
    )


def _only_tasks(tasks: Sequence[Task]) -> dict[JaxprEqn, int]:
    n_tasks = Counter(eqn for task in tasks for eqn in task.eqns)
    return {eqn: number for number, task in enumerate(tasks) for eqn in task.eqns if n_tasks[eqn] == 1}


# ---- updates of one matrix -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _MatrixUpdate:
    """Equations in order. given: the operands, or the first equal values. key: of the function, without names."""

    ops: tuple[Op, ...]
    operands: tuple[Var, ...]
    given: tuple[Var, ...]
    results: tuple[Var, ...]
    key: object


def _stacked(
    ops: Sequence[Op],
    n: int,
    home: Mapping[JaxprEqn, int],
    n_reads: Mapping[Var, int],
    new_tasks: dict[JaxprEqn, int],
) -> Sequence[Op]:
    """The operations of a segment with equal updates on stacks. Adds the tasks of new equations to `new_tasks`.

    n_reads: of each value, by equations, tasks and the caller.
    """
    if any(op.eqn.effects for op in ops):
        return ops
    stacked: list[Op] = []
    joined: list[_MatrixUpdate] = []
    for group in _equal_updates(ops, n, home, n_reads):
        new = _as_one(group, -len(group) % n if _decomposes(group[0]) else 0)
        # `jax.vmap` computes both branches of a choice by the values of each matrix.
        if _n_choices(op.eqn for op in new) == _n_choices(op.eqn for op in group[0].ops):
            new_tasks.update((op.eqn, home[group[0].ops[0].eqn]) for op in new)
            stacked += new
            joined += group
    return _with_stacks(ops, joined, stacked)


def _equal_updates(
    ops: Sequence[Op], n: int, home: Mapping[JaxprEqn, int], n_reads: Mapping[Var, int]
) -> list[Sequence[_MatrixUpdate]]:
    """Groups of updates of one task that compute the same function, for stacks on n devices."""
    updates: dict[object, list[_MatrixUpdate]] = defaultdict(list)
    eqns = [op.eqn for op in ops]
    made_by = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
    found = _between_products(eqns)
    equal = _equal_values(eqns, home) if len(found) > 1 else {}
    for numbers in found:
        inside = [ops[i] for i in _with_preparations(numbers, eqns, made_by, n_reads)]
        tasks = {home.get(op.eqn) for op in inside}
        if None not in tasks and len(tasks) == 1 and _may_stack([op.eqn for op in inside]):
            update = _matrix_update(inside, n_reads, equal.get(task := tasks.pop(), {}))
            updates[task, update.key].append(update)
    differing = [group for group in updates.values() if len({update.given for update in group}) == len(group) > 1]
    return [part for group in differing for part in _parts(group, n)]


def _with_stacks(ops: Sequence[Op], joined: Sequence[_MatrixUpdate], stacked: Sequence[Op]) -> list[Op]:
    """`stacked` in place of the updates `joined`, between the makers of operands and the readers of results."""
    inner = {op.eqn for update in joined for op in update.ops}
    made = {v for update in joined for v in update.results}
    before: list[Op] = []
    after: list[Op] = []
    for op in ops:
        if op.eqn in inner:
            continue
        is_after = any(v in made for v in operand_vars(op.eqn))
        (after if is_after else before).append(op)
        if is_after:
            made.update(op.eqn.outvars)
    return [*before, *stacked, *after]


def _n_choices(eqns: Iterable[JaxprEqn]) -> int:
    return sum(eqn.primitive.name == "cond" for outer in eqns for eqn in _with_bodies(outer))


def _with_bodies(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    return itertools.chain((eqn,), *map(all_equations, sub_jaxprs(eqn)))


def _between_products(eqns: Sequence[JaxprEqn]) -> list[list[int]]:
    """For each set of connected products, the numbers of the equations on which a product of the set depends, and that
    depend on a product or on a reduction for this set alone. So no set depends on another set.
    """
    products = [_n_products(eqn) for eqn in eqns]
    sets = _connected_products(eqns, products)
    if len(sets) < 2:
        return []
    n_products = Counter[int]()
    for i, root in sets.items():
        n_products[root] += products[i]
    bit = {root: 1 << k for k, root in enumerate(dict.fromkeys(sets.values()))}

    dependent = _dependent_sets(eqns, {i: bit[root] for i, root in sets.items()})
    started: dict[Var, int] = {}
    inside: dict[int, list[int]] = {b: [] for root, b in bit.items() if n_products[root] >= _LEAST_PRODUCTS}
    for i, eqn in enumerate(eqns):
        now = 0
        for v in operand_vars(eqn):
            now |= started.get(v, 0)
        if i in sets or eqn.primitive.name.startswith("reduce_"):
            now |= dependent[i]
        now &= dependent[i]
        if now in inside:  # one set
            inside[now].append(i)
            started.update((v, now) for v in eqn.outvars)
    return list(inside.values())


def _dependent_sets(eqns: Sequence[JaxprEqn], own: Mapping[int, int]) -> list[int]:
    """For each equation, as bits, the sets that depend on it, its own included. own: bits of equations in sets."""
    dependent = [0] * len(eqns)
    of_value: dict[Var, int] = defaultdict(int)
    for i in range(len(eqns) - 1, -1, -1):
        dependent[i] = own.get(i, 0)
        for v in eqns[i].outvars:
            dependent[i] |= of_value.get(v, 0)
        for v in operand_vars(eqns[i]) if dependent[i] else ():
            of_value[v] |= dependent[i]
    return dependent


def _connected_products(eqns: Sequence[JaxprEqn], products: Sequence[int]) -> dict[int, int]:
    """From each equation with products to the first one of its set."""
    sets: DisjointSets[int] = DisjointSets()
    latest: dict[Var, frozenset[int]] = {}
    for i, eqn in enumerate(eqns):
        known = frozenset[int]().union(*(latest.get(v, frozenset()) for v in operand_vars(eqn)))
        if products[i]:
            for other in sorted(known):
                sets.join(other, i)
            known = frozenset((i,))
        if known:
            latest.update((v, known) for v in eqn.outvars)
    return {i: sets.find(i) for i, n in enumerate(products) if n}


def _with_preparations(
    numbers: Sequence[int], eqns: Sequence[JaxprEqn], made_by: Mapping[Var, int], n_reads: Mapping[Var, int]
) -> list[int]:
    """With equations that prepare an operand from other operands, such as the square under a norm."""
    inside = set(numbers)
    operands = dict.fromkeys(v for i in numbers for v in operand_vars(eqns[i]) if made_by.get(v) not in inside)
    for v in list(operands):
        found: set[int] = set()
        pending, known = [v], operands.keys() - {v}
        while pending and pending[-1] in made_by and len(found) < _MOST_PREPARATIONS:
            i = made_by[pending.pop()]
            if i not in found:
                found.add(i)
                pending += [u for u in operand_vars(eqns[i]) if u not in known]
        reads = Counter(u for i in inside | found for u in operand_vars(eqns[i]))
        if not pending and all(n_reads.get(u, 0) == reads[u] for i in found for u in eqns[i].outvars):
            inside |= found
            del operands[v]
    return sorted(inside)


def _n_products(eqn: JaxprEqn) -> int:
    if is_contraction(eqn):
        return 1
    n_inside = sum(_n_products(one) for body in sub_jaxprs(eqn) for one in body.eqns)
    is_repeated = is_decomposition(eqn) or (n_inside and eqn.primitive.name in ("scan", "while"))
    return max(_LEAST_PRODUCTS, n_inside) if is_repeated else n_inside


def _may_stack(eqns: Sequence[JaxprEqn]) -> bool:
    return not any(
        eqn.primitive.name.startswith(_KEPT_ALONE)
        or compute_place(eqn) is not None
        or any(is_in_host(atom.aval) for atom in (*eqn.invars, *eqn.outvars))
        for eqn in itertools.chain.from_iterable(map(_with_bodies, eqns))
    )


def _matrix_update(inside: Sequence[Op], n_reads: Mapping[Var, int], equal: Mapping[Var, Var]) -> _MatrixUpdate:
    reads = Counter(v for op in inside for v in operand_vars(op.eqn))
    made = {v for op in inside for v in op.eqn.outvars}
    operands = tuple(v for v in reads if v not in made)
    results = tuple(v for op in inside for v in op.eqn.outvars if n_reads.get(v, 0) > reads[v])
    given = tuple(equal.get(v, v) for v in operands)
    key = program_key(operands, [op.eqn for op in inside], results)
    return _MatrixUpdate(tuple(inside), operands, given, results, key)


def _equal_values(eqns: Sequence[JaxprEqn], home: Mapping[JaxprEqn, int]) -> dict[int | None, dict[Var, Var]]:
    """By task: for each value that depends on scalars alone, such as a test of the step's number, its first equal."""
    found: dict[int | None, dict[Var, Var]] = defaultdict(dict)
    known: dict[object, Sequence[Var]] = {}
    for eqn in eqns:
        read, first = operand_vars(eqn), found[home.get(eqn)]
        if eqn in home and all(v in first or math.prod(shape_of(v)) <= 1 for v in read) and not _n_products(eqn):
            key = home[eqn], program_key((), [eqn], ()), tuple(first.get(v, v) for v in read)
            first.update(zip(eqn.outvars, known.setdefault(key, eqn.outvars), strict=True))
    return found


def _parts(updates: Sequence[_MatrixUpdate], n: int) -> Iterator[Sequence[_MatrixUpdate]]:
    """A multiple of `n` updates, then divisors of `n` (15 for n = 8: 8, 4, 2); decompositions stay together."""
    for size in [len(updates)] if _decomposes(updates[0]) else [len(updates) // n * n, *reversed(divisors(n))]:
        if 1 < size <= len(updates):
            yield updates[:size]
            updates = updates[size:]


def _decomposes(update: _MatrixUpdate) -> bool:
    return any(is_decomposition(eqn) for op in update.ops for eqn in _with_bodies(op.eqn))


# ---- updates as one --------------------------------------------------------------------------------------------------


def _as_one(updates: Sequence[_MatrixUpdate], n_repeated: int) -> list[Op]:
    """Equal updates on stacks. n_repeated: updates that are computed twice, to fill the stack."""
    first, padded = updates[0], [*updates, *itertools.islice(itertools.cycle(updates), n_repeated)]
    program = Block(invars=first.operands, ops=first.ops, outvars=first.results)
    is_shared = [len(set(same)) == 1 for same in zip(*(update.given for update in updates), strict=True)]
    batched = jax.vmap(lambda *xs: eval_flat(program, xs), in_axes=[None if shared else 0 for shared in is_shared])
    start, end = first.ops[0].eqn, first.ops[-1].eqn
    copy_of = shared_copies()

    eqns: list[JaxprEqn] = []
    operands: list[Var] = []
    for k, v in enumerate(first.given):
        if not is_shared[k]:
            new, (stack,) = equations_for(lambda *xs: jnp.stack(xs), *(update.given[k] for update in padded))
            # Other equations may follow the spec of their operand. A copy has any spec.
            copying, v = copy_of(stack)
            eqns += [with_source_of(eqn, start) for eqn in (*new, copying)]
        operands.append(v)

    new, stacks = equations_for(batched, *operands)
    eqns += new
    for r, stack in enumerate(stacks):
        copying, copy = copy_of(stack)
        new, parts = equations_for(lambda x: list(jnp.unstack(x)), copy)
        named, _ = with_named_results(new, parts[: len(updates)], [update.results[r] for update in updates])
        eqns += [with_source_of(eqn, end) for eqn in (copying, *named)]
    segment = first.ops[0].segment
    return [Op(eqn, scope=name_stack(eqn), segment=segment) for eqn in eqns]
