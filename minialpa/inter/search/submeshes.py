"""Which submeshes of a cluster a stage may have, how they may be viewed, and where in the row of devices they start."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from minialpa.cluster import ClusterSpec, DeviceSpec
from minialpa.inter.search.stage_kernels import Bools, Floats, Ints
from minialpa.options import AutoStageOption, PhysicalSpace

#: By how much of its time what uses all devices has to be faster than what uses none.
_PER_DEVICE = 1e-3

Seconds = TypeVar("Seconds", float, Floats)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A submesh of (hosts, devices per host) viewed as a logical shape; None for the device that all hosts have."""

    submesh: tuple[int, int]
    logical_shape: tuple[int, ...]
    device: DeviceSpec | None = None

    @property
    def n_devices(self) -> int:
        return self.submesh[0] * self.submesh[1]


def candidates(cluster: ClusterSpec, option: AutoStageOption) -> list[Candidate]:
    """Submeshes within a host by the option's rule, then whole hosts alike; each with its logical shapes."""
    out = []
    for device, runs in _runs_of_hosts(cluster).items():
        out += [
            Candidate(submesh, shape, device if cluster.host_devices else None)
            for submesh in _submeshes(option.submesh_physical_shape_space, max(runs), cluster.devices_per_host)
            for shape in logical_shapes(submesh, option.submesh_logical_shape_space)
        ]
    return out


def _submeshes(space: PhysicalSpace, hosts: int, per_host: int) -> list[tuple[int, int]]:
    """Submeshes (hosts, devices per host) of `space` on so many hosts in a row."""
    if isinstance(space, str):
        return [(1, n) for n in _counts(per_host, space)] + [(h, per_host) for h in _counts(hosts, space) if h > 1]
    return [(h, n) for h, n in dict.fromkeys(space) if (n <= per_host if h == 1 else n == per_host and h <= hosts)]


def logical_shapes(submesh: tuple[int, int], space: str) -> list[tuple[int, ...]]:
    n = submesh[0] * submesh[1]
    match space:
        case "same_as_physical":
            return [submesh]
        case "data_parallel_only":
            return [(n, 1)]
        case "model_parallel_only":
            return [(1, n)]
        case _:
            return [(n,)] + [(a, n // a) for a in range(2, n) if n % a == 0]


def is_coarser(cluster: ClusterSpec, coarse: Candidate, fine: Candidate) -> bool:
    """Whether each device of `coarse` can do the work of some neighbours of `fine`: as fast, over links as good."""
    if coarse.device != fine.device:
        return False
    small = cluster.logical_mesh(coarse.submesh, coarse.logical_shape, coarse.device)
    large = cluster.logical_mesh(fine.submesh, fine.logical_shape, fine.device)

    # Axes of one device have no links. A row of devices may stand for either axis.
    def goes_into(axes: tuple[int, ...]) -> bool:
        places = dict(zip(axes, range(len(small.shape)), strict=True))
        return all(
            n % (k := 1 if axis not in places else small.shape[places[axis]]) == 0
            and (
                k == 1
                or (small.alpha[places[axis]] <= large.alpha[axis] and small.beta[places[axis]] <= large.beta[axis])
            )
            for axis, n in enumerate(large.shape)
        )

    axes = range(len(large.shape))
    return len(small.shape) <= len(large.shape) and any(
        goes_into(chosen) for chosen in itertools.combinations(axes, len(small.shape))
    )


def may_start(cluster: ClusterSpec, choices: list[Candidate]) -> Bools:
    """[m, p]: candidate m fits in one host, or is whole hosts, from device p on, and the hosts have its device."""
    per_host = cluster.devices_per_host
    out = np.zeros((len(choices), cluster.n_devices), np.bool_)
    for m, choice in enumerate(choices):
        hosts, n = choice.submesh
        for p in range(cluster.n_devices):
            host, at = divmod(p, per_host)
            fits = at + n <= per_host and (hosts == 1 or at == 0) and host + hosts <= cluster.num_hosts
            alike = choice.device is None or all(
                cluster.device_of(h) == choice.device for h in range(host, host + hosts)
            )
            out[m, p] = fits and alike
    return out


def skip_to(cluster: ClusterSpec) -> Ints:
    """See `StageCostTable.skip_to`."""
    p = np.arange(cluster.n_devices)
    per_host = cluster.devices_per_host
    return np.where(p % per_host == 0, p + per_host, p + 1)


def transfer_seconds(cluster: ClusterSpec, border_bytes: Floats) -> Floats:
    """[j, p]: seconds of the bytes that cross border j, both directions, to a stage that starts at device p."""
    starts = np.arange(cluster.n_devices) % cluster.devices_per_host == 0
    links = [cluster.link(same_host=not crosses) for crosses in starts]
    alpha, beta = np.array([link.alpha_s for link in links]), np.array([link.beta_s_per_byte for link in links])
    out: Floats = 2 * alpha + beta * np.asarray(border_bytes, np.float64)[:, None]
    return out


def preferred_seconds(seconds: Seconds, share: Seconds) -> Seconds:
    """Seconds to compare by, of what takes a share of the devices: of what hardly differs, fewer are preferred."""
    return seconds * (1 + _PER_DEVICE * share)


def _runs_of_hosts(cluster: ClusterSpec) -> dict[DeviceSpec, list[int]]:
    """For each kind of device, how many hosts in a row have it."""
    runs: dict[DeviceSpec, list[int]] = {}
    for device, hosts in itertools.groupby(cluster.device_of(h) for h in range(cluster.num_hosts)):
        runs.setdefault(device, []).append(len(list(hosts)))
    return runs


def _counts(n: int, space: str) -> list[int]:
    return [k for k in range(1, n + 1) if space == "all" or k & (k - 1) == 0 or k == n]
