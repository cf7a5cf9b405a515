"""Commands on saved plans: `check`, `diff`, `simulate` and `report`. They need no device."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minialpa.cli.arguments import add_html, add_json, add_model, add_plan_file, output_file
from minialpa.cli.model import load_step, on_cpu
from minialpa.cli.output import json_of, save, show
from minialpa.errors import MinialpaError, VerifyError

if TYPE_CHECKING:
    from minialpa.plan import Plan


def add_commands(commands: Any) -> None:
    check = commands.add_parser("check", help="compile a saved plan with XLA for its GPU, and compare")
    add_plan_file(check)
    add_model(check)
    check.add_argument("--target", metavar="GPU", help="a GPU such as `h100`, or a JSON file; default: of the plan")
    check.add_argument("--cache", type=Path, metavar="FOLDER", help="keep compiled programs here")
    add_html(check)
    add_json(check)
    check.set_defaults(run=_check)

    diff = commands.add_parser("diff", help="print how two saved plans differ")
    diff.add_argument("plans", type=Path, nargs=2, metavar="PLAN.json")
    add_json(diff)
    diff.set_defaults(run=_diff)

    simulate = commands.add_parser("simulate", help="print the predicted timeline of one step of a saved plan")
    add_plan_file(simulate)
    simulate.add_argument("--trace", type=output_file, metavar="FILE", help="write the timeline for ui.perfetto.dev")
    add_json(simulate)
    simulate.set_defaults(run=_simulate)

    report = commands.add_parser("report", help="print a saved plan")
    add_plan_file(report)
    shown = report.add_mutually_exclusive_group()
    shown.add_argument("--full", action="store_true", help="print all operators, collectives and placements")
    shown.add_argument(
        "--explain", metavar="WHAT", help="print only lines of arguments, results and operators with WHAT"
    )
    shown.add_argument("--python", action="store_true", help="print the placements as Python source, for `jax.jit`")
    add_html(report)
    add_json(report)
    report.set_defaults(run=_report)


def load_plan(path: Path) -> Plan:
    """Raises VerifyError with the path."""
    from minialpa.plan import Plan

    try:
        return Plan.load(path)
    except OSError as error:
        raise VerifyError(
            f"`{path}` cannot be read: {error.strerror}. Write a plan with `minialpa plan MODEL --save {path}`."
        ) from error
    except VerifyError as error:
        raise VerifyError(f"`{path}`: {error}") from error


@contextmanager
def same_step(path: Path | None, model: str) -> Iterator[None]:
    """Errors of a saved plan that does not fit the model name both."""
    from minialpa.inter.staging.replan import StalePlanError

    try:
        yield
    except StalePlanError as error:
        raise MinialpaError(
            f"`{path}` was made for another model or batch than `{model}`: {error.difference}. Plan that one with "
            f"`minialpa plan {model} --save {path}`."
        ) from error


def explanation(text: str) -> str:
    """Raises MinialpaError for an unknown name."""
    if text.startswith("No part of the plan is called"):
        raise MinialpaError(text)
    return text


def _check(args: argparse.Namespace) -> int:
    """The exit status is 1 if a stage needs more memory than its devices have."""
    import minialpa

    on_cpu()
    plan = load_plan(args.plan)
    model = load_step(args, plan.n_examples)
    with same_step(args.plan, args.model):
        found = minialpa.check(plan, model.step, model.args, target=args.target, cache=args.cache)
    show(args, found.summary(), found.to_json)
    save(args, args.html, lambda path: plan.to_html(path, check=found))
    return 0 if found.fits else 1


def _diff(args: argparse.Namespace) -> int:
    """The exit status is 1 if the plans differ, as with `diff`."""
    old, new = map(load_plan, args.plans)
    text, equal = old.diff(new), old == new
    show(args, text, json_of({"equal": equal, "differences": [] if equal else text.splitlines()}))
    return 0 if equal else 1


def _simulate(args: argparse.Namespace) -> int:
    import minialpa

    found = minialpa.simulate(load_plan(args.plan))
    totals = {"total_s": found.total_s, "bubble": found.bubble, "peak_bytes": found.peak_bytes}
    show(args, found.summary(), json_of(totals | dataclasses.asdict(found)))
    save(args, args.trace, found.to_trace)
    return 0


def _report(args: argparse.Namespace) -> int:
    plan = load_plan(args.plan)
    if args.python:
        text = "\n".join(plan.to_python(mesh) for mesh in range(len(plan.stages)))
    else:
        text = plan.summary(full=args.full) if args.explain is None else explanation(plan.explain(args.explain))
    show(args, text, plan.to_json)
    save(args, args.html, plan.to_html)
    return 0
