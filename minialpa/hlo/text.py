"""A parser of HLO text: the output of `compiled.as_text()` in, computations of instructions out.

%sum = f32[8,4]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
 name  shape         opcode     operands  attributes
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from minialpa.errors import VerifyError

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """A line of a computation; all fields are text.

    name: without `%`.
    opcode: such as `all-reduce`.
    operands: names of the operands; the value of a constant; the number of a parameter.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def n_trips(self) -> int:
        """Of a `while`: 1 if XLA does not print it, and 0 of `minialpa.grouped.NEVER`."""
        if re.search(r'minialpa_trips_0/while"', self.attributes):
            return 0
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(known[1]) if known else 1

    @property
    def expected_trips(self) -> float:
        """`n_trips`, or the mean number in the scope of a loop over tiles (`minialpa.grouped`)."""
        expected = re.search(r'minialpa_trips_([\d.]+)/while"', self.attributes)
        return float(expected[1]) if expected else self.n_trips

    def called(self, *keys: str) -> tuple[str, ...]:
        """In the attributes `keys`, such as `body` or `branch_computations`."""
        pattern = rf"[ ,](?:{'|'.join(keys)})=(?:\{{([^}}]*)\}}|%?([\w.\-]+))"
        return tuple(
            name.strip().lstrip("%")
            for several, one in re.findall(pattern, self.attributes)
            for name in (several or one).split(",")
            if name.strip()
        )


@dataclass(frozen=True, slots=True)
class Computation:
    name: str
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Module:
    """A program. computations: by name, without `%`. n_devices: partitions times replicas."""

    computations: dict[str, Computation]
    entry: str
    n_devices: int


def parse_module(text: str) -> Module:
    """Raises VerifyError if there is no entry computation."""
    text = re.sub(r"/\*.*?\*/", "", text)  # comments, such as /*index=5*/
    header = text.split("\n", 1)[0]
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", header)

    # `name` is empty outside of computations.
    computations: dict[str, Computation] = {}
    entry, name, instructions = "", "", list[Instruction]()
    for line in text.splitlines():
        if opening := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            name, instructions = opening[2], []
            entry = name if opening[1] else entry
        elif line.startswith("}") and name:
            computations[name] = Computation(name, tuple(instructions))
            name = ""
        elif name and " = " in line:
            instructions.append(_instruction(line))

    if not entry:
        raise VerifyError(
            "This is no text of a compiled program, as it has no `ENTRY`. Pass the result of `compiled.as_text()`."
        )
    return Module(computations, entry, math.prod(map(int, counts)))


def _instruction(line: str) -> Instruction:
    left, right = line.split(" = ", 1)
    end_of_shape = _closing_parenthesis(right, 0) + 1 if right.startswith("(") else right.index(" ")
    opening = right.index("(", end_of_shape)
    closing = _closing_parenthesis(right, opening)
    return Instruction(
        name=left.split()[-1].lstrip("%"),
        shape=right[:end_of_shape],
        opcode=right[end_of_shape:opening].strip(),
        operands=tuple(part.split(" ")[-1].lstrip("%") for part in split_tuple(right[opening : closing + 1])),
        attributes=right[closing + 1 :],
    )


def _closing_parenthesis(text: str, opening: int) -> int:
    depth = 0
    for mark in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if mark[0] == "(" else -1
        if depth == 0:
            return mark.start()
    raise VerifyError(f"A parenthesis is not closed in `{text[:200]}`. Pass the whole text of `compiled.as_text()`.")


def split_tuple(text: str) -> list[str]:
    """The top-level parts of a tuple such as `(a, (b, c), d{1,0})`; other texts are one part."""
    if not text.startswith("("):
        return [text]

    parts, depth, start = [], 0, 1
    for mark in re.finditer(r"[(){}\[\],]", text):
        if mark[0] in "({[":
            depth += 1
        elif mark[0] in ")}]":
            depth -= 1
        # A comma ends a part at depth 1, the last parenthesis at depth 0.
        if depth == (1 if mark[0] == "," else 0):
            parts.append(text[start : mark.start()].strip())
            start = mark.end()
    return [part for part in parts if part]


