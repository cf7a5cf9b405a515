"""Functions in, `GpuProgram`s out: XLA for GPUs in processes of their own.

Equal functions are compiled once, and a folder may keep what has been compiled.
"""

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
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import jax

from minialpa.errors import MinialpaError
from minialpa.support.files import write_bytes
from minialpa.support.progress import ProgressBar
from minialpa.xla_gpu.compiled import GpuProgram
from minialpa.xla_gpu.targets import GpuTarget
from minialpa.xla_gpu.worker import Request, receive, send

#: The oldest GPUs for which XLA with CUDA 13 has code: Turing.
_OLDEST_OF_CUDA_13 = (7, 5)
#: Functions of 8 layers of width 4,096 take 1 to 3 GB to compile.
_MOST_PROCESSES = 4


class GpuCompileError(MinialpaError, RuntimeError):
    """XLA for GPUs is not installed, or does not compile a function."""


def compile_for_gpus(
    requests: Sequence[Request],
    *,
    n_processes: int | None = None,
    cache: Path | None = None,
) -> list[GpuProgram]:
    """What XLA makes of each function, in their order.

    Args:
        requests: the functions; equal ones are compiled once.
        n_processes: that compile at a time; by default one for each processor, and 4 at most.
        cache: a folder for programs that this jax has compiled. They are read from it, and added.

    Raises GpuCompileError where the wheels of the extra `gpu-compile` are missing, and for a function that XLA refuses.
    """
    keys = [_key(request) for request in requests]
    todo = dict(zip(keys, requests, strict=True))
    done = {key: program for key in todo if (program := _cached(cache, key)) is not None}
    missing = {key: request for key, request in todo.items() if key not in done}
    for target in dict.fromkeys(request.target for request in missing.values()):
        _check_installed(target)
        of_target = {key: request for key, request in missing.items() if request.target == target}
        n = n_processes or min(_MOST_PROCESSES, os.cpu_count() or 1)
        for key, program in _compiled(of_target, n, target.flags):
            done[key] = program
            _keep(cache, key, program)
    return [done[key] for key in keys]


def _check_installed(target: GpuTarget) -> None:
    has_12, has_13 = (importlib.util.find_spec(f"jax_cuda{n}_plugin") is not None for n in (12, 13))
    if not has_12 and not has_13:
        raise GpuCompileError(
            "XLA for GPUs is not installed. It needs neither a GPU nor CUDA: "
            "python -m pip install 'minialpa[gpu-compile]'"
        )
    if has_13 and target.compute_capability < _OLDEST_OF_CUDA_13:
        raise GpuCompileError(
            f"XLA with CUDA 13 has no code for GPUs as old as {target.name}. That with CUDA 12 has, in an environment "
            "of its own: python -m pip install 'minialpa[gpu-compile-cuda12]'"
        )


def _key(request: Request) -> str:
    """Tells programs apart that may differ."""
    f, target = request.function, request.target
    specs = [str(spec) for spec in (*f.in_specs, *f.out_specs)]
    types = [repr(kind) for kind in (*f.in_types, *f.out_types)]
    rest = [specs, types, f.donated, request.mesh_shape, request.n_hosts, target.text, target.flags]
    rest += [f.compiler_options, jax.__version__]
    return hashlib.sha256(f.code + json.dumps(rest).encode()).hexdigest()


# ---- processes -------------------------------------------------------------------------------------------------------


def _compiled(missing: dict[str, Request], n_processes: int, flags: Sequence[str]) -> Iterator[tuple[str, GpuProgram]]:
    """Each program, as it is done. What is not done when the caller stops is given up."""
    # Long functions first, so that none of them is left for the end.
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for key in sorted(missing, key=lambda key: -len(missing[key].function.code)):
        waiting.put(key)
    answers: queue.SimpleQueue[tuple[str, GpuProgram | Exception]] = queue.SimpleQueue()

    processes = [_Process(flags) for _ in range(min(n_processes, len(missing)))]
    threads = [threading.Thread(target=_serve, args=(each, missing, waiting, answers)) for each in processes]
    for thread in threads:
        thread.start()
    try:
        with ProgressBar() as bar:
            for i in range(len(missing)):
                key, answer = answers.get()
                if isinstance(answer, Exception):
                    raise answer
                bar.report("Compiling for GPUs", i + 1, len(missing))
                yield key, answer
    finally:
        for process in processes:
            process.kill()
        for thread in threads:
            thread.join()
        for process in processes:
            process.close()


def _serve(
    process: _Process,
    missing: dict[str, Request],
    waiting: queue.SimpleQueue[str],
    answers: queue.SimpleQueue[tuple[str, GpuProgram | Exception]],
) -> None:
    """Pass functions to a process until there are none left, or one fails."""
    with suppress(queue.Empty):
        while True:
            key = waiting.get_nowait()
            try:
                answers.put((key, process.ask(missing[key])))
            except Exception as error:
                answers.put((key, error))
                return


class _Process:
    """A process that compiles."""

    def __init__(self, flags: Sequence[str]) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
        # Only the compiler of the plugin is wanted: without this, jax looks for GPUs.
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags), "TF_CPP_MIN_LOG_LEVEL": "2"}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process runs
        self._process = subprocess.Popen(
            [sys.executable, "-m", "minialpa.xla_gpu.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
        )

    def ask(self, request: Request) -> GpuProgram:
        """The compiled function. Raises GpuCompileError where XLA refuses it, or ends the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            send(self._process.stdin, request)
            answer = receive(self._process.stdout)
        except (EOFError, OSError) as error:
            self._errors.seek(0)
            last = self._errors.read().decode(errors="replace")[-2000:]
            raise GpuCompileError(f"XLA broke off while it compiled `{request.function.name}`: {last}") from error
        if isinstance(answer, str):
            raise GpuCompileError(f"XLA for GPUs does not compile `{request.function.name}`: {answer}")
        assert isinstance(answer, GpuProgram), answer
        return answer

    def kill(self) -> None:
        """End the process, whatever it is doing. Who waits for an answer gets an error."""
        self._process.kill()

    def close(self) -> None:
        """Give back what belongs to a process that was killed, when nobody waits for it any more."""
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()


# ---- kept programs ---------------------------------------------------------------------------------------------------


def _cached(folder: Path | None, key: str) -> GpuProgram | None:
    """The program that a folder has for a key; None where it has none, or half of one."""
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
