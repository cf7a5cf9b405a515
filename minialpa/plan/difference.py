"""`Plan.diff`: says in words what differs between two plans. A line reads `what: first plan -> second plan`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from minialpa.plan.record import PlanRecord, StagePlan
from minialpa.plan.text import axes_text, bytes_text, count, operator_lines, seconds_text, stage_text

_MOST_LINES = 20


def difference(old: PlanRecord, new: PlanRecord) -> str:
    """What differs, from the cluster to the predicted seconds; `The plans are equal.` only if they are."""
    if old == new:
        return "The plans are equal."
    lines = [
        *_changes("cluster", _cluster(old), _cluster(new)),
        *_step(old, new),
        *_change("micro-batches", str(old.n_micro_batches), str(new.n_micro_batches)),
        *_change("schedule", old.schedule, new.schedule),
        *_change("rows of earlier loops", _rows(old), _rows(new)),
        *_change("casts of weights", _casts(old), _casts(new)),
        *_layers(old, new),
        *_stages(old, new),
        *_cut(_changes("placement", _placements(old), _placements(new))),
        *_cut(_operators(old, new)),
        *_changes("communication", _communication(old), _communication(new)),
        *_costs(old, new),
    ]
    if not lines:
        names = [f.name for f in dataclasses.fields(old) if getattr(old, f.name) != getattr(new, f.name)]
        lines = [f"details of {', '.join(f'`{name}`' for name in names)}"]
    return "\n".join(lines)


def _rows(plan: PlanRecord) -> str:
    return "kept" if plan.keeps_rows else "computed again"


def _casts(plan: PlanRecord) -> str:
    return "once per step" if plan.casts_once else "in each pass"


def _change(what: str, old: str, new: str) -> list[str]:
    return [] if old == new else [f"{what}: {old} -> {new}"]


def _changes(what: str, old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Entries of two tables that differ, in the order of the tables; `none` where one has no such entry."""
    names = dict.fromkeys((*old, *new))
    return [line for name in names for line in _change(f"{what} {name}", old.get(name, "none"), new.get(name, "none"))]


def _cut(lines: list[str]) -> list[str]:
    more = len(lines) - _MOST_LINES
    return lines if more <= 0 else [*lines[:_MOST_LINES], f"... and {more} more like these"]


def _cluster(plan: PlanRecord) -> dict[str, str]:
    cluster, device = plan.cluster, plan.cluster.device
    shown = {"size": f"{cluster.num_hosts} x {cluster.devices_per_host}", "device": device.name}
    shown |= {f"rate of {dtype}": f"{rate:.6g} flop/s" for dtype, rate in device.peak_flops}
    shown |= {"memory": bytes_text(device.memory_bytes), "memory bandwidth": f"{bytes_text(device.memory_bandwidth)}/s"}
    for name, link in (("inside hosts", cluster.intra_host), ("between hosts", cluster.inter_host)):
        shown[f"link {name}"] = f"{seconds_text(link.alpha_s)} + {link.beta_s_per_byte:.6g} s/B"
    return shown


def _step(old: PlanRecord, new: PlanRecord) -> list[str]:
    if old.fingerprint == new.fingerprint:
        return []
    shapes = _changes("shape of", *({v.path: f"{v.dtype}{list(v.shape)}" for v in plan.inputs} for plan in (old, new)))
    counts = _changes("number of", *({f"`{k}`": str(n) for k, n in p.fingerprint.primitives} for p in (old, new)))
    return _cut(shapes) + _cut(counts) or ["step: other operations"]


def _layers(old: PlanRecord, new: PlanRecord) -> list[str]:
    n_layers = [len(plan.remat) for plan in (old, new)]
    if n_layers[0] != n_layers[1]:
        return _change("layers", *(str(n) if n else "no pipeline" for n in n_layers))
    lines = _changes("rematerialisation", *({f"of layer {i}": r for i, r in enumerate(p.remat)} for p in (old, new)))
    return lines if old.layer_of_group == new.layer_of_group else [*lines, "layers: cut at other operations"]


