"""Captures standard error of native code. XLA reports there the arrays that it could not partition well."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Captured:
    """`text` is complete once the block has ended."""

    text: str = ""

    @property
    def rematerialised(self) -> int:
        """The number of arrays that XLA's partitioner gathered whole, without another way between two shardings."""
        return self.text.lower().count("involuntary full rematerialization")


@contextmanager
def captured_stderr() -> Iterator[Captured]:
    """Turns file descriptor 2 into a file. The text is passed on only if the block raises."""
    captured = Captured()
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        failed = True
        try:
            yield captured
            failed = False
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            captured.text = file.read().decode(errors="replace")
            if failed:
                os.write(2, captured.text.encode())
