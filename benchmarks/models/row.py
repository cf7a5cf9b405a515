"""Trains models three steps on one device, and under some methods on virtual devices of a CPU.

python -m benchmarks.models.row mlp gan              prints a row as JSON for each method
python -m benchmarks.models.row mlp --method Zero3Parallel
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import minialpa
from benchmarks.models.all_models import MODELS
from benchmarks.models.catalogue import METHODS, N_DEVICES, Step, Training
from benchmarks.models.comparison import compare, rounded_differently
from minialpa.errors import MinialpaError

#: First characters of the lines that the parent process reads; packages print other lines.
ROW, DONE = "ROW ", "DONE "
#: Serial runs on inputs that are rounded differently.
N_ROUNDED = 3


def rows_of(name: str, methods: Sequence[str]) -> Any:
    """The rows of a model, one for each method, in order of completion."""
    model = MODELS[name]
    base = {
        "package": ", ".join(f"{package} {_version(package)}".strip() for package in model.packages),
        "model": model.model,
        "optimizer": model.optimizer,
    }
    # Packages rely on what jax allows by default.
    lenient = jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard")
    with warnings.catch_warnings(), lenient[0], lenient[1]:
        warnings.simplefilter("ignore")
        try:
            training = model.build()
            serial, others = _serial_runs(training)
        except Exception as error:
            yield base | {"method": "", "outcome": "not run", "detail": _where(error)}
            return
        for method in methods:
            start_s = time.perf_counter()
            outcome = _outcome(training, method, serial, others)
            yield base | {"method": method} | outcome | {"seconds": time.perf_counter() - start_s}


def _serial_runs(training: Training) -> tuple[Any, list[Any]]:
    """The run on one device; then runs with differently rounded inputs, and with a compiler that does not optimise."""
    jitted = jax.jit(training.step)
    serial = _run(jitted, training.state, training.batches)
    others = []
    for seed in range(N_ROUNDED):
        state, batches = rounded_differently((training.state, list(training.batches)), seed, training.eps)
        others.append(_run(jitted, state, batches))
    plain = jax.jit(training.step, compiler_options={"xla_backend_optimization_level": 0})
    others.append(_run(plain, training.state, training.batches))
    return serial, others


def _run(step: Step, state: Any, batches: Sequence[Any]) -> Any:
    results = []
    state = jax.tree.map(_own, state)
    for batch in batches:
        state, result = step(state, batch)
        results.append(result)
    return _on_host((state, results))


def _own(leaf: Any) -> Any:
    """A copy, which a step may donate."""
    return jax.numpy.copy(leaf) if isinstance(leaf, jax.Array) else leaf


def _on_host(tree: Any) -> Any:
    def one(leaf: Any) -> Any:
        is_key = isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        if is_key:
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf) if hasattr(leaf, "dtype") else leaf

    return jax.tree.map(one, tree)


def _outcome(training: Training, method: str, serial: Any, others: Sequence[Any]) -> dict[str, Any]:
    """The outcome of a model under a method: `equal`, `wrong`, `refused` by an error of minialpa, or a `crash`."""
    parallel = minialpa.parallelize(training.step, method=METHODS[method](), batch_argnums=training.batch_argnums)
    try:
        found = _run(parallel, training.state, training.batches)
    except MinialpaError as error:
        return {"outcome": "refused", "detail": f"{type(error).__name__}: {_first_line(error)}"}
    except Exception as error:
        print(traceback.format_exc(), file=sys.stderr, flush=True)
        return {"outcome": "crash", "detail": _where(error)}

    compared = compare(found, serial, others, _on_host(training.state))
    outcome = {"difference": compared.difference, "rounding": compared.noise}
    if compared.wrong:
        return {"outcome": "wrong", "detail": "; ".join(compared.wrong[:3])} | outcome
    return {"outcome": "equal"} | outcome


def _where(error: Exception) -> str:
    """The message of an error, and the line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {_first_line(error)} ({Path(last.filename).name}:{last.lineno})"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:400]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.models.row", description=__doc__)
    parser.add_argument("names", nargs="+", choices=MODELS, metavar="NAME")
    parser.add_argument("--method", action="append", choices=METHODS, help="in place of those of the model")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", N_DEVICES)
    for name in args.names:
        jax.config.update("jax_enable_x64", MODELS[name].x64)
        for row in rows_of(name, args.method or MODELS[name].methods):
            print(ROW + json.dumps({"name": name} | row), flush=True)
        print(DONE + name, flush=True)
        # The next model does not need the compiled programs of hundreds of small functions.
        jax.clear_caches()


if __name__ == "__main__":
    main()
