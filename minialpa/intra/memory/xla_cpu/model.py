"""XLA for CPUs as a value, and what it makes of the operations of a program.

0. Equations and steps of reshardings become operations.       -> lowering, with primitives and layouts
1. Sums with scatters become scatters.                         -> scatters.absorb
2. All-reduces are combined.                                   -> merging.combine
3. Operations are fused into kernels.                          -> fusion.kernels_of
4. Kernels run first come, first served.                       -> fusion.run_order
5. Arguments that may be read too late are copied before all.  -> copies.copied_arguments
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from minialpa.intra.memory.compiler import CompilerModel, Kernel
from minialpa.intra.memory.xla_cpu.copies import copied_arguments
from minialpa.intra.memory.xla_cpu.fusion import kernels_of, run_order
from minialpa.intra.memory.xla_cpu.lowering import add_equation, add_step
from minialpa.intra.memory.xla_cpu.merging import combine
from minialpa.intra.memory.xla_cpu.operations import Recorder
from minialpa.intra.memory.xla_cpu.scatters import absorb


def _scheduled(recorder: Recorder, inputs: Sequence[int], results: Sequence[int]) -> list[Kernel]:
    """Steps 1 to 4."""
    operations = absorb(recorder.operations, results, recorder.zeros)
    operations = combine(operations, results, recorder.reduced)
    kernels = kernels_of(operations, results, recorder.sizes)
    return [kernels[number] for number in run_order(kernels, inputs, recorder.late)]


#: Up to jax 0.10. It drops optimization barriers before it orders the kernels.
XLA_CPU = CompilerModel(
    name="xla-cpu",
    waits_at_barriers=False,
    alignment_bytes=64,
    address_bytes=8,
    recorder=Recorder,
    add_equation=add_equation,
    add_step=add_step,
    kernels=_scheduled,
    copied_arguments=copied_arguments,
)
#: From jax 0.11 on.
XLA_CPU_WITH_BARRIERS = dataclasses.replace(XLA_CPU, name="xla-cpu-with-barriers", waits_at_barriers=True)
