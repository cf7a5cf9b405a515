"""Edited plans: tiny steps with a plan of each kind, edits of a plan's JSON, and the outcome of an edit.

An outcome is `right` (it ran, with the numbers of the serial run) or `refused` (a MinialpaError that names the field).
All other outcomes are failures: `wrong` numbers, an error of another `raw` kind, a refusal that is `unnamed`, and too
`slow` or too `large`.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import minialpa
from minialpa import (
    AutoLayerOption,
    AutoShardingOption,
    LogicalMesh,
    MinialpaError,
    PipeshardParallel,
    Plan,
    ShardParallel,
    UniformStageOption,
    Zero3Parallel,
)
from minialpa.inter.staging.staged_step import mesh_problems, realise
from minialpa.intra.strategies.candidates import nearest_candidate
from minialpa.intra.strategies.loops import scan_body
from minialpa.intra.strategies.reshard import partial_specs_of
from minialpa.methods import Method
from minialpa.plan.codec import encode
from minialpa.programs.program import Program
from minialpa.rules.common import is_summable
from minialpa.rules.known_rules import factors_of
from minialpa.runtime import local
from minialpa.sharding import EquationSpecs, Spec, specs_of
from minialpa.testing import assert_allclose

WIDTH, N_EXAMPLES = 8, 16
#: Limits for loading and running an edited plan; more than enough to compile a tiny step.
MOST_S, MOST_BYTES = 10, 10**9

Place = tuple[str | int, ...]
Loss = Callable[[Any, Any], jax.Array]


# ---- steps and their plans ------------------------------------------------------------------------------------------


def draw(*shape: int) -> Any:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32) * 0.3


def perceptron(n_layers: int) -> Loss:
    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for i in range(n_layers):
            x = jnp.tanh(x @ params[f"w{i}"] + params["b"][None])
            if i + 1 < n_layers:
                minialpa.mark_pipeline_boundary()
        return jnp.mean((x - batch["y"]) ** 2)

    return loss


def scanned(params: Any, batch: Any) -> jax.Array:
    """Layers in a scan, with a constant, a sum that is carried along and stacked results."""

    def layer(carry: Any, w: jax.Array) -> Any:
        x, total = carry
        x = x + jnp.tanh(x @ w + params["b"][None])
        return (x, total + jnp.sum(x * x)), x[:, 0]

    (x, total), first = jax.lax.scan(layer, (batch["x"], jnp.float32(0)), params["layers"])
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2) + 1e-3 * total + jnp.mean(first**2)


def language(params: Any, batch: Any) -> jax.Array:
    """A table that is looked up and multiplied with: rows split by position, counts, maxima and masks."""
    x = params["table"][batch["tokens"]]
    logits = jnp.tanh(x @ params["w"]) @ params["table"].T
    own = jnp.take_along_axis(logits, batch["tokens"][:, None], axis=-1)[:, 0]
    worst = jnp.max(logits, axis=0)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - own) + 0.1 * jnp.mean(worst)


def contrastive(params: Any, batch: Any) -> jax.Array:
    """Two layers, and a loss on all pairs of examples: two loops over micro-batches."""
    x = jnp.tanh(batch["x"] @ params["w0"] + params["b"][None])
    minialpa.mark_pipeline_boundary()
    x = jnp.tanh(x @ params["w1"] + params["b"][None])
    return jnp.mean(jax.nn.logsumexp(x @ batch["y"].T, axis=1)) - jnp.mean(x * batch["y"])


def training(loss: Loss) -> Callable[[Any, Any], Any]:
    """A step with momentum, clipping by the global norm and a step counter.

    It also passes one array on, does not read another, and returns a constant.
    """

    def step(state: Any, batch: Any) -> Any:
        value, grads = minialpa.value_and_grad(loss)(state["params"], batch)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1.0), grads)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["moments"], grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], moments)
        new = {"params": params, "moments": moments, "n": state["n"] + 1, "seed": state["seed"]}
        return new, {"loss": value, "norm": norm, "rate": 0.1}

    return step


def with_state(params: Any, batch: Any) -> tuple[Any, Any]:
    state = {"params": params, "moments": jax.tree.map(lambda p: 0.1 * p, params), "n": np.int32(3)}
    return {**state, "seed": np.arange(8, dtype=np.uint32)}, {**batch, "ids": np.arange(N_EXAMPLES, dtype=np.int32)}


def vectors(n_layers: int) -> tuple[Any, Any]:
    params = {f"w{i}": draw(WIDTH, WIDTH) + i for i in range(n_layers)} | {"b": draw(WIDTH)}
    return with_state(params, {"x": draw(N_EXAMPLES, WIDTH), "y": draw(N_EXAMPLES, WIDTH) + 1})


def stack(n_layers: int) -> tuple[Any, Any]:
    params = {"layers": draw(n_layers, WIDTH, WIDTH), "b": draw(WIDTH), "head": draw(WIDTH, WIDTH)}
    return with_state(params, {"x": draw(N_EXAMPLES, WIDTH), "y": draw(N_EXAMPLES, WIDTH) + 1})


def text() -> tuple[Any, Any]:
    tokens = np.random.default_rng(0).integers(0, 16, N_EXAMPLES, np.int32)
    return with_state({"table": draw(16, WIDTH), "w": draw(WIDTH, WIDTH)}, {"tokens": tokens})


def pipeline(n: int, schedule: str, layers: Any = "manual", **stages: Any) -> PipeshardParallel:
    option = AutoShardingOption(force_batch_dim_to_mesh_dim=0, prefer_reduce_scatter=True)
    stages = {"num_stages": 2, "submesh_physical_shape": (1, 4), "submesh_logical_shape": (2, 2)} | stages
    chosen = UniformStageOption(**stages, submesh_autosharding_option=option)
    return PipeshardParallel(num_micro_batches=n, pipeline_schedule=schedule, layer_option=layers, stage_option=chosen)


#: Logical meshes without a device.
LINE, GRID = LogicalMesh((8,)), LogicalMesh((2, 4))

SUBJECTS: dict[str, tuple[Loss, Callable[[], tuple[Any, Any]], Method]] = {
    "line": (perceptron(2), lambda: vectors(2), ShardParallel(LINE)),
    "grid": (perceptron(2), lambda: vectors(2), ShardParallel(GRID, num_micro_batches=4)),
    "zero3": (perceptron(2), lambda: vectors(2), Zero3Parallel(GRID)),
    "language": (language, text, ShardParallel(GRID)),
    "scan": (scanned, lambda: stack(3), ShardParallel(GRID, num_micro_batches=2)),
    "1f1b": (perceptron(2), lambda: vectors(2), pipeline(4, "1f1b")),
    "1f1b of two loops": (contrastive, lambda: vectors(2), pipeline(2, "1f1b")),
    "interleaved": (
        perceptron(4),
        lambda: vectors(4),
        pipeline(4, "1f1b-interleaved", minialpa.ManualLayerOption(remat="full"), num_chunks=2),
    ),
    "blocks": (scanned, lambda: stack(4), pipeline(4, "1f1b", AutoLayerOption(2))),
}  # fmt: skip


class Subject:
    """A step with its plan and its serial results. It is traced once, and equal programs are compiled once."""

    def __init__(self, name: str) -> None:
        loss, self.args, method = SUBJECTS[name]
        self.step = training(loss)
        self.plan = minialpa.parallelize(self.step, method=method).plan(*self.args())
        self.data = json.loads(self.plan.to_json())
        self.expected = jax.device_get(jax.jit(self.step)(*self.args()))
        function = minialpa.parallelize(self.step, method=method)
        self.traced = function._trace(function._parameters.bind(self.args(), {}))
        self.problems = mesh_problems(realise(self.traced, self.plan).staged)
        self.runners: dict[str, local.LocalExecutable] = {}

    def run(self, plan: Plan) -> Any:
        """The results of the step under a plan, as `parallelize` runs it."""
        function = minialpa.parallelize(self.step, method=plan)
        function._trace = lambda _: self.traced
        with mock.patch.object(local, "LocalExecutable", self._runner):
            return jax.device_get(function(*self.args()))

    def _runner(self, program: Program, devices: Any) -> local.LocalExecutable:
        key = program_text(program)
        if key not in self.runners:
            self.runners[key] = _Executable(program, devices)
        return self.runners[key]


_Executable = local.LocalExecutable
subject = functools.cache(Subject)


def program_text(program: Program) -> str:
    """The difference between programs: instructions, buffers, and the text of functions."""
    functions = [
        (f.mesh, f.in_specs, f.out_specs, f.donated, re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(f.fun)(*f.in_avals))))
        for f in program.functions
    ]
    constants = [(c.buffer, c.mesh, c.spec, np.asarray(c.value).tobytes()) for c in program.constants]
    rest = program.meshes, program.inputs, program.instructions, program.outputs, program.donated_leaves
    return repr((functions, constants, rest))


# ---- outcomes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """`kind`: see the module. note: the error, or the difference."""

    kind: str
    note: str = ""


class _TooSlowError(BaseException):
    """Not an Exception, so that no handler on the way catches it."""


@contextmanager
def _time_limit() -> Iterator[None]:
    """Limits the CPU seconds of the block, over all threads, and its wall-clock time, far above."""

    def stop(*_: Any) -> None:
        raise _TooSlowError

    limits = ((signal.ITIMER_PROF, signal.SIGPROF, MOST_S), (signal.ITIMER_REAL, signal.SIGALRM, 30 * MOST_S))
    before = [signal.signal(number, stop) for _, number, _ in limits]
    for timer, _, seconds in limits:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (timer, number, _), handler in zip(limits, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


#: A refusal names the field of the plan, or states that the text is not a plan.
NAMED = re.compile(r"`plan\b|^Not a plan|^The plan has version")


def outcome_of(on: Subject, text: str) -> Outcome:
    """The outcome when a plan's text is loaded and run."""
    bytes_before = peak_bytes()
    try:
        with _time_limit():
            found = _outcome(on, text)
    except _TooSlowError:
        found = Outcome("slow")
    if peak_bytes() - bytes_before > MOST_BYTES:
        return Outcome("large", f"{(peak_bytes() - bytes_before) / 1e9:.1f} GB, {found}")
    return found


