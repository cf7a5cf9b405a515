"""A cluster and the user's stage options in, the space of a search out.

Terms of the search:

    submesh     (hosts, devices per host), such as (1, 4)
    candidate   a submesh with a logical shape, such as (2, 2)
    column      a candidate with a rematerialisation and a price of memory: one way for a stage to use the submesh
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from minialpa.cluster import ClusterSpec, DeviceSpec
from minialpa.inter.search.stage_kernels import Bools, Floats, Ints
from minialpa.options import AutoShardingOption, AutoStageOption, PhysicalSpace, Remat

#: Prices of all values of a sublayer in memory, as multiples of its seconds per step.
MEMORY_PRICES = (0.0, 0.1, 1.0)
#: All logical shapes of a submesh open at once if there are at most so many.
_FEW_VIEWS = 3
#: A stage on all devices has to be faster than a stage on few devices by this fraction.
_PER_DEVICE = 1e-3

Seconds = TypeVar("Seconds", float, Floats)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A submesh, viewed as a logical shape. device: `None` if all hosts of the cluster have the same."""

    submesh: tuple[int, int]
    logical_shape: tuple[int, ...]
    device: DeviceSpec | None = None

    @property
    def n_devices(self) -> int:
        return self.submesh[0] * self.submesh[1]


def candidates(
    cluster: ClusterSpec,
    option: AutoStageOption,
    sharding: AutoShardingOption | None = None,
    users_shape: tuple[int, ...] = (),
) -> list[Candidate]:
    """Each submesh, part of a host or whole hosts, that `option` allows, with each of its logical shapes.

    sharding: leaves out shapes that do not have its `axis_lengths`, unless all lack them.
    users_shape: a further choice if it has three axes.
    """
    out = []
    for device, n_hosts in _longest_runs(cluster).items():
        out += [
            Candidate(submesh, shape, device if cluster.host_devices else None)
            for submesh in _submeshes(option.submesh_physical_shape_space, n_hosts, cluster.devices_per_host)
            for shape in logical_shapes(submesh, option.submesh_logical_shape_space, users_shape)
        ]
    return [one for one in out if sharding is None or sharding.has_axes(one.logical_shape)] or out


def _submeshes(space: PhysicalSpace, hosts: int, per_host: int) -> list[tuple[int, int]]:
    """(hosts, devices per host) on `hosts` equal hosts in a row."""
    if isinstance(space, str):
        return [(1, n) for n in _numbers_up_to(per_host, space)] + [
            (h, per_host) for h in _numbers_up_to(hosts, space) if h > 1
        ]
    return [(h, n) for h, n in dict.fromkeys(space) if (n <= per_host if h == 1 else n == per_host and h <= hosts)]


