"""Writes a recognised attention as equations, from its `Operands` and the requested variables.

Operands move to the layouts of the primitives, and results back to the layout of the program:

    query, out [b t g r features]    key, value [b s g features]    bias, mask [b g r t s]

b: batch, g: heads of keys, r: heads that share a key, t and s: query and key positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Var

from minialpa.attention.kind import AttentionKind, Step
from minialpa.attention.operation import attention_gradient_p, attention_p
from minialpa.ir.equations import Atom, aval_of, has_all, shape_of
from minialpa.recognition.indices import FLOATS
from minialpa.recognition.masks import MaskCondition, MaskReader, SegmentCondition, Window
from minialpa.recognition.rewrites import SCORE_FEATURE, VALUE_FEATURE
from minialpa.recognition.terms import Axes, Label, Leaf, NoFormula, Role, Softmax
from minialpa.tracing.new_equations import equations_for

#: The indices that one dimension of an operand joins.
Group = tuple[Label, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableRequest:
    """A result or gradient that the program reads from an attention.

    place: the equation that computed it before.
    """

    var: Var
    role: Role
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """The arrays that an attention reads, with their indices.

    Attributes:
        cotangent: of the result; None in the forward pass.
        segments, parts: the masks outside of `window`.
        has_float16_bar: whether the gradient computes p_bar in float16.
    """

    softmax: Softmax
    value: Leaf
    cotangent: Leaf | None
    window: Window | None
    segments: tuple[SegmentCondition, ...]
    parts: tuple[MaskCondition, ...]
    sizes: Mapping[Label, int] = field(repr=False)
    has_float16_bar: bool = False

    @property
    def float16(self) -> tuple[Step, ...]:
        steps = set(self.softmax.scores.float16)
        if self.softmax.is_float16:
            steps.add("softmax")
        if self.has_float16_bar:
            steps.add("p_bar")
        return tuple(sorted(steps))

    @property
    def variables(self) -> list[Var]:
        leaves = [self.softmax.query, self.softmax.key, self.value, *(leaf for leaf, _ in self.softmax.scores.biases)]
        cotangent = [] if self.cotangent is None else [self.cotangent]
        pairs = [side[0] for one in self.segments for side in (one.query, one.key) if not isinstance(side, bool)]
        found = [*(leaf.var for leaf in (*leaves, *cotangent)), *pairs, *(part.var for part in self.parts)]
        return list(dict.fromkeys(found))

    @property
    def position(self) -> Label:
        """Query positions: of the window, else the longest that the keys lack."""
        if self.window is not None:
            return self.window.query
        axes = [label for label in self.softmax.query.axes if label in self.softmax.query_positions]
        return max(axes, key=lambda label: self.sizes[label])

    @property
    def groups(self) -> dict[str, Group]:
        """By letter of the layouts."""
        softmax = self.softmax
        order = [label for leaf in (softmax.query, softmax.key, self.value) for label in leaf.axes]
        order += sorted(softmax.batch, key=str)
        batch = tuple(label for label in dict.fromkeys(order) if label in softmax.batch)
        rest = tuple(label for label in softmax.query.axes if label in softmax.query_positions - {self.position})
        return {
            "b": batch[:1] if len(batch) < 2 else batch[:-1],
            "g": batch[1:] if len(batch) < 2 else batch[-1:],
            "r": rest,
            "t": (self.position,),
            "s": (softmax.key_position,),
        }

    @property
    def n_scores(self) -> int:
        return self.sizes[self.position] * self.sizes[self.softmax.key_position]


def operands_of(role: Role, reader: Callable[[Softmax], MaskReader]) -> Operands:
    """Raises NoFormula if the primitives do not support the attention."""
    softmax, value, cotangent = role.softmax, role.value, role.cotangent
    if value is None:
        raise NoFormula
    window, others = reader(softmax).read(softmax.scores.masks)
    segments, parts = _segments_and_parts(softmax, others)
    if window is not None and window.is_empty:
        raise NoFormula
    is_plain = value.labels <= softmax.labels | {VALUE_FEATURE}
    if cotangent is not None:
        is_plain = is_plain and cotangent.labels <= softmax.labels - {softmax.key_position} | {VALUE_FEATURE}
    if not is_plain:
        raise NoFormula

    leaves = [softmax.query, softmax.key, value, *(leaf for leaf, _ in softmax.scores.biases)]
    leaves += [mask.leaf for mask in softmax.scores.masks] + ([] if cotangent is None else [cotangent])
    sizes: dict[Label, int] = {}
    for leaf in leaves:
        sizes |= _named_sizes(leaf.axes, shape_of(leaf.var))
    return Operands(
        softmax=softmax, value=value, cotangent=cotangent, window=window, segments=segments, parts=parts,
        sizes=sizes, has_float16_bar=role.has_float16_bar,
    )  # fmt: skip


def _segments_and_parts(
    softmax: Softmax, conditions: Sequence[MaskCondition | SegmentCondition]
) -> tuple[tuple[SegmentCondition, ...], tuple[MaskCondition, ...]]:
    """A mask of keys, as for padding, is a segment of them."""
    segments, parts = [], []
    for condition in conditions:
        if isinstance(condition, SegmentCondition):
            segments.append(condition)
        elif not softmax.query_positions & set(condition.axes):
            segments.append(SegmentCondition(condition.positive, (condition.var, condition.axes)))
        else:
            parts.append(condition)
    return tuple(segments), tuple(parts)


def with_cotangent(operands: Operands, role: Role) -> Operands | None:
    """None if the primitives do not support it."""
    cotangent = role.cotangent
    if cotangent is None or not cotangent.labels <= operands.softmax.labels | {VALUE_FEATURE}:
        return None
    sizes = _named_sizes(cotangent.axes, shape_of(cotangent.var))
    is_plain = operands.softmax.key_position not in sizes and VALUE_FEATURE in sizes
    if not is_plain or sizes[VALUE_FEATURE] != operands.sizes[VALUE_FEATURE]:
        return None
    return replace(operands, cotangent=cotangent)


def shared_dtype(operands: Operands, results: Sequence[VariableRequest]) -> Any:
    """The narrowest dtype with all numbers of query, key, value and result."""
    atoms = [operands.softmax.query.var, operands.softmax.key.var, operands.value.var]
    atoms += [request.var for request in results if request.role.name == "out"]
    return _common_dtype([aval_of(atom).dtype for atom in atoms])


def _common_dtype(dtypes: Sequence[Any]) -> Any:
    return next(np.dtype(name) for name in FLOATS if all(has_all(name, dtype) for dtype in dtypes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """A call of a primitive, the atom for each request, and the primitive's results (`raw`)."""

    eqns: list[JaxprEqn]
    results: list[Atom]
    raw: list[Atom]


