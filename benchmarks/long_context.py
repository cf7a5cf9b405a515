"""Plans for Llama 3 at long context on H100s: `AutoParallel` and the methods of experts, with the same prices.

python -m benchmarks.long_context llama-3-8b 64 8192 [--methods auto fsdp ...]     one setting, a line for each method
python -m benchmarks.long_context --list                                           the settings

Steps are planned and priced, not run. Attention is one operation (`recognise`) in all models, and the loss is computed
for 1024 positions at a time. Seconds come from the cost model, with rates of devices and links from data sheets and
without overlap. The methods:

    auto        `AutoParallel`: stages, submeshes, shardings, micro-batches and rematerialisation are chosen
    fsdp        parameters, gradients and optimizer state sharded over all devices, one example per device at a time
    hsdp        the same, but parameters are sharded in each host and replicated between hosts
    dp_tp       examples split between hosts, operators split in each host
    fsdp_dots   fsdp that keeps the results of contractions and recomputes all other values; hsdp_dots likewise

Published runs of these models use fsdp, hsdp and dp_tp: one `lax.scan` over blocks, and the backward pass recomputes
each block. `auto` and the last two see a Python loop over blocks, and the planner chooses the recomputed values.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

import minialpa
from benchmarks.corpus import arguments
from benchmarks.planning import PER_HOST, cluster_of, planned, traced_step
from benchmarks.registry import Rows, Size, benchmark
from minialpa import AutoLayerOption, AutoParallel, AutoShardingOption, PipeshardParallel, Plan, UniformStageOption
from minialpa.errors import InfeasibleError
from minialpa.methods import Method
from minialpa.recognition.step import recognise
from minialpa.tracing.trace import TracedStep

#: Tokens of a batch, and tokens for settings in which the first number gives too few examples for the devices.
_TOKENS, _MANY_TOKENS = 2**22, 2**24
#: Positions whose logits are in memory at once: 32,768 positions would need 17 GB in float32 for each example.
_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class Setting:
    """A model of `minialpa.models` on H100s. arguments: differences from the published size."""

    model: str
    n_devices: int
    seq_len: int
    arguments: tuple[tuple[str, Any], ...] = ()

    @property
    def batch_size(self) -> int:
        few = _TOKENS // self.seq_len
        return few if few >= self.n_devices else _MANY_TOKENS // self.seq_len

    def traced(self, *, in_scan: bool) -> TracedStep:
        """in_scan: whether the blocks are one scan, and recomputed."""
        sizes = {
            "seq_len": self.seq_len,
            "batch_size": self.batch_size,
            "loss_chunks": self.seq_len // _CHUNK,
            "scan_layers": in_scan,
            "remat_blocks": in_scan,
        } | dict(self.arguments)
        case = minialpa.models.build(self.model, **sizes)
        step = traced_step(case.train_step(minialpa.value_and_grad), *arguments(case))
        return recognise(step, everywhere=True)


SETTINGS = tuple(
    Setting(model, n_devices, seq_len)
    for model, counts in (("llama-3-8b", (8, 64)), ("llama-3-70b", (64, 256)))
    for n_devices in counts
    for seq_len in (8192, 32768)
)
#: Small enough for tests.
_TINY = Setting("llama", 2, 256, (("hidden", 64), ("n_layers", 1), ("batch_size", 4)))


# ---- methods ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to train a model. in_scan: see `Setting.traced`."""

    method: Callable[[Setting], Method]
    in_scan: bool


