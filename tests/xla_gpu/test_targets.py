"""Targets: by name, from a file, and as text."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from minialpa.cluster import ClusterSpec
from minialpa.errors import VerifyError
from minialpa.xla_gpu.targets import TARGETS, target_of


def test_a_file_gives_the_target_that_was_written(tmp_path: Path) -> None:
    mine = dataclasses.replace(TARGETS["a100-40gb"], name="mine", memory_bytes=1 << 30)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(dataclasses.asdict(mine)))
    assert target_of(str(path)) == mine


def test_files_with_something_else_and_unknown_names_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    for text in ("", "[]", '{"name": "x"}', '{"speed": 1}'):
        path.write_text(text)
        with pytest.raises(VerifyError, match=r"describes no GPU .* Write the fields name, "):
            target_of(str(path))
    with pytest.raises(VerifyError, match="v100, a100-40gb"):
        target_of("h1000")


@pytest.mark.parametrize("preset", ["v100-p3.16xlarge", "a100-40gb", "a100-80gb", "h100", "h200"])
def test_every_gpu_that_is_planned_for_is_a_target_with_about_its_memory(preset: str) -> None:
    device = ClusterSpec.preset(preset).device  # type: ignore[arg-type]
    assert target_of(device.name).memory_bytes == pytest.approx(device.memory_bytes, rel=0.08)
