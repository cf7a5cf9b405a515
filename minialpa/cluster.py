"""Rates of devices and links in, seconds of kernels and collectives out: the cluster that a plan is made for.

Times are in seconds and sizes in bytes. Collectives follow the alpha-beta model: `alpha` seconds to start, `beta`
seconds per byte that leaves a device (Thakur et al., 2005; Alpa, OSDI'22, section 4.1).

    cluster = ClusterSpec.preset("h100", num_hosts=2)        # 2 x 8 GPUs
    mesh = cluster.logical_mesh((2, 8), (4, 4))              # both hosts, viewed as 4 x 4
    mesh.all_reduce_s(1e9, axes=(1,))                        # to sum 1 GB in each row of 4 GPUs
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np

from minialpa.errors import ShardingError, meant
from minialpa.field_types import (
    Count,
    MeshLengths,
    NotNegative,
    Positive,
    Within,
    check_fields,
    check_value,
)
from minialpa.support.private_jax import api_boundary, warn

#: Version of the JSON of `ClusterSpec.to_json`.
_VERSION = 1
PresetName = Literal["v100-p3.16xlarge", "a100-40gb", "a100-80gb", "h100", "h200", "b200", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRates:
    """How close kernels come to the peak flop/s and the memory bandwidth of a device.

    seconds of a matrix product = launch_s + flops / (sustained product_efficiency peak)
                                + exposed_bytes bytes / bandwidth
    seconds of an attention     = launch_s + max(flops / (attention_efficiency peak), bytes / bandwidth)
    seconds of another kernel   = max(flops / peak, bytes / (memory_efficiency bandwidth))

    All attributes except `launch_s` are fractions.

    Attributes:
        product_efficiency: rate of one large product.
        exposed_bytes: part of the bytes of a product that moves while it does not compute.
        memory_efficiency: more than 1 if the compiler fuses most operations, whose results are then never written.
        launch_s: seconds at the start and end of a product without arithmetic.
        attention_efficiency: rate of fused attention.
        sustained: rate of products that follow each other under the power limit, relative to one product.
        overlap: part of the seconds of work in which collectives can run; 0 where streams wait for each other.
        contention: part of the rate of work that collectives beside it take, with processors and bandwidth.
    """

    product_efficiency: Positive
    exposed_bytes: NotNegative
    memory_efficiency: Positive
    launch_s: NotNegative
    attention_efficiency: Positive = 1.0
    sustained: Positive = 1.0
    overlap: NotNegative = 1.0
    contention: NotNegative = 0.0

    @api_boundary
    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One accelerator.

    Attributes:
        peak_flops: (dtype name, flop/s); "tensorfloat32" is the rate of float32 products in jax's default precision.
        memory_bandwidth: bytes per second.
        kernels: `None` for the roofline: max(flops / peak, bytes / bandwidth).
        n_processors: streaming multiprocessors of a GPU, which compute the tiles of a product in rounds; 0 if unknown.
        host_bandwidth: bytes per second to the memory of the host, and as many from it at the same time.
        host_bytes: memory of the host for each device; None if unknown: then the planner moves no values to it.
    """

    name: str
    peak_flops: tuple[tuple[str, Positive], ...]
    memory_bytes: Positive
    memory_bandwidth: Positive
    kernels: KernelRates | None = None
    n_processors: Annotated[int, Within(0)] = 0
    host_bandwidth: Positive = 50e9
    host_bytes: Positive | None = None

    @api_boundary
    def __post_init__(self) -> None:
        check_fields(self)
        if not self.peak_flops:
            raise ShardingError(
                f"`peak_flops` of the device `{self.name}` is empty. Give it the rate of at least one dtype, such as "
                '(("float32", 2e13),).'
            )

    def flops_per_s(self, dtype: str) -> float:
        """Peak rate for `dtype`. An unlisted dtype has the float32 rate, or the slowest."""
        table = dict(self.peak_flops)
        return table.get(dtype, table.get("float32", min(table.values())))

    def product_s(self, flops: float, n_bytes: float, dtype: str) -> float:
        """Seconds of a matrix product, without `launch_s`. n_bytes: bytes that it reads and writes."""
        computing_s, memory_s = self.computing_s(flops, dtype), n_bytes / self.memory_bandwidth
        if self.kernels is None:
            return max(computing_s, memory_s)
        return computing_s + memory_s * self.kernels.exposed_bytes

    def computing_s(self, flops: float, dtype: str) -> float:
        """Seconds of the arithmetic of a matrix product, with all processors busy."""
        efficiency = 1.0 if self.kernels is None else self.kernels.product_efficiency * self.kernels.sustained
        return flops / (efficiency * self.flops_per_s(dtype))

    def attention_s(self, flops: float, n_bytes: float, dtype: str) -> float:
        """Seconds of a fused attention, without `launch_s`. n_bytes: bytes that it reads and writes."""
        efficiency = 1.0 if self.kernels is None else self.kernels.attention_efficiency
        return max(flops / (efficiency * self.flops_per_s(dtype)), n_bytes / self.memory_bandwidth)

    def kernel_s(self, flops: float, n_bytes: float, dtype: str) -> float:
        """Seconds of any other kernel. The planner passes the written bytes."""
        efficiency = 1.0 if self.kernels is None else self.kernels.memory_efficiency
        return max(flops / self.flops_per_s(dtype), n_bytes / (efficiency * self.memory_bandwidth))

    @property
    def overlap(self) -> float:
        return 1.0 if self.kernels is None else self.kernels.overlap

    @property
    def contention(self) -> float:
        return 0.0 if self.kernels is None else self.kernels.contention

    @property
    def launch_s(self) -> float:
        return 0.0 if self.kernels is None else self.kernels.launch_s


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A link between two devices: n bytes take alpha_s + n * beta_s_per_byte seconds.

    step_s: seconds of each step of a collective around a ring after the first (n - 1 in all), added to its alpha.
    """

    alpha_s: NotNegative
    beta_s_per_byte: NotNegative
    step_s: NotNegative = 0.0

    @api_boundary
    def __post_init__(self) -> None:
        check_fields(self)

    def transfer_s(self, n_bytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * n_bytes


def _device(
    name: str,
    memory_gb: float,
    bandwidth: float,
    kernels: KernelRates | None = None,
    n_processors: int = 0,
    host_bandwidth: float = 50e9,
    host_gb: float | None = 256,
    **tflops: float,
) -> DeviceSpec:
    """Memories in GB, bandwidths in bytes/s, peak rates in Tflop/s by dtype.

    By default PCIe 5.0 with 16 lanes, and an eighth of the 2 TB of a DGX H100, H200 or B200.
    """
    rates = tuple(sorted((k, v * 1e12) for k, v in tflops.items()))
    host_bytes = None if host_gb is None else host_gb * 1e9
    return DeviceSpec(name, rates, memory_gb * 1e9, bandwidth, kernels, n_processors, host_bandwidth, host_bytes)


#: PCIe 3.0 and 4.0 with 16 lanes, in bytes/s. Hosts: an eighth of a p3.16xlarge (488 GB) and of DGX A100s (1 and 2 TB).
_PCIE_3, _PCIE_4 = 12e9, 25e9


def _kernels(sustained: float, memory_efficiency: float, attention_efficiency: float) -> KernelRates:
    """Rates with constants of products that fit XLA's tables of an H100, the only GPU with tables.

    See `benchmarks.gpu_products`. `sustained` and `memory_efficiency` are fitted to published runs
    (`benchmarks.published_runs`). `attention_efficiency`, of cuDNN's kernel, is chosen by hand, as few runs use it.
    `contention` is 20 of 132 processors, which collectives have in the training of DeepSeek-V3 (section 3.2.2).
    """
    return KernelRates(
        product_efficiency=0.87,
        exposed_bytes=0.74,
        memory_efficiency=memory_efficiency,
        launch_s=5e-6,
        attention_efficiency=attention_efficiency,
        sustained=sustained,
        contention=0.15,
    )


#: Rates by GPU generation. V100s and B200s, with few published runs, have the rates of a neighbouring generation.
_AMPERE_KERNELS = _kernels(sustained=0.98, memory_efficiency=1.35, attention_efficiency=0.5)
_HOPPER_KERNELS = _kernels(sustained=0.74, memory_efficiency=1.9, attention_efficiency=0.4)

#: Rates in Tflop/s by dtype.
_AMPERE = {"float32": 19.5, "tensorfloat32": 156, "float16": 312, "bfloat16": 312}
_HOPPER = {"float32": 67, "tensorfloat32": 494, "float16": 989, "bfloat16": 989} | dict.fromkeys(
    ("float8_e4m3fn", "float8_e5m2"), 1979
)
_BLACKWELL = {"float32": 75, "tensorfloat32": 1125, "float16": 2250, "bfloat16": 2250} | dict.fromkeys(
    ("float8_e4m3fn", "float8_e5m2"), 4500
)

#: Device, link inside a host, link between hosts, from the vendors' data sheets, with dense rates. The figures for CPUs
#: are rough: a virtual device has a part of a processor.
_PRESETS: dict[str, tuple[DeviceSpec, LinkSpec, LinkSpec]] = {
    "v100-p3.16xlarge": (
        _device("v100", 16, 0.9e12, _AMPERE_KERNELS, 80, _PCIE_3, 61, float32=15.7, float16=125, bfloat16=15.7),
        LinkSpec(6e-6, 1 / 120e9),
        LinkSpec(2e-5, 1 / 3.1e9),
    ),
    "a100-40gb": (
        _device("a100-40gb", 40, 1.55e12, _AMPERE_KERNELS, 108, _PCIE_4, 128, **_AMPERE),
        LinkSpec(5e-6, 1 / 250e9),
        LinkSpec(1.5e-5, 1 / 25e9),
    ),
    "a100-80gb": (
        _device("a100-80gb", 80, 2.0e12, _AMPERE_KERNELS, 108, _PCIE_4, **_AMPERE),
        LinkSpec(5e-6, 1 / 250e9),
        LinkSpec(1.5e-5, 1 / 25e9),
    ),
    "h100": (
        _device("h100", 80, 3.35e12, _HOPPER_KERNELS, 132, **_HOPPER),
        LinkSpec(5e-6, 1 / 400e9),
        LinkSpec(1.5e-5, 1 / 50e9),
    ),
    "h200": (
        _device("h200", 141, 4.8e12, _HOPPER_KERNELS, 132, **_HOPPER),
        LinkSpec(5e-6, 1 / 400e9),
        LinkSpec(1.5e-5, 1 / 50e9),
    ),
    "b200": (
        _device("b200", 180, 7.7e12, _HOPPER_KERNELS, 148, **_BLACKWELL),
        LinkSpec(5e-6, 1 / 800e9),
        LinkSpec(1.5e-5, 1 / 50e9),
    ),
    "cpu": (
        _device("cpu", 4, 1e10, host_gb=None, float32=0.05, float16=0.01, bfloat16=0.01),
        LinkSpec(5e-5, 1 / 2e9),
        LinkSpec(2e-4, 1 / 1e9),
    ),
}

#: Presets of hosts with one network adapter per device. Their link between hosts in `_PRESETS` is one adapter.
_ADAPTER_FOR_EACH = frozenset({"a100-40gb", "a100-80gb", "h100", "h200", "b200"})

#: (regular expression for the name of a GPU in jax or Ray, its preset); the first match counts.
_GPU_KINDS: tuple[tuple[str, PresetName], ...] = (
    (r"\bb200\b", "b200"),
    (r"\bh200\b", "h200"),
    (r"\bh100\b", "h100"),
    (r"\ba100\b.*40g", "a100-40gb"),
    (r"\ba100\b", "a100-80gb"),
    (r"\bv100\b", "v100-p3.16xlarge"),
)


def gpu_preset(kind: str) -> PresetName:
    """The preset of a GPU, by its name in jax or Ray. Warns about an unknown GPU, which gets the preset of a V100."""
    found = next((preset for pattern, preset in _GPU_KINDS if re.search(pattern, kind, re.IGNORECASE)), None)
    if found is None:
        warn(
            f"minialpa has no rates for the GPU {kind!r} and plans as if it were a V100. Pass its rates as "
            "`devices=ClusterSpec(...)` to the method.",
        )
    return found or "v100-p3.16xlarge"


#: Default `alpha` of a logical mesh, outer axis first: seconds, rounded from `_PRESETS`.
_DEFAULT_ALPHA = (1e-5, 5e-6, 5e-6)
#: Default `beta`, outer axis first: seconds per byte of the network and of NVLink of A100s.
_DEFAULT_BETA = (1 / 25e9, 1 / 250e9, 1 / 250e9)


@dataclass(frozen=True, slots=True)
class LogicalMesh:
    """A view of a group of devices with one to three axes, with prices of collectives along them.

    Attributes:
        shape: devices along each axis, in row-major order.
        alpha: seconds to start a collective along each axis.
        beta: seconds per byte along each axis.
        spread: seconds of an all-to-all / of an all-gather of equal bytes: above 1 if a group has several devices on
            a host and leaves it.
        device: the kind of all devices. With `None`, compute has no price, and the planner splits matrix products and
            convolutions over all devices as far as it can.
    """

    shape: MeshLengths
    alpha: tuple[NotNegative, ...] = ()
    beta: tuple[NotNegative, ...] = ()
    device: DeviceSpec | None = None
    spread: tuple[NotNegative, ...] = ()

    @api_boundary
    def __post_init__(self) -> None:
        check_fields(self)
        shape = tuple(int(n) for n in self.shape)
        object.__setattr__(self, "shape", shape)
        for name, default in (("alpha", _DEFAULT_ALPHA), ("beta", _DEFAULT_BETA), ("spread", (1.0, 1.0, 1.0))):
            values: Sequence[float] = getattr(self, name) or default[-len(shape) :]
            if len(values) != len(shape):
                raise ShardingError(
                    f"`LogicalMesh` has the shape {shape}, but {name}={values}. Give `{name}` one value for each axis."
                )
            object.__setattr__(self, name, tuple(float(v) for v in values))

    @property
    def n_devices(self) -> int:
        return math.prod(self.shape)

    def all_gather_s(self, n_bytes: float, axes: Sequence[int]) -> float:
        """Seconds of an all-gather. n_bytes: of the gathered result."""
        return sum(
            self._linear_s(axis, n_bytes / math.prod(self._lengths(inner)))
            for axis, inner in self._outer_to_inner(axes)
        )

    def reduce_scatter_s(self, n_bytes: float, axes: Sequence[int]) -> float:
        """Seconds of a reduce-scatter. n_bytes: of the operand on each device."""
        return self.all_gather_s(n_bytes, axes)

    def all_reduce_s(self, n_bytes: float, axes: Sequence[int]) -> float:
        """Seconds of an all-reduce. n_bytes: of the operand on each device.

        Each phase has a start: reduce-scatters along inner axes, an all-reduce along the outer axis, all-gathers.
        """
        live = [axis for axis, _ in self._outer_to_inner(axes)]
        if not live:
            return 0.0
        outer, inner = live[0], live[1:]
        n_shards = math.prod(self._lengths(inner))
        return 2 * self.all_gather_s(n_bytes, inner) + self._linear_s(outer, 2 * n_bytes / n_shards)

    def all_to_all_s(self, n_bytes: float, axes: Sequence[int]) -> float:
        """Seconds of an all-to-all. n_bytes: of the operand on each device."""
        return sum(self._linear_s(axis, n_bytes * self.spread[axis]) for axis, _ in self._outer_to_inner(axes))

    def permute_s(self, n_bytes: float, axes: Sequence[int]) -> float:
        """Seconds until each device has sent `n_bytes` to one other device."""
        return max(
            (self.alpha[axis] + self.beta[axis] * n_bytes for axis, _ in self._outer_to_inner(axes)), default=0.0
        )

    def _linear_s(self, axis: int, n_bytes: float) -> float:
        k = self.shape[axis]
        return self.alpha[axis] + self.beta[axis] * (k - 1) / k * n_bytes

    def _lengths(self, axes: Sequence[int]) -> list[int]:
        return [self.shape[axis] for axis in axes]

    def _outer_to_inner(self, axes: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Each axis with several devices, outermost first, with the later axes."""
        live = sorted(axis for axis in set(axes) if self.shape[axis] > 1)
        return [(axis, live[i + 1 :]) for i, axis in enumerate(live)]


