"""Checks and times the NCCL transport on the GPUs of this machine.

python -m benchmarks.gpu_nccl

On one GPU, a communicator of one rank sends jax arrays to itself, and arrays go to CuPy and back. On two GPUs, two
processes send each other arrays through the transport, and one of them is killed. A check that fails raises.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import secrets
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.registry import Rows
from benchmarks.run import table
from minialpa.errors import WorkerError
from minialpa.runtime.transports.host_transport import HostTransport
from minialpa.runtime.transports.nccl import DeviceLink, Endpoint, NcclTransport, exchange, new_id
from minialpa.runtime.transports.transport import ExpectedPart, Part

DTYPES = ("bool", "int8", "uint16", "int32", "float16", "bfloat16", "float32", "complex64", "float8_e4m3fn")
SHAPES = ((), (1,), (0, 3), (7, 5, 3), (1000, 1001))
SIZES = tuple(n << 20 for n in (1, 4, 16, 64, 256))
REPEATS = 20
TIMEOUT_S = 300.0


def main() -> int:
    if importlib.util.find_spec("cupy") is None:
        print("Skipped: there is no CuPy here. Install the `gpu` extra.")
        return 0
    import cupy
    import cupy.cuda.nccl

    try:
        n_gpus = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        print(f"Skipped: CUDA finds no GPU here ({error}).")
        return 0
    nccl_version = cupy.cuda.nccl.get_version()
    print(f"CuPy {cupy.__version__}, NCCL {nccl_version}, jax {jax.__version__}, {n_gpus} GPUs", flush=True)
    # Each part has its own processes, because jax takes most of the memory of all visible GPUs.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(table(pool.apply(one_gpu)), flush=True)
    if n_gpus < 2:
        print("The transport itself needs two GPUs.")
        return 0
    print(table(two_gpus()))
    return 0


# One GPU


def one_gpu() -> Rows:
    """A communicator whose only rank is its own peer: every dtype and shape, then bandwidth."""
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    import cupy
    import cupy.cuda.nccl  # noqa: F401

    device = jax.devices("gpu")[0]
    check_dlpack(cupy)
    end = Endpoint(device, new_id(), rank=0, n_ranks=1)
    for dtype in DTYPES:
        for shape in SHAPES:
            x = some_array(dtype, shape, device)
            y = jnp.empty(shape, x.dtype, device=device)
            jax.block_until_ready((x, y))
            exchange([(end, x)], [(end, y)])
            check_equal(y, x)
    rows = []
    for n_bytes in SIZES:
        x = jax.device_put(np.arange(n_bytes // 4, dtype=np.float32), device).block_until_ready()
        times = []
        for i in range(REPEATS):
            y = jnp.empty(x.shape, x.dtype, device=device).block_until_ready()
            start = time.perf_counter()
            exchange([(end, x)], [(end, y)])
            times.append(time.perf_counter() - start)
            # A kernel of jax reads the array that NCCL wrote, and then reuses its memory.
            x = jax.jit(lambda y: y + jnp.float32(1), donate_argnums=0)(y)
            assert float(x[0]) == i + 1 and y.is_deleted()
        rows.append(_row("to itself", n_bytes, statistics.median(times)))
    end.close(abort=False)
    return rows


def check_dlpack(cupy: Any) -> None:
    """Arrays go from jax to CuPy and back in the same memory."""
    for dtype in ("int32", "float16", "float32", "complex64"):
        x = jnp.arange(1000).astype(dtype)
        there = cupy.from_dlpack(x)
        back = jnp.from_dlpack(there)
        assert x.unsafe_buffer_pointer() == there.data.ptr == back.unsafe_buffer_pointer(), dtype
        check_equal(back, x)


def some_array(dtype: str, shape: tuple[int, ...], device: jax.Device) -> jax.Array:
    values = np.random.default_rng(0).integers(0, 100, size=shape)
    placed: jax.Array = jax.device_put(jnp.asarray(values).astype(jnp.dtype(dtype)), device)
    return placed


def check_equal(actual: jax.Array, expected: jax.Array) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes(), (actual, expected)


# Two GPUs


def two_gpus() -> Rows:
    """Two workers with a GPU each: every dtype and shape in both directions, times, and the death of one worker."""
    secret = secrets.token_bytes(32)
    context = multiprocessing.get_context("spawn")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    pipes, processes = [], []
    for number, work in enumerate((_measure, _echo)):
        near, far = context.Pipe()
        process = context.Process(target=_worker, args=(far, secret, number, visible[number], work), daemon=True)
        process.start()
        pipes.append(near)
        processes.append(process)
    addresses = [_answer(pipe) for pipe in pipes]
    for pipe in pipes:
        pipe.send(addresses)
    rows: Rows = _answer(pipes[0])
    processes[1].kill()
    message = _answer(pipes[0])
    assert "orker 1 " in message, message
    print(f"A killed worker is noticed: {message}")
    processes[0].join(TIMEOUT_S)
    return rows


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(TIMEOUT_S):
        raise TimeoutError("A worker does not answer.")
    return pipe.recv()


def _worker(pipe: Connection, secret: bytes, number: int, gpu: str, work: Any) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    control = HostTransport(secret, number)
    pipe.send(control.address)
    control.connect(pipe.recv(), TIMEOUT_S)
    work(NcclTransport(control, jax.devices("gpu"), [DeviceLink(0, 0, 1, 0), DeviceLink(1, 0, 0, 0)]), pipe)


def _messages() -> list[tuple[str, tuple[int, ...]]]:
    checked: list[tuple[str, tuple[int, ...]]] = [(dtype, shape) for dtype in DTYPES for shape in SHAPES]
    return checked + [("uint8", (n_bytes,)) for n_bytes in (1024, *SIZES) for _ in range(REPEATS)]


def _measure(transport: NcclTransport, pipe: Connection) -> None:
    device = jax.devices("gpu")[0]
    times: dict[int, list[float]] = {}
    for tag, (dtype, shape) in enumerate(_messages()):
        x = some_array(dtype, shape, device).block_until_ready()
        start = time.perf_counter()
        transport.send(1, tag, [Part(x)])
        (back,) = transport.receive(1, tag, [ExpectedPart(shape, np.dtype(x.dtype))], TIMEOUT_S)
        times.setdefault(x.nbytes, []).append((time.perf_counter() - start) / 2)
        check_equal(back, x)
    pipe.send([_row("between two GPUs", size, statistics.median(times[size])) for size in (1024, *SIZES)])
    # The other worker is killed while this worker waits for it, with a message in flight that it will not receive.
    transport.send(1, 1 << 40, [Part(jnp.zeros(1 << 28, jnp.uint8))])
    try:
        transport.receive(1, 1 << 41, [], TIMEOUT_S)
    except WorkerError as error:
        pipe.send(str(error))
    transport.close()


def _echo(transport: NcclTransport, pipe: Connection) -> None:
    for tag, (dtype, shape) in enumerate(_messages()):
        (array,) = transport.receive(0, tag, [ExpectedPart(shape, jnp.dtype(dtype))], TIMEOUT_S)
        transport.send(0, tag, [Part(array)])
    time.sleep(TIMEOUT_S)


def _row(way: str, n_bytes: int, seconds: float) -> dict[str, Any]:
    return {"way": way, "kb": n_bytes / 1024, "time_us": seconds * 1e6, "gb_per_s": n_bytes / seconds / 1e9}


if __name__ == "__main__":
    raise SystemExit(main())
