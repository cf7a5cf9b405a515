"""Functions in, `GpuProgram`s out: runs XLA for GPUs in separate processes."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path

import jax

from minialpa.errors import MinialpaError
from minialpa.support.files import write_bytes
from minialpa.support.private_jax import exported_text
from minialpa.support.progress import phase
from minialpa.xla_gpu.targets import GpuTarget
from minialpa.xla_gpu.worker import CompileRequest, GpuProgram, receive, send

#: Compute capability of Turing, the oldest GPUs of CUDA 13.
_OLDEST_OF_CUDA_13 = (7, 5)
#: A function of 8 layers of width 4,096 takes 1 to 3 GB to compile.
_MOST_PROCESSES = 4


class GpuCompileError(MinialpaError, RuntimeError):
    """XLA for GPUs is not installed, or refuses a function."""


def compile_for_gpus(requests: Sequence[CompileRequest], *, cache: Path | None = None) -> list[GpuProgram]:
    """Compile each function, equal ones once, in the order of the requests.

    cache: a folder of compiled programs, which gets the new ones.

    Raises GpuCompileError if the wheels of the extra `gpu-compile` are missing, or if XLA refuses a function.
    """
    keys = [_key(request) for request in requests]
    todo = dict(zip(keys, requests, strict=True))
    done = {key: program for key in todo if (program := _cached_program(cache, key)) is not None}
    missing = {key: request for key, request in todo.items() if key not in done}
    for target in dict.fromkeys(request.target for request in missing.values()):
        _check_installed(target)
        of_target = {key: request for key, request in missing.items() if request.target == target}
        with phase(f"compiling for {target.name}") as report:
            report("functions", 0, len(of_target))
            for i, (key, program) in enumerate(_compile_all(of_target, target.flags)):
                done[key] = program
                _keep(cache, key, program)
                report("functions", i + 1, len(of_target))
    return [done[key] for key in keys]


def _check_installed(target: GpuTarget) -> None:
    """Raises GpuCompileError."""
    has_12, has_13 = (importlib.util.find_spec(f"jax_cuda{n}_plugin") is not None for n in (12, 13))
    if not has_12 and not has_13:
        raise GpuCompileError(
            "XLA for GPUs is not installed. Install it, which needs neither a GPU nor CUDA: "
            "python -m pip install 'minialpa[gpu-compile]'"
        )
    if has_13 and target.compute_capability < _OLDEST_OF_CUDA_13:
        raise GpuCompileError(
            f"XLA with CUDA 13 has no code for GPUs as old as {target.name}. Use CUDA 12, in a separate environment: "
            "python -m pip install 'minialpa[gpu-compile-cuda12]'"
        )


def _key(request: CompileRequest) -> str:
    """A hash without the user's names: equal layers have different ones."""
    f, target = request.function, request.target
    specs = [str(spec) for spec in (*f.in_specs, *f.out_specs)]
    types = [repr(kind) for kind in (*f.in_types, *f.out_types)]
    rest = [specs, types, f.donated, request.mesh_shape, request.n_hosts, target.text, target.flags]
    rest += [f.compiler_options, jax.__version__]
    return hashlib.sha256((exported_text(f.code) + json.dumps(rest)).encode()).hexdigest()


# ---- processes -------------------------------------------------------------------------------------------------------


def _compile_all(missing: dict[str, CompileRequest], flags: Sequence[str]) -> Iterator[tuple[str, GpuProgram]]:
    """Programs in the order of their ends. The processes end with the iterator."""
    processes = [_Process(flags) for _ in range(min(_MOST_PROCESSES, os.cpu_count() or 1, len(missing)))]
    free: queue.SimpleQueue[_Process] = queue.SimpleQueue()
    for process in processes:
        free.put(process)

    def ask(key: str) -> tuple[str, GpuProgram]:
        process = free.get()
        try:
            return key, process.ask(missing[key])
        finally:
            free.put(process)

    # At the end, a long function would run alone.
    keys = sorted(missing, key=lambda key: -len(missing[key].function.code))
    pool = ThreadPoolExecutor(len(processes))
    try:
        for done in as_completed([pool.submit(ask, key) for key in keys]):
            yield done.result()
    finally:
        for process in processes:
            process.kill()
        pool.shutdown(cancel_futures=True)
        for process in processes:
            process.close()


class _Process:
    """Compiles one function at a time."""

    def __init__(self, flags: Sequence[str]) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
        # By default, jax looks for GPUs.
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags), "TF_CPP_MIN_LOG_LEVEL": "2"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process runs
        self._process = subprocess.Popen(
            [sys.executable, "-m", "minialpa.xla_gpu.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
        )

    def ask(self, request: CompileRequest) -> GpuProgram:
        """Raises GpuCompileError if XLA refuses the function, or ends the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            send(self._process.stdin, request)
            answer = receive(self._process.stdout)
        except (EOFError, OSError) as error:
            self._errors.seek(0)
            last = self._errors.read().decode(errors="replace")[-2000:]
            raise GpuCompileError(
                f"The process of XLA ended while it compiled `{request.function.name}`. If this machine has little "
                f"free memory, free some and repeat. The end of its output: {last or 'none'}"
            ) from error
        if isinstance(answer, str):
            raise GpuCompileError(f"XLA for GPUs does not compile `{request.function.name}`: {answer}")
        return GpuProgram(**answer)

    def kill(self) -> None:
        """A thread that waits for an answer gets an error."""
        self._process.kill()

    def close(self) -> None:
        """After the last thread has stopped waiting."""
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()


# ---- kept programs ---------------------------------------------------------------------------------------------------


def _cached_program(folder: Path | None, key: str) -> GpuProgram | None:
    """None if the file is missing or incomplete."""
    if folder is None:
        return None
    try:
        values = json.loads(gzip.decompress((folder / f"{key}.json.gz").read_bytes()))
        return GpuProgram(**values)
    except (OSError, EOFError, TypeError, ValueError, zlib.error):
        return None


def _keep(folder: Path | None, key: str, program: GpuProgram) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(folder / f"{key}.json.gz", gzip.compress(json.dumps(dataclasses.asdict(program)).encode()))
