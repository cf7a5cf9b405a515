"""Collectives that XLA combines into one, since they do not depend on each other.

It combines those of one kind and type over the same devices, as long as their results have no more bytes than a limit.
What is combined starts when the last operand is there, so that all operands, such as all gradients, are in memory at
that time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

from minialpa.intra.memory.xla.operations import Operation, makers_of


def combine(
    operations: Sequence[Operation],
    results: Sequence[int],
    kinds: Mapping[int, Hashable],
    sizes: Sequence[float],
    most_bytes: float,
) -> tuple[Operation, ...]:
    """`operations` with those that write a value of `kinds` joined where the kinds are equal; in a valid order.

    sizes: bytes of values. most_bytes: what is joined may write at most.
    """
    out = tuple(operations)
    for kind in dict.fromkeys(kinds.values()):
        groups = _groups(out, results, [value for value, other in kinds.items() if other == kind])
        groups = [part for group in groups for part in _parts(out, group, sizes, most_bytes)]
        if any(len(group) > 1 for group in groups):
            out = _sorted(_merged(out, groups))
    return out


def _parts(
    operations: Sequence[Operation], group: Sequence[int], sizes: Sequence[float], most_bytes: float
) -> Iterator[list[int]]:
    """A group, cut where it would write more than `most_bytes`."""
    part: list[int] = []
    n_bytes = 0.0
    for number in group:
        own_bytes = sum(sizes[v] for v in operations[number].writes)
        if part and n_bytes + own_bytes > most_bytes:
            yield part
            part, n_bytes = [], 0.0
        part.append(number)
        n_bytes += own_bytes
    yield part


def _groups(operations: Sequence[Operation], results: Sequence[int], values: Sequence[int]) -> list[list[int]]:
    """Runs, in the order of `_postorder`, of operations that write `values` and do not depend on each other."""
    maker = makers_of(operations)
    below = _dependencies(operations, maker)
    wanted = {maker[value] for value in values if value in maker}

    groups: list[list[int]] = []
    for number in _postorder(operations, maker, results):
        if number not in wanted:
            continue
        if groups and not any(below[number] >> member & 1 for member in groups[-1]):
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def _dependencies(operations: Sequence[Operation], maker: Mapping[int, int]) -> list[int]:
    """For each operation, those that it depends on, as bits."""
    below: list[int] = []
    for op in operations:
        bits = 0
        for value in op.reads:
            if value in maker:
                bits |= below[maker[value]] | 1 << maker[value]
        below.append(bits)
    return below


def _postorder(operations: Sequence[Operation], maker: Mapping[int, int], results: Sequence[int]) -> list[int]:
    """Operations that `results` need, each behind its operands, depth first."""
    order: list[int] = []
    seen: set[int] = set()
    for result in results:
        # (operation, how many of its operands are done)
        stack = [(maker[result], 0)] if result in maker and maker[result] not in seen else []
        while stack:
            number, n_done = stack.pop()
            seen.add(number)

            operands = [maker[value] for value in operations[number].reads if value in maker]
            while n_done < len(operands) and operands[n_done] in seen:
                n_done += 1

            if n_done == len(operands):
                order.append(number)
            else:
                stack += [(number, n_done + 1), (operands[n_done], 0)]
    return order


def _merged(operations: Sequence[Operation], groups: Sequence[Sequence[int]]) -> list[Operation]:
    """`operations` with the members of each group replaced by one operation, in the place of the last member."""
    joined: dict[int, Operation | None] = {}
    for group in groups:
        members = sorted(group)
        reads = tuple(value for member in members for value in operations[member].reads)
        writes = tuple(value for member in members for value in operations[member].writes)
        joined.update(dict.fromkeys(members))
        joined[members[-1]] = Operation(kind="own", reads=reads, writes=writes)
    return [op for number, old in enumerate(operations) if (op := joined.get(number, old)) is not None]


def _sorted(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """The same operations, each behind those that it reads from, otherwise in the given order."""
    made = {value for op in operations for value in op.writes}
    out: list[Operation] = []
    ready: set[int] = set()
    pending = list(operations)
    while pending:
        late = []
        for op in pending:
            if all(value in ready or value not in made for value in op.reads):
                out.append(op)
                ready.update(op.writes)
            else:
                late.append(op)

        # Each round places at least one operation, as they form no cycle.
        assert len(late) < len(pending), late[0]
        pending = late
    return tuple(out)
