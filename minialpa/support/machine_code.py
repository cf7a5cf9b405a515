"""Compiles the loops of `support/loops.py` to machine code, by numba.

Compiling takes seconds, so machine code is kept in files. Numba would lay them beside the source, into the installed
package: pip does not know them there, so it leaves them behind when it replaces or removes the package, with folders
that look like a package. Here they go to the user's folder for caches, else to a private one among temporary files.
That folder is named by the environment: this is the one part of planning that reads it, and no plan depends on it.

Numba looks for its cache of a function in the attribute `_cache`, which has no public door.
"""

from __future__ import annotations

import functools
import hashlib
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, NullCache

from minialpa.support.loop_sources import SOURCES_DIGEST


def dispatcher_of(function: Callable[..., Any]) -> Any:
    """What numba calls a function that it compiles, with files for its code; see `support/loops.py`."""
    dispatcher: Any = numba.njit(function)
    if dispatcher is not function:  # else numba was told to compile nothing
        dispatcher._cache = _Cache(function)
    return dispatcher


#: Of all that the machine code follows from, but for what numba tells apart itself: Python and the processor.
_DIGEST = SOURCES_DIGEST and hashlib.sha256(f"{numba.__version__} {SOURCES_DIGEST}".encode()).hexdigest()[:16]


@functools.cache
def cache_folder() -> Path | None:
    """The folder that holds the machine code of these sources, made if need be. None: there is no place for one."""
    if _DIGEST is None:
        return None
    name = f"loops-{_DIGEST}"
    chosen: str = vars(numba.config)["CACHE_DIR"]
    if chosen:  # where this user wants everything that numba keeps
        with suppress(OSError):
            return _made(Path(chosen) / f"minialpa-{name}")
        return None
    for root in _roots():
        with suppress(OSError):
            if _is_private(_made(root)) and _is_private(_made(root / name)):
                return root / name
    return None


def _roots() -> Iterator[Path]:
    """Folders of minialpa for caches, the best first."""
    named = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # others are to be ignored, by the XDG Base Directory Specification
        yield Path(named) / "minialpa"
    home = os.path.expanduser("~")
    if os.path.isabs(home) and os.path.isdir(home):  # services run as users whose home is nowhere
        yield Path(home, *(("Library", "Caches") if sys.platform == "darwin" else (".cache",)), "minialpa")
    with suppress(FileNotFoundError):  # where no folder for temporary files can be written
        yield Path(tempfile.gettempdir()) / (f"minialpa-{os.getuid()}" if hasattr(os, "getuid") else "minialpa")


def _made(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _is_private(folder: Path) -> bool:
    """Whether nobody else can put files here. What is read from them is run."""
    found = folder.lstat()
    is_mine = not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o022)
    return is_mine and stat.S_ISDIR(found.st_mode)


class _Locator:
    """Tells numba where the code of a function is and what it is made of: what its own locators tell, see there."""

    def __init__(self, function: Callable[..., Any], file: str, folder: Path) -> None:
        self._py_file, self._line, self._folder = file, function.__code__.co_firstlineno, folder

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Locator | None:
        folder = cache_folder()
        return None if folder is None else cls(py_func, py_file, folder)

    def ensure_cache_path(self) -> None:
        _made(self._folder)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return self._folder.name

    def get_disambiguator(self) -> str:
        return str(self._line)


class _Implementation(CompileResultCacheImpl):
    _locator_classes: Any = (_Locator,)


class _Files(FunctionCache):
    _impl_class = _Implementation


class _Cache(NullCache):
    """The files of one function, where there is a folder for them. Files that cannot be used cost time and no more."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @functools.cached_property
    def _files(self) -> Any:
        try:
            return _Files(self._function)
        except RuntimeError:  # there is no folder
            return NullCache()

    @property
    def cache_path(self) -> str | None:
        path: str | None = self._files.cache_path
        return path

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return self._files.load_overload(sig, target_context)
        except Exception:  # whatever reading half a file ends in
            self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):  # the disk is full, or others may only read
            self._files.save_overload(sig, data)

    def flush(self) -> None:
        with suppress(OSError):
            self._files.flush()