def _stages(old: PlanRecord, new: PlanRecord) -> list[str]:
    texts = [{str(k): stage_text(plan, k) for k in range(len(plan.stages))} for plan in (old, new)]
    lines = _change("stages", *(str(len(plan.stages)) for plan in (old, new))) + _changes("stage", *texts)
    for k, (a, b) in enumerate(zip(old.stages, new.stages, strict=False)):
        lines += _changes(f"stage {k}, option", _options(a), _options(b))
        if a.logical_shape == b.logical_shape:
            lines += _changes(f"stage {k}, link of", _links(a), _links(b))
    return lines


def _options(stage: StagePlan) -> dict[str, str]:
    return {f"`{f.name}`": str(getattr(stage.option, f.name)) for f in dataclasses.fields(stage.option)}


def _links(stage: StagePlan) -> dict[str, str]:
    links = zip(stage.alpha, stage.beta, strict=True)
    return {f"axis {i}": f"{seconds_text(alpha)} + {beta:.6g} s/B" for i, (alpha, beta) in enumerate(links)}


def _placements(plan: PlanRecord) -> dict[str, str]:
    return {
        value.path: ", ".join(
            f"mesh {m} {s}" for m, s in zip(value.mesh_ids, value.placement().partition_specs, strict=True)
        )
        or "not used"
        for value in (*plan.inputs, *plan.outputs)
    }


def _operators(old: PlanRecord, new: PlanRecord) -> list[str]:
    """Lines of operators that only one of the plans has, stage by stage."""
    lines = []
    for k in range(max(len(old.stages), len(new.stages))):
        a, b = ([] if k >= len(p.stages) else operator_lines(p, p.stages[k].operators) for p in (old, new))
        lines += [f"operator of stage {k}: {line} -> none" for line in a if line not in b]
        lines += [f"operator of stage {k}: none -> {line}" for line in b if line not in a]
    return lines


def _communication(plan: PlanRecord) -> dict[str, str]:
    """Bytes and number of collectives of a step, for each kind, axes and stage."""
    total: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for c in plan.collectives:
        name = f"of stage {c.stage}, {c.kind} over {axes_text(c.axes)}"
        total[name] += c.n_bytes * c.times_per_step  # type: ignore[assignment]  # bytes are floats
        times[name] += c.times_per_step
    return {name: f"{bytes_text(total[name])} in {count(times[name], 'collective')} per step" for name in total}


def _costs(old: PlanRecord, new: PlanRecord) -> list[str]:
    figures: tuple[tuple[str, Callable[[PlanRecord], float]], ...] = (
        ("total", lambda plan: plan.cost.total_s),
        ("compute", lambda plan: plan.cost.compute_s),
        ("communication", lambda plan: plan.cost.communication_s),
        ("bubble", lambda plan: plan.cost.bubble_s),
        ("update", lambda plan: plan.cost.update_s),
    )
    lines = [line for name, of in figures for line in _figure(f"{name} per step", of(old), of(new), seconds_text)]
    return lines + list(_peaks(old, new))


def _peaks(old: PlanRecord, new: PlanRecord) -> Iterable[str]:
    a, b = old.cost.peak_bytes, new.cost.peak_bytes
    if len(a) != len(b):
        yield f"peak memory: {', '.join(map(bytes_text, a))} -> {', '.join(map(bytes_text, b))}"
        return
    for k, pair in enumerate(zip(a, b, strict=True)):
        yield from _figure(f"peak memory of stage {k}", *pair, bytes_text)


def _figure(what: str, old: float, new: float, text: Callable[[Any], str]) -> list[str]:
    if old == new:
        return []
    change = f" ({(new - old) / old:+.1%})" if old else ""
    return [f"{what}: {text(old)} -> {text(new)}{change}"]
