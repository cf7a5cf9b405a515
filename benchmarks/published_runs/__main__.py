"""Measured seconds and bytes of published runs, beside minialpa's predictions.

    python -m benchmarks.published_runs --runs FILE [--only SYSTEM ...] [--every N] [--json FILE] [--write PAGE]
    python -m benchmarks.published_runs --runs FILE --choices [--only SYSTEM ...]
    python -m benchmarks.published_runs --runs FILE --leave-out system

FILE is a list of published runs; `record.py` lists its fields. Each run's model is built in its dimensions and planned
with its degrees, and the plan's seconds and bytes are compared with the measured ones. `--choices` is for runs that
were the best of a sweep: it prices all designs that the trainer could have run, and compares the best of them with the
run. `--fit SYSTEM ...` finds the constants of `KernelRates` that come closest to the runs of some systems.
`--leave-out` fits them without each system, or without runs on many GPUs, and tests them on the left-out runs.

A run is planned once: the folder `--plans` keeps the seconds of its plan as a function of rates. Delete the folder
after a change of the planner.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.published_runs import page
from benchmarks.published_runs.choices import Choice, choose
from benchmarks.published_runs.fit import Planned, fitted, leave_out_scales, leave_out_systems, text_of
from benchmarks.published_runs.predict import Prediction, parts_of_run, predict
from benchmarks.published_runs.record import Run, read
from minialpa.support.files import write_text

_T = TypeVar("_T")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.published_runs", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="the file of published runs")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of systems")
    parser.add_argument("--every", type=int, default=1, help="predict every so many runs of a system only")
    parser.add_argument("--json", type=Path, help="write a line for each run")
    parser.add_argument("--write", type=Path, help="write the scores as a page of Markdown")
    parser.add_argument(
        "--choices", action="store_true", help="the best designs by our prices beside the best of sweeps"
    )
    parser.add_argument("--fit", nargs="*", default=[], help="systems whose runs the constants are fitted to")
    parser.add_argument("--leave-out", choices=("system", "scale"), help="test constants on runs that did not set them")
    parser.add_argument("--plans", type=Path, default=Path("build/published_runs"), help="the folder of planned runs")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args(argv)

    rows = read(args.runs)
    runs = [row for row in rows if isinstance(row, Run) and _is_wanted(row, args.only or args.fit)]
    runs = [run for group in _by_system(runs) for run in group[:: args.every]]
    if args.choices:
        for choice in _in_processes(choose, runs, args.processes):
            print(_choice_line(choice), flush=True)
        return 0
    # Runs of few stages and GPUs take less time to plan.
    found = list(_in_processes(partial(predict, folder=args.plans), sorted(runs, key=_effort), args.processes))
    found.sort(key=lambda one: one.run.number)
    if args.fit:
        print(text_of(fitted(_planned(found, args.plans))))
        return 0
    if args.leave_out:
        splits = leave_out_systems if args.leave_out == "system" else leave_out_scales
        print(page.splits(splits(_planned(found, args.plans))))
        return 0

    left_out = [reason for row in rows if not isinstance(row, Run) for reason in row[1:]]
    text = page.page(found, left_out, _planned(found, args.plans))
    print(page.rows(found))
    print(text)
    if args.write:
        write_text(args.write, text)
    if args.json:
        write_text(args.json, "".join(json.dumps(_record(one)) + "\n" for one in found))
    return 0


def _is_wanted(run: Run, names: Sequence[str]) -> bool:
    return not names or any(name in run.system for name in names)


def _effort(run: Run) -> int:
    return run.n_gpus * run.pp * run.n_chunks


def _planned(found: Sequence[Prediction], folder: Path) -> Planned:
    """The runs with measured seconds and a plan."""
    parts = ((one.run, parts_of_run(one.run, folder)) for one in found if one.error is not None)
    return [(run, each) for run, each in parts if not isinstance(each, str)]


def _by_system(runs: Sequence[Run]) -> list[list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.system, []).append(run)
    return list(groups.values())


def _in_processes(function: Callable[[Run], _T], runs: Sequence[Run], n_processes: int) -> Iterator[_T]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(n_processes, mp_context=context) as pool:
        yield from pool.map(function, runs)


def _record(one: Prediction) -> dict[str, Any]:
    return dataclasses.asdict(one) | {"error": one.error}


def _choice_line(choice: Choice) -> str:
    run, ratio = choice.theirs.run, choice.ratio
    return (
        f"{run.name} on {run.n_gpus} {run.gpu[:4]}, of {choice.n_designs} designs: theirs {_design(choice.theirs)}; "
        f"ours {_design(choice.ours)}; ratio {'none' if ratio is None else f'{ratio:.3f}'}"
    )


def _design(one: Prediction) -> str:
    run = one.run
    micro_batch = run.batch // (run.dp * run.fsdp * run.n_micro_batches)
    seconds = one.failure if one.step_s is None else f"{one.step_s:.3f} s"
    return (
        f"dp {run.dp * run.fsdp} tp {run.tp} pp {run.pp}, micro-batches of {micro_batch}: {seconds}, "
        f"{one.peak_bytes / 2**30:.0f} GiB{'' if one.fits else ', does not fit'}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
