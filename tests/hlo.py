"""Reading compiled HLO: which collectives a program holds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_OP = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-start)?\(")


def collectives(texts: Iterable[str], *, ignore_scalars: bool = True) -> Counter[str]:
    """Number of collectives of each kind; one that moves only scalars does not count unless asked for."""
    found: Counter[str] = Counter()
    for text in texts:
        for shapes, kind in _OP.findall(text):
            if not ignore_scalars or re.search(r"\[\d", shapes):
                found[kind] += 1
    return found
