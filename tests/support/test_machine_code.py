"""Machine code of loops is kept in the user's folder for caches; if that is unusable, loops still compile."""

from __future__ import annotations

import importlib
import inspect
import os
import resource
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import pytest

import minialpa
from minialpa.support import machine_code
from minialpa.support.loop_sources import SOURCES
from minialpa.support.loops import compiled
from minialpa.support.machine_code import cache_folder

PACKAGE = Path(minialpa.__file__).parent


def double(x: int) -> int:
    return 2 * x


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the caches, the home and the temporary files of a user without other folders."""
    for name in ("cache", "home", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    cache_folder.cache_clear()
    yield tmp_path
    cache_folder.cache_clear()


def run() -> tuple[int, int]:
    """Calls `double` as a new process does; returns how often its code was found, and how often it was compiled."""
    function: Any = compiled(double)
    assert function(21) == 42
    return sum(function.stats.cache_hits.values()), sum(function.stats.cache_misses.values())


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_code_is_kept_for_later_processes_and_not_beside_the_source(folders: Path) -> None:
    beside = Path(__file__).parent
    before = [path for path in files(beside) if path.suffix in (".nbi", ".nbc")]
    assert run() == (0, 1)
    kept = files(folders)
    assert kept and all(path.is_relative_to(folders / "cache" / "minialpa") for path in kept)
    assert [path for path in files(beside) if path.suffix in (".nbi", ".nbc")] == before
    assert run() == (1, 0)


@pytest.mark.parametrize("wrong", ["others may write to it", "a link", "of another user"])
def test_a_folder_that_cannot_be_trusted_is_not_used(
    wrong: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folders / "nowhere"))
    mine = folders / "cache" / "minialpa"
    match wrong:
        case "others may write to it":
            mine.mkdir()
            mine.chmod(0o777)
        case "a link":
            (folders / "elsewhere").mkdir(mode=0o700)
            mine.symlink_to(folders / "elsewhere")
        case "of another user":
            mine.mkdir()
            uid = os.getuid()
            monkeypatch.setattr(os, "getuid", lambda: uid + 1)

    assert run() == (0, 1)
    assert {path.relative_to(folders).parts[0] for path in files(folders)} <= {"temporary"}


def test_without_any_folder_every_process_compiles(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cache", "home", "temporary"):
        (folders / name).rmdir()
        (folders / name).write_text("")
    monkeypatch.setenv("HOME", str(folders / "home"))
    assert (run(), run()) == ((0, 1), (0, 1))
    assert cache_folder() is None


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_damaged_files_are_replaced(suffix: str, folders: Path) -> None:
    run()
    (path,) = [path for path in files(folders) if path.suffix == suffix]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert [run(), run()] == [(0, 1), (1, 0)]


def test_a_full_disk_is_no_error(folders: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        found = run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert found == (0, 1)
    assert [run(), run()] == [(0, 1), (1, 0)]


def test_the_folder_that_a_user_gives_numba_is_taken(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folders / "chosen"))
    assert [run(), run()] == [(0, 1), (1, 0)]
    assert {path.relative_to(folders).parts[0] for path in files(folders)} == {"chosen"}


def test_other_sources_have_other_code(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    monkeypatch.setattr(machine_code, "_DIGEST", "others")
    cache_folder.cache_clear()
    assert run() == (0, 1)


def _modules() -> Iterator[Any]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if "@compiled" in path.read_text(encoding="utf-8") and path.name != "loops.py":
            yield importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))


def test_the_sources_are_all_that_code_is_made_of() -> None:
    """Modules with compiled functions, and modules of the records and functions that these use."""
    found = set()
    for module in _modules():
        for function in vars(module).values():
            if inspect.isclass(function) or not hasattr(function, "py_func"):
                continue
            used = [function, *typing.get_type_hints(function.py_func).values()]
            found |= {
                inspect.getfile(inspect.unwrap(x)) for x in used if hasattr(x, "py_func") or hasattr(x, "_fields")
            }
    assert sorted(str(Path(path).relative_to(PACKAGE)) for path in found) == list(SOURCES)