def array_sizes(shape: str) -> Iterator[tuple[int, float]]:
    """(elements, bytes) of each array of a shape such as `f32[8,4]{1,0}` or a tuple of shapes."""
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", shape):
        n_elements = math.prod(int(size.lstrip("<=")) for size in dims.split(",") if size)
        # The first number in a dtype's name is its bits (`bf16`, `f8e4m3fn`, `c64`).
        bits = re.search(r"\d+", dtype)
        yield n_elements, n_elements * (int(bits[0]) / 8 if bits else float(dtype == "pred"))


def array_dims(shape: str) -> tuple[int, ...]:
    """`f32[8,4]{1,0}` gives (8, 4)."""
    return tuple(_numbers(shape[shape.index("[") : shape.index("]")]))


def parse_groups(attributes: str, n_devices: int) -> Groups:
    """The device groups of `replica_groups`, or the pairs of `source_target_pairs`.

    Raises VerifyError for a form that is not one of

    * `{{0,1},{2,3}}`: a list; `{}` stands for one group of all devices;
    * `[2,4]<=[4,2]T(1,0)`: the rows of an iota that is reshaped, transposed and reshaped (`_iota`);
    * `mesh['a'=2,'b'=4] {'a'}`: axes of a mesh, or parts of axes as in `'a':(1)2` (`_mesh_groups`).
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
    raise VerifyError(
        f"The compiled program has device groups in an unknown form, `{text[:80]}`. This is a bug in minialpa: report "
        "it with this message."
    )


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in array.reshape(-1, array.shape[-1]).tolist())


def _iota(text: str) -> np.ndarray:
    """`[2,4]<=[4,2]T(1,0)` is iota(8) as [4,2], transposed by (1,0), as [2,4]. Without `[2,4]<=`, it is one row."""
    target, _, rest = text.rpartition("<=")
    dims, _, order = rest.partition("T")
    source = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    source = source.transpose(_numbers(order)) if order else source
    return source.reshape(_numbers(target) if target else -1)


@dataclass(frozen=True, slots=True)
class _SubAxis:
    """`'a':(2)3` in HLO: with mesh axis `a` reshaped to [2, 3, rest], the dimension of length 3.

    before: product of the lengths before this dimension, here 2. length: here 3.
    """

    axis: str
    before: int
    length: int

    def includes(self, other: _SubAxis) -> bool:
        """other: one of the shortest sub-axes that HLO names."""
        return self.axis == other.axis and self.before <= other.before < max(self.before * self.length, 2)


def _mesh_groups(mesh: str, device_ids: str | None, axes: str) -> Groups:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh)}
    devices = np.arange(math.prod(sizes.values()))
    if device_ids:
        devices = _iota(device_ids) if "[" in device_ids else np.array(_numbers(device_ids))
    chosen = [
        _SubAxis(name, int(before or 1), int(length or sizes[name]))
        for name, before, length in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", axes)
    ]

    # Each part of an axis is a dimension; dimensions inside groups move to the end.
    parts = [part for name, size in sizes.items() for part in _parts_of_axis(name, size, chosen)]
    inside = [i for sub_axis in chosen for i, part in enumerate(parts) if sub_axis.includes(part)]
    outside = [i for i in range(len(parts)) if i not in inside]
    grid = devices.reshape([part.length for part in parts]).transpose(outside + inside)
    return _rows(grid.reshape(-1, math.prod(parts[i].length for i in inside)))


def _parts_of_axis(axis: str, size: int, chosen: Sequence[_SubAxis]) -> list[_SubAxis]:
    """Cuts are where chosen sub-axes begin and end."""
    cuts = {1, size}
    for sub_axis in chosen:
        if sub_axis.axis == axis:
            cuts |= {sub_axis.before, sub_axis.before * sub_axis.length}
    parts = [_SubAxis(axis, low, high // low) for low, high in itertools.pairwise(sorted(cuts))]
    return [*parts, _SubAxis(axis, 1, 1)] if size == 1 else parts
