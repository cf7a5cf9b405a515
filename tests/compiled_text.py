"""How many collectives of each kind compiled programs hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from minialpa import hlo


def collectives(texts: Iterable[str], *, ignore_scalars: bool = True) -> Counter[str]:
    """Number of collectives of each kind; one that moves only scalars does not count unless asked for."""
    found = (one for text in texts for one in hlo.collectives(text))
    return Counter(one.kind for one in found if one.n_elements > 1 or not ignore_scalars)
