"""`Form`: an array as a formula of an attention, with a name for the index of each dimension.

The formula is a `Term`: a `Number`, an array of the program (`Leaf`), `Scores` before their softmax, or a
`SoftmaxArray` of the softmax or its derivative. For example, exp(s - max s) of scores [b h t s] is `Form((b, h, t, s),
SoftmaxArray(kind=WEIGHT, ...))`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from jax.extend.core import Var

from minialpa.attention.kind import Step

#: The name of an index.
Label = Hashable
#: The index of each dimension; None if the array does not depend on it.
Axes = tuple[Label | None, ...]


class NoFormula(Exception):
    """No part of an attention of the primitives. Never leaves `recognition`."""


class Kind(enum.Enum):
    """The formula of a term. Without brackets, it has the indices of the scores, [.. t s].

    score = scale * sum_d query key + biases, under masks; s: key position, t: query position; d, e: features.
    """

    NUMBER = "number"
    LEAF = "array"
    PRODUCT = "sum_d array array"
    SCORE = "score"
    MAXIMUM = "max_s score [t]"
    SHIFTED = "score - max_s score"
    WEIGHT = "w = exp(score - max_s score)"
    TOTAL = "z = sum_s w [t]"
    PROBABILITY = "p = w / z"
    OUT = "sum_s p value [t e]"
    TOTAL_SQUARED = "z^-2 [t]"
    DIVIDED = "p_bar / z, where p_bar = sum_e out_bar value"
    DIVIDED_TWICE = "p_bar z^-2"
    WEIGHTED = "p_bar z^-2 w"
    MEAN = "sum_s p_bar z^-2 w [t]"
    MINUS_MEAN = "-sum_s p_bar z^-2 w [t]"
    CENTRED = "p_bar / z - sum_s p_bar z^-2 w"
    SCORE_BAR = "(p_bar / z - sum_s p_bar z^-2 w) w"
    QUERY_BAR = "sum_s score_bar key [t d]"
    KEY_BAR = "sum_t score_bar query [s d]"
    VALUE_BAR = "sum_t p out_bar [s e]"


#: Kinds without an index of key positions.
OF_QUERIES = frozenset({Kind.MAXIMUM, Kind.TOTAL, Kind.TOTAL_SQUARED, Kind.MEAN, Kind.MINUS_MEAN})
RESULTS = frozenset({Kind.OUT, Kind.QUERY_BAR, Kind.KEY_BAR, Kind.VALUE_BAR})


@dataclass(frozen=True, slots=True)
class Number:
    """An array with one value everywhere."""

    value: float

    @property
    def labels(self) -> frozenset[Label]:
        return frozenset()


@dataclass(frozen=True, slots=True)
class Leaf:
    """An array of the program. number: equal for equal arrays. var: holds the array."""

    number: int
    axes: Axes
    var: Var = field(compare=False)

    @property
    def labels(self) -> frozenset[Label]:
        return frozenset(label for label in self.axes if label is not None)


@dataclass(frozen=True, slots=True)
class Mask:
    """True where the boolean array `leaf` equals `positive`."""

    leaf: Leaf
    positive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """scale * sum_feature left right + sum of biases; `masked_score` where a mask is false.

    var: of the product.
    feature: of the sum.
    biases: pairs (array, 1.0 or -1.0 as its factor), in order.
    masks: in order, after the biases.
    float16: the steps that run in float16.
    """

    var: Var
    left: Leaf
    right: Leaf
    feature: Label
    scale: float = 1.0
    biases: tuple[tuple[Leaf, float], ...] = ()
    masks: tuple[Mask, ...] = ()
    masked_score: float = -math.inf
    float16: frozenset[Step] = frozenset()

    @property
    def labels(self) -> frozenset[Label]:
        others = [leaf.labels for leaf, _ in self.biases] + [mask.leaf.labels for mask in self.masks]
        return self.product_labels.union(*others)

    @property
    def product_labels(self) -> frozenset[Label]:
        return (self.left.labels | self.right.labels) - {self.feature}

    @property
    def is_product(self) -> bool:
        return self.scale == 1 and not self.biases and not self.masks


@dataclass(frozen=True, slots=True)
class Softmax:
    """Over the index `key_position`, which only one of the two factors, the key, has."""

    scores: Scores
    key_position: Label
    is_float16: bool = False

    def __post_init__(self) -> None:
        has_key = [self.key_position in leaf.labels for leaf in (self.scores.left, self.scores.right)]
        if sorted(has_key) != [False, True] or not self.query_positions:
            raise NoFormula

    @property
    def key(self) -> Leaf:
        return self.scores.left if self.key_position in self.scores.left.labels else self.scores.right

    @property
    def query(self) -> Leaf:
        return self.scores.right if self.key is self.scores.left else self.scores.left

    @property
    def feature(self) -> Label:
        return self.scores.feature

    @property
    def labels(self) -> frozenset[Label]:
        return self.scores.labels

    @property
    def query_positions(self) -> frozenset[Label]:
        """Of the query, absent from the key: positions, and heads that share keys."""
        return self.query.labels - self.key.labels

    @property
    def batch(self) -> frozenset[Label]:
        return self.labels - self.query_positions - {self.key_position}


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxArray:
    """An array that a softmax or its derivative computes.

    Attributes:
        labels: the indices on which the term depends, without indices over which a gradient was summed.
        value: if the formula has it.
        cotangent: of the result, if the formula has it.
        hidden: the masks under which a SCORE_BAR was set to 0.
        is_scaled: whether a SCORE_BAR is multiplied by the scale of the scores.
        has_float16_bar: whether p_bar, if the formula has it, is in float16.
    """

    kind: Kind
    softmax: Softmax
    labels: frozenset[Label]
    value: Leaf | None = None
    cotangent: Leaf | None = None
    hidden: frozenset[Mask] = frozenset()
    is_scaled: bool = False
    has_float16_bar: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the term has all indices of its kind: no sum has removed one."""
        own = {self.softmax.key_position} if self.kind in OF_QUERIES else set()
        return self.labels == self.softmax.labels - own

    @property
    def is_derivative(self) -> bool:
        return self.hidden == frozenset(self.softmax.scores.masks)


