"""Run benchmarks by name and print a table for each.

python -m benchmarks.run overhead plan_time [--size tiny] [--json results.json]
python -m benchmarks.run --list
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.registry import Rows, all_benchmarks
from minialpa.support.files import write_text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.run", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run")
    parser.add_argument("--size", choices=("tiny", "full"), default="full")
    parser.add_argument("--json", type=Path, help="write the rows of every benchmark to this file")
    parser.add_argument("--list", action="store_true", help="print the names and what they measure")
    args = parser.parse_args(argv)
    known = all_benchmarks()
    if unknown := sorted(set(args.names) - set(known)):
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(known)}")
    if args.list or not args.names:
        for name, run in known.items():
            print(f"{name:12} {(run.__doc__ or '').splitlines()[0]}")
        return 0
    jax.config.update("jax_num_cpu_devices", 8)
    results = {}
    for name in args.names:
        results[name] = known[name](args.size)
        print(f"{name}\n{table(results[name])}\n", flush=True)
    if args.json is not None:
        write_text(args.json, json.dumps(results, indent=1) + "\n")
    return 0


def table(rows: Rows) -> str:
    """The rows in columns, in the order of their first occurrence."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, *([_text(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join(f"  {line}".rstrip() for line in lines)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
