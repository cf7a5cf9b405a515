"""Compiles the loops of `support/loops.py` with numba, and keeps the machine code in files.

numba would put these files into the installed package, where pip does not remove them. Here they go to the user's cache
folder, or to a private temporary folder.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache

from minialpa.support.loop_sources import SOURCES_DIGEST
from minialpa.support.users_cache import made, users_cache


def dispatcher_of(function: Callable[..., Any]) -> Any:
    dispatcher: Any = numba.njit(function)
    if dispatcher is not function and cache_folder() is not None:  # numba may be disabled
        dispatcher._cache = _Files(function)
    return dispatcher


#: numba itself distinguishes versions of Python and processors.
_DIGEST = SOURCES_DIGEST and hashlib.sha256(f"{numba.__version__} {SOURCES_DIGEST}".encode()).hexdigest()[:16]


@functools.cache
def cache_folder() -> Path | None:
    """Made if necessary; None without a place for it."""
    if _DIGEST is None:
        return None
    name = f"loops-{_DIGEST}"
    chosen: str = vars(numba.config)["CACHE_DIR"]
    if chosen:  # by the user, for all files of numba
        with suppress(OSError):
            return made(Path(chosen) / f"minialpa-{name}")
        return None
    return users_cache(name)


class _Locator:
    """Passes the folder and version of a function's code to numba."""

    def __init__(self, function: Callable[..., Any], file: str, folder: Path) -> None:
        self._py_file, self._line, self._folder = file, function.__code__.co_firstlineno, folder

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Locator | None:
        folder = cache_folder()
        return None if folder is None else cls(py_func, py_file, folder)

    def ensure_cache_path(self) -> None:
        made(self._folder)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return self._folder.name

    def get_disambiguator(self) -> str:
        return str(self._line)


class _Implementation(CompileResultCacheImpl):
    _locator_classes: Any = (_Locator,)


class _Files(FunctionCache):
    """Unusable files cost only time."""

    _impl_class = _Implementation

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a damaged file may raise anything
            self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):  # the disk is full, or read-only
            super().save_overload(sig, data)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()
