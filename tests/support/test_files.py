"""A file holds the old text or the new one, never a part."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from minialpa.inter.search.stage_cost import save_costs
from minialpa.support.files import write_text
from minialpa.support.perfetto import write_trace
from tests.plans import shard_plan


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("writer", ["plan", "trace", "costs"])
def test_a_full_disk_leaves_the_old_file(writer: str, tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_text("old", encoding="utf-8")
    plan = shard_plan()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            match writer:
                case "plan":
                    plan.save(path)
                case "trace":
                    write_trace(path, [{"name": "x"}])
                case "costs":
                    save_costs(str(path), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text(encoding="utf-8") == "old"
    assert names(tmp_path) == ["kept.json"]


def test_permissions_stay_and_new_files_have_the_usual_ones(tmp_path: Path) -> None:
    for name, mode in (("private", 0o600), ("shared", 0o664)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
        write_text(tmp_path / name, "new")
        assert (tmp_path / name).stat().st_mode & 0o7777 == mode
    (tmp_path / "usual").touch()
    write_text(tmp_path / "new", "new")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert names(tmp_path) == ["new", "private", "shared", "usual"]


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "file")
    for text in ("first", "second"):
        write_text(tmp_path / "link", text + " → β")
        assert (tmp_path / "folder" / "file").read_bytes() == f"{text} → β".encode()
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "folder") == ["file"]


def test_what_is_no_regular_file_is_written_to(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        write_text(f"/dev/fd/{writing}", "through a pipe")
        assert os.read(reading, 100) == b"through a pipe"
    finally:
        os.close(reading)
        os.close(writing)
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path, "text")
    for nowhere, kind in (("nowhere", FileNotFoundError), ("file", NotADirectoryError)):
        (tmp_path / "file").touch()
        with pytest.raises(kind) as caught:
            write_text(tmp_path / nowhere / "below", "text")
        assert caught.value.filename == str(tmp_path / nowhere / "below")
    (tmp_path / "file").unlink()
    assert names(tmp_path) == []


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_file_in_a_folder_of_others_is_written_to_and_a_read_only_one_is_not(tmp_path: Path) -> None:
    for name in ("mine", "read-only"):
        (tmp_path / name).write_text("old", encoding="utf-8")
    (tmp_path / "read-only").chmod(0o444)
    with pytest.raises(PermissionError):
        write_text(tmp_path / "read-only", "new")
    tmp_path.chmod(0o555)
    try:
        write_text(tmp_path / "mine", "new")
        with pytest.raises(PermissionError):
            write_text(tmp_path / "another", "new")
    finally:
        tmp_path.chmod(0o755)
    assert [(tmp_path / name).read_text(encoding="utf-8") for name in names(tmp_path)] == ["new", "old"]
