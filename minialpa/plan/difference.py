"""Two plans in, their differences out, one line each: `micro-batches: 4 -> 8`."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping

from minialpa.plan.record import PlanRecord, StagePlan
from minialpa.plan.text import axes_text, count, operator_lines, seconds_text, stage_text
from minialpa.support.sizes import bytes_text

_MOST_LINES = 20


def difference(old: PlanRecord, new: PlanRecord) -> str:
    """`The plans are equal.` means equal in all fields."""
    if old == new:
        return "The plans are equal."
    lines = [
        *_change_lines("cluster", _cluster_texts(old), _cluster_texts(new)),
        *_step_lines(old, new),
        *_change_lines("", _setting_texts(old), _setting_texts(new)),
        *_layer_lines(old, new),
        *_stage_lines(old, new),
        *_first_lines(_change_lines("placement", _placement_texts(old), _placement_texts(new))),
        *_first_lines(_operator_lines(old, new)),
        *_change_lines("communication", _communication_texts(old), _communication_texts(new)),
        *_cost_lines(old, new),
    ]
    if not lines:
        names = [f.name for f in dataclasses.fields(old) if getattr(old, f.name) != getattr(new, f.name)]
        lines = [f"details of {', '.join(f'`{name}`' for name in names)}"]
    return "\n".join(lines)


def _change_line(what: str, old: str, new: str) -> list[str]:
    return [] if old == new else [f"{what}: {old} -> {new}"]


def _change_lines(what: str, old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """A missing entry shows as `none`."""
    prefix = f"{what} " if what else ""
    names = dict.fromkeys((*old, *new))
    return [
        line for name in names for line in _change_line(prefix + name, old.get(name, "none"), new.get(name, "none"))
    ]


def _first_lines(lines: list[str]) -> list[str]:
    more = len(lines) - _MOST_LINES
    return lines if more <= 0 else [*lines[:_MOST_LINES], f"... and {more} more like these"]


def _cluster_texts(plan: PlanRecord) -> dict[str, str]:
    cluster, device = plan.cluster, plan.cluster.device
    shown = {"size": f"{cluster.num_hosts} x {cluster.devices_per_host}", "device": device.name}
    shown |= {f"rate of {dtype}": f"{rate:.6g} flop/s" for dtype, rate in device.peak_flops}
    shown |= {"memory": bytes_text(device.memory_bytes), "memory bandwidth": f"{bytes_text(device.memory_bandwidth)}/s"}
    for name, link in (("inside hosts", cluster.intra_host), ("between hosts", cluster.inter_host)):
        shown[f"link {name}"] = f"{seconds_text(link.alpha_s)} + {link.beta_s_per_byte:.6g} s/B"
    return shown


def _step_lines(old: PlanRecord, new: PlanRecord) -> list[str]:
    if old.fingerprint == new.fingerprint:
        return []
    shapes = _change_lines(
        "shape of", *({v.path: f"{v.dtype}{list(v.shape)}" for v in plan.inputs} for plan in (old, new))
    )
    counts = _change_lines("number of", *({f"`{k}`": str(n) for k, n in p.fingerprint.primitives} for p in (old, new)))
    return _first_lines(shapes) + _first_lines(counts) or ["step: other operations"]


def _setting_texts(plan: PlanRecord) -> dict[str, str]:
    return {
        "micro-batches": str(plan.n_micro_batches),
        "schedule": plan.schedule,
        "per-example values of earlier loops": "kept" if plan.keeps_activations else "recomputed in later loops",
        "casts of weights": "once per step" if plan.casts_once else "in each pass",
        "updates of matrices": "in stacks" if plan.stack_matrices else "one by one",
    }


def _layer_lines(old: PlanRecord, new: PlanRecord) -> list[str]:
    n_layers = [len(plan.remat) for plan in (old, new)]
    if n_layers[0] != n_layers[1]:
        return _change_line("layers", *(str(n) if n else "no pipeline" for n in n_layers))
    lines = _change_lines(
        "rematerialisation", *({f"of layer {i}": r for i, r in enumerate(p.remat)} for p in (old, new))
    )
    return lines if old.layer_of_group == new.layer_of_group else [*lines, "layers: cut at other operations"]


def _stage_lines(old: PlanRecord, new: PlanRecord) -> list[str]:
    texts = [{str(k): stage_text(plan, k) for k in range(len(plan.stages))} for plan in (old, new)]
    lines = _change_line("stages", *(str(len(plan.stages)) for plan in (old, new))) + _change_lines("stage", *texts)
    for k, (a, b) in enumerate(zip(old.stages, new.stages, strict=False)):
        lines += _change_lines(f"stage {k}, option", _option_texts(a), _option_texts(b))
    return lines


def _option_texts(stage: StagePlan) -> dict[str, str]:
    return {f"`{f.name}`": str(getattr(stage.option, f.name)) for f in dataclasses.fields(stage.option)}


def _placement_texts(plan: PlanRecord) -> dict[str, str]:
    """Path -> meshes and specs."""
    out = {}
    for value in (*plan.inputs, *plan.outputs):
        places = zip(value.mesh_ids, value.placement().partition_specs, strict=True)
        memory = "" if value.memory_kind == "device" else f" in {value.memory_kind}"
        out[value.path] = (", ".join(f"mesh {mesh} {spec}" for mesh, spec in places) or "not used") + memory
    return out


def _operator_lines(old: PlanRecord, new: PlanRecord) -> list[str]:
    lines = []
    for k in range(max(len(old.stages), len(new.stages))):
        a, b = ([] if k >= len(p.stages) else operator_lines(p, p.stages[k].operators) for p in (old, new))
        lines += [f"operator of stage {k}: {line} -> none" for line in a if line not in b]
        lines += [f"operator of stage {k}: none -> {line}" for line in b if line not in a]
    return lines


def _communication_texts(plan: PlanRecord) -> dict[str, str]:
    n_bytes: dict[str, float] = {}
    times: Counter[str] = Counter()
    for c in plan.collectives:
        name = f"of stage {c.stage}, {c.kind} over {axes_text(c.axes)}"
        n_bytes[name] = n_bytes.get(name, 0.0) + c.n_bytes * c.times_per_step
        times[name] += c.times_per_step
    return {name: f"{bytes_text(n_bytes[name])} in {count(times[name], 'collective')} per step" for name in times}


def _cost_lines(old: PlanRecord, new: PlanRecord) -> list[str]:
    lines = []
    for name in ("total", "compute", "communication", "bubble", "update"):
        old_s, new_s = (getattr(plan.cost, f"{name}_s") for plan in (old, new))
        lines += _figure_line(f"{name} per step", old_s, new_s, seconds_text)

    a, b = old.cost.peak_bytes, new.cost.peak_bytes
    if len(a) != len(b):
        return [*lines, f"peak memory: {', '.join(map(bytes_text, a))} -> {', '.join(map(bytes_text, b))}"]
    for k, pair in enumerate(zip(a, b, strict=True)):
        lines += _figure_line(f"peak memory of stage {k}", *pair, bytes_text)
    return lines


def _figure_line(what: str, old: float, new: float, text: Callable[[float], str]) -> list[str]:
    if old == new:
        return []
    change = f" ({(new - old) / old:+.1%})" if old else ""
    return [f"{what}: {text(old)} -> {text(new)}{change}"]
