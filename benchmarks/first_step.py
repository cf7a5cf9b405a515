"""Time to the first steps: models of other packages under minialpa, beside `jax.jit` on one device.

Each row is a fresh process that builds one model of `benchmarks.models`, then traces, plans and compiles its step and
runs it three times. `jax.jit` runs in the same kind of process, with a donated state. The ways take turns, `--runs`
times, and the fastest run counts, because other work on the machine only adds time. Seconds are CPU seconds of all
threads; only `wall_s` is wall-clock time. They leave out imports and the initialisation of the model. Memory is the
peak of the whole process.

    python -m benchmarks.first_step                      the models below under each way, in about half an hour
    python -m benchmarks.first_step bert vit --way none  some of them
    python -m benchmarks.first_step --json rows.json     also write the rows to a file; rows of the file do not run
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from benchmarks.registry import Rows, Size, benchmark
from benchmarks.run import table
from minialpa.support.files import write_text

N_DEVICES, N_STEPS = 8, 3
PLAIN = "jax.jit"
WAYS = ("sharded", "pipelined", "none")
#: Models of many packages: scanned layers, attentions of all kinds, convolutions, loops, graphs, science.
MODELS = [
    "linen_scan", "linen_vit", "linen_resnet", "linen_seq2seq", "linen_diffusion", "nnx_mlp",
    "nnx_transformer", "equinox_cnn", "neural_ode", "haiku_resnet", "haiku_lstm",
    "haiku_stack", "bert", "gpt2", "llama", "vit",
    "clip", "whisper", "diffusers_unet", "graph_network", "real_nvp", "penzai_transformer",
    "haliax_network", "mamba", "equimo_vit",
]  # fmt: skip
#: Phases with their own times; the rest of the calls is the steps.
PHASES = ("trace_s", "plan_s", "compile_s")


@benchmark("first_step")
def first_step(size: Size) -> Rows:
    """Seconds to trace, plan, compile and run three steps of other packages' models, next to `jax.jit`."""
    if size == "tiny":
        return _rows_of("mlp", {way: [measured("mlp", way)] for way in (PLAIN, "sharded")})
    return list(rows(MODELS, WAYS, n_runs=2))


def rows(names: Sequence[str], ways: Sequence[str], n_runs: int) -> Iterator[dict[str, Any]]:
    """The rows of each model, for `jax.jit` and for each way, in order of completion."""
    for name in names:
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in (PLAIN, *ways)}
        for i in range(n_runs):
            for way in runs if i % 2 == 0 else reversed(runs):
                runs[way].append(_in_process(name, way))
        yield from _rows_of(name, runs)


def _rows_of(name: str, runs: Mapping[str, Sequence[dict[str, float]]]) -> Rows:
    fastest = {way: {key: min(run[key] for run in some) for key in some[0]} for way, some in runs.items()}
    plain = fastest[PLAIN]
    return [
        {
            "model": name,
            "way": way,
            **{column: found.get(column, 0.0) for column in (*PHASES, "steps_s", "cpu_s", "wall_s")},
            "ratio": found["cpu_s"] / plain["cpu_s"],
            "wall_ratio": found["wall_s"] / plain["wall_s"],
            "memory_ratio": found["peak_mb"] / plain["peak_mb"],
        }
        for way, found in fastest.items()
    ]


def _in_process(name: str, way: str) -> dict[str, float]:
    """`measured` in a fresh process."""
    environment = os.environ | {"USE_TF": "0", "USE_TORCH": "0", "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.first_step", name, "--measure", way]
    # minialpa may be a fresh checkout without byte code: Python keeps the byte code of the first process.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"`{name}`, {way}: the process ended with code {ended.returncode}.\n{ended.stderr[-2000:]}")
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def measured(name: str, way: str) -> dict[str, float]:
    """Seconds of the phases and of all phases together, and the peak memory of this process in MB."""
    from benchmarks.models.all_models import MODELS as known

    # Packages rely on what jax allows by default.
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        training = known[name].build()
        # The step may donate its arguments, and a model may share arrays with its optimizer.
        state = jax.tree.map(lambda x: jax.numpy.copy(x) if isinstance(x, jax.Array) else x, training.state)
        jax.block_until_ready((state, training.batches))

        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        seconds = _run_plain(training, state) if way == PLAIN else _run_parallel(training, state, way)
        wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return seconds | {"steps_s": cpu_s - sum(seconds.values()), "cpu_s": cpu_s, "wall_s": wall_s, "peak_mb": peak_mb}


