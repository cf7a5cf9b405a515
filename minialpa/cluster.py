"""What a plan is made for: devices, links, the cluster that they form, and logical meshes over a part of it.

All times are in seconds and all sizes in bytes. Collectives follow the alpha-beta model: `alpha` seconds to start,
`beta` seconds for each byte that leaves a device (Thakur et al., 2005; Alpa, OSDI'22, section 4.1).
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from minialpa.errors import ShardingError

#: Of what `ClusterSpec.to_json` writes.
_VERSION = 1
PresetName = Literal["v100-p3.16xlarge", "a100-40gb", "a100-80gb", "h100", "h200", "b200", "cpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRates:
    """How close kernels come to the rates of a device. The defaults are the roofline.

    seconds of a matrix product = launch_s + flops / (sustained product_efficiency peak)
                                + exposed_bytes bytes / bandwidth
    seconds of an attention     = launch_s + flops / (attention_efficiency peak)
    seconds of another operation = written bytes / (memory_efficiency bandwidth)

    Attributes:
        product_efficiency: the part of the peak rate at which large products compute, each by itself.
        exposed_bytes: the part of what a product reads and writes that does not move while it computes.
        memory_efficiency: what other operations write, each by itself, as a part of what the memory could move in
            their time; more than 1 where compilers fuse most of them, so that their results are not written at all.
        launch_s: seconds in which a product does not compute yet, or no longer.
        attention_efficiency: the part of the peak rate at which fused attention computes.
        sustained: the part of the rate of products that is left when many follow each other, under the power limit.
        overlap: the part of a program's work beside which it can run collectives; 0 where streams wait for each other.
    """

    product_efficiency: float
    exposed_bytes: float
    memory_efficiency: float
    launch_s: float
    attention_efficiency: float = field(default=1.0, metadata={"may_be_missing": True})
    sustained: float = field(default=1.0, metadata={"may_be_missing": True})
    overlap: float = field(default=1.0, metadata={"may_be_missing": True})

    def __post_init__(self) -> None:
        parts = (self.product_efficiency, self.memory_efficiency, self.attention_efficiency, self.sustained)
        if min(parts) <= 0 or min(self.exposed_bytes, self.launch_s, self.overlap) < 0:
            raise ShardingError(f"Efficiencies are positive, and other constants not negative; got {self}.")


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One accelerator.

    Attributes:
        name: name of the device, such as "h100".
        peak_flops: (name of a dtype, floating point operations per second) for each dtype; "tensorfloat32" is the rate
            of products of float32 in the precision that jax uses by default.
        memory_bytes: memory of the device.
        memory_bandwidth: bytes per second that the device reads from its memory.
        kernels: how close kernels come to these rates; None for the roofline, where each takes as long as its
            arithmetic or its bytes, whichever is longer.
        n_processors: streaming multiprocessors of a GPU, which compute the tiles of a product in rounds; 0 if unknown.
    """

    name: str
    peak_flops: tuple[tuple[str, float], ...]
    memory_bytes: float
    memory_bandwidth: float
    kernels: KernelRates | None = field(default=None, metadata={"may_be_missing": True})
    n_processors: int = field(default=0, metadata={"may_be_missing": True})

    def __post_init__(self) -> None:
        if not self.peak_flops or min(self.memory_bytes, self.memory_bandwidth, *dict(self.peak_flops).values()) <= 0:
            raise ShardingError(
                f"Device `{self.name}` needs positive `peak_flops`, `memory_bytes` and `memory_bandwidth`."
            )

    def flops_per_s(self, dtype: str) -> float:
        """Peak rate for `dtype`; a dtype that is not listed runs at the float32 rate, or the slowest one."""
        table = dict(self.peak_flops)
        return table.get(dtype, table.get("float32", min(table.values())))

    def product_s(self, flops: float, n_bytes: float, dtype: str) -> float:
        """Seconds of a matrix product, besides `launch_s`, that reads and writes `n_bytes`."""
        computing_s, memory_s = self.computing_s(flops, dtype), n_bytes / self.memory_bandwidth
        if self.kernels is None:
            return max(computing_s, memory_s)
        return computing_s + memory_s * self.kernels.exposed_bytes

    def computing_s(self, flops: float, dtype: str) -> float:
        """Seconds of the arithmetic of a matrix product on processors none of which is idle."""
        efficiency = 1.0 if self.kernels is None else self.kernels.product_efficiency * self.kernels.sustained
        return flops / (efficiency * self.flops_per_s(dtype))

    def attention_s(self, flops: float, n_bytes: float, dtype: str) -> float:
        """Seconds of an attention in one kernel, besides `launch_s`, that reads and writes `n_bytes`."""
        efficiency = 1.0 if self.kernels is None else self.kernels.attention_efficiency
        return max(flops / (efficiency * self.flops_per_s(dtype)), n_bytes / self.memory_bandwidth)

    def kernel_s(self, flops: float, n_bytes: float, dtype: str) -> float:
        """Seconds of any other kernel that reads and writes `n_bytes`."""
        efficiency = 1.0 if self.kernels is None else self.kernels.memory_efficiency
        return max(flops / self.flops_per_s(dtype), n_bytes / (efficiency * self.memory_bandwidth))

    @property
    def overlap(self) -> float:
        """The part of a program's work beside which it can run collectives."""
        return 1.0 if self.kernels is None else self.kernels.overlap

    @property
    def launch_s(self) -> float:
        """Seconds that each product takes, however small it is."""
        return 0.0 if self.kernels is None else self.kernels.launch_s


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A link between two devices.

    Attributes:
        alpha_s: seconds to start a transfer.
        beta_s_per_byte: seconds per byte after that.
    """

    alpha_s: float
    beta_s_per_byte: float

    def __post_init__(self) -> None:
        if self.alpha_s < 0 or self.beta_s_per_byte < 0:
            raise ShardingError(f"Link times cannot be negative: {self}.")

    def transfer_s(self, n_bytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * n_bytes


def _device(
    name: str,
    memory_gb: float,
    bandwidth: float,
    kernels: KernelRates | None = None,
    n_processors: int = 0,
    **tflops: float,
) -> DeviceSpec:
    rates = tuple(sorted((k, v * 1e12) for k, v in tflops.items()))
    return DeviceSpec(name, rates, memory_gb * 1e9, bandwidth, kernels, n_processors)


def _kernels(sustained: float, memory_efficiency: float, attention_efficiency: float) -> KernelRates:
    """Products are fitted to XLA's tables of an H100, as other GPUs have none (see `benchmarks.gpu_products`).

    The first two arguments are those with which published runs are predicted well (see `benchmarks.published_runs`),
    rounded. The efficiency of attention is that of cuDNN's kernel, chosen by hand: few of these runs use it.
    """
    return KernelRates(
        product_efficiency=0.87,
        exposed_bytes=0.74,
        memory_efficiency=memory_efficiency,
        launch_s=5e-6,
        attention_efficiency=attention_efficiency,
        sustained=sustained,
    )


#: Of GPUs of each generation. Nobody has published enough runs of V100s and B200s: they have their neighbours' figures.
_AMPERE_KERNELS = _kernels(sustained=0.98, memory_efficiency=1.35, attention_efficiency=0.5)
_HOPPER_KERNELS = _kernels(sustained=0.74, memory_efficiency=1.9, attention_efficiency=0.4)

#: Rates in Tflop/s by dtype.
_HOPPER = {"float32": 67, "tensorfloat32": 494, "float16": 989, "bfloat16": 989} | dict.fromkeys(
    ("float8_e4m3fn", "float8_e5m2"), 1979
)
_BLACKWELL = {"float32": 75, "tensorfloat32": 1125, "float16": 2250, "bfloat16": 2250} | dict.fromkeys(
    ("float8_e4m3fn", "float8_e5m2"), 4500
)

#: Device, link inside a host, link between hosts; from the vendors' data sheets, with dense rates. The figures for CPUs
#: are round ones for a virtual device, which has a part of a processor.
_PRESETS: dict[str, tuple[DeviceSpec, LinkSpec, LinkSpec]] = {
    "v100-p3.16xlarge": (
        _device("v100", 16, 0.9e12, _AMPERE_KERNELS, 80, float32=15.7, float16=125, bfloat16=15.7),
        LinkSpec(6e-6, 1 / 120e9),
        LinkSpec(2e-5, 1 / 3.1e9),
    ),
    "a100-40gb": (
        _device(
            "a100-40gb", 40, 1.55e12, _AMPERE_KERNELS, 108, float32=19.5, tensorfloat32=156, float16=312, bfloat16=312
        ),
        LinkSpec(5e-6, 1 / 250e9),
        LinkSpec(1.5e-5, 1 / 25e9),
    ),
    "a100-80gb": (
        _device(
            "a100-80gb", 80, 2.0e12, _AMPERE_KERNELS, 108, float32=19.5, tensorfloat32=156, float16=312, bfloat16=312
        ),
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
        _device("cpu", 4, 1e10, float32=0.05, float16=0.01, bfloat16=0.01),
        LinkSpec(5e-5, 1 / 2e9),
        LinkSpec(2e-4, 1 / 1e9),
    ),
}

#: Hosts of these presets have a network adapter for each device; the link between hosts in `_PRESETS` is one of them.
_ADAPTER_FOR_EACH = frozenset({"a100-40gb", "a100-80gb", "h100", "h200", "b200"})

#: (regular expression for the name that jax or Ray has for a GPU, its preset); the first one that matches counts.
_GPU_KINDS: tuple[tuple[str, PresetName], ...] = (
    (r"\bb200\b", "b200"),
    (r"\bh200\b", "h200"),
    (r"\bh100\b", "h100"),
    (r"\ba100\b.*40g", "a100-40gb"),
    (r"\ba100\b", "a100-80gb"),
    (r"\bv100\b", "v100-p3.16xlarge"),
)


def gpu_preset(kind: str) -> PresetName:
    """The preset of a GPU, by the name that jax or Ray has for it. If there is none, warns and returns a V100's."""
    found = next((preset for pattern, preset in _GPU_KINDS if re.search(pattern, kind, re.IGNORECASE)), None)
    if found is None:
        warnings.warn(
            f"minialpa has no figures for the GPU {kind!r} and plans as if it were a V100. Give its own: "
            "`devices=ClusterSpec(...)` of the method.",
            stacklevel=2,
        )
    return found or "v100-p3.16xlarge"


