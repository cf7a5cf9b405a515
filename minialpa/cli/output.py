"""Results of a command in, text and JSON out. With `--json`, only JSON goes to standard output.

`args.output` is standard output. What code of the user prints goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minialpa.support.files import write_text


def show(args: argparse.Namespace, text: str, to_json: Callable[[], str]) -> None:
    """Print in the form that `--json` asks for, and write its file."""
    print(to_json() if args.json is True else text, file=args.output)
    if isinstance(args.json, Path):
        save(args, args.json, lambda path: write_text(path, to_json()))


def note(args: argparse.Namespace, text: str) -> None:
    """Print a text that is no part of the result."""
    print(text, file=sys.stderr if getattr(args, "json", None) is True else args.output)


def save(args: argparse.Namespace, path: Path | None, write: Callable[[Path], object]) -> None:
    if path is not None:
        write(path)
        note(args, f"Written to {path}.")


def json_of(data: dict[str, Any]) -> Callable[[], str]:
    return lambda: json.dumps(data, indent=2)