def _outcome(on: Subject, text: str) -> Outcome:
    try:
        plan = Plan.from_json(text)
        plan.summary()
        plan.explain("")
        plan.diff(on.plan)
        results = on.run(plan)
    except MinialpaError as error:
        return Outcome("refused" if NAMED.search(str(error)) else "unnamed", f"{type(error).__name__}: {error}"[:600])
    except Exception as error:
        return Outcome("raw", f"{type(error).__name__}: {error}"[:600])
    try:
        assert_allclose(results, on.expected, rtol=2e-4, atol=1e-5)
    except AssertionError as error:
        return Outcome("wrong", str(error)[:300])
    return Outcome("right")


# ---- edits ----------------------------------------------------------------------------------------------------------


def places(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """The places and values in JSON data."""
    yield place, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*place, key))


def at(data: Any, place: Place) -> Any:
    return functools.reduce(lambda v, key: v[key], place, data)


def put(data: Any, place: Place, value: Any) -> Any:
    """`data` with `value` at `place`, in place."""
    if not place:
        return value
    at(data, place[:-1])[place[-1]] = value
    return data


def spec_places(data: Any) -> dict[str, list[Place]]:
    """The places of specs, by the kind of their owner."""
    found: dict[str, list[Place]] = {}
    for place, value in places(data):
        if isinstance(value, str) and (kind := _spec_kind(place)):
            found.setdefault(kind, []).append(place)
    return found


