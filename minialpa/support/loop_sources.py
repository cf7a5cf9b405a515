"""What the machine code of the planner's loops is made of, as it was when it was imported."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

#: What machine code is made of: the functions that are compiled here, and the classes of their arguments. One that
#: calls another holds its code, so a change of any of them is a change of all.
SOURCES = (
    "inter/search/stage_kernels.py",
    "intra/solver/csr_graph.py",
    "intra/solver/dominance.py",
    "intra/solver/local_search.py",
    "intra/solver/trws.py",
)


def _digest() -> str | None:
    """Of the sources as they are imported: who edits them meanwhile would else find old code under the name of the new.

    None where they cannot be read: they may have been packed.
    """
    with suppress(OSError):
        sources = [(Path(__file__).parents[1] / name).read_bytes() for name in SOURCES]
        return hashlib.sha256(b"\0".join(sources)).hexdigest()
    return None


SOURCES_DIGEST = _digest()
