"""Commands that use the devices of this machine: `demo`, `bench`, `calibrate` and `doctor`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from minialpa.cli.arguments import (
    add_devices,
    add_html,
    add_json,
    add_model,
    add_planning,
    cluster_of,
    method_of,
    output_file,
    positive,
)
from minialpa.cli.model import check_examples, load_step, parallel_step, users_code
from minialpa.cli.output import json_of, note, save, show
from minialpa.support.files import write_text

if TYPE_CHECKING:
    from minialpa.api.parallelized import ParallelizedFunc
    from minialpa.runtime.executable import Executable


def add_commands(commands: Any) -> None:
    demo = commands.add_parser("demo", help="train a small GPT on virtual CPU devices, and compare with one device")
    demo.add_argument("--devices", type=positive, default=8, metavar="N", help="virtual CPU devices (default 8)")
    demo.add_argument("--steps", type=positive, default=8, metavar="N", help="training steps (default 8)")
    demo.set_defaults(run=_demo)

    bench = commands.add_parser("bench", help="run a model on this machine, and compare predicted and measured seconds")
    add_model(bench)
    bench.add_argument("--devices", type=positive, metavar="N", help="virtual CPU devices; default: the local devices")
    bench.add_argument("--steps", type=positive, default=10, metavar="N", help="measured steps (default 10)")
    add_devices(bench)
    add_planning(bench)
    add_html(bench)
    add_json(bench)
    bench.set_defaults(run=_bench)

    calibrate = commands.add_parser("calibrate", help="measure the devices of this machine for `--cluster`, in minutes")
    calibrate.add_argument("--out", type=output_file, metavar="FILE", help="write the measured cluster here")
    calibrate.add_argument("--virtual-devices", type=positive, metavar="N", help="measure N virtual CPU devices")
    calibrate.set_defaults(run=_calibrate)

    doctor = commands.add_parser("doctor", help="print what is installed, and which devices and transports work")
    add_json(doctor)
    doctor.set_defaults(run=_doctor)


def _use_virtual_devices(n: int | None) -> None:
    """Before jax starts its devices."""
    import jax

    if n is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", n)


def _demo(args: argparse.Namespace) -> int:
    _use_virtual_devices(args.devices)
    from minialpa.demo import run_demo

    with redirect_stdout(args.output):
        return run_demo(args.devices, args.steps)


# ---- bench -----------------------------------------------------------------------------------------------------------


def _bench(args: argparse.Namespace) -> int:
    import jax

    from minialpa.plan.text import header, seconds_text

    _use_virtual_devices(args.devices)
    is_described = args.cluster or args.num_hosts or args.devices_per_host
    method = method_of(args, cluster_of(args) if is_described else None)
    model = load_step(args)
    values = jax.tree.map(_random, model.args)
    step = parallel_step(args, model, method)
    lowered = step.lower(*values)
    check_examples(args, lowered.plan)
    executable = lowered.compile()

    with users_code(f"The step of `{args.model}`"):
        _run_s(step, executable, values)  # to warm up
        seconds = [_run_s(step, executable, values) for _ in range(args.steps)]
    plan, median_s = lowered.plan, statistics.median(seconds)
    examples_per_s = plan.n_examples / median_s if plan.n_examples else None

    lines = [
        header(plan),
        f"Predicted {seconds_text(plan.cost.total_s)} per step, measured {seconds_text(median_s)}: the median of "
        f"{args.steps} steps of {seconds_text(min(seconds))} to {seconds_text(max(seconds))}",
    ]
    if examples_per_s is not None:
        lines.append(f"{examples_per_s:.3g} examples per second, {plan.n_examples} in a batch")
    data = {
        "model": args.model,
        "plan": header(plan),
        "predicted_s": plan.cost.total_s,
        "measured_s": median_s,
        "steps_s": seconds,
        "n_examples": plan.n_examples,
        "examples_per_s": examples_per_s,
    }
    show(args, "\n".join(lines), json_of(data))
    save(args, args.html, lambda path: plan.to_html(path, measured=executable.stage_timeline()))
    return 0


def _run_s(step: ParallelizedFunc, executable: Executable, values: tuple[Any, ...]) -> float:
    """The arguments are on their devices before."""
    placed = step.preshard_dynamic_args(*values)
    executable.sync()
    start = time.perf_counter()
    results = step(*placed)
    executable.sync()
    seconds = time.perf_counter() - start
    del results
    return seconds


def _random(leaf: Any) -> Any:
    """Floats from 0 to 0.1, integers 0 and 1, for a `jax.ShapeDtypeStruct`. Other leaves stay."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    is_key = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    if isinstance(leaf, jax.Array) and not is_key:
        return np.asarray(leaf)  # the step may take over the memory of an array on a device
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    if is_key:
        return jnp.zeros(leaf.shape, leaf.dtype)
    rng = np.random.default_rng(0)
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        return (0.1 * rng.random(leaf.shape, np.float32)).astype(leaf.dtype)
    return rng.integers(0, 2, leaf.shape).astype(leaf.dtype)


# ---- calibrate and doctor --------------------------------------------------------------------------------------------


def _calibrate(args: argparse.Namespace) -> int:
    _use_virtual_devices(args.virtual_devices)
    from minialpa.calibration import calibrate

    found = calibrate()
    note(args, found.summary())
    save(args, args.out, lambda path: write_text(path, found.cluster.to_json()))
    return 0


#: Packages whose versions `doctor` prints, besides cupy, whose name depends on the version of CUDA.
_PACKAGES = ("minialpa", "jax", "jaxlib", "numpy", "pulp", "highspy", "flax", "optax", "ray")


def _doctor(args: argparse.Namespace) -> int:
    """Exit status 1 if jax finds no device."""
    from importlib.metadata import packages_distributions

    from minialpa.runtime.diagnosis import diagnose_transports
    from minialpa.support.machine_code import cache_folder

    names = (*_PACKAGES, *packages_distributions().get("cupy", ["cupy"]))
    found: dict[str, Any] = {
        "packages": {name: _version(name) for name in names},
        "machine_code": str(cache_folder() or "") or None,
        "devices": _devices(),
        "transports": diagnose_transports(),
    }
    show(args, "\n".join(_doctor_lines(found)), json_of(found))
    return 0 if found["devices"]["count"] else 1


def _doctor_lines(found: dict[str, Any]) -> Iterator[str]:
    for name, version in found["packages"].items():
        yield f"{name:14} {version or 'not installed'}"
    nowhere = "kept nowhere: no folder can be written, and every process compiles the planner's loops"
    yield f"{'machine code':14} {found['machine_code'] or nowhere}"

    devices = found["devices"]
    if devices["count"]:
        yield f"{'devices':14} {devices['count']} x {devices['kind']} ({devices['platform']})"
        yield json.dumps(devices["rates"])
    else:
        yield f"{'devices':14} do not work: {devices['error']}"
    for transport, outcome in found["transports"].items():
        yield f"{transport:14} {outcome}"


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> dict[str, Any]:
    """With rates for the planner, or the error of the requested platform."""
    import jax

    from minialpa.session import describe_devices

    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        return {"count": 0, "error": str(error)}
    rates = dataclasses.asdict(describe_devices(devices).device)
    return {"count": len(devices), "kind": devices[0].device_kind, "platform": devices[0].platform, "rates": rates}
