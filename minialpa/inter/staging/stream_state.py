"""Updates that fetch state from host memory bit by bit: a staged step in; the same step, whose fetches wait, out.

    barrier(state in host memory, gradient)   becomes   barrier(state in host memory, gradient, earlier new values)

Without these waits, all of the state would be in device memory at once.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from jax.extend.core import JaxprEqn, Var

from minialpa.inter.microbatch.batching import is_barrier
from minialpa.inter.staging.tasks import StagedStep, Task
from minialpa.ir.equations import aval_of, fresh_var, host_bytes_of, is_extended, is_in_host, operand_vars
from minialpa.ir.op import Op

#: Most bytes on the way, as a multiple of the largest state with one gradient: one arrives, one is updated, one leaves.
_ON_THE_WAY = 3


@dataclass(frozen=True, slots=True)
class _Fetch:
    """A barrier in front of the state with one gradient. known_at: the number of the equation that makes it.

    new: the results of the task that depend on this state, and on no other.
    """

    barrier: JaxprEqn
    n_bytes: int
    known_at: int
    new: tuple[Var, ...]


def with_streamed_state(staged: StagedStep) -> StagedStep:
    """The same object if no task fetches more state than may be on the way, or if an operation has effects."""
    state = frozenset(v for v in staged.inputs if is_in_host(aval_of(v)))
    if not state or any(op.eqn.effects for op in staged.split.ops):
        return staged
    waiting = _waiting_barriers(staged.tasks, state)
    return _with_barriers(staged, waiting) if waiting else staged


def _waiting_barriers(tasks: Sequence[Task], state: AbstractSet[Var]) -> dict[JaxprEqn, JaxprEqn]:
    """For each barrier that has to wait, the barrier that does. A barrier in several tasks waits in none."""
    n_tasks = Counter(eqn for task in tasks for eqn in task.eqns if is_barrier(eqn))
    found = (_waiting(list(_fetches(task, state))) for task in tasks)
    return {old: new for of_task in found for old, new in of_task.items() if n_tasks[old] == 1}


def _with_barriers(staged: StagedStep, waiting: Mapping[JaxprEqn, JaxprEqn]) -> StagedStep:
    ops = _in_order([replace(op, eqn=waiting.get(op.eqn, op.eqn)) for op in staged.split.ops])
    position = {op.eqn: i for i, op in enumerate(ops)}

    def in_order(task: Task) -> Task:
        eqns = (waiting.get(eqn, eqn) for eqn in task.eqns)
        return replace(task, eqns=tuple(sorted(eqns, key=position.__getitem__)))

    tasks = (task if waiting.keys().isdisjoint(task.eqns) else in_order(task) for task in staged.tasks)
    return replace(staged, split=replace(staged.split, ops=tuple(ops)), tasks=tuple(tasks))


def _fetches(task: Task, state: AbstractSet[Var]) -> Iterator[_Fetch]:
    made_at = {v: i for i, eqn in enumerate(task.eqns) for v in eqn.outvars}
    barriers = [eqn for eqn in task.eqns if is_barrier(eqn) and not state.isdisjoint(operand_vars(eqn))]
    bits = {barrier: 1 << i for i, barrier in enumerate(barriers)}
    # For each value, the barriers on which it depends.
    depends: dict[Var, int] = {}
    for eqn in task.eqns:
        found = bits.get(eqn, 0)
        for v in operand_vars(eqn):
            found |= depends.get(v, 0)
        if found:
            depends.update(dict.fromkeys(eqn.outvars, found))

    new: dict[int, list[Var]] = defaultdict(list)
    for v in task.outvars:
        new[depends.get(v, 0)].append(v)
    for barrier, bit in bits.items():
        operands = operand_vars(barrier)
        if new[bit]:
            n_bytes = sum(host_bytes_of(v) for v in operands)
            yield _Fetch(barrier, n_bytes, max(made_at.get(v, -1) for v in operands), tuple(new[bit]))


def _waiting(fetches: list[_Fetch]) -> dict[JaxprEqn, JaxprEqn]:
    """Barriers that wait for the new values of earlier ones, in the order of gradients."""
    most = _ON_THE_WAY * max((one.n_bytes for one in fetches), default=0)
    waiting: dict[JaxprEqn, JaxprEqn] = {}
    on_the_way: deque[_Fetch] = deque()
    n_bytes = 0
    for fetch in sorted(fetches, key=lambda one: one.known_at):
        done: list[Var] = []
        n_bytes += fetch.n_bytes
        while n_bytes > most:
            earlier = on_the_way.popleft()
            n_bytes -= earlier.n_bytes
            done += earlier.new
        on_the_way.append(fetch)
        if done:
            waiting[fetch.barrier] = _with_operands(fetch.barrier, done)
    return waiting


def _with_operands(barrier: JaxprEqn, more: Sequence[Var]) -> JaxprEqn:
    arrays = [v for v in more if not is_extended(aval_of(v).dtype)]
    results = [*barrier.outvars, *(fresh_var(v.aval) for v in arrays)]
    waiting: JaxprEqn = barrier.replace(invars=[*barrier.invars, *arrays], outvars=results)
    return waiting


def _in_order(ops: Sequence[Op]) -> list[Op]:
    """`ops`, each after the makers of its operands, and otherwise in the given order."""
    made_by = {v: i for i, op in enumerate(ops) for v in op.eqn.outvars}
    makers = [{made_by[v] for v in operand_vars(op.eqn) if v in made_by} for op in ops]
    readers: dict[int, list[int]] = defaultdict(list)
    for i, numbers in enumerate(makers):
        for maker in numbers:
            readers[maker].append(i)

    n_missing = list(map(len, makers))
    ready = [i for i, n in enumerate(n_missing) if not n]
    found: list[Op] = []
    while ready:
        i = heapq.heappop(ready)
        found.append(ops[i])
        for reader in readers[i]:
            n_missing[reader] -= 1
            if not n_missing[reader]:
                heapq.heappush(ready, reader)
    assert len(found) == len(ops), "operations wait for each other"
    return found
