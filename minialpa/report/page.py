"""A plan in, one HTML file out, which needs no other file: `page`; and a part of it for notebooks: `card`."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from minialpa.cluster import LinkSpec
from minialpa.inter.schedule.simulate import simulate
from minialpa.inter.schedule.timeline import Timeline
from minialpa.plan import Plan
from minialpa.plan.check import PlanCheck
from minialpa.plan.record import StagePlan, limit_bytes
from minialpa.plan.text import (
    certificate_text,
    count,
    layers_text,
    no_search_text,
    ranges_text,
    seconds_text,
    variant_text,
)
from minialpa.report.drawings import (
    PipelinePicture,
    host_pictures,
    memory_curves,
    memory_scale,
    pipeline_picture,
    roofline_picture,
    shard_pictures,
    si_text,
)
from minialpa.report.figures import (
    MEMORY_KINDS,
    MemoryUse,
    other_share,
    stage_memory,
    throughput,
    time_parts,
)
from minialpa.report.findings import findings
from minialpa.report.groups import common_root, equal_layers, without_root
from minialpa.report.rows import array_rows, collective_rows, crosses_hosts, link_rows, operator_rows
from minialpa.report.tree import module_tree
from minialpa.report.words import LEGEND, number_text, percent_text
from minialpa.runtime.steps.step_trace import TaskTime
from minialpa.support.sizes import bytes_text

_SECTIONS = (
    ("findings", "Findings"),
    ("model", "Model"),
    ("cluster", "Cluster"),
    ("shardings", "Shardings"),
    ("timeline", "Timeline"),
    ("memory", "Memory"),
    ("communication", "Communication"),
    ("roofline", "Roofline"),
    ("choice", "Why this plan"),
    ("operators", "Operators"),
    ("words", "Words"),
)
#: Parts of a step, and kinds of intervals, in words.
_PART_WORDS = {
    "compute": "compute",
    "communication": "waiting for collectives",
    "bubble": "waiting for other stages",
    "update": "update",
    "idle": "devices without a stage",
}
_KIND_WORDS = {"step": "forward and backward", "transfer": "transfer to another stage"}
_SOURCE_WORDS = {
    "predicted": "predicted times",
    "XLA:GPU": "times of programs that XLA compiled for GPUs",
    "measured": "measured times",
}
#: Words of the page, in addition to `LEGEND`.
_WORDS = {
    "stage": "neighbouring layers of the model, and the devices that compute them",
    "micro-batch": "an equal part of the examples of a step; all devices of a stage work on one at a time",
    "mesh": "the devices of a stage as a row or a grid; arrays are split over its axes",
    "update": "the work once per step: the optimizer, and collectives of gradients",
    "model FLOP utilisation": "the part of the peak of all devices that the products of the model use, without repeats",
}
_N_LONGEST = 12


def page(plan: Plan, *, title: str = "", check: PlanCheck | None = None, measured: Sequence[TaskTime] = ()) -> str:
    """One file of HTML.

    title: of the page; by default the name and size of the model.
    check: its times get lanes beside the predicted ones.
    measured: `Executable.stage_timeline()`, for lanes of measured times.
    """
    timeline = simulate(plan)
    picture = pipeline_picture(plan, timeline, check, measured)
    operators = operator_rows(plan)
    memory = [stage_memory(plan, k) for k in range(len(plan.stages))]
    fractions = time_parts(plan)

    return _template("report.html.jinja").render(
        plan=plan,
        title=title or _model_text(plan),
        subtitle=_subtitle(plan),
        sections=_SECTIONS,
        has_stages=len(plan.stages) > 1,
        has_hosts=plan.cluster.num_hosts > 1,
        tiles=_tiles(plan),
        parts=[(name, part, percent_text(part)) for name, part in fractions.items()],
        part_words=list(_part_words(plan)),
        hidden_s=max(plan.n_micro_batches * sum(one.hidden_s for one in stage.passes) for stage in plan.stages),
        findings=[list(group) for _, group in itertools.groupby(findings(plan), lambda one: (one.level, one.topic))],
        tree=module_tree(plan),
        other_share=other_share(plan),
        cluster_text=_cluster_text(plan),
        hosts=host_pictures(plan),
        n_hosts=plan.cluster.num_hosts,
        stages=_stage_rows(plan, timeline),
        arrays=[(row, shard_pictures(plan, row.value)) for row in array_rows(plan)],
        timeline=picture,
        sources=list(dict.fromkeys(_SOURCE_WORDS[lane.source] for lane in picture.lanes)),
        lane_rows=list(_lane_rows(picture)),
        timeline_s=timeline.total_s,
        curves=memory_curves(plan, timeline),
        memory=memory,
        memory_bars=[_memory_bar(one, memory_scale(plan)) for one in memory],
        memory_kinds=[(kind, kind, "") for kind in _kinds_of(memory)],
        memory_columns=[(kind, "num") for kind in _kinds_of(memory)],
        links=link_rows(plan),
        transfers=list(_transfer_rows(timeline)),
        collectives=collective_rows(plan),
        roofline=roofline_picture(plan, operators),
        device=plan.cluster.device.name,
        operators=operators,
        longest=sorted(operators, key=lambda row: -row.seconds)[:_N_LONGEST],
        choice_text=_choice_text(plan),
        alternatives=list(_alternative_rows(plan)),
        longest_s=max([plan.cost.total_s, *(other.total_s for other in plan.alternatives)]),
        constraints=list(_constraints(plan)),
        words=[*_WORDS.items(), *LEGEND.items()],
        n_equations=count(plan.fingerprint.n_equations, "equation"),
        versions=(_version("minialpa"), _version("jax")),
    )


def card(plan: Plan) -> str:
    """A part of a page with any colours."""
    return _template("card.html.jinja").render(
        title=_model_text(plan),
        subtitle=_subtitle(plan),
        tiles=_tiles(plan),
        stages=_stage_rows(plan, simulate(plan)),
        warnings=[one for one in findings(plan) if one.level == "warning"],
    )


# ---- templates -------------------------------------------------------------------------------------------------------


def _template(name: str) -> jinja2.Template:
    return environment().get_template(name)


@functools.cache
def environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )

    made.filters |= {
        "breaks": _breaks,
        "bytes": bytes_text,
        "dims": lambda shape: f"[{', '.join(map(str, shape))}]",
        "flop": functools.partial(si_text, unit="flop"),
        "micro": _micro,
        "number": number_text,
        "of": _of_text,
        "percent": percent_text,
        "rate": functools.partial(si_text, unit="flop/s"),
        "seconds": lambda value: _micro(seconds_text(value)),
        "sentence": lambda text: text[:1].upper() + text[1:],
        "ticks": _ticks,
    }
    made.globals["kind_names"] = lambda kinds: [(kind, _KIND_WORDS.get(kind, kind), "") for kind in kinds]
    return made


def _version(package: str) -> str:
    """Empty if not installed, as in a source tree."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _micro(text: str) -> str:
    return re.sub(r"(?<=\d )us\b", "µs", text)