@lru_cache(maxsize=1 << 12)
def axis_links(shape: tuple[int, ...], per_host: int) -> tuple[tuple[int, float], ...]:
    """For each axis: groups that share the link of a host, 0 if all stay on a host, and `LogicalMesh.spread`.

    A group sends over the link of a host once in a ring, from each device to all others in an all-to-all.
    """
    host_of, found = np.arange(math.prod(shape)).reshape(shape) // per_host, []
    for axis, k in enumerate(shape):
        groups = np.moveaxis(host_of, axis, -1).reshape(-1, k)
        numbers = np.arange(len(groups))[:, None] * (host_of.max() + 1) + groups
        pairs, n_own = np.unique(numbers, return_counts=True)  # of groups and hosts
        hosts, leaves = pairs % (host_of.max() + 1), n_own < k
        n_groups = int(np.bincount(hosts, leaves).max())
        n_sent = float(np.bincount(hosts, n_own * (k - n_own)).max())
        found.append((n_groups, n_sent / (k - 1) / n_groups if n_groups else 1.0))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Hosts with consecutive device numbers, and the links inside and between hosts.

    Attributes:
        device: the device of every host, unless `host_devices` lists others.
        intra_host: the link between two devices of a host.
        inter_host: the link of a host to other hosts: all its network adapters together, which its devices share.
        host_devices: the device of each host, if hosts differ; else empty.
    """

    num_hosts: Count
    devices_per_host: Count
    device: DeviceSpec
    intra_host: LinkSpec
    inter_host: LinkSpec
    host_devices: tuple[DeviceSpec, ...] = ()

    @api_boundary
    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "host_devices", tuple(self.host_devices))
        if self.host_devices and len(self.host_devices) != self.num_hosts:
            raise ShardingError(
                f"`host_devices` has {len(self.host_devices)} devices, and `num_hosts` is {self.num_hosts}. Pass one "
                "device for each host, or an empty tuple."
            )

    @property
    def n_devices(self) -> int:
        return self.num_hosts * self.devices_per_host

    @staticmethod
    @api_boundary
    def preset(name: PresetName, *, num_hosts: int = 1, devices_per_host: int = 8) -> ClusterSpec:
        """A cluster of hosts with rates from vendor data sheets. Raises ShardingError for an unknown name."""
        check_value("devices_per_host", devices_per_host, Count)
        if name not in tuple(_PRESETS):  # also for a value without a hash
            raise ShardingError(
                f"There is no cluster preset `{name}`.{meant(name, _PRESETS)} Choose one of {', '.join(_PRESETS)}."
            )
        device, intra_host, inter_host = _PRESETS[name]
        if name in _ADAPTER_FOR_EACH:
            inter_host = replace(inter_host, beta_s_per_byte=inter_host.beta_s_per_byte / devices_per_host)
        return ClusterSpec(num_hosts, devices_per_host, device, intra_host, inter_host)

    def device_of(self, host: int) -> DeviceSpec:
        return self.host_devices[host] if self.host_devices else self.device

    def link(self, *, same_host: bool) -> LinkSpec:
        return self.intra_host if same_host else self.inter_host

    def logical_mesh(
        self, submesh: tuple[int, int], shape: tuple[int, ...], device: DeviceSpec | None = None
    ) -> LogicalMesh:
        """The submesh of (hosts, devices per host), viewed as `shape`, with the alpha and beta of each axis.

        An axis whose groups span hosts has the network link, others the link inside a host. Of 2 hosts x 8 devices as
        (4, 4), 4 groups along axis 0 share the link of a host: beta is 4 times the beta of the link.

        device: the kind of the devices; `None` for `self.device`.
        """
        hosts, per_host = submesh
        if math.prod(shape) != hosts * per_host:
            raise ShardingError(
                f"The logical shape {shape} has {math.prod(shape)} devices, but the submesh of {hosts} x {per_host} "
                f"devices has {hosts * per_host}. Choose a logical shape with the product {hosts * per_host}, such as "
                f"({hosts}, {per_host}), or another submesh."
            )

        sharing = axis_links(tuple(shape), per_host)
        links = [self.link(same_host=not n_groups) for n_groups, _ in sharing]
        further_s = (self._further_steps_s(shape[axis:], per_host) for axis in range(len(shape)))
        alpha = tuple(link.alpha_s + step_s for link, step_s in zip(links, further_s, strict=True))
        beta = tuple(link.beta_s_per_byte * max(1, n) for link, (n, _) in zip(links, sharing, strict=True))
        return LogicalMesh(shape, alpha, beta, device or self.device, tuple(spread for _, spread in sharing))

    def _further_steps_s(self, shape: tuple[int, ...], per_host: int) -> float:
        """Seconds of the ring steps after the first, along the first axis of `shape`: one to each further host, and the
        others inside hosts."""
        n_hosts = min(shape[0], math.ceil(math.prod(shape) / per_host))
        inside, between = max(0, shape[0] - max(2, n_hosts)), max(0, n_hosts - 2)
        return inside * self.intra_host.step_s + between * self.inter_host.step_s

    def to_json(self) -> str:
        return json.dumps({"version": _VERSION, **asdict(self)}, indent=1, sort_keys=True)

    @staticmethod
    @api_boundary
    def from_json(text: str) -> ClusterSpec:
        """The inverse of `to_json`. Raises ShardingError for any other text."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ShardingError(
                f"This is no cluster description, as it is no JSON ({error}). Write one with `minialpa calibrate` or "
                "`ClusterSpec.to_json`."
            ) from error
        if isinstance(data, dict) and "plan" in data:
            raise ShardingError(
                "This is a plan, not a cluster description. Write a cluster description with `minialpa calibrate` or "
                "`ClusterSpec.to_json`."
            )
        return ClusterSpec.from_dict(data)

    @staticmethod
    @api_boundary
    def from_dict(data: dict[str, Any]) -> ClusterSpec:
        """The inverse of `dataclasses.asdict`; `data` may have the `version` of `to_json`. Raises ShardingError."""
        if isinstance(data, dict) and data.get("version", _VERSION) != _VERSION:
            raise ShardingError(
                f"The cluster description has version {data['version']}; this minialpa reads version {_VERSION}. Write "
                "a new one with `minialpa calibrate` or `ClusterSpec.to_json`."
            )
        try:
            devices = [_decode_device(d) for d in (data["device"], *data.get("host_devices", ()))]
            links = {name: LinkSpec(**data[name]) for name in ("intra_host", "inter_host")}
            return ClusterSpec(
                data["num_hosts"], data["devices_per_host"], devices[0], **links, host_devices=tuple(devices[1:])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ShardingError(
                "This is no cluster description "
                f"({f'{error} is missing' if isinstance(error, KeyError) else str(error).rstrip('.')}). "
                "Write one with `minialpa calibrate` or `ClusterSpec.to_json`."
            ) from error


def _decode_device(data: dict[str, Any]) -> DeviceSpec:
    rates = tuple((str(dtype), float(rate)) for dtype, rate in data["peak_flops"])
    kernels = data.get("kernels")
    return DeviceSpec(**{**data, "peak_flops": rates, "kernels": kernels and KernelRates(**kernels)})