def _spec_kind(place: Place) -> str | None:
    names = [key for key in place if isinstance(key, str)]
    if names[-1:] == ["equation_specs"]:
        numbers = place[place.index("equation_specs") + 2 :]
        inside = "body " if len(numbers) > 2 else ""
        return inside + ("operands", "made", "results")[int(numbers[-2])]
    if names[-1:] == ["input_specs"] or names[-2:] in (["inputs", "specs"], ["outputs", "specs"]):
        return " ".join(names[-2:])
    return "operators" if names[-1:] in (["result"], ["operands"]) and "operators" in names else None


def other_ways(rng: np.random.Generator, on: Subject, data: Any) -> tuple[Any, str]:
    """Other strategies for some equations, and other specs of their results: right, even if slow."""
    k = int(rng.integers(len(on.plan.stages)))
    problem, mesh_shape = on.problems[k], on.plan.stages[k].logical_shape
    chosen = on.plan.stages[k].equation_specs
    pairs = list(_plain_equations(problem.eqns, chosen, ("plan", "stages", k, "equation_specs")))
    n = int(rng.choice([1, 3, len(pairs)]))
    for i in rng.choice(len(pairs), min(n, len(pairs)), replace=False):
        place, eqn = pairs[i]
        operands, made = (tuple(any_spec(rng, v, mesh_shape) for v in vs) for vs in (eqn.invars, eqn.outvars))
        operands, made = nearest_candidate(eqn, factors_of(eqn).on_mesh(), mesh_shape, operands, made)
        results = tuple(any_spec(rng, v, mesh_shape, not_partial=v in problem.not_partial) for v in eqn.outvars)
        put(data, place, encode(EquationSpecs(operands, made, results)))
    return data, f"{n} other ways on stage {k}"


