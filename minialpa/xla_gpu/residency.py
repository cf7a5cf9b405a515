"""The memory that one mesh needs for a step: its program and its compiled functions in, bytes of a device out.

While a function runs, a device holds what the function needs, and the buffers that other instructions need later:

    peak = max over runs of (peak of the function + bytes of live buffers that are none of its arguments)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from jax.sharding import NamedSharding

from minialpa.programs.mesh_program import MeshProgram, Receive, Relayout, Send
from minialpa.programs.program import Accumulate, Free, Run
from minialpa.sharding import abstract_mesh
from minialpa.xla_gpu.compiled import GpuProgram


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory that a device of a mesh needs.

    Attributes:
        n_bytes: at that time.
        function: name of the function that runs then.
        held_bytes: of the buffers that other instructions need.
    """

    n_bytes: int
    function: str
    held_bytes: int


def peak_of(program: MeshProgram, compiled: Sequence[GpuProgram]) -> Peak:
    """The most memory of a device. compiled: the functions of the program, by number."""
    live = {slot.buffer for slot in program.inputs} | {slot.buffer for slot in program.constants}
    peak = Peak(sum(buffer_bytes(program, b) for b in live), "", 0)
    for instruction in program.instructions:
        match instruction:
            case Run() | Accumulate():
                function, inputs, outputs = _call(instruction)
                held = sum(buffer_bytes(program, b) for b in live.difference(inputs))
                needed = held + compiled[function].peak_bytes
                if needed > peak.n_bytes:
                    peak = Peak(needed, program.functions[function].name, held)
                live.difference_update(inputs[k] for k in program.functions[function].donated)
                live.update(outputs)
            case Free(buffers):
                live.difference_update(buffers)
            case Receive(target, _) | Relayout(_, target, _):
                live.add(target)
            case Send():
                pass
            case _:
                assert_never(instruction)
    return peak


def _call(instruction: Run | Accumulate) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """The function that an instruction runs, what it reads and what it writes."""
    match instruction:
        case Run(function, inputs, outputs):
            return function, inputs, outputs
        case Accumulate(function, totals, values):
            return function, (*totals, *values), totals


def buffer_bytes(program: MeshProgram, buffer: int) -> int:
    """Bytes of a buffer on each device."""
    kind = program.types[buffer]
    sharding = NamedSharding(abstract_mesh(program.shape.logical_shape), program.specs[buffer])
    n_elements = math.prod(sharding.shard_shape(kind.data_shape))
    return math.ceil(n_elements * np.dtype(kind.dtype).itemsize)
