"""XLA for CPUs and for GPUs as values, and what they make of the operations of a program.

0. Equations and steps of reshardings become operations.       -> lowering, with primitives and layouts
1. Sums with scatters become scatters.                         -> scatters.absorb; gathers, for GPUs
2. Collectives are combined.                                   -> combining.combine
3. Operations are fused into kernels.                          -> cpu_fusion.fused; epilogues, gpu_fusion, siblings
4. Kernels are ordered.                                        -> cpu_fusion.run_order; gpu_order.run_order, gpu_overlap
5. Arguments that may be read too late are copied before all.  -> copies.copied_arguments, for CPUs
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from minialpa.cost import GPU_COMBINED_BYTES
from minialpa.intra.memory.compiler import CompilerModel, Kernel
from minialpa.intra.memory.xla import cpu_fusion, gpu_fusion, gpu_order
from minialpa.intra.memory.xla.combining import combine
from minialpa.intra.memory.xla.copies import copied_arguments
from minialpa.intra.memory.xla.epilogues import with_epilogues
from minialpa.intra.memory.xla.gathers import of_transposed
from minialpa.intra.memory.xla.gpu_overlap import overlapped
from minialpa.intra.memory.xla.graph import Graph
from minialpa.intra.memory.xla.lowering import add_equation, add_step
from minialpa.intra.memory.xla.operations import Recorder
from minialpa.intra.memory.xla.scatters import absorb
from minialpa.intra.memory.xla.siblings import joined

#: Of programs for GPUs, whose schedule depends on times that are not modelled. XLA fits most of those that need more
#: than the model says into this (`python -m benchmarks.gpu_fidelity`).
_GPU_RESERVE = 0.025


def _scheduled_on_cpu(recorder: Recorder, inputs: Sequence[int], results: Sequence[int]) -> list[Kernel]:
    """Steps 1 to 4."""
    sums = {value: alike for value, (kind, alike) in recorder.combinable.items() if kind == "all-reduce"}
    operations = absorb(recorder.operations, results, recorder.zeros)
    operations = combine(operations, results, sums)
    kernels = cpu_fusion.fused(operations, results, recorder.sizes)
    return [kernels[number] for number in cpu_fusion.run_order(kernels, inputs, recorder.late)]


def _scheduled_on_gpu(recorder: Recorder, inputs: Sequence[int], results: Sequence[int]) -> list[Kernel]:
    """Steps 1 to 4."""
    sizes = recorder.sizes
    operations = absorb(recorder.operations, results, recorder.zeros)
    operations, renamed = of_transposed(operations, results, recorder.column_gathers)
    combinable = {renamed.get(value, value): kind for value, kind in recorder.combinable.items()}
    operations = combine(operations, results, combinable, sizes, GPU_COMBINED_BYTES)

    operations = with_epilogues(operations, inputs, results, sizes)
    kernels = joined(gpu_fusion.fused(Graph(operations, results, sizes)), results)

    sums = {value for value, (kind, _) in combinable.items() if kind != "all-gather"}
    order = gpu_order.run_order(kernels, results, sizes, sums)
    exchanged = {renamed.get(value, value) for value in recorder.exchanged}
    work = {v for op in operations if op.kind == "own" and op.in_place is None for v in op.writes} - exchanged
    return overlapped(kernels, order, sizes, exchanged, work)


def _nothing_copied(kernels: Sequence[Kernel], home: Mapping[int, int], replaced: Mapping[int, int]) -> dict[int, int]:
    """On GPUs, kernels over the same arrays are one, which reads an argument before it writes the result there."""
    return {}


#: Up to jax 0.10. It drops optimization barriers before it orders the kernels.
XLA_CPU = CompilerModel(
    name="xla-cpu",
    waits_at_barriers=False,
    alignment_bytes=64,
    address_bytes=8,
    recorder=Recorder,
    add_equation=add_equation,
    add_step=add_step,
    kernels=_scheduled_on_cpu,
    copied_arguments=copied_arguments,
)
#: From jax 0.11 on.
XLA_CPU_WITH_BARRIERS = dataclasses.replace(XLA_CPU, name="xla-cpu-with-barriers", waits_at_barriers=True)
#: It drops barriers, too, but in programs for GPUs conditions take their place, outside of loops (`intra/ordering.py`).
XLA_GPU = dataclasses.replace(
    XLA_CPU,
    name="xla-gpu",
    waits_at_barriers=True,
    drops_inner_barriers=True,
    alignment_bytes=256,
    recorder=functools.partial(Recorder, on_gpu=True),
    kernels=_scheduled_on_gpu,
    copied_arguments=_nothing_copied,
    reserve=_GPU_RESERVE,
)
