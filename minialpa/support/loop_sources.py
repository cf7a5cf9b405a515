"""The source files of compiled loops, and their digest, which names the cached machine code."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

#: Modules of compiled functions and of their arguments' classes.
SOURCES = (
    "inter/schedule/list_scheduler.py",
    "inter/search/stage_kernels.py",
    "intra/solver/csr_graph.py",
    "intra/solver/dominance.py",
    "intra/solver/local_search.py",
    "intra/solver/trws.py",
)


def _digest() -> str | None:
    """None if the sources cannot be read, as in a packed program."""
    with suppress(OSError):
        sources = [(Path(__file__).parents[1] / name).read_bytes() for name in SOURCES]
        return hashlib.sha256(b"\0".join(sources)).hexdigest()
    return None


#: Computed at import: sources that are edited later must not name old code.
SOURCES_DIGEST = _digest()
