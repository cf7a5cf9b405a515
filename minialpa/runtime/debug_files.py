"""The parts of an executable go in; the files of `Executable.dump_debug_info` come out.

Alpa's scripts look for files that begin with the name of the step.
"""

from __future__ import annotations

import math
import platform
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from minialpa.ir.equations import aval_bytes
from minialpa.plan import PlacementSpec, Plan
from minialpa.programs.program import Accumulate, MeshShape, Program, Run, Transfer, numbered_leaves
from minialpa.programs.resharding import Box, Move, Resharding
from minialpa.runtime.arrays import dtype_named
from minialpa.runtime.runner import Runner
from minialpa.support.sizes import bytes_text

#: Packages whose versions change plans or programs.
_PACKAGES = ("minialpa", "jax", "jaxlib", "numpy", "flax", "optax", "ray")


@dataclass(frozen=True, slots=True)
class DebugFile:
    """about: one line."""

    name: str
    about: str
    text: str


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DebugParts:
    """The content of the files.

    Attributes:
        name: of the user's function.
        placements: of argument leaves, and of result leaves.
        planning_texts: makes further files: name -> text, which begins with its description.
    """

    name: str
    plan: Plan
    program: Program
    runner: Runner
    placements: tuple[Sequence[PlacementSpec], Sequence[PlacementSpec]]
    planning_texts: Callable[[], Mapping[str, str]]


def debug_files(parts: DebugParts) -> Iterator[DebugFile]:
    """The last one, README.txt, has a line for each other file."""
    listed = []
    for file in _all_files(parts):
        listed.append(f"{file.name}: {file.about}")
        yield file
    yield DebugFile("README.txt", "this list", "\n".join(listed))


def _all_files(parts: DebugParts) -> Iterator[DebugFile]:
    prefix, plan, program, runner = _file_name(parts.name), parts.plan, parts.program, parts.runner
    yield DebugFile("plan.json", "the plan, for `minialpa.Plan.load`", plan.to_json())
    yield DebugFile("summary.txt", "the plan as text, in full", plan.summary(full=True))
    yield DebugFile("placements.txt", "shardings of arguments, results and operators", plan.explain(""))
    lines = "\n".join(_instruction_lines(program))
    yield DebugFile("instructions.txt", "the instructions that the runtime issues", lines)
    yield from _program_files(prefix, program, runner.hlo_texts())
    yield from _memory_files(prefix, program, runner.allocation_sizes())

    transfers = "\n\n".join(_transfer_paragraphs(parts))
    yield DebugFile(f"{prefix}_resharding_tasks.txt", "transfers between meshes, and their sends", transfers)
    for side, specs in zip(("input", "output"), parts.placements, strict=True):
        text = "\n".join(map(str, specs))
        yield DebugFile(f"{prefix}_{side}_placement_specs.txt", f"meshes and shardings of each {side}", text)

    for name, text in parts.planning_texts().items():
        yield DebugFile(name, text.partition("\n")[0], text)
    for name, text in runner.descriptions().items():
        yield DebugFile(f"{name}.txt", "a process of the runtime, or its devices", text)
    yield DebugFile("versions.txt", "versions of Python and packages", "\n".join(_version_lines()))


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII)


def _stage_prefix(prefix: str, program: Program, mesh: int) -> str:
    return prefix if len(program.meshes) == 1 else f"{prefix}_stage_{mesh}"


def _instruction_lines(program: Program) -> Iterator[str]:
    for i, instruction in enumerate(program.instructions):
        name = ""
        if isinstance(instruction, Run | Accumulate):
            name = f"{program.functions[instruction.function].name} "
        yield f"{i}: {name}{instruction}"


def _version_lines() -> Iterator[str]:
    yield f"python {platform.python_version()}"
    for package in _PACKAGES:
        try:
            yield f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            yield f"{package} not installed"


# ---- programs and memory ---------------------------------------------------------------------------------------------


def _program_files(prefix: str, program: Program, texts: Sequence[str]) -> Iterator[DebugFile]:
    """Each distinct program once. The first has the name of the stage alone."""
    functions: dict[tuple[int, str], list[str]] = defaultdict(list)
    for function, text in zip(program.functions, texts, strict=True):
        functions[function.mesh, text].append(function.name)

    used: Counter[str] = Counter()
    for (mesh, text), names in functions.items():
        stage = _stage_prefix(prefix, program, mesh)
        stem = f"{stage}_{_file_name(names[0])}" if used[stage] else stage
        used[stem] += 1
        number = f"_{used[stem]}" if used[stem] > 1 else ""
        of_stage = "" if len(program.meshes) == 1 else f" of stage {mesh}"
        called = ", ".join(f"`{name}`" for name in dict.fromkeys(names))
        yield DebugFile(f"{stem}{number}.hlo", f"compiled HLO of {called}{of_stage}", text)


