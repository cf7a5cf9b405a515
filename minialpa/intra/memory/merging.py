"""All-reduces that do not wait for each other become one: operations in, operations out.

So does the compiler, for sums of one type over the same devices, and the sums of all gradients happen at once when the
last of them is there: every gradient is in memory at that time.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from minialpa.intra.memory.fusion import Operation


def combine(
    operations: Sequence[Operation], results: Sequence[int], kinds: Mapping[int, Hashable]
) -> tuple[Operation, ...]:
    """`operations` with those that write a value of `kinds` joined where the kinds are equal; in a valid order."""
    out = tuple(operations)
    for kind in dict.fromkeys(kinds.values()):
        groups = _groups(out, results, [v for v, k in kinds.items() if k == kind])
        if any(len(group) > 1 for group in groups):
            out = _sorted(_merged(out, groups))
    return out


def _groups(operations: Sequence[Operation], results: Sequence[int], values: Sequence[int]) -> list[list[int]]:
    """Runs, in the order of `_postorder`, of operations that write `values` and do not depend on each other."""
    maker = {v: p for p, op in enumerate(operations) for v in op.writes}
    below: list[int] = []  # operations that an operation depends on, as bits
    for op in operations:
        bits = 0
        for v in op.reads:
            if v in maker:
                bits |= below[maker[v]] | 1 << maker[v]
        below.append(bits)
    wanted = {maker[v] for v in values if v in maker}
    groups: list[list[int]] = []
    for p in _postorder(operations, maker, results):
        if p in wanted:
            if groups and not any(below[p] >> q & 1 for q in groups[-1]):
                groups[-1].append(p)
            else:
                groups.append([p])
    return groups


def _postorder(operations: Sequence[Operation], maker: Mapping[int, int], results: Sequence[int]) -> list[int]:
    """Operations that `results` need, each behind its operands, depth first."""
    order: list[int] = []
    seen: set[int] = set()
    for result in results:
        stack = [(maker[result], 0)] if result in maker and maker[result] not in seen else []
        while stack:
            p, i = stack.pop()
            seen.add(p)
            operands = [maker[v] for v in operations[p].reads if v in maker]
            while i < len(operands) and operands[i] in seen:
                i += 1
            if i == len(operands):
                order.append(p)
            else:
                stack += [(p, i + 1), (operands[i], 0)]
    return order


def _merged(operations: Sequence[Operation], groups: Sequence[Sequence[int]]) -> list[Operation]:
    joined: dict[int, Operation | None] = {}
    for group in groups:
        members = sorted(group)
        reads = tuple(v for p in members for v in operations[p].reads)
        joined.update(dict.fromkeys(members))
        joined[members[-1]] = Operation("own", reads, tuple(v for p in members for v in operations[p].writes))
    return [op for p, old in enumerate(operations) if (op := joined.get(p, old)) is not None]


def _sorted(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """The same operations, each behind those that it reads from, otherwise in the given order."""
    made = {v for op in operations for v in op.writes}
    out: list[Operation] = []
    ready: set[int] = set()
    pending = list(operations)
    while pending:
        late = []
        for op in pending:
            if all(v in ready or v not in made for v in op.reads):
                out.append(op)
                ready.update(op.writes)
            else:
                late.append(op)
        assert len(late) < len(pending), late[0]
        pending = late
    return tuple(out)
