"""The arguments that XLA copies before it runs anything, since a result takes over their buffers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from minialpa.intra.memory.compiler import Kernel


def copied_arguments(kernels: Sequence[Kernel], home: Mapping[int, int], replaced: Mapping[int, int]) -> dict[int, int]:
    """See `CompilerModel.copied_arguments`.

    XLA decides that before it knows the order: any reader that the result does not wait for may come later.
    """
    maker = {value: number for number, kernel in enumerate(kernels) for value in kernel.writes}
    below: list[int] = []  # kernels that a kernel waits for, as bits, and itself
    readers: dict[int, int] = defaultdict(int)  # kernels that read a buffer, as bits
    for number, kernel in enumerate(kernels):
        own = bits = 1 << number
        for value in kernel.reads:
            bits |= below[maker[value]] if value in maker else 0
            readers[home.get(value, value)] |= own
        below.append(bits)

    return {
        result: argument
        for result, argument in replaced.items()
        if result in maker and readers[argument] & ~below[maker[result]]
    }
