"""The parts of `benchmarks.gpu_all` work, at tiny sizes on a CPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

import jax
import pytest

from benchmarks.gpu_all import PARTS, Setting, run_parts
from minialpa.session import describe_devices

#: They take longest.
LONG = ("compiled", "numeric")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in PARTS])
def test_a_part_gives_rows_of_numbers_and_text(name: str) -> None:
    device = jax.devices()[0]
    setting = Setting(device, describe_devices([device]), is_tiny=True, end=time.monotonic() + 60)
    rows = list(PARTS[name].rows(setting))
    assert rows
    for row in json.loads(json.dumps(rows)):
        assert all(isinstance(value, str | float | int) for value in row.values()), row


def test_a_part_without_time_is_cut_off_and_the_page_has_the_others(tmp_path: Path) -> None:
    (tmp_path / "rates.jsonl").write_text(json.dumps({"what": "measured before"}) + "\n")
    run_parts(["numeric"], tmp_path, minutes=0.01, cpu=True)
    page = (tmp_path / "gpu.md").read_text()
    assert "measured before" in page
    assert "cut off when its time was over" in page
