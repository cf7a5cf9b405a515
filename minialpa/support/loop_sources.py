"""The sources of the machine code of compiled loops, and their digest at import."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

#: The modules of compiled functions and of the classes of their arguments. Machine code includes the code of functions
#: that it calls, so a change of one module is a change of all.
SOURCES = (
    "inter/search/stage_kernels.py",
    "intra/solver/csr_graph.py",
    "intra/solver/dominance.py",
    "intra/solver/local_search.py",
    "intra/solver/trws.py",
)


def _digest() -> str | None:
    """The digest of the sources; None if they cannot be read, as in a packed program."""
    with suppress(OSError):
        sources = [(Path(__file__).parents[1] / name).read_bytes() for name in SOURCES]
        return hashlib.sha256(b"\0".join(sources)).hexdigest()
    return None


#: Read at import: sources that are edited later must not give old code a new name.
SOURCES_DIGEST = _digest()