def _one_stage(setting: Setting, option: AutoShardingOption, examples_over: int, remat: bool) -> Method:
    """One stage under `option`, with one example for each of `examples_over` groups of devices in a micro-batch.

    remat: whether the planner recomputes all values except contractions. A pipeline of one stage may do that.
    """
    n = setting.n_devices
    shape = (n,) if n <= PER_HOST else (n // PER_HOST, PER_HOST)
    batch_size = dict(setting.arguments).get("batch_size", setting.batch_size)
    return PipeshardParallel(
        num_micro_batches=batch_size // examples_over,
        layer_option=AutoLayerOption(remat="dots" if remat else "none"),
        stage_option=UniformStageOption(1, submesh_logical_shape=shape, submesh_autosharding_option=option),
    )


def _fsdp(setting: Setting, remat: bool = False) -> Method:
    option = AutoShardingOption(force_zero_stage_3=True, force_data_parallel=True, prefer_reduce_scatter=True)
    return _one_stage(setting, option, setting.n_devices, remat)


def _hsdp(setting: Setting, remat: bool = False) -> Method:
    in_host = {"*.params*": PartitionSpec("y")}
    if not remat:  # the first dimension of stacked weights is the layer
        in_host = {"*.params['blocks']*": PartitionSpec(None, "y"), **in_host}
    option = AutoShardingOption(fixed_specs=in_host, force_data_parallel=True, prefer_reduce_scatter=True)
    return _one_stage(setting, option, setting.n_devices, remat)


def _dp_tp(setting: Setting) -> Method:
    option = AutoShardingOption(force_batch_dim_to_mesh_dim=0, prefer_reduce_scatter=True)
    return _one_stage(setting, option, setting.n_devices // PER_HOST, remat=False)


_WAYS = {
    "auto": _Way(lambda _: AutoParallel(), in_scan=False),
    "fsdp": _Way(_fsdp, in_scan=True),
    "hsdp": _Way(_hsdp, in_scan=True),
    "dp_tp": _Way(_dp_tp, in_scan=True),
    "fsdp_dots": _Way(lambda setting: _fsdp(setting, remat=True), in_scan=False),
    "hsdp_dots": _Way(lambda setting: _hsdp(setting, remat=True), in_scan=False),
}
#: Methods that need several hosts.
_BETWEEN_HOSTS = ("hsdp", "dp_tp", "hsdp_dots")
METHODS = tuple(_WAYS)


# ---- rows ------------------------------------------------------------------------------------------------------------


@benchmark("long_context")
def long_context(size: Size) -> Rows:
    """Predicted seconds, memory, and the seconds of planning, for each setting and method."""
    return [row for setting in (SETTINGS if size == "full" else (_TINY,)) for row in rows(setting)]


def rows(setting: Setting, names: Sequence[str] = METHODS) -> Iterator[dict[str, Any]]:
    """A row for each method that the setting has."""
    traced: dict[bool, TracedStep] = {}
    for name in names:
        way = _WAYS[name]
        if name in _BETWEEN_HOSTS and setting.n_devices <= PER_HOST:
            continue
        start = time.process_time()
        if way.in_scan not in traced:
            traced[way.in_scan] = setting.traced(in_scan=way.in_scan)
        trace_cpu_s = time.process_time() - start
        row = _row(name, setting, traced[way.in_scan], way.method(setting))
        yield row | ({"remat": "blocks"} if way.in_scan else {}) | {"trace_cpu_s": trace_cpu_s}


def _row(name: str, setting: Setting, traced: TracedStep, method: Method) -> dict[str, Any]:
    cluster = cluster_of("h100", setting.n_devices)
    start, cpu_start = time.perf_counter(), time.process_time()
    cells: dict[str, Any] = {
        "model": setting.model,
        "devices": setting.n_devices,
        "seq_len": setting.seq_len,
        "method": name,
    }
    try:
        cells |= _cells(setting, planned(traced, cluster, method))
    except InfeasibleError as error:
        cells |= {"failure": str(error).splitlines()[0]}
    return cells | {"plan_s": time.perf_counter() - start, "plan_cpu_s": time.process_time() - cpu_start}


def _cells(setting: Setting, plan: Plan) -> dict[str, Any]:
    cost = plan.cost
    n_tokens = dict(setting.arguments).get("batch_size", setting.batch_size) * setting.seq_len
    return {
        "step_s": cost.total_s,
        "tokens_per_s_and_device": n_tokens / cost.total_s / setting.n_devices,
        "communication_s": cost.communication_s,
        "micro_batches": plan.n_micro_batches,
        "stages": len(plan.stages),
        "mesh": "x".join(map(str, plan.stages[0].logical_shape)),
        "remat": "+".join(sorted(set(plan.remat))) or "none",
        "peak_gb": max(cost.peak_bytes) / 1e9,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.long_context", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a model of the table")
    parser.add_argument("devices", nargs="?", type=int)
    parser.add_argument("seq_len", nargs="?", type=int)
    parser.add_argument("--methods", nargs="*", default=METHODS, choices=METHODS)
    parser.add_argument("--list", action="store_true", help="print the settings")
    args = parser.parse_args(argv)
    found = [s for s in SETTINGS if (s.model, s.n_devices, s.seq_len) == (args.model, args.devices, args.seq_len)]
    if args.list or not found:
        print("\n".join(f"{s.model} {s.n_devices} {s.seq_len}" for s in SETTINGS))
        return 0 if args.list else 2
    for row in rows(found[0], args.methods):
        print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
