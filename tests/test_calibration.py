"""Constants of a cluster from measurements: a known cluster comes back, and real devices are measured."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from minialpa import ClusterSpec, ShardingError
from minialpa.calibration import measure
from minialpa.calibration.calibrate import fitted
from minialpa.calibration.measure import ByteTime, Measurements, ProductTime
from minialpa.cli import main
from minialpa.cluster import LogicalMesh


def test_measurements_of_a_known_cluster_give_that_cluster() -> None:
    known = ClusterSpec.preset("h100", devices_per_host=4)
    device, link = known.device, known.intra_host
    products = [
        (rate, 2.0 * m * k * n, 2.0 * (m * k + k * n + m * n))
        for rate in ("bfloat16", "tensorfloat32")
        for m, k, n in ((128, 128, 128), (4096, 1024, 128), (8192, 8192, 8192), (64, 16384, 1024))
    ]
    mesh = LogicalMesh((4,), (link.alpha_s,), (link.beta_s_per_byte,))
    made = Measurements(
        n_devices=4,
        products=tuple(
            ProductTime(rate, flops, n_bytes, device.product_s(flops, n_bytes, rate) + device.launch_s)
            for rate, flops, n_bytes in products
        ),
        kernels=tuple(ByteTime(n, 3e-6 + n / device.memory_bandwidth) for n in (1e4, 1e6, 1e8)),
        sums=tuple(ByteTime(n, mesh.all_reduce_s(n, (0,))) for n in (1e3, 1e6, 1e9)),
    )
    found = fitted(known, made).cluster
    assert found.intra_host.alpha_s == pytest.approx(link.alpha_s)
    assert found.intra_host.beta_s_per_byte == pytest.approx(link.beta_s_per_byte)
    assert found.device.memory_bandwidth == pytest.approx(device.memory_bandwidth)
    assert found.device.launch_s == pytest.approx(device.launch_s)
    for rate, flops, n_bytes in products:
        assert found.device.product_s(flops, n_bytes, rate) == pytest.approx(device.product_s(flops, n_bytes, rate))


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_LONG_S", 1e-5)
    monkeypatch.setattr(measure, "_RUN_S", 1e-3)


@pytest.mark.usefixtures("_short")
def test_devices_are_measured_and_the_file_is_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.json"
    assert main(["calibrate", "--out", str(path)]) == 0
    assert "8 x cpu" in capsys.readouterr().out
    cluster = ClusterSpec.from_json(path.read_text())
    assert cluster.n_devices == len(jax.devices()) and cluster.device.kernels is not None
    assert 1e7 < cluster.device.flops_per_s("float32") < 1e14

    newer = json.dumps(json.loads(path.read_text()) | {"version": 2})
    with pytest.raises(ShardingError, match="version 2"):
        ClusterSpec.from_json(newer)


def test_a_missing_folder_is_reported_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--out", "/nowhere/cluster.json"]) == 2
    assert "no folder" in capsys.readouterr().err