def _plain_equations(eqns: Any, chosen: Any, place: Place) -> Iterator[tuple[Place, Any]]:
    """Equations with their places in a plan, also in loops, without loops and calls that only pass arrays on."""
    for i, (eqn, specs) in enumerate(zip(eqns, chosen, strict=True)):
        if specs.body:
            yield from _plain_equations(scan_body(eqn).flat.eqns, specs.body, (*place, i, 3))
        elif eqn.primitive.name != "optimization_barrier":
            yield (*place, i), eqn


def any_spec(rng: np.random.Generator, v: Any, mesh_shape: tuple[int, ...], *, not_partial: bool = False) -> Spec:
    find = specs_of if not_partial or not is_summable(v) else partial_specs_of
    specs = list(find(v.aval.shape, mesh_shape))
    return specs[rng.integers(len(specs))]


def edited_spec(rng: np.random.Generator, text: str, known: list[str]) -> str:
    """Another spec: of a sum, of other axes, of another rank, or any other of the plan."""
    dims, _, partial = text.partition("+P")
    parts = dims.split(",") if dims else []
    match rng.integers(8):
        case 0 | 1:
            return dims + ("" if partial else f"+P{rng.choice(['0', '1', '01', '10', '00', '5'])}")
        case 2 | 3 if parts:
            parts[rng.integers(len(parts))] = str(rng.choice(["R", "S0", "S1", "S0", "S1", "S01", "S2"]))
        case 4 if parts:  # no spec of a dimension
            parts[rng.integers(len(parts))] = str(rng.choice(["S10", "S00", "S7", "S", "S-1", "X", "S0S1", "s0", ""]))
        case 5:
            parts = [parts[:-1], [*parts, "S0"], [str(p) for p in rng.permutation(parts)]][rng.integers(3)]
        case 6:  # summed instead of split
            axes = sorted({c for part in parts for c in part[1:]})
            return ",".join("R" for _ in parts) + ("+P" + "".join(axes) if axes else "")
        case _:
            return str(rng.choice(known))
    return ",".join(parts) + (f"+P{partial}" if partial else "")


