"""The record's name of a GPU in, the machines that have it out.

A name such as "H100-96GB-HBM2e-500W" has the chip and its differences from the data sheet: memory, power limit, links.
Notes on a run may name the adapters of a host.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass

from benchmarks.published_runs.errors import NotBuiltError
from minialpa import ClusterSpec
from minialpa.cluster import DeviceSpec, LinkSpec, PresetName


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A chip in its most common version.

    Attributes:
        preset: the preset with its rates.
        watts: its power limit.
        host_link: bytes per second that all adapters of a host of eight send together, if notes have no rate.
        nvlink: fraction of the preset's rate between the GPUs of a host.
    """

    preset: PresetName
    watts: float
    host_link: float
    nvlink: float = 1.0


#: (regular expression, chip); the first one that a name begins with counts. H800 and A800 have 400 GB/s of NVLink where
#: H100 has 900 and A100 has 600 (data sheets).
_CHIPS: tuple[tuple[str, Chip], ...] = (
    (r"G?B200", Chip(preset="b200", watts=1000, host_link=400e9)),
    (r"G?H200", Chip(preset="h200", watts=700, host_link=400e9)),
    (r"H800", Chip(preset="h100", watts=700, host_link=400e9, nvlink=400 / 900)),
    (r"H100", Chip(preset="h100", watts=700, host_link=400e9)),
    (r"A800", Chip(preset="a100-80gb", watts=400, host_link=200e9, nvlink=400 / 600)),
    (r"A100.*40 ?G", Chip(preset="a100-40gb", watts=400, host_link=200e9)),
    (r"A100", Chip(preset="a100-80gb", watts=400, host_link=200e9)),
    (r"V100", Chip(preset="v100-p3.16xlarge", watts=300, host_link=50e9)),
)
#: Bytes per second of older memory that some chips are also sold with: an H100 with 96 GB of HBM2e.
_OTHER_MEMORY = {("h100", "HBM2e"): 2.4e12}
#: The fraction of an adapter's rate that NCCL reaches, if it is far below 1. Omni-Path: a sum of 4 GB over
#: 32 GPUs of four hosts took 1.53 s on Jean Zay, 40.5 of the 100 Gb/s of the adapter that its ring went through
#: (bigscience, experiments/bandwidth/all_reduce_bench-a100-n4.txt; NCCL 2.10).
_REACHED = {"Omni-Path": 0.405}
#: Seconds of a step of a ring inside a host and between hosts: NCCL's own model of its rings, for its protocol for
#: large messages (`hwLat` in its src/graph/tuning.cc).
_STEP_S = (3.4e-6, 1.4e-5)
#: Bits per second of an adapter of each generation of InfiniBand.
_INFINIBAND = {"EDR": 100e9, "HDR": 200e9, "NDR": 400e9, "XDR": 800e9}


def chip_of(kind: str) -> Chip:
    """The chip of this name. Raises NotBuiltError for an unknown name."""
    for pattern, chip in _CHIPS:
        if re.match(pattern, kind, re.IGNORECASE):
            return chip
    raise NotBuiltError(f"the GPU {kind}: no figures of it")


def device_of(kind: str) -> DeviceSpec:
    """The GPU of this name."""
    chip = chip_of(kind)
    device = ClusterSpec.preset(chip.preset).device
    kernels = device.kernels
    assert kernels is not None, kind
    memory = re.search(r"(\d+) ?GB", kind)
    bandwidth = next(
        (rate for (preset, name), rate in _OTHER_MEMORY.items() if preset == chip.preset and name in kind),
        device.memory_bandwidth,
    )
    # Trainers for chips without bfloat16 take float16, at its rate.
    rates = dict(device.peak_flops)
    rates["bfloat16"] = max(rates["bfloat16"], rates["float16"])

    return dataclasses.replace(
        device,
        peak_flops=tuple(sorted(rates.items())),
        memory_bytes=_usable_bytes(int(memory[1]) if memory else device.memory_bytes / 1e9),
        memory_bandwidth=bandwidth,
        kernels=dataclasses.replace(kernels, sustained=kernels.sustained * power_part(kind)),
    )


def _usable_bytes(gb: float) -> float:
    """Usable bytes of a GPU with this number of "GB", each 2^30 bytes: the driver and its context take one GB."""
    return (gb - 1) * 2**30


def power_part(kind: str) -> float:
    """The fraction of the arithmetic rate under the power limit in the name of a GPU.

    It is the root of the fraction of power. Power goes with the cube of the clock, less the power of memory and
    leakage.
    """
    limit = re.search(r"(\d+) ?W\b", kind)
    return min(1.0, math.sqrt(int(limit[1]) / chip_of(kind).watts)) if limit else 1.0


def cluster_of_gpus(kind: str, n_hosts: int, per_host: int, notes: str) -> ClusterSpec:
    """Hosts of such GPUs. notes: the notes on the run."""
    chip = chip_of(kind)
    cluster = ClusterSpec.preset(chip.preset, num_hosts=n_hosts, devices_per_host=per_host)
    within, between = cluster.intra_host, cluster.inter_host
    return dataclasses.replace(
        cluster,
        device=device_of(kind),
        intra_host=LinkSpec(within.alpha_s, within.beta_s_per_byte / chip.nvlink, _STEP_S[0]),
        inter_host=LinkSpec(between.alpha_s, 1 / (_noted_link(notes) or chip.host_link), _STEP_S[1]),
    )


def _noted_link(notes: str) -> float | None:
    """Bytes per second of the adapters of a host, from notes such as "4x100 Gb/s" or "8xHDR"; else None."""
    found = re.search(r"(\d+) ?x ?(\d+) ?Gb/?p?s", notes)
    if found:
        reached = next((part for name, part in _REACHED.items() if name in notes), 1.0)
        return int(found[1]) * int(found[2]) * 1e9 / 8 * reached
    found = re.search(rf"(\d+) ?x ?({'|'.join(_INFINIBAND)})", notes)
    return int(found[1]) * _INFINIBAND[found[2]] / 8 if found else None
