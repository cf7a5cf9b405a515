"""The examples of a Markdown page, and their output. `python -m tests.pages FILE...` writes the output into the page.

A block in Python may be followed by a block without a language, which has the text that it prints.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

DOCS = Path(__file__).parents[1] / "docs"
_BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n+```\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Example:
    """A block of Python. output: on the page; None without. start, end: of the output in the text of the page."""

    code: str
    output: str | None
    start: int
    end: int


def examples_of(path: Path) -> list[Example]:
    """Examples that begin with `# source:` need other packages, and are left out."""
    found = _BLOCK.finditer(path.read_text(encoding="utf-8"))
    return [Example(one[1], one[2], *one.span(2)) for one in found if not one[1].startswith("# source:")]


def run(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The names after all examples, which run one after the other in jax as users have it, and the output of each."""
    names: dict[str, Any] = {"__name__": "script"}
    return names, list(_outputs(path, names))


def _outputs(path: Path, names: dict[str, Any]) -> Iterator[str]:
    for example in examples_of(path):
        printed = io.StringIO()
        with (
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
            contextlib.redirect_stdout(printed),
        ):
            exec(compile(example.code, str(path), "exec"), names)
        yield printed.getvalue()


def write(path: Path) -> None:
    """Put the output of each example in place of the output on the page."""
    text = path.read_text(encoding="utf-8")
    for example, printed in reversed(list(zip(examples_of(path), run(path)[1], strict=True))):
        if example.output is not None:
            text = text[: example.start] + printed + text[example.end :]
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    jax.config.update("jax_platforms", "cpu")
    pages = [Path(name).resolve() for name in sys.argv[1:]]
    os.chdir(tempfile.mkdtemp())
    for page in pages:
        write(page)