Term = Number | Leaf | Scores | SoftmaxArray


def kind_of(term: Term) -> Kind:
    match term:
        case Number():
            return Kind.NUMBER
        case Leaf():
            return Kind.LEAF
        case Scores():
            return Kind.PRODUCT if term.is_product else Kind.SCORE
    return term.kind


@dataclass(frozen=True, slots=True)
class Form:
    """An array as a formula, and the index of each dimension."""

    axes: Axes
    term: Term


def renamed(term: Term, names: Mapping[Label, Label]) -> Term:
    """Raises NoFormula if two indices would have one name."""
    if not names:
        return term
    match term:
        case Leaf():
            return _renamed_leaf(term, names)

        case Scores():
            _check_apart(term.labels | {term.feature}, names)
            return replace(
                term,
                left=_renamed_leaf(term.left, names),
                right=_renamed_leaf(term.right, names),
                feature=names.get(term.feature, term.feature),
                biases=tuple((_renamed_leaf(leaf, names), factor) for leaf, factor in term.biases),
                masks=tuple(_renamed_mask(mask, names) for mask in term.masks),
            )

        case SoftmaxArray():
            _check_apart(term.softmax.labels | term.labels | {term.softmax.feature}, names)
            scores = renamed(term.softmax.scores, names)
            assert isinstance(scores, Scores), scores
            key = term.softmax.key_position
            return replace(
                term,
                softmax=replace(term.softmax, scores=scores, key_position=names.get(key, key)),
                labels=frozenset(names.get(label, label) for label in term.labels),
                value=None if term.value is None else _renamed_leaf(term.value, names),
                cotangent=None if term.cotangent is None else _renamed_leaf(term.cotangent, names),
                hidden=frozenset(_renamed_mask(mask, names) for mask in term.hidden),
            )
    return term


def _renamed_leaf(leaf: Leaf, names: Mapping[Label, Label]) -> Leaf:
    return replace(leaf, axes=tuple(names.get(label, label) for label in leaf.axes))


def _renamed_mask(mask: Mask, names: Mapping[Label, Label]) -> Mask:
    return replace(mask, leaf=_renamed_leaf(mask.leaf, names))


def _check_apart(labels: frozenset[Label], names: Mapping[Label, Label]) -> None:
    if len({names.get(label, label) for label in labels}) < len(labels):
        raise NoFormula


# ---- roles -----------------------------------------------------------------------------------------------------------


_NAMES = {Kind.OUT: "out", Kind.QUERY_BAR: "query", Kind.KEY_BAR: "key", Kind.VALUE_BAR: "value"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """The result of an attention, or the gradient of one of its operands.

    Attributes:
        name: "out", or the operand of a gradient: "query", "key", "value" or "bias".
        value: the array of values; None if only its gradient is known.
        cotangent: of the result; None in the forward pass.
        has_float16_bar: whether the formula has p_bar in float16.
    """

    name: str
    softmax: Softmax
    axes: Axes
    value: Leaf | None = None
    cotangent: Leaf | None = None
    has_float16_bar: bool = False
    bias: int = 0


def find_role(form: Form) -> Role | None:
    """None if a value with this form is no result of an attention."""
    part = form.term
    if not isinstance(part, SoftmaxArray) or part.labels != frozenset(form.axes) - {None}:
        return None
    softmax = part.softmax
    found = {name: getattr(part, name) for name in ("softmax", "value", "cotangent", "has_float16_bar")}
    found["axes"] = form.axes
    if part.kind is Kind.SCORE_BAR and part.is_derivative and not part.is_scaled:
        biases = [i for i, (bias, sign) in enumerate(softmax.scores.biases) if sign == 1 and bias.labels == part.labels]
        return Role(name="bias", bias=biases[0], **found) if biases else None
    if part.kind not in _NAMES or not part.labels & softmax.labels <= _own_indices(part):
        return None
    return Role(name=_NAMES[part.kind], **found)


def _own_indices(part: SoftmaxArray) -> frozenset[Label]:
    """Indices of the scores in a finished result or gradient."""
    softmax = part.softmax
    is_of_queries = part.kind in (Kind.OUT, Kind.QUERY_BAR)
    return softmax.batch | (softmax.query_positions if is_of_queries else {softmax.key_position})
