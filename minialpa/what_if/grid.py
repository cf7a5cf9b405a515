"""Models, clusters, batches, memory and links to combine in; one `Case` for each combination out."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from minialpa.cluster import ClusterSpec, LinkSpec, PresetName
from minialpa.errors import MinialpaError
from minialpa.support.private_jax import api_boundary
from minialpa.support.sizes import bytes_text
from minialpa.what_if.steps import check, default_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model on one cluster.

    Attributes:
        model: as in `minialpa plan`.
        cluster: a preset of `ClusterSpec`.
        devices: of each host.
        batch: examples; None for the default of the model.
        memory_bytes: of each device.
        sequence: positions of an example; None for the default of the model.
        link_speed: multiplies the bytes per second of all links of the preset.
    """

    model: str
    cluster: PresetName
    hosts: int
    devices: int
    batch: int | None
    memory_bytes: float
    sequence: int | None = None
    link_speed: float = 1.0

    def __post_init__(self) -> None:
        least = min(self.hosts, self.devices, self.memory_bytes, self.link_speed, self.batch or 1, self.sequence or 1)
        if not 0 < least < math.inf:
            raise MinialpaError(f"All numbers of a case must be positive; got {self}.")

    @property
    def gpus(self) -> int:
        return self.hosts * self.devices

    def spec(self) -> ClusterSpec:
        preset = ClusterSpec.preset(self.cluster, num_hosts=self.hosts, devices_per_host=self.devices)
        return dataclasses.replace(
            preset,
            device=dataclasses.replace(preset.device, memory_bytes=self.memory_bytes),
            intra_host=self._link(preset.intra_host),
            inter_host=self._link(preset.inter_host),
        )

    def _link(self, link: LinkSpec) -> LinkSpec:
        return dataclasses.replace(link, beta_s_per_byte=link.beta_s_per_byte / self.link_speed)

    def __str__(self) -> str:
        """`gpt-1.3b on 16 x h100 of 80 GB, batch 1024`."""
        return (
            f"{self.model} on {self.gpus} x {self.cluster} of {bytes_text(self.memory_bytes)}"
            + (f", batch {self.batch}" if self.batch else "")
            + (f", sequence {self.sequence}" if self.sequence else "")
            + (f", links x {self.link_speed:g}" if self.link_speed != 1 else "")
        )


@api_boundary
def cases(
    models: Sequence[str],
    *,
    gpus: Sequence[int] = (8,),
    clusters: Sequence[PresetName] = ("h100",),
    batches: Sequence[int | None] = (None,),
    memory: Sequence[float | None] = (None,),
    sequences: Sequence[int | None] = (None,),
    link_speeds: Sequence[float] = (1.0,),
    devices_per_host: int = 8,
) -> tuple[Case, ...]:
    """All combinations.

    Args:
        gpus: numbers of devices: at most `devices_per_host`, or whole hosts.
        memory: bytes of each device; None for the memory of the preset.

    Other arguments are as in `Case`. Raises MinialpaError for values that no cluster or no model has.
    """
    for model in models:
        check(model, batches, sequences)
    found = tuple(
        Case(
            model=model,
            cluster=cluster,
            hosts=hosts,
            devices=devices,
            batch=batch or default_batch(model),
            memory_bytes=ClusterSpec.preset(cluster).device.memory_bytes if n_bytes is None else n_bytes,
            sequence=sequence,
            link_speed=link_speed,
        )
        for model, batch, sequence, cluster, (hosts, devices), link_speed, n_bytes in itertools.product(
            dict.fromkeys(models),
            dict.fromkeys(batches),
            dict.fromkeys(sequences),
            dict.fromkeys(clusters),
            [_hosts(n, devices_per_host) for n in dict.fromkeys(gpus)],
            dict.fromkeys(link_speeds),
            dict.fromkeys(memory),
        )
    )
    if not found:
        raise MinialpaError("There is no case to plan. Give each argument at least one value.")
    return found


def _hosts(n: int, devices_per_host: int) -> tuple[int, int]:
    """(hosts, devices per host) of `n` devices."""
    if n <= devices_per_host:
        return 1, n
    if n % devices_per_host:
        raise MinialpaError(
            f"{n} GPUs are no whole number of hosts with {devices_per_host} GPUs each. Choose at most "
            f"{devices_per_host}, or a multiple such as {n - n % devices_per_host}."
        )
    return n // devices_per_host, devices_per_host


# ---- values of the command line --------------------------------------------------------------------------------------


def numbers(text: str) -> tuple[int, ...]:
    """`8,16,96` -> (8, 16, 96), and `8..64` -> (8, 16, 32, 64). Raises MinialpaError for other texts."""
    return tuple(dict.fromkeys(n for part in text.split(",") for n in _range(part.strip(), text)))


def _range(part: str, text: str) -> Iterator[int]:
    first, dots, last = (one.strip() for one in part.partition(".."))
    stop = last if dots else first
    if not (first.isdecimal() and stop.isdecimal() and 0 < int(first) <= int(stop)):
        raise MinialpaError(
            f"`{text}` is no list of positive whole numbers. Write `8,16,64`, or `8..64` for 8, 16, 32 and 64."
        )
    n = int(first)
    while n <= int(stop):
        yield n
        n *= 2


def memory_sizes(text: str) -> tuple[float, ...]:
    """`40GB,80GB` -> (40e9, 80e9); a number without unit is in GB. Raises MinialpaError for other texts."""
    units = {"": 1e9, "gb": 1e9, "gib": 2.0**30}

    def size(part: str) -> float:
        found = re.fullmatch(r"([\d.]+) *(\w*)", part)
        if found is None or found[2].lower() not in units:
            raise ValueError(part)
        return float(found[1]) * units[found[2].lower()]

    return _values(text, size, "sizes of memory", "40GB,80GB")


def factors(text: str) -> tuple[float, ...]:
    """`0.5,1,2` -> (0.5, 1.0, 2.0). Raises MinialpaError for other texts."""
    return _values(text, float, "positive numbers", "0.5,1,2")


def prices(text: str, clusters: Sequence[str]) -> dict[str, float]:
    """Dollars per GPU-hour by cluster, from `2.5` or `h100=2.5,a100-80gb=1.3`. Raises MinialpaError for other texts."""
    if "=" not in text:
        (price,) = _values(text, float, "one price per GPU-hour", "2.5", most=1)
        return dict.fromkeys(clusters, price)

    pairs = [part.partition("=")[::2] for part in text.split(",")]
    named = {name.strip(): _values(value, float, "prices per GPU-hour", "2.5", most=1)[0] for name, value in pairs}
    unknown = [name for name in named if name not in clusters]
    if unknown:
        raise MinialpaError(
            f"`{text}` has a price for `{unknown[0]}`, which is no cluster of this command. Name one of "
            f"{', '.join(clusters)}."
        )
    return named


def _values(
    text: str, parse: Callable[[str], float], what: str, example: str, most: int | None = None
) -> tuple[float, ...]:
    try:
        found = tuple(dict.fromkeys(parse(part.strip()) for part in text.split(",")))
        if min(found) > 0 and max(found) < float("inf") and (most is None or len(found) <= most):
            return found
    except ValueError:
        pass
    raise MinialpaError(f"Expected {what}, such as `{example}`; got `{text}`.")
