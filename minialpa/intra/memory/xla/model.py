"""XLA for CPUs and for GPUs: operations of one device in, kernels in order out.

0. Equations and steps of reshardings become operations.       -> lowering, layouts
1. Sums with scatters become scatters.                         -> rewrites.absorb
2. Collectives are combined.                                   -> rewrites.combine
3. Operations are fused into kernels.                          -> fusion.fused, for GPUs after rewrites.with_epilogues
                                                                  and before siblings
4. Kernels are ordered.                                        -> order, gpu_overlap

Each rule improves predictions for GPUs. CPUs are devices for tests, with the same fusion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from minialpa.cost import GPU_COMBINED_BYTES
from minialpa.intra.memory.compiler import Compiler, Kernel
from minialpa.intra.memory.xla.fusion import Graph, fused
from minialpa.intra.memory.xla.gpu_overlap import overlapped, with_host_copies
from minialpa.intra.memory.xla.lowering import add_equation, add_step
from minialpa.intra.memory.xla.operations import Operation, Recorder
from minialpa.intra.memory.xla.order import order_on_cpu, order_on_gpu
from minialpa.intra.memory.xla.rewrites import absorb, combine, with_epilogues
from minialpa.intra.memory.xla.siblings import with_siblings

#: The schedule of GPU programs depends on times that are not modelled. This reserve covers most programs that need more
#: than predicted (`python -m benchmarks.gpu_fidelity`).
_GPU_RESERVE = 0.025
#: With less, float32 results of `tanh` with two readers would not be stored.
_CPU_WORK = 1.25


def _rewritten_operations(recorder: Recorder, results: Sequence[int]) -> tuple[Operation, ...]:
    """Steps 1 and 2."""
    read = {*results, *(v for op in recorder.operations for v in op.reads)}
    unread = recorder.stored.keys() - read
    used = [op for op in recorder.operations if unread.isdisjoint(op.writes)]
    operations = absorb(used, results, recorder.zeros)
    return combine(operations, results, recorder.combinable, recorder.sizes, GPU_COMBINED_BYTES)


def _kernels_on_cpu(recorder: Recorder, inputs: Sequence[int], results: Sequence[int]) -> list[Kernel]:
    # On CPUs, work costs more beside memory traffic.
    operations = [op._replace(work_bytes=_CPU_WORK * op.work_bytes) for op in _rewritten_operations(recorder, results)]
    kernels = fused(Graph(operations, results, recorder.sizes))
    return [kernels[number] for number in order_on_cpu(kernels, inputs)]


def _kernels_on_gpu(recorder: Recorder, inputs: Sequence[int], results: Sequence[int]) -> list[Kernel]:
    sizes = recorder.sizes
    operations = with_epilogues(_rewritten_operations(recorder, results), inputs, results, sizes)
    loops = {v for op in operations if op.kind == "loop" and not op.reduces for v in op.writes}
    shapes = [value.shape for value in recorder.values]
    kernels = with_siblings(fused(Graph(operations, results, sizes)), loops, set(results), shapes)
    ordered = [kernels[number] for number in order_on_gpu(kernels, results, sizes)]
    work = (
        {v for op in operations if op.kind == "own" and op.in_place is None for v in op.writes}
        - recorder.exchanged
        - recorder.fetched
        - recorder.stored.keys()
    )
    found = overlapped(ordered, sizes, recorder.exchanged, work)
    if not recorder.fetched and not recorder.stored:
        return found
    return with_host_copies(found, recorder.fetched, recorder.stored.keys(), work)


#: XLA drops barriers. Outside of loops, conditions replace them (`intra/shard_arrays.py`).
XLA_GPU = Compiler(
    name="xla-gpu",
    waits_at_barriers=True,
    drops_inner_barriers=True,
    alignment_bytes=256,
    address_bytes=8,
    reserve=_GPU_RESERVE,
    recorder=Recorder,
    add_equation=add_equation,
    add_step=add_step,
    kernels=_kernels_on_gpu,
)
#: Up to jax 0.10, XLA drops optimization barriers before it orders the kernels.
XLA_CPU = dataclasses.replace(
    XLA_GPU,
    name="xla-cpu",
    waits_at_barriers=False,
    drops_inner_barriers=False,
    alignment_bytes=64,
    reserve=0.0,
    kernels=_kernels_on_cpu,
)
#: From jax 0.11 on.
XLA_CPU_WITH_BARRIERS = dataclasses.replace(XLA_CPU, name="xla-cpu-with-barriers", waits_at_barriers=True)
