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


@pytest.mark.parametrize("text", ["", "[]", '{"name": "x"}', '{"speed": 1}'])
def test_a_file_with_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(VerifyError, match="holds no GPU"):
        target_of(str(path))


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(VerifyError, match="v100, a100-40gb"):
        target_of("h1000")


@pytest.mark.parametrize("preset", ["v100-p3.16xlarge", "a100-40gb", "a100-80gb", "h100", "h200"])
def test_every_gpu_that_is_planned_for_is_a_target_with_about_its_memory(preset: str) -> None:
    device = ClusterSpec.preset(preset).device  # type: ignore[arg-type]
    assert target_of(device.name).memory_bytes == pytest.approx(device.memory_bytes, rel=0.08)
