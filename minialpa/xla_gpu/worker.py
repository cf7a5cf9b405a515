"""A process that compiles for GPUs: requests on standard input, programs or errors on standard output, in turns.

XLA reads its flags once in a process, and GPUs need other flags than the process of `compile.py`.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import struct
import sys
from dataclasses import dataclass
from typing import IO, Any

from minialpa.programs.mesh_program import MeshFunction
from minialpa.xla_gpu.targets import GpuTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProgram:
    """A compiled function. All bytes are of one device.

    temporary_bytes: of all buffers that are neither arguments nor results.
    alias_bytes: of results in the memory of donated arguments.
    text: the scheduled program, with XLA's estimate for each kernel.
    host_peak_bytes: in host memory; the other fields are of device memory.
    """

    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    alias_bytes: int
    text: str
    host_peak_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """By XLA's `memory_analysis`."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes - self.alias_bytes


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """One function to compile.

    function: exported for "cuda".
    mesh_shape: the logical mesh on which it runs.
    n_hosts: hosts of this mesh, with equally many GPUs.
    """

    function: MeshFunction
    mesh_shape: tuple[int, ...]
    n_hosts: int
    target: GpuTarget


def compiled(request: CompileRequest) -> GpuProgram:
    """This machine may lack such GPUs."""
    # `compile.py` needs `CompileRequest` without the compiler.
    import math

    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding

    from minialpa.programs.mesh_program import callable_of
    from minialpa.sharding import abstract_mesh
    from minialpa.support.private_jax import set_memory_kinds

    n_devices = math.prod(request.mesh_shape)
    layout = f"1x{request.n_hosts}x{n_devices // request.n_hosts}"
    topology: Any = topologies.get_topology_desc(platform="cuda", target_config=request.target.text, topology=layout)
    names = abstract_mesh(request.mesh_shape).axis_names
    mesh = Mesh(np.array(topology.devices).reshape(request.mesh_shape), names)

    function = request.function
    call, avals = callable_of(function)
    jitted = jax.jit(
        call,
        in_shardings=tuple(NamedSharding(mesh, spec) for spec in function.in_specs),
        out_shardings=tuple(NamedSharding(mesh, spec) for spec in function.out_specs),
        donate_argnums=function.donated,
        keep_unused=True,
    )
    lowered = jitted.trace(*avals).lower(lowering_platforms=("cuda",))
    in_host = [[kind.in_host for kind in types] for types in (function.in_types, function.out_types)]
    if any(map(any, in_host)):
        # Devices of a topology have no memories, so their shardings have no memory kind.
        set_memory_kinds(lowered, *in_host)
    made = lowered.compile(compiler_options=dict(function.compiler_options))
    memory: Any = made.memory_analysis()
    return GpuProgram(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        text=made.as_text() or "",
        host_peak_bytes=memory.host_argument_size_in_bytes
        + memory.host_output_size_in_bytes
        + memory.host_temp_size_in_bytes
        - memory.host_alias_size_in_bytes,
    )


def send(stream: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<q", len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Raises EOFError at the end of the stream."""
    head = stream.read(8)
    data = stream.read(struct.unpack("<q", head)[0]) if len(head) == 8 else b""
    if not data:
        raise EOFError
    return pickle.loads(data)


def main() -> None:
    # Output of libraries goes to standard error.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            request = receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            # As a dict: here, `GpuProgram` is a class of `__main__`.
            answer: dict[str, Any] | str = dataclasses.asdict(compiled(request))
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        send(answers, answer)


if __name__ == "__main__":
    main()
