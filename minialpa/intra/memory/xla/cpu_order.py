"""The order in which kernels run on a CPU: as soon as their operands are there, first come, first served.

So what is computed again for a backward pass is computed early and kept, unless the program waits at barriers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from minialpa.intra.memory.compiler import Kernel


def run_order(kernels: Sequence[Kernel], inputs: Sequence[int]) -> list[int]:
    """Numbers of `kernels` in the order in which they run."""
    readers: dict[int, list[int]] = {}
    for number, kernel in enumerate(kernels):
        for value in kernel.reads:
            readers.setdefault(value, []).append(number)
    missing = [len(kernel.reads) for kernel in kernels]

    # Inputs start the queue, then constants, then kernels that read nothing.
    available = [*inputs, *_constants(kernels, readers, inputs)]
    queue: deque[tuple[int | None, tuple[int, ...]]] = deque((None, (value,)) for value in available)
    queue.extend((number, kernel.writes) for number, kernel in enumerate(kernels) if not kernel.reads)

    order = []
    while queue:
        done, values = queue.popleft()
        if done is not None:
            order.append(done)
        for reader in (number for value in values for number in readers.get(value, ())):
            missing[reader] -= 1
            if not missing[reader]:
                queue.append((reader, kernels[reader].writes))

    assert len(order) == len(kernels), (len(order), len(kernels))
    return order


def _constants(kernels: Sequence[Kernel], read: Mapping[int, object], inputs: Sequence[int]) -> list[int]:
    """Those of the `read` values that are neither inputs nor made by a kernel."""
    known = set(inputs).union(*(kernel.writes for kernel in kernels))
    return [value for value in read if value not in known]
