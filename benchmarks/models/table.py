"""Trains all models in separate processes and writes the table of benchmarks/models.md.

All models, in 10 to 20 minutes on 2 quiet cores; the same command continues an interrupted run:
    python -m benchmarks.models.table --processes 2 --results /tmp/rows.json --write benchmarks/models.md
Some models:
    python -m benchmarks.models.table mlp gan
The page of the rows so far, without training:
    python -m benchmarks.models.table --seconds 0 --results /tmp/rows.json --write benchmarks/models.md
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.models.all_models import MODELS
from benchmarks.models.page import page
from benchmarks.models.processes import train
from benchmarks.models.results import OtherVersions, read
from benchmarks.registry import Rows
from minialpa.support.files import write_text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.models.table", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="models; all models without a name")
    parser.add_argument("--processes", type=int, default=2, help="number of parallel processes")
    parser.add_argument("--results", type=Path, help="a file of rows; models with rows in it are not trained")
    parser.add_argument("--seconds", type=float, default=math.inf, help="seconds after which no model starts")
    parser.add_argument("--write", type=Path, help="the file of the page")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.names) - MODELS.keys()):
        parser.error(f"no model is called {', '.join(unknown)}")
    try:
        results = read(args.results)
    except OtherVersions as error:
        parser.error(str(error))

    names = args.names or list(MODELS)
    todo = [name for name in names if name not in results.of_model]
    deadline = time.monotonic() + args.seconds

    def done(name: str, rows: Rows) -> None:
        results.add(name, rows)
        for row in rows:
            print(f"{row['outcome']:8} {name}, {row['method']}: {row.get('detail', '')}", flush=True)

    train(todo, args.processes, done, lambda: time.monotonic() >= deadline)
    print(f"{sum(name in results.of_model for name in names)} of {len(names)} models are done.")
    if args.write is not None:
        write_text(args.write, page(results.rows(MODELS)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