def _memory_files(prefix: str, program: Program, sizes: Sequence[int]) -> Iterator[DebugFile]:
    """Alpa's lines, with a GB of 1024**3 bytes, and the bytes of each function."""
    by_mesh: dict[int, list[tuple[str, int]]] = {mesh: [] for mesh in range(len(program.meshes))}
    for function, size in zip(program.functions, sizes, strict=True):
        by_mesh[function.mesh].append((function.name, size))

    for mesh, found in by_mesh.items():
        name = f"{_stage_prefix(prefix, program, mesh)}.mem_usage.txt"
        yield DebugFile(name, f"bytes per device of the functions of stage {mesh}", _memory_text(found))
    largest = [(f"stage {mesh}", max((size for _, size in found), default=0)) for mesh, found in by_mesh.items()]
    yield DebugFile(f"{prefix}_mem_usage.txt", "bytes per device of the largest stage", _memory_text(largest))


def _memory_text(sizes: Sequence[tuple[str, int]]) -> str:
    most = max((size for _, size in sizes), default=0)
    return "\n".join([f"total_allocation_size: {most / 1024**3:.3f} GB", *(f"{name}: {n} bytes" for name, n in sizes)])


# ---- transfers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeldArray:
    name: str
    shape: tuple[int, ...]
    dtype: Any
    mesh: int
    spec: PartitionSpec

    @property
    def n_bytes(self) -> int:
        return aval_bytes(self)


def _transfer_paragraphs(parts: DebugParts) -> list[str]:
    """A paragraph for each transfer; equal ones, of several micro-batches, once with a count."""
    program, reshardings, held = parts.program, parts.runner.reshardings, _arguments(parts)
    counts: Counter[str] = Counter()
    for instruction in program.instructions:
        match instruction:
            case Run(number, _, outputs):
                function = program.functions[number]
                results = zip(outputs, function.out_avals, function.out_specs, strict=True)
                for k, (buffer, aval, spec) in enumerate(results):
                    held[buffer] = _HeldArray(
                        name=f"result {k} of {function.name}",
                        shape=aval.shape, dtype=aval.dtype, mesh=function.mesh, spec=spec,
                    )  # fmt: skip
            case Transfer(source, target, mesh, spec):
                array = held[source]
                held[target] = replace(array, mesh=mesh, spec=spec)
                if array.mesh != mesh:
                    counts[_transfer_text(program.meshes, array, held[target], reshardings.get(target))] += 1
    return [text if n == 1 else f"{n} times: {text}" for text, n in counts.items()] or [
        "No array moves between meshes."
    ]


def _arguments(parts: DebugParts) -> dict[int, _HeldArray]:
    program = parts.program
    leaves = list(numbered_leaves(parts.placements[0], program.blocks.arguments))
    held = {}
    for slot in program.inputs:
        leaf, rows = leaves[slot.leaf]
        shape = list(leaf.shape) if rows is None else [rows[1] - rows[0], *leaf.shape[1:]]
        name = leaf.path if rows is None else f"{leaf.path}[{rows[0]}:{rows[1]}]"
        if slot.rows is not None:
            shape[slot.rows[2]] = slot.rows[1] - slot.rows[0]
        held[slot.buffer] = _HeldArray(
            name=name, shape=tuple(shape), dtype=dtype_named(leaf.dtype), mesh=slot.mesh, spec=slot.spec
        )
    for constant in program.constants:
        value = constant.value if hasattr(constant.value, "dtype") else np.asarray(constant.value)
        held[constant.buffer] = _HeldArray(
            name="constant", shape=value.shape, dtype=value.dtype, mesh=constant.mesh, spec=constant.spec
        )
    return held


def _transfer_text(
    meshes: Sequence[MeshShape], source: _HeldArray, target: _HeldArray, resharding: Resharding | None
) -> str:
    lines = [
        f"{source.name} {source.dtype}{list(source.shape)}, {bytes_text(source.n_bytes)}",
        f"from {_place_text(meshes, source)}",
        f"to {_place_text(meshes, target)}",
    ]
    if resharding is None:
        return "\n  ".join([*lines, "by `jax.device_put` in this process"])
    if resharding.landing != target.spec:
        lines.append(f"arrives as {resharding.landing}, then mesh {target.mesh} gathers the rest")
    return "\n  ".join([*lines, *map(_move_text, resharding.moves)])


def _place_text(meshes: Sequence[MeshShape], array: _HeldArray) -> str:
    mesh = meshes[array.mesh]
    last = mesh.first_device + math.prod(mesh.logical_shape) - 1
    shape = " x ".join(map(str, mesh.logical_shape))
    return f"mesh {array.mesh} ({shape}, devices {mesh.first_device} to {last}): {array.spec}"


def _move_text(move: Move) -> str:
    verb = "relays" if move.relayed else "sends"
    return f"device {move.source} {verb} {_box_text(move.box)} to {', '.join(map(str, move.targets))}"


def _box_text(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"
