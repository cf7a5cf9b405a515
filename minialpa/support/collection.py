"""`collection_paused` keeps Python's garbage collector out of tracing and planning.

Both make millions of small objects that live as long as the plan. The collector would walk through them for up to half
of the time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