#: Default `alpha` of a logical mesh, outer axis first: seconds to start a transfer, rounded from `_PRESETS`.
_DEFAULT_ALPHA = (1e-5, 5e-6)
#: Default `beta`, outer axis first: seconds per byte of the network and of NVLink, as those of A100s in `_PRESETS`.
_DEFAULT_BETA = (1 / 25e9, 1 / 250e9)


@dataclass(frozen=True, slots=True)
class LogicalMesh:
    """A 1-D or 2-D view of a group of devices.

    Attributes:
        shape: devices along each axis. Axis 0, the outer one, crosses hosts if there are several; axis 1 is faster.
        alpha: seconds to start a collective along each axis.
        beta: seconds per byte along each axis.
        device: what the mesh is made of. With None compute has no price: the planner compares communication alone, and
            splits matrix products and convolutions over all devices as far as it can.
    """

    shape: tuple[int, ...]
    alpha: tuple[float, ...] = ()
    beta: tuple[float, ...] = ()
    device: DeviceSpec | None = None

    def __post_init__(self) -> None:
        shape = tuple(int(n) for n in self.shape)
        if len(shape) not in (1, 2) or min(shape) < 1:
            raise ShardingError(f"A logical mesh has 1 or 2 axes of positive length; got {self.shape}.")
        object.__setattr__(self, "shape", shape)
        for name, default in (("alpha", _DEFAULT_ALPHA), ("beta", _DEFAULT_BETA)):
            values: Sequence[float] = getattr(self, name) or default[-len(shape) :]
            if len(values) != len(shape):
                raise ShardingError(f"`{name}` needs one value for each axis of {shape}; got {values}.")
            object.__setattr__(self, name, tuple(float(v) for v in values))

    @property
    def n_devices(self) -> int:
        return math.prod(self.shape)

    def all_gather_s(self, n_bytes: float, axes: Sequence[int]) -> float:
        """Seconds until each device of the group holds all `n_bytes` (size of the gathered result)."""
        return sum(
            self._linear_s(axis, n_bytes / math.prod(self._lengths(inner)))
            for axis, inner in self._outer_to_inner(axes)
        )

    def reduce_scatter_s(self, n_bytes: float, axes: Sequence[int]) -> float:
        """Seconds to sum buffers of `n_bytes` over the group and leave one shard on each device."""
        return self.all_gather_s(n_bytes, axes)

    def all_reduce_s(self, n_bytes: float, axes: Sequence[int]) -> float:
        """Seconds to sum buffers of `n_bytes` over the group.

        Over two axes there are three phases, each with a start: a reduce-scatter along the inner axis, an all-reduce of
        the shards along the outer one, and an all-gather along the inner one.
        """
        live = [axis for axis, _ in self._outer_to_inner(axes)]
        if not live:
            return 0.0
        outer, inner = live[0], live[1:]
        n_shards = math.prod(self._lengths(inner))
        return 2 * self.all_gather_s(n_bytes, inner) + self._linear_s(outer, 2 * n_bytes / n_shards)

    def all_to_all_s(self, n_bytes: float, axes: Sequence[int]) -> float:
        """Seconds to exchange blocks when each device holds `n_bytes`, axis by axis."""
        return sum(self._linear_s(axis, n_bytes) for axis, _ in self._outer_to_inner(axes))

    def permute_s(self, n_bytes: float, axes: Sequence[int]) -> float:
        """Seconds until each device has sent `n_bytes` to one other, over the slowest link between two such devices."""
        return max(
            (self.alpha[axis] + self.beta[axis] * n_bytes for axis, _ in self._outer_to_inner(axes)), default=0.0
        )

    def _linear_s(self, axis: int, n_bytes: float) -> float:
        k = self.shape[axis]
        return self.alpha[axis] + self.beta[axis] * (k - 1) / k * n_bytes

    def _lengths(self, axes: Sequence[int]) -> list[int]:
        return [self.shape[axis] for axis in axes]

    def _outer_to_inner(self, axes: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Each axis longer than 1, with the axes of the group that lie inside it."""
        live = sorted(axis for axis in set(axes) if self.shape[axis] > 1)
        return [(axis, live[i + 1 :]) for i, axis in enumerate(live)]


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Hosts, their devices, and the links inside and between hosts.

    Attributes:
        num_hosts: number of hosts.
        devices_per_host: number of devices in each host.
        device: the device of every host, unless `host_devices` says otherwise.
        intra_host: the link between two devices of a host.
        inter_host: the link of a host to other hosts, all of its network adapters together, which its devices share.
        host_devices: the device of each host if hosts differ; empty if all have `device`.
    """

    num_hosts: int
    devices_per_host: int
    device: DeviceSpec
    intra_host: LinkSpec
    inter_host: LinkSpec
    host_devices: tuple[DeviceSpec, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "host_devices", tuple(self.host_devices))
        if self.host_devices and len(self.host_devices) != self.num_hosts:
            raise ShardingError(
                f"`host_devices` lists a device for each of {self.num_hosts} hosts, or none; got "
                f"{len(self.host_devices)}."
            )
        if self.num_hosts < 1 or self.devices_per_host < 1:
            raise ShardingError(
                f"A cluster has at least one host with one device; got {self.num_hosts} x {self.devices_per_host}."
            )

    @property
    def n_devices(self) -> int:
        return self.num_hosts * self.devices_per_host

    @staticmethod
    def preset(name: PresetName, *, num_hosts: int = 1, devices_per_host: int = 8) -> ClusterSpec:
        """A cluster of well-known hosts, from vendor data sheets. Raises ShardingError on an unknown name."""
        if name not in _PRESETS:
            raise ShardingError(f"No preset `{name}`. Known: {', '.join(_PRESETS)}.")
        device, intra_host, inter_host = _PRESETS[name]
        if name in _ADAPTER_FOR_EACH:
            inter_host = LinkSpec(inter_host.alpha_s, inter_host.beta_s_per_byte / max(1, devices_per_host))
        return ClusterSpec(num_hosts, devices_per_host, device, intra_host, inter_host)

    def device_of(self, host: int) -> DeviceSpec:
        """The device that a host has."""
        return self.host_devices[host] if self.host_devices else self.device

    def link(self, *, same_host: bool) -> LinkSpec:
        return self.intra_host if same_host else self.inter_host

    def logical_mesh(
        self, submesh: tuple[int, int], shape: tuple[int, ...], device: DeviceSpec | None = None
    ) -> LogicalMesh:
        """View a submesh of (hosts, devices per host) as `shape`, with the links that each axis really crosses.

        device: what the submesh is made of; None for `device` of the cluster.

        An axis stays inside hosts when the axes inside it and itself fit in one host's share of the submesh.
        """
        hosts, per_host = submesh
        if math.prod(shape) != hosts * per_host:
            raise ShardingError(f"A submesh of {hosts} x {per_host} devices cannot be viewed as {shape}.")

        alpha, beta = [], []
        for axis in range(len(shape)):
            crosses = math.prod(shape[axis:]) > per_host
            link = self.link(same_host=not crosses)
            # Devices of a host that are in different groups of this axis share the host's network link.
            sharing = min(per_host, math.prod(shape[axis + 1 :])) if crosses else 1
            alpha.append(link.alpha_s)
            beta.append(link.beta_s_per_byte * sharing)
        return LogicalMesh(shape, tuple(alpha), tuple(beta), device or self.device)

    def to_json(self) -> str:
        return json.dumps({"version": _VERSION, **asdict(self)}, indent=1, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> ClusterSpec:
        """The cluster that `to_json` wrote. Raises ShardingError for any other text."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ShardingError(f"Not a cluster description: {error}. Write one with `ClusterSpec.to_json`.") from error
        if isinstance(data, dict) and "plan" in data:
            raise ShardingError("This is a plan, and no cluster description. Write one with `ClusterSpec.to_json`.")
        return ClusterSpec.from_dict(data)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> ClusterSpec:
        """The cluster that `asdict` made such a dict of, with or without the version of its form."""
        if isinstance(data, dict) and data.get("version", _VERSION) != _VERSION:
            raise ShardingError(
                f"A cluster description of version {data['version']}, and this minialpa reads {_VERSION}. Write it "
                "again with `minialpa calibrate` or `ClusterSpec.to_json`."
            )
        try:
            devices = [_decode_device(d) for d in (data["device"], *data.get("host_devices", ()))]
            links = {name: LinkSpec(**data[name]) for name in ("intra_host", "inter_host")}
            return ClusterSpec(
                data["num_hosts"], data["devices_per_host"], devices[0], **links, host_devices=tuple(devices[1:])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ShardingError(
                f"Not a cluster description ({error!r}). Write one with `ClusterSpec.to_json`."
            ) from error


def _decode_device(data: dict[str, Any]) -> DeviceSpec:
    rates = tuple((str(dtype), float(rate)) for dtype, rate in data["peak_flops"])
    kernels = data.get("kernels")
    return DeviceSpec(**{**data, "peak_flops": rates, "kernels": kernels and KernelRates(**kernels)})