def emit_attention(operands: Operands, requests: Sequence[VariableRequest], dtype: Any) -> Emitted:
    writer = _LayoutWriter(operands, dtype)
    variables = operands.variables

    def compute(*arrays: Any) -> list[Any]:
        read = dict(zip(variables, arrays, strict=True))
        raw = attention_p.bind(*writer.main(read), *writer.others(read), kind=writer.kind)
        out = []
        for request in requests:
            role = request.role
            if role.name == "out":
                out.append(writer.result(raw[0], "btgr", _feature_indices(role.axes, writer), request))
            else:
                out.append(writer.result(raw[1], "btgr", (), request))
        return [*raw, *out]

    eqns, atoms = equations_for(compute, *variables)
    return Emitted(eqns=eqns, results=atoms[2:], raw=atoms[:2])


def emit_gradient(
    operands: Operands, forward: Sequence[Atom], requests: Sequence[VariableRequest], dtype: Any
) -> Emitted:
    """`attention_gradient_p`, and the requested gradients. forward: the raw results of `attention_p`."""
    writer = _LayoutWriter(operands, dtype)
    variables, cotangent = operands.variables, operands.cotangent
    assert cotangent is not None, operands
    requested_biases = {request.role.bias for request in requests if request.role.name == "bias"}
    requested = tuple(i in requested_biases for i in range(writer.kind.n_biases))
    biases = [leaf for leaf, _ in operands.softmax.scores.biases]

    def dtype_of(name: str, default: Any, bias: int = 0) -> str:
        asked = [aval_of(r.var).dtype for r in requests if r.role.name == name and r.role.bias == bias]
        return str(_common_dtype(asked or [default]))

    names = ("query", "key", "value")
    dtypes = (
        *(dtype_of(name, dtype) for name in names),
        *(dtype_of("bias", aval_of(leaf.var).dtype, i) for i, leaf in enumerate(biases) if requested[i]),
    )

    def compute(out: Any, logsumexp: Any, *arrays: Any) -> list[Any]:
        read = dict(zip(variables, arrays, strict=True))
        out_bar = writer.operand(read[cotangent.var], cotangent.axes, "btgr", (VALUE_FEATURE,))
        out_bar = lax.convert_element_type(out_bar, dtype)
        raw = attention_gradient_p.bind(
            *writer.main(read), out, logsumexp, out_bar, *writer.others(read),
            kind=writer.kind, dtypes=dtypes, with_bias_gradient=requested,
        )  # fmt: skip
        results = []
        for request in requests:
            role = request.role
            if role.name == "bias":
                x = raw[3 + sum(requested[: role.bias])]
                results.append(writer.bias_gradient(x, biases[role.bias], request))
            else:
                x, letters = raw[names.index(role.name)], "btgr" if role.name == "query" else "bsg"
                results.append(writer.result(x, letters, _feature_indices(role.axes, writer), request))
        return [*raw, *results]

    eqns, atoms = equations_for(compute, *forward, *variables)
    n = len(dtypes)
    return Emitted(eqns=eqns, results=atoms[n:], raw=atoms[:n])


