"""Makes the pictures in docs/pictures: `python -m tests.pictures_doc` writes them.

`data-flow.svg` shows the phases of planning and running. Its packages and values come from the functions of the phases.
`plan-on-a-mesh.svg` shows a plan of two feed-forward blocks and its simulated timeline.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import jax
import jax.numpy as jnp
import numpy as np
import optax

import minialpa
from minialpa import AutoStageOption, ClusterSpec, ManualLayerOption, PipeshardParallel, Plan, Timeline
from minialpa.calls import Parameters
from minialpa.inter.build_plan import build_plan
from minialpa.inter.layers.layered_step import layered_step, whole_scans
from minialpa.inter.lower.emit import emit_program
from minialpa.inter.lower.mesh_programs import split_by_mesh
from minialpa.inter.microbatch.rewrite import split_micro_batches
from minialpa.inter.search.user_stages import given_stages
from minialpa.inter.staging.staged_step import realise
from minialpa.inter.staging.tasks import stage_split
from minialpa.intra.graph.solve import MeshSolver
from minialpa.plan import PlacedValue, StagePlan, bytes_text, seconds_text
from minialpa.plan.text import axes_text
from minialpa.runtime.cluster.cluster_executable import ClusterExecutable
from minialpa.runtime.local import LocalExecutable
from minialpa.sharding import Spec
from minialpa.tracing.trace import trace_step

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
_INK, _GREY, _LINE, _BLUE, _GREEN, _CHIP = "#1f2933", "#52606d", "#9aa5b1", "#1d4ed8", "#dcfce7", "#e0e7ff"
_STYLE = f"""<style>
text{{font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:{_INK}}}
.m{{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'Liberation Mono',monospace}}
.b{{font-weight:600}} .c{{text-anchor:middle}} .e{{text-anchor:end}} .g{{fill:{_GREY}}} .v{{fill:{_BLUE}}}
.s{{font-size:10.5px}} .t{{font-size:9.5px}} .l{{font-size:13px}} .h{{font-size:18px}}
path{{fill:none;stroke:{_GREY};stroke-width:1.3}} .a{{marker-end:url(#a)}} .f{{stroke:{_LINE};stroke-dasharray:5 4}}
</style><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"
  markerUnits="userSpaceOnUse" orient="auto"><polygon points="0,0.8 8,4 0,7.2" fill="{_GREY}"/></marker>"""


class Svg:
    """A picture with a background of its own, so that it is readable in dark mode. Styles: see `_STYLE`."""

    def __init__(self, height: int, title: str, description: str) -> None:
        size = f'viewBox="0 0 900 {height}" width="900" height="{height}"'
        heading = f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
        self._parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', heading, _STYLE]
        self.rect(0.5, 0.5, 899, height - 1, "#fff", stroke="#d9e2ec", radius=10)
        self.text(24, 36, "h b", title)

    def rect(self, x: float, y: float, w: float, h: float, fill: str, *, stroke: str = "none", radius: int = 6) -> None:
        box = f'x="{x:.4g}" y="{y:.4g}" width="{w:.4g}" height="{h:.4g}"'
        self._parts.append(f'<rect {box} rx="{radius}" fill="{fill}" stroke="{stroke}"/>')

    def text(self, x: float, y: float, style: str, *lines: str, step: float = 14) -> None:
        for k, line in enumerate(lines):
            self._parts.append(f'<text x="{x:.4g}" y="{y + step * k:.4g}" class="{style}">{escape(line)}</text>')

    def line(self, *points: tuple[float, float], style: str = "a") -> None:
        """A line through points. style: "a" draws an arrow."""
        path = "L".join(f"{x:.4g},{y:.4g}" for x, y in points)
        self._parts.append(f'<path d="M{path}" class="{style}"/>')

    def labelled(self, x: float, end: float, y: float, label: str) -> None:
        """A horizontal arrow with a label above it."""
        self.text((x + end) / 2, y - 6, "m s c v", label)
        self.line((x, y), (end, y))

    def __str__(self) -> str:
        return "\n".join((*self._parts, "</svg>", ""))


@dataclass(frozen=True, slots=True)
class Step:
    """A box with the package and the result of `makes`. phases: the phases in inter/phases.py that print the result."""

    makes: Callable[..., Any]
    words: tuple[str, ...]
    phases: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """The package of the function without `minialpa`, or its module at the top level."""
        parts = self.makes.__module__.split(".")[1:]
        return ".".join(parts[:-1] or parts)

    @property
    def value(self) -> str:
        """The name of the type that the function returns, or of the entries of a list or tuple."""
        return str(re.findall(r"[A-Z]\w+", inspect.signature(self.makes).return_annotation)[-1])


#: In the order of the code: up to the stages, then for each choice of stages, then with a plan.
STEPS = (
    Step(Parameters.bind, ("arguments as leaves,", "names and a pytree")),
    Step(trace_step, ("one flat program;", "attentions recognised"), ("trace",)),
    Step(whole_scans, ("layers, and values that", "backward recomputes"), ("layers", "rematerialise")),
    Step(given_stages, ("layers and a submesh", "for each stage")),
    Step(split_micro_batches, ("loops over micro-", "batches, and updates"), ("microbatch",)),
    Step(stage_split, ("tasks: equations that", "run together on a mesh"), ("stages",)),
    Step(MeshSolver.solve, ("a spec for each value,", "chosen by an ILP"), ("shardings",)),
    Step(build_plan, ("all decisions, with", "seconds and bytes")),
    Step(realise, (f"{realise.__name__}: the tasks of", "the plan, from the step")),
    Step(emit_program, ("instructions over", "numbered buffers"), ("instructions",)),
)
_BY_MESH, _LAYERED = Step(split_by_mesh, ()), Step(layered_step, ())
_PLAN = Step(Plan.from_json, ("layers, stages, specs,", "micro-batches;", "no equations"))
_RUNS = (
    Step(LocalExecutable.__call__, ("compiles and runs,", "in this process")),
    Step(ClusterExecutable.__call__, ("one call per step", "to each worker")),
)

_W, _H, _GAP = 144, 82, 84
_LEFT = [36 + k * (_W + _GAP) for k in range(4)]
_CENTRE = [x + _W / 2 for x in _LEFT]
_ROWS, _BORDER = (122, 268, 436, 614), 566


def data_flow() -> str:
    """docs/pictures/data-flow.svg."""
    svg = Svg(702, "From a training step to a running program", "Packages of minialpa, and the values between them.")
    svg.text(24, 57, "g", "A box is a package. The label on its arrow is the frozen value that the package returns.")
    svg.rect(622, 46, 30, 14, _CHIP, radius=7)
    svg.text(658, 57, "s g", "a phase in minialpa plan MODEL --dump")
    svg.rect(16, 72, 868, _BORDER - 72, "#f3f7fc", radius=8)
    svg.rect(16, _BORDER, 868, 120, "#fdf4e7", radius=8)
    svg.line((16, _BORDER), (884, _BORDER), style="f")
    svg.text(872, _BORDER - 8, "b e g", "pure planning (no devices)", "runtime (devices)", step=26)
    _planning(svg)
    _stored_plan(svg, _ROWS[2])
    _runs(svg, _ROWS[3])
    return str(svg)


def _planning(svg: Svg) -> None:
    """The steps in rows of four, each with its value on the arrow to the next step."""
    svg.text(_CENTRE[0], 92, "m s c v", "step(state, batch)")
    svg.line((_CENTRE[0], 97), (_CENTRE[0], _ROWS[0]))
    svg.rect(26, _ROWS[1] - 30, 848, _H + 40, "#e6eef8", stroke="#c3d3e8", radius=8)
    svg.text(864, _ROWS[1] - 12, "s e g", "for each choice of stages that the planner tries")
    for k, step in enumerate(STEPS):
        # The plan and its file come before the last two.
        row, column = divmod(k if k < 8 else k + 2, 4)
        _box(svg, _LEFT[column], _ROWS[row], step)
        if column < 3:
            svg.labelled(_LEFT[column] + _W, _LEFT[column + 1], _ROWS[row] + 34, step.value)

    stages, best = f"{_LAYERED.value}, {STEPS[3].value} of each stage", f"{STEPS[7].value} with the least seconds"
    for row, (down, label) in enumerate(((20, stages), (36, best))):
        x, target, y = _CENTRE[3], _CENTRE[row], _ROWS[row] + _H + down
        svg.text((x + target) / 2, y - 6, "m s c v", label)
        svg.line((x, _ROWS[row] + _H), (x, y), (target, y), (target, _ROWS[row + 1]))


def _box(svg: Svg, x: float, y: float, step: Step, h: float = _H) -> None:
    """A package, its work in words, and its phases on chips."""
    svg.rect(x, y, _W, h, _GREEN if step is _PLAN else "#fff", stroke=_LINE)
    svg.text(x + 10, y + 20, "m b l", step.package)
    svg.text(x + 10, y + 37, "s g", *step.words)
    for phase in step.phases:
        width = 5.8 * len(phase) + 10
        svg.rect(x + 6, y + 60, width, 16, _CHIP, radius=8)
        svg.text(x + 6 + width / 2, y + 71.5, "m t c v", phase)
        x += width + 3


def _stored_plan(svg: Svg, y: float) -> None:
    """The plan, its file, and the path of a saved plan."""
    file, plan = _LEFT[:2]
    check = f"{realise.__name__} checks that it fits the traced step."
    svg.text(file, y - 24, "s g", "A saved plan starts here and needs no search:", check)
    svg.rect(file, y, _W, _H, _GREEN, stroke=_LINE, radius=0)
    svg.text(file + 10, y + 20, "m b l", "plan.json")
    svg.text(file + 10, y + 37, "s g", "the same decisions", "in a JSON file")
    _box(svg, plan, y, _PLAN)
    svg.labelled(plan, file + _W, y + 28, Plan.save.__qualname__)
    svg.labelled(file + _W, plan, y + 60, Plan.load.__qualname__)
    svg.labelled(plan + _W, _LEFT[2], y + 34, _PLAN.value)
    svg.text(_CENTRE[2] + 8, y - 18, "m s v", STEPS[1].value)
    svg.line((_CENTRE[2], y - 32), (_CENTRE[2], y))


def _runs(svg: Svg, y: float) -> None:
    """The two ways to run a program: in this process, and on a cluster."""
    turn = _ROWS[2] + _H + 18
    svg.line((_CENTRE[3], turn - 18), (_CENTRE[3], turn), (_CENTRE[0], turn), style="")
    for step, x, program in zip(_RUNS, _LEFT[::2], (STEPS[9].value, f"{_BY_MESH.value} of each mesh"), strict=True):
        svg.line((x + _W / 2, turn), (x + _W / 2, y))
        svg.text(x + _W / 2 + 8, y - 14, "m s v", program)
        _box(svg, x, y, step, h=60)
        svg.line((x + _W, y + 30), (x + _W + _GAP, y + 30))
        svg.text(x + _W + _GAP + 6, y + 34, "m s v", "result leaves")


_SHARDS = ("#bfdbfe", "#fde68a", "#bbf7d0", "#fbcfe8")
_PASSES = {"forward": "#bfdbfe", "backward": "#fed7aa", "update": "#bbf7d0"}
_START, _LENGTH, _LANE = 88, 784, 38


def planned() -> Plan:
    """The plan in the picture. The planner chooses its stages, meshes and specs."""
    optimizer = optax.adamw(1e-3)

    def train_step(params: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            hidden = batch["x"] + jax.nn.gelu(batch["x"] @ params["up0"]) @ params["down0"]
            minialpa.mark_pipeline_boundary()
            result = hidden + jax.nn.gelu(hidden @ params["up1"]) @ params["down1"]
            return jnp.mean((result - batch["y"]) ** 2)

        value, grads = minialpa.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    rows, up, down = (jax.ShapeDtypeStruct((4096 * a, 4096 * b), jnp.float32) for a, b in ((2, 1), (1, 4), (4, 1)))
    params = {"up0": up, "down0": down, "up1": up, "down1": down}
    args = (params, jax.eval_shape(optimizer.init, params), {"x": rows, "y": rows})
    method = PipeshardParallel(num_micro_batches=4, layer_option=ManualLayerOption(), stage_option=AutoStageOption())
    cluster = ClusterSpec.preset("h100", num_hosts=2, devices_per_host=4)
    with jax.numpy_dtype_promotion("standard"):
        return minialpa.plan(train_step, args, cluster=cluster, method=method)


def plan_on_a_mesh(plan: Plan) -> str:
    """docs/pictures/plan-on-a-mesh.svg."""
    svg = Svg(808, "A plan: which device holds which part, and when it computes", f"Made with jax {jax.__version__}.")
    hosts, per_host, device = plan.cluster.num_hosts, plan.cluster.devices_per_host, plan.cluster.device.name.upper()
    step = f"The step trains two feed-forward blocks with AdamW on {hosts} hosts of {per_host} {device} devices."
    search = "The planner has chosen stages, meshes and specs. Each colour is a shard, with the numbers of its devices."
    specs = "S0 splits a dimension over axis 0 of the mesh, S01 over both axes, and R does not split it."
    svg.text(24, 58, "g", step, search, specs, step=17)
    for number, x in enumerate((16, 490)):
        _stage(svg, plan, number, x, 108)
    for one in plan.transfers:
        name, y, ends = ("activation", 184, (416, 484)) if one.source.number == 0 else ("gradient", 238, (484, 416))
        svg.line((ends[0], y), (ends[1], y))
        svg.text(450, y - 7, "s c", name, bytes_text(one.n_bytes), step=22)
    svg.text(450, 280, "s c g", "for each", "micro-batch")
    _timeline(svg, minialpa.simulate(plan), 622)
    return str(svg)


def _stage(svg: Svg, plan: Plan, number: int, x: float, y: float) -> None:
    """The panel of one stage: its mesh with axis 0 down and axis 1 to the right, its predictions and its arrays."""
    stage = plan.stages[number]
    last, host = stage.first_device + stage.n_devices - 1, stage.first_device // plan.cluster.devices_per_host
    svg.rect(x, y, 394, 484, "#f8fafc", stroke="#d9e2ec", radius=8)
    svg.text(x + 16, y + 25, "b l", f"Stage {number}: block {number}")
    svg.text(x + 378, y + 25, "e g", f"host {host}, devices {stage.first_device} to {last}")
    left, top, (rows, columns) = x + 58, y + 68, stage.logical_shape
    for device, (i, j) in enumerate(np.ndindex(rows, columns), stage.first_device):
        svg.rect(left + 44 * j, top + 44 * i, 38, 38, "#fff", stroke=_GREY, radius=4)
        svg.text(left + 44 * j + 19, top + 44 * i + 23, "m b c", str(device))
    svg.line((left, top - 8), (left + 44 * columns - 6, top - 8))
    svg.text(left + 22 * columns - 3, top - 14, "s c g", "axis 1")
    svg.line((left - 8, top), (left - 8, top + 44 * rows - 6))
    svg.text(left - 13, top + 22 * rows + 1, "s e g", "axis 0")
    passes = [f"{seconds_text(one.seconds)} per micro-batch" for one in stage.passes]
    once = f"{seconds_text(stage.update_s)} per step", f"{bytes_text(stage.peak_bytes)} per device"
    svg.text(x + 168, y + 80, "g", *(one.kind for one in stage.passes), "update", "memory", step=21)
    svg.text(x + 234, y + 80, "", *passes, *once, step=21)
    for k, (role, array) in enumerate(_arrays(plan, number)):
        _cut_array(svg, x + 16, y + 174 + 77 * k, role, array, stage)


def _arrays(plan: Plan, number: int) -> list[tuple[str, PlacedValue]]:
    """The part of the batch that a block reads, its two weights, and the activation between them, with their roles."""
    placed = {one.path: one for one in plan.inputs}
    up, down = placed[f"params['up{number}']"], placed[f"params['down{number}']"]
    product = next(one for one in plan.stages[number].operators if one.part == "forward")
    hidden = replace(up, path=f"x @ up{number}", shape=product.shape, specs=(product.result,))
    batch = ("labels", placed["batch['y']"]) if number else ("examples", placed["batch['x']"])
    return [batch, ("weight", up), ("activation of a micro-batch", hidden), ("weight", down)]


def _cut_array(svg: Svg, x: float, y: float, role: str, array: PlacedValue, stage: StagePlan) -> None:
    """An array cut into shards, with one colour for each shard, and its spec in words."""
    (rows, columns), (spec,), mesh = array.shape, array.specs, stage.logical_shape
    holders: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for device, place in enumerate(np.ndindex(*mesh), stage.first_device):
        holders[tuple(place[axis] for axis in spec.axes)].append(str(device))
    width, height = 92 * min(1.0, (columns / rows) ** 0.3), 66 * min(1.0, (rows / columns) ** 0.3)
    n_down, n_across = (math.prod(mesh[axis] for axis in axes) for axes in spec.dims)
    w, h = width / n_across, height / n_down
    for k, shard in enumerate(sorted(holders)):
        left, top = x + 46 - width / 2 + w * (k % n_across), y + 33 - height / 2 + h * (k // n_across)
        svg.rect(left, top, w, h, _SHARDS[k], stroke=_GREY, radius=0)
        svg.text(left + w / 2, top + h / 2 + 3.5, "m t c", " ".join(holders[shard]))
    svg.text(x + 106, y + 16, "m", f"{array.path} f32[{rows},{columns}]")
    svg.text(x + 106, y + 36, "m b v l", str(spec))
    svg.text(x + 162, y + 36, "g", role)
    svg.text(x + 106, y + 54, "", spec_words(spec, len(mesh)))


def spec_words(spec: Spec, n_axes: int) -> str:
    """The spec of a matrix on a mesh of `n_axes` axes: `rows over axis 0, replicated over axis 1` for `S0,R`."""
    replicated = tuple(axis for axis in range(n_axes) if axis not in spec.axes)
    parts = zip(("rows", "columns", "replicated"), (*spec.dims, replicated), strict=True)
    return ", ".join(f"{what} over {axes_text(axes)}" for what, axes in parts if axes)


def _timeline(svg: Svg, timeline: Timeline, y: float) -> None:
    """The passes of each stage to scale, and the transfers between the stages."""
    scale = _LENGTH / timeline.total_s
    order = f"{timeline.schedule.upper()} with {timeline.n_micro_batches} micro-batches"
    svg.text(24, y, "b l", f"One step: {order}, {seconds_text(timeline.total_s)} by minialpa.simulate(plan)")
    tops = [y + 20 + (_LANE + 26) * k for k in range(len(timeline.stages))]
    for k, (stage, top) in enumerate(zip(timeline.stages, tops, strict=True)):
        svg.rect(_START, top, _LENGTH, _LANE, "#edf1f5", radius=3)
        svg.text(24, top + 17, "b", f"Stage {k}")
        svg.text(24, top + 32, "s g", f"waits {timeline.bubble[k]:.0%}")
        for one in stage.passes:
            left, width = _START + scale * one.start_s, scale * (one.end_s - one.start_s)
            name = "update" if one.micro_batch is None else f"{one.kind[0].upper()}{one.micro_batch}"
            svg.rect(left, top, width, _LANE, _PASSES[one.kind], stroke="#fff", radius=3)
            svg.text(left + width / 2, top + _LANE / 2 + 4, "s c" if one.micro_batch is None else "b c", name)
    for sent in timeline.transfers:
        from_bottom = sent.target_stage > sent.source_stage
        y, end_y = tops[sent.source_stage] + _LANE * from_bottom, tops[sent.target_stage] + _LANE * (not from_bottom)
        svg.line((_START + scale * sent.start_s, y), (_START + scale * sent.end_s, end_y))

    for k in range(int(1e3 * timeline.total_s) + 1):
        svg.text(_START + scale * k / 1e3, tops[-1] + _LANE + 18, "s c g", f"{k} ms")
    words = "F2: forward pass of micro-batch 2. B2: its backward pass. Arrows: transfers. Grey: the stage waits."
    svg.text(24, tops[-1] + _LANE + 44, "g", words)


def pictures() -> dict[str, str]:
    """The text of each picture, by the name of its file."""
    return {"data-flow.svg": data_flow(), "plan-on-a-mesh.svg": plan_on_a_mesh(planned())}


if __name__ == "__main__":
    for name, text in pictures().items():
        (FOLDER / name).write_text(text)
