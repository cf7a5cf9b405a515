"""Plans in short memory, with and without moves to host memory: seconds of a step on an H100.

python -m benchmarks.run memory_choices

Each model is planned in one stage under five limits, from the memory of `offload` in all layers to the memory with all
values kept. Without `DeviceSpec.host_bytes` the planner only recomputes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import minialpa
from benchmarks.corpus import arguments
from benchmarks.planning import cluster_of, planned, traced_step
from benchmarks.registry import Rows, Size, benchmark
from minialpa import AutoShardingOption, Plan, ShardParallel
from minialpa.errors import InfeasibleError
from minialpa.options import RematChoice
from minialpa.tracing.trace import TracedStep

#: Limits: parts of the way from the bytes of `offload` in all layers to the bytes of `none`.
_PARTS = (0.0, 0.05, 0.07, 0.15, 0.4)


@dataclass(frozen=True, slots=True)
class _Setting:
    """A model of `minialpa.models` on one H100."""

    name: str
    model: str
    sizes: tuple[tuple[str, Any], ...]


def _setting(name: str, model: str, **sizes: Any) -> _Setting:
    return _Setting(name, model, (("vocab_size", 4096), *sizes.items()))


_LLAMA = {"n_kv_heads": 8, "ffn": 28672}
_SETTINGS = (
    _setting("gpt-12288, 16K tokens", "gpt", hidden=12288, n_layers=6, n_heads=96, seq_len=16384, batch_size=2),
    _setting("gpt-8192, 16K tokens", "gpt", hidden=8192, n_layers=6, n_heads=64, seq_len=16384, batch_size=2),
    _setting("gpt-8192, 32K tokens", "gpt", hidden=8192, n_layers=6, n_heads=64, seq_len=32768, batch_size=2),
    _setting(
        "llama-8192, 16K tokens", "llama", hidden=8192, n_layers=6, n_heads=64, seq_len=16384, batch_size=2, **_LLAMA
    ),
)
_TINY = (_setting("gpt", "gpt", hidden=64, n_layers=2, n_heads=2, seq_len=64, batch_size=2),)


def _plan(step: TracedStep, limit: float, remat: RematChoice, *, may_move: bool) -> Plan | None:
    cluster = cluster_of("h100", 1)
    if not may_move:
        cluster = replace(cluster, device=replace(cluster.device, host_bytes=None))
    method = ShardParallel(remat=remat, auto_sharding_option=AutoShardingOption(memory_limit_bytes=limit))
    try:
        return planned(step, cluster, method)
    except InfeasibleError:
        return None


def _rows(setting: _Setting) -> Iterator[dict[str, Any]]:
    case = minialpa.models.build(setting.model, **dict(setting.sizes))
    step = traced_step(case.train_step(minialpa.value_and_grad), *arguments(case))

    def plan_with(limit: float, remat: RematChoice = "auto", *, may_move: bool = False) -> Plan | None:
        return _plan(step, limit, remat, may_move=may_move)

    ends = [plan_with(1e15, remat, may_move=True) for remat in ("offload", "none")]
    least, most = (plan.cost.peak_bytes[0] for plan in ends if plan is not None)
    for part in _PARTS:
        limit = least + part * (most - least)
        recomputing, chosen = plan_with(limit), plan_with(limit, may_move=True)
        seconds = [math.inf if plan is None else plan.cost.total_s for plan in (recomputing, chosen)]
        yield {
            "model": setting.name,
            "limit_gb": limit / 1e9,
            "recomputing_s": seconds[0],
            "chosen_s": seconds[1],
            "times_as_fast": math.nan if math.isinf(seconds[1]) else seconds[0] / seconds[1],
            "host_gb": 0.0 if chosen is None else chosen.stages[0].host_bytes / 1e9,
            "choices": "" if chosen is None else "/".join(sorted(set(chosen.remat))),
        }


@benchmark("memory_choices")
def memory_choices(size: Size) -> Rows:
    """Seconds of plans in short memory that only recompute, and of plans that may move values to the host."""
    return [row for setting in (_SETTINGS if size == "full" else _TINY) for row in _rows(setting)]