def edit_specs(rng: np.random.Generator, data: Any) -> tuple[Any, str]:
    """One edit of a spec somewhere, or one that keeps several specs in agreement."""
    found = spec_places(data)
    kinds = sorted(found)
    kinds += [kind for kind in kinds if kind != "operators"] * 2  # operators are only for display
    kind = kinds[rng.integers(len(kinds))]
    place = found[kind][rng.integers(len(found[kind]))]
    old, new = at(data, place), edited_spec(rng, at(data, place), sorted({at(data, p) for p in found[kind]}))

    others, note = [place], "alone"
    match rng.integers(8):
        case 0 | 1 if "equation_specs" in place:
            others, note = (
                [(*place[:-2], *inside) for inside, _ in places(at(data, place[:-2]))],
                "in all of the equation",
            )
        case 2:
            others, note = [p for ps in found.values() for p in ps], "everywhere"
        case 3 if "equation_specs" in place:
            equations = at(data, place[: place.index("equation_specs") + 1])
            a, b = rng.integers(len(equations), size=2)
            equations[a], equations[b] = equations[b], equations[a]
            return data, f"{show(place[:4])} {a} and {b} swapped"
        case 4 if kind in ("stages input_specs", "inputs specs"):
            others = [p for k in ("stages input_specs", "inputs specs") for p in found.get(k, ())]
            note = "of inputs, as both sides have them"
    for other in others:
        if at(data, other) == old:
            put(data, other, new)
    return data, f"{show(place)}: {old} -> {new}, {note}"


NUMBERS: list[Any] = [
    0, 1, 2, 3, 8, -1, -7, 10**7, 10**15, 10**30, 10**400, 1e308, 0.5, True, float("inf"), float("nan"),
]  # fmt: skip
VALUES: list[Any] = [
    None, False, "", "x", "R", "S0", "none", "full", "gpipe", "1f1b", "inference", "1f1b-interleaved", "forward",
    "backward", "step", "update", [], {}, [[]], [0], [1, 0], [0, 0], {"x": 1}, "x" * 10**6, [0] * 10**5, "\ud800", "\0",
]  # fmt: skip


def edit_anything(rng: np.random.Generator, data: Any) -> tuple[Any, str]:
    """One edit of a number, a list, or of any value. `test_codec.py` edits fields and texts."""
    everywhere = [pair for pair in places(data) if pair[0]]
    # Each field counts as much as another, however often it occurs.
    by_field: dict[Any, list[tuple[Place, Any]]] = {}
    for place, value in everywhere:
        by_field.setdefault(tuple(k for k in place if isinstance(k, str)), []).append((place, value))
    fields = sorted(by_field)
    choices = by_field[fields[rng.integers(len(fields))]]
    place, value = choices[rng.integers(len(choices))]
    match rng.integers(4):
        case 0 | 1 if isinstance(value, int | float) and not isinstance(value, bool):
            near = [value + 1, value - 1, value * 2, -value, value / 2, value // 2]
            new = [*near, *NUMBERS][rng.integers(len(near) + len(NUMBERS))]
            return put(data, place, new), f"{show(place)}: {value} -> {str(new)[:30]}"
        case 0 | 1 if isinstance(value, list):
            return edit_list(rng, data, place, value)
        case 2 if len(choices) > 1:
            other, theirs = choices[rng.integers(len(choices))]
            if place != other[: len(place)] and other != place[: len(other)]:
                return put(put(data, place, theirs), other, value), f"{show(place)} and {show(other)} swapped"
    new = copy.deepcopy([*VALUES, *NUMBERS][rng.integers(len(VALUES) + len(NUMBERS))])
    return put(data, place, new), f"{show(place)}: {str(value)[:30]} -> {str(new)[:30]}"


def edit_list(rng: np.random.Generator, data: Any, place: Place, value: list[Any]) -> tuple[Any, str]:
    i = int(rng.integers(len(value))) if value else 0
    edits = {
        "longer": value + copy.deepcopy(value[-1:]),
        "permuted": [value[j] for j in rng.permutation(len(value))],
        "doubled": value + copy.deepcopy(value),
        "empty": [],
        "without one": value[:i] + value[i + 1 :],
    }
    what = str(rng.choice(sorted(edits)))
    new = copy.deepcopy(edits[what])
    return put(data, place, new), f"{show(place)} {what}"


def show(place: Place) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place).lstrip(".")


def mutation(rng: np.random.Generator, on: Subject, *, of_specs: bool) -> tuple[str, str]:
    """The text of an edited plan, and a description of the edit."""
    while True:
        data = copy.deepcopy(on.data)
        if of_specs and rng.integers(6) == 0:
            data, note = other_ways(rng, on, data)
        else:
            data, note = edit_specs(rng, data) if of_specs else edit_anything(rng, data)
        if data != on.data:
            return json.dumps(data), note
