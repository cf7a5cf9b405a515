"""What XLA makes of the operations of a program: the kernels that run, in the order in which they run.

    1. Sums with scatters become scatters.            -> scatters.absorb
    2. All-reduces are combined.                      -> merging.combine
    3. Operations are fused into kernels.             -> fusion.kernels_of
    4. Kernels run first come, first served.          -> fusion.run_order

What it does to single equations comes before: lowering.py, with primitives.py and layouts.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from minialpa.intra.memory.fusion import Kernel, kernels_of, run_order
from minialpa.intra.memory.merging import combine
from minialpa.intra.memory.operations import Recorder
from minialpa.intra.memory.scatters import absorb


def scheduled_kernels(recorder: Recorder, inputs: Sequence[int], results: Sequence[int]) -> list[Kernel]:
    """The kernels of a program in the order in which they run. inputs, results: values of `recorder`."""
    operations = absorb(recorder.operations, results, recorder.zeros)
    operations = combine(operations, results, recorder.reduced)
    kernels = kernels_of(operations, results, recorder.sizes)
    return [kernels[number] for number in run_order(kernels, inputs)]