def _ticks(text: str) -> Markup:
    """Names in backticks as code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def _breaks(text: str) -> Markup:
    """Long paths may break after a separator."""
    return Markup(re.sub(r"([/\],])", r"\1<wbr>", str(escape(text))))


def _of_text(part: float, whole: float) -> str:
    """`25.9 of 80 GB`."""
    small, large = bytes_text(part), bytes_text(whole)
    return f"{small.split()[0] if small.split()[1] == large.split()[1] else small} of {large}"


# ---- the step --------------------------------------------------------------------------------------------------------


def _model_text(plan: Plan) -> str:
    """`Gpt, 1.31 billion parameters`."""
    n = sum(_n_elements(plan))
    words = next(
        (f"{n / 10**power:.3g} {word}" for power, word in ((9, "billion"), (6, "million")) if n >= 10**power), f"{n:,}"
    )
    root = common_root([op.module for stage in plan.stages for op in stage.operators])
    return ", ".join(filter(None, [root or "Training step", f"{words} parameters" if n else ""]))


def _n_elements(plan: Plan) -> Iterator[int]:
    for value, role in zip(plan.inputs, plan.roles, strict=bool(plan.roles)):
        if role == "weights":
            yield math.prod(value.shape)


def _subtitle(plan: Plan) -> str:
    cluster, n = plan.cluster, plan.n_examples
    parts = [
        f"{count(cluster.num_hosts, 'host')} with {cluster.devices_per_host} {cluster.device.name}"
        + (" each" if cluster.num_hosts > 1 else ""),
        count(len(plan.stages), "stage"),
        count(plan.n_micro_batches, "micro-batch")
        + ("" if n is None else f" of {n // plan.n_micro_batches:,} examples"),
    ]
    kept = [remat for remat in sorted(set(plan.remat)) if remat != "none"]
    parts += [f"schedule {plan.schedule}"] if len(plan.stages) > 1 else []
    parts += [f"rematerialisation {'/'.join(kept)}"] if kept else []
    return " · ".join(parts)


def _tiles(plan: Plan) -> list[tuple[str, str, str]]:
    """(what, number, note)."""
    rates = throughput(plan)
    memory = [stage_memory(plan, k) for k in range(len(plan.stages))]
    k = max(range(len(memory)), key=lambda k: memory[k].used)
    tiles = [("step", _micro(seconds_text(plan.cost.total_s)), "predicted")]
    if rates.tokens is not None:
        tiles.append(("tokens per second", number_text(rates.tokens), ""))
    if rates.examples is not None:
        tiles.append(("examples per second", number_text(rates.examples), ""))
    if rates.utilisation is not None:
        peak = si_text(plan.cluster.device.flops_per_s(rates.dtype), "flop/s")
        tiles.append(("model FLOP utilisation", percent_text(rates.utilisation), f"of {peak} {rates.dtype}"))
    where = f"stage {k}, the fullest" if len(memory) > 1 else "of each device"
    used = f"{percent_text(memory[k].used)}, {where}"
    tiles.append(("memory", _of_text(memory[k].peak_bytes, memory[k].limit_bytes), used))
    if memory[k].host_bytes:
        tiles.append(("host memory", bytes_text(memory[k].host_bytes), "for each device"))
    return tiles


def _part_words(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """(part, in words, seconds and percent) of the step."""
    for name, part in time_parts(plan).items():
        if part:
            yield name, _PART_WORDS[name], f"{_micro(seconds_text(part * plan.cost.total_s))} ({percent_text(part)})"


# ---- cluster and stages ----------------------------------------------------------------------------------------------


def _cluster_text(plan: Plan) -> str:
    cluster = plan.cluster

    def link(one: LinkSpec) -> str:
        rate = si_text(1 / one.beta_s_per_byte, "B/s") if one.beta_s_per_byte else "no limit"
        return f"{rate} and {_micro(seconds_text(one.alpha_s))} to start"

    between = f" Between hosts: {link(cluster.inter_host)}." if cluster.num_hosts > 1 else ""
    device = cluster.device
    return (
        f"Devices are of kind {device.name}, with {bytes_text(device.memory_bytes)} of memory at "
        f"{si_text(device.memory_bandwidth, 'B/s')}. Links inside a host: {link(cluster.intra_host)}.{between} "
        "Colours are stages."
    )


def _stage_rows(plan: Plan, timeline: Timeline) -> list[dict[str, Any]]:
    return [
        {
            "modules": _modules_text(plan, k),
            "devices": ranges_text(range(stage.first_device, stage.first_device + stage.n_devices)),
            "mesh": _mesh_text(stage),
            "compute_s": stage.compute_s,
            "communication_s": stage.communication_s,
            "update_s": stage.update_s + sum(stage.between_s),
            "memory": _of_text(stage.peak_bytes, limit_bytes(plan, k)),
            "bubble": bubble,
        }
        for k, (stage, bubble) in enumerate(zip(plan.stages, timeline.bubble, strict=True))
    ]


def _modules_text(plan: Plan, k: int) -> str:
    """The outermost ones of a stage, or its layers."""
    names = without_root([op.module for stage in plan.stages for op in stage.operators])
    start = sum(len(stage.operators) for stage in plan.stages[:k])
    own = names[start : start + len(plan.stages[k].operators)]
    outermost = dict.fromkeys(name.partition("/")[0].partition(".")[0] for name in own if name)
    groups = equal_layers(outermost, lambda name: name, lambda _: "")
    return ", ".join(group.name for group in groups) or layers_text(plan.stages[k].layers)


def _mesh_text(stage: StagePlan) -> str:
    """`2 across hosts by 8`, `2 by 4`."""
    axes = [
        f"{n} across hosts" if crosses_hosts(stage, axis) else str(n)
        for axis, n in enumerate(stage.logical_shape)
        if n > 1
    ]
    return " by ".join(axes) or "one device"


# ---- timeline, memory, transfers -------------------------------------------------------------------------------------


def _lane_rows(picture: PipelinePicture) -> Iterator[dict[str, Any]]:
    """The passes of each lane, and transfers in the thin lane below."""
    passes = [lane for lane in picture.lanes if not lane.is_transfer]
    transfers = {(lane.stage, lane.source): lane for lane in picture.lanes if lane.is_transfer}
    for lane in passes:
        sent = transfers.get((lane.stage, lane.source))
        yield {
            "name": lane.name,
            "source": lane.source,
            "n": lane.n,
            "busy_s": lane.busy_s,
            "share": lane.busy_s / picture.total_s if picture.total_s else 0.0,
            "n_sent": 0 if sent is None else sent.n,
            "sent_s": 0.0 if sent is None else sent.busy_s,
        }


def _kinds_of(memory: Sequence[MemoryUse]) -> list[str]:
    return [kind for kind in MEMORY_KINDS if any(one.parts.get(kind) for one in memory)]


def _memory_bar(memory: MemoryUse, whole: float) -> list[tuple[str, float, str]]:
    return [(kind, size / whole, bytes_text(size)) for kind, size in memory.parts.items()]


def _transfer_rows(timeline: Timeline) -> Iterator[dict[str, Any]]:
    pairs = sorted({(one.source_stage, one.target_stage) for one in timeline.transfers})
    for source, target in pairs:
        own = [one for one in timeline.transfers if (one.source_stage, one.target_stage) == (source, target)]
        yield {
            "source": source,
            "target": target,
            "n": len(own),
            "seconds": sum(one.end_s - one.start_s for one in own),
            "n_bytes": sum(one.n_bytes for one in own),
        }


# ---- the choice ------------------------------------------------------------------------------------------------------


def _choice_text(plan: Plan) -> str:
    if plan.search_not_made is not None:
        return f"{_micro(no_search_text(plan.search_not_made))}."
    if plan.certificate is None:
        return (
            "The options fix the stages, so the planner compared no pipelines."
            if len(plan.stages) > 1
            else ("The planner compared no pipelines for this plan.")
        )
    bound_s = plan.certificate.bound_s
    over = plan.cost.total_s / bound_s - 1 if bound_s else 0.0
    end = "this plan reaches it" if over < 0.0005 else f"this plan takes {percent_text(over)} longer"
    return f"{_micro(certificate_text(plan.certificate))}: {end}."


def _alternative_rows(plan: Plan) -> Iterator[dict[str, Any]]:
    """This plan first."""
    total_s = plan.cost.total_s
    yield {
        "name": f"this plan: {variant_text(plan)}",
        "total_s": total_s,
        "difference": "",
        "peak_bytes": max(plan.cost.peak_bytes),
        "note": "",
    }
    for other in plan.alternatives:
        yield {
            "name": other.name,
            "total_s": other.total_s,
            "difference": f"{100 * (other.total_s / total_s - 1):+.1f} %" if total_s else "",
            "peak_bytes": other.peak_bytes,
            "note": "estimated from parts of the step" if other.is_sketch else "",
        }


def _constraints(plan: Plan) -> Iterator[tuple[str, str]]:
    """(what, its value): memory limits, and options of stages that differ from their defaults."""
    limits = {limit_bytes(plan, k) for k in range(len(plan.stages))}
    yield "memory limit", " or ".join(bytes_text(limit) for limit in sorted(limits)) + " on each device"
    options: dict[tuple[str, str], list[int]] = {}
    for k, stage in enumerate(plan.stages):
        for name in stage.option.set_names:
            options.setdefault((name, f"{getattr(stage.option, name)!r}"), []).append(k)
    for (name, value), stages in options.items():
        where = f", in stages {ranges_text(stages)}" if len(stages) < len(plan.stages) else ""
        yield f"`{name}`", f"`{value}`{where}"
    if not options:
        yield "options of shardings", "all have their defaults"
    if plan.casts_once:
        yield "weights", "are cast to narrower dtypes once per step"
    if plan.keeps_activations:
        yield "later loops", "read values that earlier loops kept"
    for name, is_set in plan.compiler_options:
        yield f"`{name}`", f"`{is_set}`, an option of XLA"