def logical_shapes(submesh: tuple[int, int], space: str, users_shape: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """space: `AutoStageOption.submesh_logical_shape_space`."""
    n = submesh[0] * submesh[1]
    match space:
        case "same_as_physical":
            return [submesh]
        case "data_parallel_only":
            return [(n, 1)]
        case "model_parallel_only":
            return [(1, n)]
        case _:
            own = [users_shape] if len(users_shape) > 2 and math.prod(users_shape) == n else []
            return [(n,)] + [(a, n // a) for a in range(2, n) if n % a == 0] + own


def first_views(choices: Sequence[Candidate], per_host: int, n_examples: int) -> Bools:
    """[m]: whether candidate m is open at first.

    A submesh with many logical shapes starts with one or three axes, its hosts on axis 0, and with gcd(devices,
    n_examples) devices on axis 0, for a micro-batch of `n_examples`.
    """
    shapes: dict[tuple[tuple[int, int], DeviceSpec | None], list[int]] = {}
    for m, choice in enumerate(choices):
        shapes.setdefault((choice.submesh, choice.device), []).append(m)

    out = np.zeros(len(choices), np.bool_)
    for (submesh, _), views in shapes.items():
        n = math.prod(submesh)
        outer = (n // math.gcd(n, per_host), math.gcd(n, n_examples))
        first = [m for m in views if len(choices[m].logical_shape) != 2 or choices[m].logical_shape[0] in outer]
        few = len(views) <= _FEW_VIEWS or not any(len(choices[m].logical_shape) == 2 for m in first)
        out[views if few else first] = True
    return out


def may_start(cluster: ClusterSpec, choices: list[Candidate]) -> Bools:
    """[m, p]: from device p on, candidate m is part of a host or whole hosts, and the hosts have its device."""
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
    """[j, p]: seconds of the bytes that cross border j, in both directions, for a stage that starts at device p."""
    starts = np.arange(cluster.n_devices) % cluster.devices_per_host == 0
    links = [cluster.link(same_host=not crosses) for crosses in starts]
    alpha, beta = np.array([link.alpha_s for link in links]), np.array([link.beta_s_per_byte for link in links])
    out: Floats = 2 * alpha + beta * np.asarray(border_bytes, np.float64)[:, None]
    return out


def preferred_seconds(seconds: Seconds, share: Seconds) -> Seconds:
    """Seconds for comparisons: of nearly equal times, the smaller share of the devices wins."""
    return seconds * (1 + _PER_DEVICE * share)


def _longest_runs(cluster: ClusterSpec) -> dict[DeviceSpec, int]:
    """The most hosts in a row with each kind of device."""
    longest: dict[DeviceSpec, int] = {}
    for device, hosts in itertools.groupby(cluster.device_of(h) for h in range(cluster.num_hosts)):
        longest[device] = max(longest.get(device, 0), len(list(hosts)))
    return longest


def _numbers_up_to(n: int, space: str) -> list[int]:
    """All numbers, or powers of two and n."""
    return [k for k in range(1, n + 1) if space == "all" or k & (k - 1) == 0 or k == n]


# ---- the space of a search -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The choices of a search.

    remats: of all layers of a stage.
    tolerance: fraction of the step time by which a pipeline may be slower than the fastest.
    """

    micro_batches: tuple[int, ...]
    remats: tuple[Remat, ...]
    candidates: tuple[Candidate, ...]
    schedule: str
    use_all_devices: bool
    tolerance: float


@dataclass(frozen=True, slots=True)
class Column:
    """candidate, price: indices in `Space.candidates` and `MEMORY_PRICES`."""

    candidate: int
    remat: Remat
    price: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """All columns of a space, by their numbers in the cost tables: prices vary fastest, then rematerialisation.

    Attributes:
        n_devices: [column].
        memory_bytes: [column], per device; inf without a limit.
        may_start: [column, device], whether the submesh may start at that device of the cluster.
    """

    columns: tuple[Column, ...]
    number: Mapping[Column, int]
    n_devices: Ints
    memory_bytes: Floats
    may_start: Bools
    submesh_of: Ints

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, number: int) -> Column:
        return self.columns[number]

    def at_price(self, column: Column, price: int) -> int:
        return self.number[replace(column, price=price)]

    def is_of(self, candidates: Bools) -> Bools:
        return candidates[[column.candidate for column in self.columns]]

    def on_same_submesh(self, column: int) -> Ints:
        return np.flatnonzero(self.submesh_of == self.submesh_of[column])


def columns_of(space: Space, cluster: ClusterSpec, option: AutoShardingOption) -> Columns:
    """option: sets the memory limit."""
    columns = tuple(
        Column(candidate, remat, price)
        for candidate in range(len(space.candidates))
        for remat in space.remats
        for price in range(len(MEMORY_PRICES))
    )

    devices = [space.candidates[column.candidate].device or cluster.device for column in columns]
    starts = may_start(cluster, list(space.candidates))
    submeshes = [(candidate.submesh, candidate.device) for candidate in space.candidates]
    return Columns(
        columns=columns,
        number={column: c for c, column in enumerate(columns)},
        n_devices=np.array([space.candidates[column.candidate].n_devices for column in columns]),
        memory_bytes=np.array([option.limit_bytes(device) or math.inf for device in devices]),
        may_start=np.array([starts[column.candidate] for column in columns]),
        submesh_of=np.array([submeshes.index(submeshes[column.candidate]) for column in columns]),
    )
