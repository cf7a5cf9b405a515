"""The command line: `minialpa demo`, `minialpa plan`, `minialpa doctor`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minialpa.errors import MinialpaError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status. Errors of minialpa are printed without a traceback."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
        return status
    except MinialpaError as error:
        print(f"minialpa: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="minialpa", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train a small GPT on virtual CPU devices, next to one device")
    demo.add_argument("--devices", type=int, default=8, help="virtual CPU devices (default 8)")
    demo.add_argument("--steps", type=int, default=8, help="training steps (default 8)")
    demo.set_defaults(run=_demo)

    plan = commands.add_parser("plan", help="plan a model for a cluster, with no device")
    plan.add_argument("model", help="a benchmark model such as `gpt` or `gpt-1.3b`, or `module:function`")
    plan.add_argument("--cluster", default="a100-80gb", help="a preset, or a JSON file of a ClusterSpec")
    plan.add_argument("--num-hosts", type=int, default=1)
    plan.add_argument("--devices-per-host", type=int, default=8)
    plan.add_argument("--batch-size", type=int, default=None)
    plan.add_argument("--micro-batches", type=int, default=1)
    plan.add_argument("--layers", type=int, default=0, help="pipeline layers; 0 plans without a pipeline (default)")
    plan.add_argument("--output", type=Path, default=None, help="write the plan as JSON to this file")
    plan.set_defaults(run=_plan)

    doctor = commands.add_parser("doctor", help="what is installed, and which devices there are")
    doctor.set_defaults(run=_doctor)
    return parser


def _demo(args: argparse.Namespace) -> int:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", args.devices)
    from minialpa.demo import run_demo

    return run_demo(args.devices, args.steps)


def _plan(args: argparse.Namespace) -> int:
    import minialpa
    from minialpa.cluster import ClusterSpec

    if Path(args.cluster).is_file():
        cluster = ClusterSpec.from_json(Path(args.cluster).read_text())
    else:
        cluster = ClusterSpec.preset(args.cluster, num_hosts=args.num_hosts, devices_per_host=args.devices_per_host)
    step, state, batch = _load(args.model, args.batch_size)
    method: Any = minialpa.ShardParallel(num_micro_batches=args.micro_batches)
    if args.layers:
        layers = minialpa.AutoLayerOption(layer_num=args.layers)
        method = minialpa.PipeshardParallel(
            num_micro_batches=args.micro_batches, layer_option=layers, stage_option="auto"
        )
    start = time.perf_counter()
    found = minialpa.plan(step, (state, batch), cluster=cluster, method=method)
    print(found.summary())
    print(f"Planned in {time.perf_counter() - start:.1f} s.")
    if args.output is not None:
        found.save(args.output)
        print(f"Written to {args.output}.")
    return 0


def _load(name: str, batch_size: int | None) -> tuple[Any, Any, Any]:
    """Step, abstract state and abstract batch of a benchmark model, or of `module:function`, which returns three."""
    import jax

    import minialpa
    from minialpa import models

    if ":" in name:
        module, _, function = name.partition(":")
        loaded: tuple[Any, Any, Any] = getattr(importlib.import_module(module), function)()
        return loaded
    case = models.build(name)
    state = jax.eval_shape(case.init, jax.ShapeDtypeStruct((), jax.random.key(0).dtype))
    batch = case.make_batch(0, batch_size or case.batch_size)
    return case.train_step(minialpa.value_and_grad), state, batch


def _doctor(args: argparse.Namespace) -> int:
    import importlib.metadata as metadata

    import jax

    from minialpa.session import describe_devices

    for package in (
        "minialpa",
        "jax",
        "jaxlib",
        "numpy",
        "networkx",
        "pulp",
        "highspy",
        "flax",
        "optax",
        "ray",
        "cupy",
    ):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            version = "not installed"
        print(f"{package:10} {version}")
    devices = jax.local_devices()
    print(f"devices    {len(devices)} x {devices[0].device_kind} ({devices[0].platform})")
    print(json.dumps(json.loads(describe_devices(devices).to_json())["device"]))
    return 0
