"""A process that compiles for GPUs: requests on its standard input, answers on its standard output, in turns.

XLA reads its flags once in a process, and those for GPUs are not those of the process that asks (`compile.py`). Nothing
here needs a GPU, a driver or CUDA.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
from dataclasses import dataclass
from typing import IO, Any

from minialpa.programs.mesh_program import MeshFunction
from minialpa.xla_gpu.compiled import GpuProgram
from minialpa.xla_gpu.targets import GpuTarget


@dataclass(frozen=True, slots=True)
class Request:
    """One function to compile.

    Attributes:
        function: exported for "cuda".
        mesh_shape: the logical mesh that it runs on.
        n_hosts: hosts of this mesh, with equal numbers of GPUs.
        target: the GPU.
    """

    function: MeshFunction
    mesh_shape: tuple[int, ...]
    n_hosts: int
    target: GpuTarget


def compiled(request: Request) -> GpuProgram:
    """What XLA makes of the function. Raises what jax and XLA raise."""
    # Here, so that the process that asks can import `Request` without the compiler.
    import math

    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding

    from minialpa.programs.mesh_program import callable_of
    from minialpa.sharding import abstract_mesh

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
    made = (
        jitted.trace(*avals)
        .lower(lowering_platforms=("cuda",))
        .compile(compiler_options=dict(function.compiler_options))
    )
    memory: Any = made.memory_analysis()
    return GpuProgram(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        text=made.as_text() or "",
    )


def send(stream: IO[bytes], value: Any) -> None:
    """Write a value, after its length."""
    data = pickle.dumps(value)
    stream.write(struct.pack("<q", len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The next value. Raises EOFError where the stream has ended."""
    head = stream.read(8)
    data = stream.read(struct.unpack("<q", head)[0]) if len(head) == 8 else b""
    if not data:
        raise EOFError
    return pickle.loads(data)


def main() -> None:
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            request = receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: GpuProgram | str = compiled(request)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        send(answers, answer)


if __name__ == "__main__":
    main()
