# PYTHON_ARGCOMPLETE_OK
"""The command `minialpa`: arguments in, text or JSON and an exit status out. docs/cli.md describes both."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

INTERRUPTED = 130  # the status of shells after an interrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. argv: None for the arguments of this process."""
    try:
        # Imports take 0.1 s, which Ctrl-C can interrupt, too.
        from minialpa.cli.interrupts import interruptible

        with interruptible(ends_process=argv is None) as is_interrupted:
            from minialpa.cli.commands import run

            return run(argv, is_interrupted)
    except KeyboardInterrupt:
        print("minialpa: interrupted", file=sys.stderr)

    # XLA may crash at a regular end. `multiprocessing` needs one to end its processes.
    if argv is None and "multiprocessing" not in sys.modules:
        os._exit(INTERRUPTED)
    return INTERRUPTED