def _feature_indices(axes: Axes, writer: _LayoutWriter) -> Group:
    """Indices that the scores lack."""
    return tuple(label for label in axes if label is not None and label not in writer.operands.softmax.labels)


class _LayoutWriter:
    """Brings operands to the layouts of the primitives, and results back. read: the array of each variable."""

    def __init__(self, operands: Operands, dtype: Any) -> None:
        self.operands, self.dtype = operands, dtype
        self.groups = operands.groups
        scores, window = operands.softmax.scores, operands.window
        self.shift = 0
        left, right = (None, None) if window is None else (window.left, window.right)
        # The primitives require left, right >= 0: other windows shift the positions.
        if right is not None and right < 0:
            self.shift, left, right = right, None if left is None else left + right, 0
        elif left is not None and left < 0:
            self.shift, left, right = -left, 0, None if right is None else right + left
        assert min(left or 0, right or 0) >= 0, window
        self.kind = AttentionKind(
            scale=scores.scale,
            left=left,
            right=right,
            masked_score=scores.masked_score,
            n_biases=len(scores.biases),
            n_segments=len(operands.segments),
            n_masks=len(operands.parts),
            float16=operands.float16,
        )

    def main(self, read: Mapping[Var, Any]) -> list[Any]:
        query, key, value = self.operands.softmax.query, self.operands.softmax.key, self.operands.value
        arrays = (
            self.operand(read[query.var], query.axes, "btgr", (SCORE_FEATURE,)),
            self.operand(read[key.var], key.axes, "bsg", (SCORE_FEATURE,)),
            self.operand(read[value.var], value.axes, "bsg", (VALUE_FEATURE,)),
        )
        return [lax.convert_element_type(array, self.dtype) for array in arrays]

    def others(self, read: Mapping[Var, Any]) -> list[Any]:
        out = []
        if self.kind.has_window:
            sizes = [self.operands.sizes[self.groups[letter][0]] for letter in "ts"]
            queries, keys = (lax.iota(np.int32, size) for size in sizes)
            out += [lax.add(queries, np.int32(self.shift)) if self.shift else queries, keys]
        for segment in self.operands.segments:
            for side in (segment.query, segment.key):
                if isinstance(side, bool):
                    out.append(lax.full((1,) * 5, side))
                else:
                    out.append(self.operand(read[side[0]], side[1], "bgrts", None))
        for leaf, sign in self.operands.softmax.scores.biases:
            bias = self.operand(read[leaf.var], leaf.axes, "bgrts", None)
            out.append(bias if sign == 1 else lax.neg(bias))
        for part in self.operands.parts:
            mask = self.operand(read[part.var], part.axes, "bgrts", None)
            out.append(mask if part.positive else lax.bitwise_not(mask))
        return out

    def operand(self, x: Any, axes: Axes, letters: str, features: Group | None) -> Any:
        """One dimension for each letter, and one for features.

        features: None for biases and masks, which have length 1 for letters on whose indices they do not depend.
        """
        groups = [self.groups[letter] for letter in letters] + ([] if features is None else [features])
        own = [label for label in axes if label is not None]
        sizes = {**self.operands.sizes, **_named_sizes(axes, x.shape)}

        requested = [label for group in groups for label in group if features is not None or set(group) & set(own)]
        x = _reshaped(x, [sizes[label] for label in own])
        x = _broadcast(x, own, {label: sizes[label] for label in requested})
        return _reshaped(x, [math.prod(sizes[label] for label in group if label in requested) for group in groups])

    def result(self, x: Any, letters: str, features: Group, request: VariableRequest) -> Any:
        labels = [label for letter in letters for label in self.groups[letter]] + list(features)
        return self._in_layout(x, labels, dict(zip(features, x.shape[-1:], strict=False)), request)

    def bias_gradient(self, x: Any, bias: Leaf, request: VariableRequest) -> Any:
        groups = [self.groups[letter] for letter in "bgrts"]
        labels = [label for group in groups for label in group if set(group) & bias.labels]
        return self._in_layout(x, labels, {}, request)

    def _in_layout(self, x: Any, labels: Sequence[Label], others: Mapping[Label, int], request: VariableRequest) -> Any:
        """From indices `labels` to the layout of the requested variable. others: lengths of features."""
        axes = request.role.axes
        sizes = {**self.operands.sizes, **others}
        x = _reshaped(x, [sizes[label] for label in labels])
        own = [label for label in axes if label is not None]

        # An operand is broadcast along an index that it lacks, so its gradient is a sum.
        summed = [i for i, label in enumerate(labels) if label not in own]
        if summed:
            x = jnp.sum(x, tuple(summed))
        kept = [label for label in labels if label in own]
        x = _transposed(x, [kept.index(label) for label in own])
        shape = shape_of(request.var)
        x = _reshaped(x, [1 if label is None else size for label, size in zip(axes, shape, strict=True)])
        if x.shape != shape:
            x = lax.broadcast_in_dim(x, shape, range(len(shape)))
        return lax.convert_element_type(x, aval_of(request.var).dtype)


def _named_sizes(axes: Axes, shape: Sequence[int]) -> dict[Label, int]:
    return {label: size for label, size in zip(axes, shape, strict=True) if label is not None}


def _broadcast(x: Any, own: Sequence[Label], requested: Mapping[Label, int]) -> Any:
    """From indices `own` to the indices and lengths `requested`, in their order."""
    order = list(requested)
    present = [label for label in order if label in own]
    x = _transposed(x, [own.index(label) for label in present])
    if present == order:
        return x
    return lax.broadcast_in_dim(x, list(requested.values()), [order.index(label) for label in present])


def _reshaped(x: Any, shape: Sequence[int]) -> Any:
    return x if tuple(x.shape) == tuple(shape) else lax.reshape(x, tuple(shape))


def _transposed(x: Any, permutation: Sequence[int]) -> Any:
    return x if list(permutation) == list(range(x.ndim)) else lax.transpose(x, tuple(permutation))
