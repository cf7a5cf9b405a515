"""Rewritings before XLA fuses operations: the operations of a program in, fewer operations out.

A sum with a scatter becomes a scatter into the other operand, if the scatter has no other reader:      -> absorb
    scatter_add(base, i, u) + x   ->   scatter_add(base + x, i, u),   and base + x is x where base is zeros

Collectives of one kind and type over the same devices that do not depend on each other become one. It starts when the
last operand exists, so all operands are in memory at that time.                                        -> combine

For GPUs, a product computes the one operation that reads it, if this is a view or elementwise and writes no more
bytes than it reads (a bias, a scale, the update of a weight), and then the next one. The other operands have to be
arguments of the program, or repeat arguments. A function that reads the product twice, such as gelu, stays
outside.                                                                                        -> with_epilogues
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from minialpa.intra.memory.xla.operations import Operation, makers_of

# ---- sums with scatters ----------------------------------------------------------------------------------------------


def absorb(operations: Sequence[Operation], results: Sequence[int], zeros: AbstractSet[int]) -> tuple[Operation, ...]:
    """The result is in a valid order. zeros: values that are all zeros."""
    n_readers = Counter([value for op in operations for value in op.reads] + list(results))
    out: dict[int, Operation] = {}  # by their first results; by negative numbers without results

    for number, op in enumerate(operations):
        scattered = _scattered_operand(op, out, n_readers)
        if scattered is None:
            out[op.writes[0] if op.writes else -1 - number] = op
            continue

        scatter = out.pop(scattered)
        base = next(value for value in op.reads if value != scattered)
        if scatter.reads[0] not in zeros:
            # The result of the scatter becomes its first operand.
            out[scattered] = op._replace(reads=(scatter.reads[0], base), writes=(scattered,))
            base = scattered
        out[op.writes[0]] = scatter._replace(reads=(base, *scatter.reads[1:]), writes=op.writes, in_place=base)

    return tuple(out.values())


def _scattered_operand(op: Operation, made: Mapping[int, Operation], n_readers: Mapping[int, int]) -> int | None:
    if op.sums != "add":
        return None
    return next(
        (value for value in op.reads if value in made and made[value].sums == "scatter" and n_readers[value] == 1), None
    )


# ---- collectives -----------------------------------------------------------------------------------------------------


def combine(
    operations: Sequence[Operation],
    results: Sequence[int],
    kinds: Mapping[int, Hashable],
    sizes: Sequence[float],
    most_bytes: float,
) -> tuple[Operation, ...]:
    """In a valid order; operations that write values of equal `kinds` are joined.

    sizes: bytes of values.
    most_bytes: of the results of a joined operation.
    """
    out = tuple(operations)
    for kind in dict.fromkeys(kinds.values()):
        groups = _groups(out, results, [value for value, other in kinds.items() if other == kind])
        groups = [part for group in groups for part in _limited_groups(out, group, sizes, most_bytes)]
        if any(len(group) > 1 for group in groups):
            out = _in_valid_order(_with_merged_groups(out, groups))
    return out


def _limited_groups(
    operations: Sequence[Operation], group: Sequence[int], sizes: Sequence[float], most_bytes: float
) -> Iterator[list[int]]:
    """Each part writes at most `most_bytes`."""
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
    """Runs, in postorder, of operations that write `values` and do not depend on each other."""
    maker = makers_of(operations)
    below = _dependencies(operations, maker)
    required = {maker[value] for value in values if value in maker}

    groups: list[list[int]] = []
    for number in _postorder(operations, maker, results):
        if number not in required:
            continue
        if groups and not any(below[number] >> member & 1 for member in groups[-1]):
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def _dependencies(operations: Sequence[Operation], maker: Mapping[int, int]) -> list[int]:
    """Bit i is set for each operation that depends on operation i."""
    below: list[int] = []
    for op in operations:
        bits = 0
        for value in op.reads:
            if value in maker:
                bits |= below[maker[value]] | 1 << maker[value]
        below.append(bits)
    return below


def _postorder(operations: Sequence[Operation], maker: Mapping[int, int], results: Sequence[int]) -> list[int]:
    order: list[int] = []
    seen: set[int] = set()
    for result in results:
        # Each operation with the operands that are left.
        stack: list[tuple[int, Iterator[int]]] = []
        following = None if maker.get(result) in seen else maker.get(result)
        while following is not None or stack:
            if following is not None:
                seen.add(following)
                stack.append((following, iter([maker[v] for v in operations[following].reads if v in maker])))
            number, left = stack[-1]
            following = next((operand for operand in left if operand not in seen), None)
            if following is None:
                order.append(number)
                stack.pop()
    return order


def _with_merged_groups(operations: Sequence[Operation], groups: Sequence[Sequence[int]]) -> list[Operation]:
    """One operation replaces each group, in the place of its last member."""
    joined: dict[int, Operation | None] = {}
    for group in groups:
        members = sorted(group)
        reads = tuple(value for member in members for value in operations[member].reads)
        writes = tuple(value for member in members for value in operations[member].writes)
        joined.update(dict.fromkeys(members))
        joined[members[-1]] = Operation(kind="own", reads=reads, writes=writes)
    return [op for number, old in enumerate(operations) if (op := joined.get(number, old)) is not None]


def _in_valid_order(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """Each after the makers of its operands, otherwise in the given order."""
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


# ---- products --------------------------------------------------------------------------------------------------------


def with_epilogues(
    operations: Sequence[Operation], inputs: Sequence[int], results: Sequence[int], sizes: Sequence[float]
) -> tuple[Operation, ...]:
    """sizes: bytes of values; 0 for literals."""
    n_reads = Counter(v for op in operations for v in op.reads)
    n_reads.update(results)
    out: list[Operation | None] = []
    # By the result of a product with one reader, its place in `out`.
    products: dict[int, int] = {}
    arguments_of = _arguments_read(operations, inputs, sizes)
    for op in operations:
        # The operation reads one product, once, and arguments.
        others = {v for v in op.reads if v not in arguments_of and sizes[v]}
        (product,) = others if len(others) == 1 else (None,)
        if product in products and op.reads.count(product) == 1 and _is_epilogue(op, sizes):
            place = products.pop(product)
            before = out[place]
            assert before is not None
            arguments = (read for v in op.reads if v != product for read in arguments_of.get(v, (v,)))
            op = before._replace(reads=(*before.reads, *arguments), writes=op.writes)
            out[place] = None
        out.append(op)

        if op.is_product and len(op.writes) == 1 and n_reads[op.writes[0]] == 1:
            products[op.writes[0]] = len(out) - 1
    return tuple(op for op in out if op is not None)


def _arguments_read(
    operations: Sequence[Operation], inputs: Sequence[int], sizes: Sequence[float]
) -> dict[int, tuple[int, ...]]:
    """For arguments, and values made of these by views and broadcasts: the arguments that a kernel reads.

    Literals do not count.
    """
    arguments_of: dict[int, tuple[int, ...]] = {v: (v,) for v in inputs}
    for op in operations:
        is_of_arguments = all(v in arguments_of or not sizes[v] for v in op.reads)
        if is_of_arguments and (op.repeats or op.kind in ("fill", "view")):
            reads = tuple(read for v in op.reads for read in arguments_of.get(v, (v,)))
            arguments_of.update(dict.fromkeys(op.writes, reads))
    return arguments_of


def _is_epilogue(op: Operation, sizes: Sequence[float]) -> bool:
    if op.kind == "view":
        return len(op.reads) == 1 and not op.waits
    is_loop = op.kind == "loop" and op.elementwise and not op.reduces
    return is_loop and sum(sizes[v] for v in op.reads) >= sum(sizes[v] for v in op.writes)