def _run_plain(training: Any, state: Any) -> dict[str, float]:
    seconds: dict[str, float] = {}
    traced = _timed(seconds, "trace_s", jax.jit(training.step, donate_argnums=0).trace)(state, training.batches[0])
    compiled = _timed(seconds, "compile_s", lambda: traced.lower().compile())()
    _run_steps(compiled, training, state)
    return seconds


def _run_parallel(training: Any, state: Any, way: str) -> dict[str, float]:
    import minialpa
    from benchmarks.models.catalogue import METHODS, NONE, SEARCHED, SHARD
    from minialpa.api import parallelized
    from minialpa.api.parallelized import ParallelizedFunc

    method = METHODS[{"sharded": SHARD, "pipelined": SEARCHED, "none": NONE}[way]]()
    places = ((ParallelizedFunc, "_trace"), (ParallelizedFunc, "_plan_for"), (parallelized, "compile_step"))
    seconds: dict[str, float] = {}
    with ExitStack() as stack:
        for phase, (place, name) in zip(PHASES, places, strict=True):
            stack.enter_context(mock.patch.object(place, name, _timed(seconds, phase, getattr(place, name))))
        step = minialpa.parallelize(training.step, method=method, batch_argnums=training.batch_argnums, plan_cache=None)
        _run_steps(step, training, state)
    return seconds


def _run_steps(step: Callable[..., Any], training: Any, state: Any) -> None:
    for i in range(N_STEPS):
        state, result = step(state, training.batches[i % len(training.batches)])
        jax.block_until_ready((state, result))


def _timed(seconds: dict[str, float], phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the seconds of its calls added to `seconds[phase]`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        start_s = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[phase] = seconds.get(phase, 0.0) + time.process_time() - start_s

    return call


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.first_step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="MODEL", help=f"names of the models table; {len(MODELS)} if none")
    parser.add_argument("--way", action="append", choices=WAYS, help="all if none")
    parser.add_argument("--runs", type=int, default=2, help="processes for each way")
    parser.add_argument("--json", type=Path, help="a file of rows")
    parser.add_argument("--measure", choices=(PLAIN, *WAYS), help="measure in this process, and print JSON")
    args = parser.parse_args()
    if args.measure:
        jax.config.update("jax_num_cpu_devices", N_DEVICES)
        print(json.dumps(measured(args.names[0], args.measure)))
        return

    ways = tuple(args.way or WAYS)
    done: Rows = json.loads(args.json.read_text()) if args.json is not None and args.json.exists() else []
    known = {(row["model"], row["way"]) for row in done}
    for name in args.names or MODELS:
        if all((name, way) in known for way in ways):
            continue
        new = list(rows([name], ways, args.runs))
        print(table(new), flush=True)
        done += new
        if args.json is not None:
            write_text(args.json, json.dumps(done, indent=1) + "\n")
    print(table(done))
    print(table(summary(done)))


def summary(done: Rows) -> Rows:
    """The median and the largest ratios of each way."""
    out: Rows = []
    for way in WAYS:
        some = [row for row in done if row["way"] == way]
        ratios = {name: [row[name] for row in some] for name in ("ratio", "wall_ratio", "memory_ratio")}
        of_way: dict[str, Any] = {"way": way, "models": len(some)}
        for name, values in ratios.items() if some else ():
            of_way |= {f"median {name}": statistics.median(values), f"largest {name}": max(values)}
        out.append(of_way)
    return out


if __name__ == "__main__":
    main()
