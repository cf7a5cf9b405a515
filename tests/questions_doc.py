"""Makes docs/five-questions.md from the output of its commands: `python -m tests.questions_doc` writes it."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import jax

from minialpa.cli import main

ROOT = Path(__file__).parents[1]
PATH = ROOT / "docs" / "five-questions.md"
MODELS = ("plain", "flax", "equinox")

_HEAD = f"""# Five questions

Each question about a plan has one command. The models are the same network in plain jax, flax and equinox, in
[examples/questions.py](../examples/questions.py): 8 layers of 4096 units. A test runs the commands for all three
models and compares the output on this page (jax {jax.__version__}). [Reading a plan](reading-a-plan.md) explains it.
"""
_A100 = "--cluster a100-80gb:4"

#: Question, answer, command, and how many lines of its output are shown.
QUESTIONS = (
    (
        "Which mesh for my model?",
        "`explain ... stages` plans the step on each mesh, and as pipelines of equal stages.\n"
        "`minialpa what-if` compares clusters.",
        f"minialpa explain examples/questions.py:flax stages {_A100} --method ShardParallel",
        99,
    ),
    (
        "Does it fit?",
        "`plan` shows the memory of a device beside its limit, and `explain ... memory` the kinds of memory.\n"
        "`minialpa check` compiles the programs for the exact bytes.",
        f"minialpa explain examples/questions.py:plain memory {_A100} --method DataParallel --batch 2048",
        99,
    ),
    (
        "What if I had half the memory?",
        "`--memory` plans for devices with less memory. Here the planner splits weights and optimizer state.",
        f"minialpa explain examples/questions.py:plain memory {_A100} --batch 2048 --method ShardParallel "
        "--memory 0.6GB",
        99,
    ),
    (
        "Which operation reshards, and where in my code?",
        "`explain ... communication` lists all collectives, with the operation, the module and the line.",
        f"minialpa explain examples/questions.py:equinox communication {_A100} --method ShardParallel --batch 512",
        8,
    ),
    (
        "Why is this stage slow?",
        "With a stage, `explain` lists its operators, the longest first, and its collectives.",
        f"minialpa explain examples/questions.py:flax 'stage 0' {_A100} --method DataParallel",
        9,
    ),
)


def output_of(command: str) -> str:
    """The standard output of a command, run from the folder of the repository. Raises AssertionError if it fails."""
    printed = io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(printed):
        status = main(shlex.split(command)[1:])
    assert status == 0, (command, status)
    return printed.getvalue()


def page() -> str:
    parts = [_HEAD]
    for title, answer, command, most in QUESTIONS:
        lines = output_of(command).rstrip().splitlines()
        shown = lines if len(lines) <= most else [*lines[:most], "..."]
        text = "\n".join(shown)
        parts.append(f"## {title}\n\n{answer}\n\n```bash\n{command}\n```\n\n```\n{text}\n```\n")
    return "\n".join(parts)


def for_model(command: str, model: str) -> str:
    return re.sub(r"questions\.py:\w+", f"questions.py:{model}", command)


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
