"""Steps that others have measured, beside what minialpa predicts of them.

    python -m benchmarks.published_runs --runs FILE [--only SYSTEM ...] [--every N] [--json FILE] [--write PAGE]
    python -m benchmarks.published_runs --runs FILE --choices

FILE is a list of published runs, see `record.py` for its fields. Each run's model is built in its dimensions, its
degrees are forced, and the plan's seconds and bytes are put beside what was measured. `--choices` lets the planner
choose for the runs that were the best of a sweep. The constants of `KernelRates` that come closest to the runs of some
systems are found with `--fit SYSTEM ...`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.published_runs import page
from benchmarks.published_runs.fit import fit
from benchmarks.published_runs.predict import Prediction, choose, predict
from benchmarks.published_runs.record import Run, read
from minialpa.support.files import write_text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.published_runs", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, required=True, help="the file of published runs")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of systems")
    parser.add_argument("--every", type=int, default=1, help="predict every so many runs of a system only")
    parser.add_argument("--json", type=Path, help="write a line for each run")
    parser.add_argument("--write", type=Path, help="write the scores as a page of Markdown")
    parser.add_argument("--choices", action="store_true", help="plans of our own for the best of each sweep")
    parser.add_argument("--fit", nargs="*", default=[], help="systems whose runs the constants are fitted to")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args(argv)

    rows = read(args.runs)
    runs = [row for row in rows if isinstance(row, Run) and _is_wanted(row, args.only or args.fit)]
    runs = [run for group in _by_system(runs) for run in group[:: args.every]]
    if args.choices:
        for run in runs:
            print(_choice_line(run), flush=True)
        return 0
    if args.fit:
        print(fit(runs))
        return 0

    found = list(_predicted(runs, args.processes))
    left_out = [reason for row in rows if not isinstance(row, Run) for reason in row[1:]]
    text = page.page(found, left_out)
    print(page.rows(found))
    print(text)
    if args.write:
        write_text(args.write, text)
    if args.json:
        write_text(args.json, "".join(json.dumps(_record(one)) + "\n" for one in found))
    return 0


def _is_wanted(run: Run, names: Sequence[str]) -> bool:
    return not names or any(name in run.system for name in names)


def _by_system(runs: Sequence[Run]) -> list[list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.system, []).append(run)
    return list(groups.values())


def _predicted(runs: Sequence[Run], n_processes: int) -> Iterator[Prediction]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(n_processes, mp_context=context) as pool:
        yield from pool.map(predict, runs)


def _record(one: Prediction) -> dict[str, Any]:
    return dataclasses.asdict(one) | {"error": one.error}


def _choice_line(run: Run) -> str:
    theirs, ours = choose(run)
    degrees = f"dp {run.dp} fsdp {run.fsdp} tp {run.tp} pp {run.pp}, {run.n_micro_batches} micro-batches"
    stages = " ".join("x".join(map(str, stage.logical_shape)) for stage in ours.stages)
    return (
        f"{run.name} on {run.n_gpus}: {degrees}: {theirs.cost.total_s:.3f} s; ours {ours.cost.total_s:.3f} s: stages "
        f"{stages}, {ours.n_micro_batches} micro-batches; ratio {theirs.cost.total_s / ours.cost.total_s:.3f}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
