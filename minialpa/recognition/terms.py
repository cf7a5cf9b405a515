"""What arrays are to an attention: terms, and the indices of their dimensions.

A `Form` is an array with a name for the index of each dimension, and what it is as a `Term`: a number, an array of the
program that nothing more is known of (`Leaf`), scores before their softmax (`Scores`), or something that the softmax or
its derivative computes (`Part`). `Kind` lists what these are.
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
#: The index that each dimension stands for; None where an array does not depend on it.
Axes = tuple[Label | None, ...]


class NoFormula(Exception):
    """A value is no part of an attention that the primitives compute. Never leaves `recognition`."""


class Kind(enum.Enum):
    """What a term is, by its formula. Where a formula names no index, the array has those of the scores [.. t s].

    score = scale * sum_d query key + biases, under masks; s: key position, t: query position, d, e: features.
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


#: Kinds that have no index of key positions.
OF_QUERIES = frozenset({Kind.MAXIMUM, Kind.TOTAL, Kind.TOTAL_SQUARED, Kind.MEAN, Kind.MINUS_MEAN})
#: What an attention is computed for.
RESULTS = frozenset({Kind.OUT, Kind.QUERY_BAR, Kind.KEY_BAR, Kind.VALUE_BAR})


@dataclass(frozen=True, slots=True)
class Number:
    """An array whose elements are all this number."""

    value: float

    @property
    def labels(self) -> frozenset[Label]:
        return frozenset()


@dataclass(frozen=True, slots=True)
class Leaf:
    """An array of the program.

    Attributes:
        number: equal arrays have equal numbers.
        axes: the index of each dimension.
        var: the variable; arrays with one number may be in several.
    """

    number: int
    axes: Axes
    var: Var = field(compare=False)

    @property
    def labels(self) -> frozenset[Label]:
        return frozenset(label for label in self.axes if label is not None)


@dataclass(frozen=True, slots=True)
class Mask:
    """True where a boolean array is `positive`."""

    leaf: Leaf
    positive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """scale * sum_feature left right + sum of biases; `masked_score` where a mask is False.

    Attributes:
        var: the variable of the product.
        left, right: the factors.
        feature: the index that the product sums over.
        scale: 1.0 if nothing scales the product.
        biases: arrays that are added, in their order, each times 1.0 or -1.0.
        masks: in their order, after the biases.
        masked_score: the score of what is masked.
        float16: which of "product" and "scale" are in float16.
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
    """The softmax of scores over the index `key_position`, which exactly one of the two factors has: the key.

    is_float16: whether it is computed in float16.
    """

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
        """All indices of a score."""
        return self.scores.labels

    @property
    def query_positions(self) -> frozenset[Label]:
        """Indices of the queries that the keys do not have: positions, and heads that share keys."""
        return self.query.labels - self.key.labels

    @property
    def batch(self) -> frozenset[Label]:
        """The indices that are neither positions of queries nor of keys."""
        return self.labels - self.query_positions - {self.key_position}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a softmax or its derivative computes.

    Attributes:
        kind: the formula.
        softmax: the softmax.
        labels: the indices that the term depends on; some are missing where a gradient was summed over them.
        value: the array of values; None if the formula has none.
        cotangent: the cotangent of the result; None if the formula has none.
        hidden: the masks where a SCORE_BAR is 0.
        is_scaled: whether a SCORE_BAR is times the scale of the scores.
        has_float16_bar: whether p_bar is in float16, if the formula has it.
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
        """Whether the term has all its indices."""
        own = {self.softmax.key_position} if self.kind in OF_QUERIES else set()
        return self.labels == self.softmax.labels - own


Term = Number | Leaf | Scores | Part


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
    """What an array is. axes: the index of each dimension."""

    axes: Axes
    term: Term


def renamed(term: Term, names: Mapping[Label, Label]) -> Term:
    """The term with other names for some of its indices. Raises NoFormula if two would have one name."""
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
        case Part():
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
