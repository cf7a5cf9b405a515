"""HLO text as data: what `compiled.as_text()` prints in, computations of instructions out. Nothing is interpreted here.

%sum = f32[8,4]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
 name  shape         opcode     operands  attributes
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from minialpa.errors import VerifyError

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Instruction:
    """A line of a computation. `shape` and `attributes` are text; `operands` are names, or the value of a constant."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    def called(self, *keys: str) -> tuple[str, ...]:
        """Computations named by the attributes `keys`, such as `body` or `branch_computations`."""
        pattern = rf"[ ,](?:{'|'.join(keys)})=(?:\{{([^}}]*)\}}|%?([\w.\-]+))"
        return tuple(
            name.strip().lstrip("%")
            for several, one in re.findall(pattern, self.attributes)
            for name in (several or one).split(",")
            if name.strip()
        )


@dataclass(frozen=True, slots=True)
class Computation:
    """Instructions in the order of the text."""

    name: str
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Module:
    """Computations by name. n_devices: partitions times replicas."""

    computations: dict[str, Computation]
    entry: str
    n_devices: int


def parse_module(text: str) -> Module:
    """The module that XLA printed as `text`. Raises VerifyError if there is no entry computation."""
    text = re.sub(r"/\*.*?\*/", "", text)
    header = text.split("\n", 1)[0]
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)
    computations: dict[str, Computation] = {}
    entry, name, lines = "", "", list[Instruction]()
    for line in text.splitlines():
        if opening := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            name, lines = opening[2], []
            entry = name if opening[1] else entry
        elif line.startswith("}") and name:
            computations[name] = Computation(name, tuple(lines))
            name = ""
        elif name and " = " in line:
            lines.append(_instruction(line))
    if not entry:
        raise VerifyError(
            "Not the text of a compiled program: it has no `ENTRY`. Pass what `compiled.as_text()` gives."
        )
    return Module(computations, entry, math.prod(map(int, counts)))


def _instruction(line: str) -> Instruction:
    left, right = line.split(" = ", 1)
    end = _closing(right, 0) + 1 if right.startswith("(") else right.index(" ")
    opening = right.index("(", end)
    closing = _closing(right, opening)
    operands = tuple(part.split(" ")[-1].lstrip("%") for part in split_tuple(right[opening : closing + 1]))
    name = left.split()[-1].lstrip("%")
    return Instruction(name, right[:end], right[end:opening].strip(), operands, right[closing + 1 :])


def _closing(text: str, opening: int) -> int:
    """Place of the parenthesis that closes the one at `opening`."""
    depth = 0
    for mark in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if mark[0] == "(" else -1
        if depth == 0:
            return mark.start()
    raise VerifyError(f"A parenthesis is not closed in `{text[:200]}`. Pass the whole text of the program.")


def split_tuple(text: str) -> list[str]:
    """Parts of `(a, (b, c), d{1,0})` at its top level; of a text without parentheses, the text itself."""
    if not text.startswith("("):
        return [text]
    parts, depth, start = [], 0, 1
    for mark in re.finditer(r"[(){}\[\],]", text):
        if mark[0] in "({[":
            depth += 1
        elif mark[0] in ")}]":
            depth -= 1
        if depth == (1 if mark[0] == "," else 0):
            parts.append(text[start : mark.start()].strip())
            start = mark.end()
    return [part for part in parts if part]


def array_sizes(shape: str) -> Iterator[tuple[int, float]]:
    """(elements, bytes) of each array of a shape such as `f32[8,4]{1,0}` or a tuple of them."""
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", shape):
        n = math.prod(int(size.lstrip("<=")) for size in dims.split(",") if size)
        yield n, n * _dtype_bytes(dtype)


def array_dims(shape: str) -> tuple[int, ...]:
    """Dimensions of an array's shape: (8, 4) of `f32[8,4]{1,0}`."""
    return tuple(_numbers(shape[shape.index("[") : shape.index("]")]))


def _dtype_bytes(dtype: str) -> float:
    """Bytes of one element: the first number of the name is its bits (`bf16`, `f8e4m3fn`, `c64`); `pred` has eight."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else float(dtype == "pred")


def parse_groups(attributes: str, n_devices: int) -> Groups:
    """Devices of each `replica_groups`, in any of its forms; the pairs of `source_target_pairs`.

    `{{0,1},{2,3}}`, `{}` for all devices, `[2,4]<=[4,2]T(1,0)` for an iota, reshaped, transposed and reshaped, and
    `mesh['a'=2,'b'=4] {'a'}` for axes of a mesh or `'a':(1)2` for a part of one. Raises VerifyError on another form.
    """
    found = re.search(r"(?:replica_groups|source_target_pairs)=(.*)", attributes)
    text = found[1] if found else "{}"
    if listed := re.match(r"\{((?:\{[\d,]*\},?)*)\}", text):
        groups = tuple(tuple(map(int, part.split(","))) for part in re.findall(r"\{([\d,]+)\}", listed[1]))
        return groups or (tuple(range(n_devices)),)
    if iota := re.match(r"(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)", text):
        return _rows(_iota(iota[1]))
    if axes := re.match(r"mesh\[([^\]]*)\](?:, device_ids=\((.*?\]?(?:T\([\d,]+\))?)\))? \{(.*?)\}", text):
        return _mesh_groups(*axes.groups())
    raise VerifyError(f"Replica groups in a form that is not known: `{text[:80]}`. Teach `parse_groups` to read it.")


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in array.reshape(-1, array.shape[-1]).tolist())


def _iota(text: str) -> np.ndarray:
    """`[2,4]<=[4,2]T(1,0)`: iota(8) as [4,2], transposed by (1,0), as [2,4]. Without `[2,4]<=`, as one row."""
    target, _, rest = text.rpartition("<=")
    dims, _, order = rest.partition("T")
    source = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    source = source.transpose(_numbers(order)) if order else source
    return source.reshape(_numbers(target) if target else -1)


def _mesh_groups(mesh: str, device_ids: str | None, axes: str) -> Groups:
    """Groups over `axes` of the mesh, in its device order. `'a':(2)3` is the middle one of `a` as [2, 3, rest]."""
    sizes = {name: int(n) for name, n in re.findall(r"'([^']*)'=(\d+)", mesh)}
    devices = np.arange(math.prod(sizes.values()))
    if device_ids:
        devices = _iota(device_ids) if "[" in device_ids else np.array(_numbers(device_ids))
    chosen = [
        (name, int(before or 1), int(length or sizes[name]))
        for name, before, length in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", axes)
    ]
    parts: list[tuple[str, int, int]] = []  # (axis, place inside the axis, length)
    for name, size in sizes.items():
        cuts = sorted({1, size, *(c for n, before, length in chosen if n == name for c in (before, before * length))})
        parts.extend((name, low, high // low) for low, high in itertools.pairwise(cuts))
        if size == 1:
            parts.append((name, 1, 1))
    inside = [i for n, b, k in chosen for i, (name, at, _) in enumerate(parts) if n == name and b <= at < max(b * k, 2)]
    outside = [i for i in range(len(parts)) if i not in inside]
    grid = devices.reshape([length for _, _, length in parts]).transpose(outside + inside)
    return _rows(grid.reshape(-1, math.prod(parts[i][2] for i in inside)))
