"""Commands that plan a model: `plan`, `explain` and `what-if`. They need no device."""

from __future__ import annotations

import argparse
import difflib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minialpa.cli.arguments import (
    METHODS,
    PHASES,
    PLANNING,
    PRESETS,
    add_completed,
    add_devices,
    add_html,
    add_json,
    add_method,
    add_model,
    add_planning,
    cluster_of,
    method_of,
    model_names,
    one_of,
    output_file,
    positive,
    preset_named,
)
from minialpa.cli.model import check_examples, load_step, on_cpu, parallel_step
from minialpa.cli.output import json_of, note, save, show
from minialpa.cli.saved import explanation, load_plan, same_step
from minialpa.errors import MinialpaError
from minialpa.support.files import write_text


def add_commands(commands: Any) -> None:
    _add_plan(commands.add_parser("plan", help="plan a model for a cluster"))
    _add_explain(commands.add_parser("explain", help="print the alternatives to one choice of a plan, with costs"))
    _add_what_if(commands.add_parser("what-if", help="compare plans for other clusters, batches and memory"))


def _add_plan(plan: argparse.ArgumentParser) -> None:
    add_model(plan)
    add_devices(plan)
    add_planning(plan)
    plan.add_argument("--full", action="store_true", help="print all operators, collectives and placements")
    plan.add_argument("--save", type=output_file, metavar="PLAN.json", help="write the plan to this file")
    add_html(plan)
    add_json(plan)
    plan.add_argument(
        "--dump",
        nargs="?",
        const="all",
        **one_of("phase", ("all", *PHASES)),
        metavar="PHASE",
        help=f"print the step after a phase ({', '.join(PHASES)}); without PHASE, write all to the folder `phases`",
    )
    plan.add_argument(
        "--diff", nargs=2, **one_of("phase", PHASES), metavar="PHASE", help="print what changes between two phases"
    )
    plan.add_argument("--check", action="store_true", help="compile the plan for the GPU, as `minialpa check` does")
    plan.set_defaults(run=_plan)


def _add_explain(explain: argparse.ArgumentParser) -> None:
    add_model(explain)
    explain.add_argument(
        "what", metavar="WHAT", help="stages, micro-batches, remat, or a part of the path of an argument or result"
    )
    explain.add_argument("--plan", type=Path, metavar="PLAN.json", help="explain this plan in place of a new one")
    add_devices(explain)
    add_planning(explain)
    add_json(explain)
    explain.set_defaults(run=_explain)


def _add_what_if(what_if: argparse.ArgumentParser) -> None:
    add_completed(
        what_if, "models", names=model_names, ending="py", nargs="+", metavar="MODEL", help="as in `minialpa plan`"
    )
    what_if.add_argument("--gpus", default="8", metavar="N,N|N..N", help="devices: 8,16,64, or 8..1024 by doubling")
    what_if.add_argument("--cluster", default="h100", metavar="NAME,NAME", help=f"presets: {', '.join(PRESETS)}")
    what_if.add_argument(
        "--devices-per-host", type=positive, default=8, metavar="N", help="devices of a host; default 8"
    )
    what_if.add_argument("--batch", metavar="N,N|N..N", help="examples in a batch; default: the model's")
    what_if.add_argument("--memory", metavar="SIZE,SIZE", help="memory of a device, such as 40GB,80GB")
    what_if.add_argument("--sequence", metavar="N,N|N..N", help="positions of an example; default: the model's")
    what_if.add_argument("--link-speed", default="1", metavar="X,X", help="factors for the bytes per second of links")
    what_if.add_argument("--price", metavar="DOLLARS", help="of a GPU-hour: 2.5, or h100=2.5,a100-80gb=1.3")
    what_if.add_argument("--processes", type=positive, metavar="N", help="default: one for each core")
    add_method(what_if)
    add_html(what_if)
    what_if.add_argument("--csv", type=output_file, metavar="FILE", help="write the comparison as a table")
    add_json(what_if)
    what_if.set_defaults(run=_what_if)


def _plan(args: argparse.Namespace) -> int:
    import minialpa

    on_cpu()
    method = method_of(args, cluster_of(args))
    model = load_step(args)
    start = time.perf_counter()
    found = parallel_step(args, model, method).plan(*model.args)
    seconds = time.perf_counter() - start

    check_examples(args, found)

    show(args, found.summary(full=args.full), found.to_json)
    note(args, f"Planned in {seconds:.1f} s.")
    save(args, args.save, found.save)
    checked = minialpa.check(found, model.step, model.args) if args.check else None
    save(args, args.html, lambda path: found.to_html(path, check=checked))
    if args.dump is not None or args.diff is not None:
        _print_phases(args, minialpa.phases(found, model.step, model.args))
    if checked is not None:
        note(args, checked.summary())
    return 0 if checked is None or checked.fits else 1


def _print_phases(args: argparse.Namespace, phases: Mapping[str, str]) -> None:
    if args.dump == "all":
        folder = Path("phases")
        folder.mkdir(exist_ok=True)
        for i, (name, text) in enumerate(phases.items()):
            write_text(folder / f"{i}-{name}.txt", text)
        note(args, f"Written to {folder}: {', '.join(phases)}.")
    elif args.dump is not None:
        note(args, phases[args.dump])
    if args.diff is not None:
        old, new = (phases[name].splitlines() for name in args.diff)
        note(args, "\n".join(difflib.unified_diff(old, new, args.diff[0], args.diff[1], lineterm="")))


def _explain(args: argparse.Namespace) -> int:
    import minialpa

    on_cpu()
    method: Any
    if args.plan is None:
        method, planned_batch = method_of(args, cluster_of(args)), None
    else:
        given = [f"--{name.replace('_', '-')}" for name in PLANNING if getattr(args, name) is not None]
        if given:
            raise MinialpaError(
                f"`{args.plan}` has its own choices. Leave out {', '.join(given)}, or leave out --plan."
            )
        method = load_plan(args.plan)
        planned_batch = method.n_examples

    model = load_step(args, planned_batch)
    with same_step(args.plan, args.model):
        found = parallel_step(args, model, method).plan(*model.args)
        check_examples(args, found)
        text = explanation(minialpa.parallelize(model.step, method=found).explain(args.what, *model.args))
    show(args, text, json_of({"what": args.what, "lines": text.splitlines()}))
    return 0


def _what_if(args: argparse.Namespace) -> int:
    """The exit status is 1 if no plan fits."""
    from minialpa.what_if import factors, memory_sizes, numbers, prices, what_if

    on_cpu()
    clusters = [preset_named(name.strip()) for name in args.cluster.split(",")]
    found = what_if(
        args.models,
        gpus=numbers(args.gpus),
        clusters=clusters,
        batches=numbers(args.batch) if args.batch else (None,),
        memory=memory_sizes(args.memory) if args.memory else (None,),
        sequences=numbers(args.sequence) if args.sequence else (None,),
        link_speeds=factors(args.link_speed),
        devices_per_host=args.devices_per_host,
        prices=prices(args.price, clusters) if args.price else None,
        method=args.method or METHODS[0],
        planning_effort=args.effort or "fast",
        processes=args.processes,
    )
    show(args, found.text(), found.to_json)
    save(args, args.html, found.save_html)
    save(args, args.csv, found.save_csv)
    return 0 if any(one.fits for one in found.outcomes) else 1
