"""The texts and files of an executable whose second mesh is on two hosts of a Ray cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.runtime.ray.faults import AT_ONCE, Training, make_batch

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]


def test_workers_send_the_programs_memory_and_descriptions_of_their_meshes(cluster: Cluster, tmp_path: Path) -> None:
    training = Training(cluster.address)
    training.start(hosts=3)
    executable = training.steps[3].get_executable(training.state, make_batch(0), AT_ONCE)
    texts, sizes = executable.get_hlo_text(), executable.get_stage_allocation_size()
    assert len(texts) == len(executable.function_names) and all("HloModule" in text for text in texts)
    forward = dict(zip(executable.function_names, texts, strict=True))["forward0"]
    assert 'op_name="' in forward and "/jvp()/dot_general" in forward
    assert len(sizes) == 2 and max(sizes) == executable.get_total_allocation_size() > 0

    executable.dump_debug_info(tmp_path)
    for k in range(2):
        assert "HloModule" in (tmp_path / f"step_stage_{k}.hlo").read_text()
        assert (tmp_path / f"step_stage_{k}.mem_usage.txt").read_text().startswith("total_allocation_size: 0.000 GB\n")
    transfers = (tmp_path / "step_resharding_tasks.txt").read_text()
    assert "from mesh 0 (1, devices 0 to 0)" in transfers and "\n  device 0 sends [" in transfers
    workers = {path.name for path in tmp_path.glob("*-worker.txt")}
    assert workers == {"stage0-host0-worker.txt", "stage1-host1-worker.txt", "stage1-host2-worker.txt"}
    assert "ray 2" in (tmp_path / "versions.txt").read_text()
