"""`REWRITES`: the rules by which the kinds of terms of an attention follow from each other.

A row states that an equation with operands of these kinds computes a term of another kind, if its `build` accepts the
operands: `div` of a WEIGHT by a TOTAL is a PROBABILITY.

A row holds for every float: zeros of both signs, infinities, NaN, the smallest and the largest numbers. Results may
differ by rounding; if finite cotangents add up to infinity, one result may be NaN and the other infinity or a number. A
step that holds only for most numbers has no row, and its attention stays as written:

- exp(x) / sum exp(x) without a maximum, and (sum w value) / z: sums may be infinite;
- exp(x - logsumexp(x)): if all scores are far below zero, rounding loses the logarithm of the number of keys;
- z > 0: false for NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from minialpa.attention.kind import Step
from minialpa.ir.equations import Atom, aval_of, has_all, shape_of
from minialpa.recognition.terms import (
    OF_QUERIES,
    RESULTS,
    Kind,
    Label,
    Leaf,
    Mask,
    NoFormula,
    Number,
    Scores,
    Softmax,
    SoftmaxArray,
    Term,
    kind_of,
)

#: The indices of features: d of queries and keys, e of values.
SCORE_FEATURE, VALUE_FEATURE = "d", "e"
_PRECISIONS = (
    None,
    lax.Precision.DEFAULT,
    (lax.Precision.DEFAULT, lax.Precision.DEFAULT),
    lax.DotAlgorithmPreset.BF16_BF16_F32,
)

_MOST_IN_FLOAT16 = float(jnp.finfo(jnp.float16).max)

#: over: the indices of the sum or maximum.
Build = Callable[[JaxprEqn, Sequence[Any], frozenset[Label]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """`build` returns the term of the result, or raises NoFormula if the rule does not apply."""

    primitive: str
    operands: tuple[Kind, ...]
    result: Kind
    build: Build


def rewritten(eqn: JaxprEqn, terms: Sequence[Term], over: frozenset[Label] = frozenset()) -> Term:
    """Raises NoFormula if no rule applies."""
    rule = _RULES.get((eqn.primitive.name, tuple(kind_of(term) for term in terms)))
    if rule is None:
        raise NoFormula
    term: Term = rule.build(eqn, terms, over)
    return term


# ---- scores --------------------------------------------------------------------------------------------------------


def _product(eqn: JaxprEqn, terms: Sequence[Any], over: frozenset[Label]) -> Any:
    """Scores without scale, biases and masks."""
    left, right = terms
    if len(over) != 1 or not _has_usual_precision(eqn):
        raise NoFormula
    (feature,) = over
    if feature not in left.labels & right.labels:
        raise NoFormula
    steps: frozenset[Step] = frozenset({"product"} if _is_float16(eqn.outvars[0]) else ())
    return Scores(var=eqn.outvars[0], left=left, right=right, feature=feature, float16=steps)


def _has_usual_precision(eqn: JaxprEqn) -> bool:
    if _rounds_to_float16(eqn):
        return all(map(_is_float16, eqn.invars))
    return eqn.params["precision"] in _PRECISIONS


def _rounds_to_float16(eqn: JaxprEqn) -> bool:
    return bool(eqn.params["precision"] == lax.DotAlgorithmPreset.F16_F16_F32)


def _is_float16(atom: Atom) -> bool:
    return bool(aval_of(atom).dtype == jnp.float16)


def _scaled_scores(eqn: JaxprEqn, terms: Sequence[Any], over: frozenset[Label]) -> Any:
    scores, c = _other_and_number(terms)
    steps = scores.float16 | ({"scale"} if _is_float16(eqn.outvars[0]) else set())
    return replace(scores, scale=_factor(eqn, c), float16=steps)


def _factor(eqn: JaxprEqn, c: float) -> float:
    """Raises NoFormula if c or 1 / c is 0 or infinite."""
    info = jnp.finfo(aval_of(eqn.outvars[0]).dtype)
    if not float(info.tiny) <= abs(c) <= 1 / float(info.tiny):
        raise NoFormula
    return c if eqn.primitive.name == "mul" else 1 / c


def _biased_scores(eqn: JaxprEqn, terms: Sequence[Any], over: frozenset[Label]) -> Any:
    scores, bias = (terms[1], terms[0]) if isinstance(terms[0], Leaf) else terms
    # In 16 bits, a large number loses an added number.
    if aval_of(eqn.outvars[0]).dtype.itemsize < 4 or scores.masks:
        raise NoFormula
    return replace(scores, biases=(*scores.biases, (bias, -1.0 if eqn.primitive.name == "sub" else 1.0)))


def _masked_scores(eqn: JaxprEqn, terms: Sequence[Any], over: frozenset[Label]) -> Any:
    mask, scores, c = _choice(terms)
    if math.isnan(c) or c == math.inf or (scores.masks and scores.masked_score != c):
        raise NoFormula
    return replace(scores, masks=(*scores.masks, mask), masked_score=c)


def _choice(terms: Sequence[Any]) -> tuple[Mask, Any, float]:
    """select_n(boolean, if_false, if_true) with a number as one case: the mask of the other case, this case, number."""
    which, if_false, if_true = terms
    if isinstance(if_false, Number):
        return Mask(which, positive=True), if_true, if_false.value
    return Mask(which, positive=False), if_false, if_true.value


# ---- softmax and its derivative ------------------------------------------------------------------------------------


def _maximum(eqn: JaxprEqn, terms: Sequence[Any], over: frozenset[Label]) -> Any:
    """Over keys; it defines the softmax."""
    if len(over) != 1:
        raise NoFormula
    (key,) = over
    softmax = Softmax(terms[0], key, is_float16=_is_float16(eqn.outvars[0]))
    if softmax.is_float16 and _n_keys(softmax) > _MOST_IN_FLOAT16:
        raise NoFormula
    return SoftmaxArray(kind=Kind.MAXIMUM, softmax=softmax, labels=softmax.labels - over)


def _n_keys(softmax: Softmax) -> int:
    n_keys: int = shape_of(softmax.key.var)[softmax.key.axes.index(softmax.key_position)]
    return n_keys


def _softmax_term(kind: Kind) -> Build:
    """For whole terms of one softmax, with one array of values and one cotangent, in the dtype of the maximum."""

    def build(eqn: JaxprEqn, terms: Sequence[Any], over: frozenset[Label]) -> Any:
        parts = [term for term in terms if isinstance(term, SoftmaxArray)]
        softmax = parts[0].softmax
        if any(part.softmax != softmax or not part.is_whole for part in parts):
            raise NoFormula
        if kind not in OF_QUERIES and _is_float16(eqn.outvars[0]) != softmax.is_float16:
            raise NoFormula

        own = frozenset({softmax.key_position}) if kind in OF_QUERIES else frozenset()
        if over and over != own:
            raise NoFormula
        value, cotangent, is_float16 = _values_and_cotangent(terms, softmax)
        labels = softmax.labels - own
        return SoftmaxArray(
            kind=kind, softmax=softmax, labels=labels, value=value, cotangent=cotangent, has_float16_bar=is_float16
        )

    return build


def _values_and_cotangent(terms: Sequence[Any], softmax: Softmax) -> tuple[Leaf | None, Leaf | None, bool]:
    """Also whether their product is float16. Raises NoFormula for several."""
    pairs: set[tuple[Leaf | None, Leaf | None, bool]] = set()
    for term in terms:
        if isinstance(term, SoftmaxArray) and term.value is not None:
            pairs.add((term.value, term.cotangent, term.has_float16_bar))
        if isinstance(term, Scores) and term != softmax.scores:
            pairs.add((*_value_and_cotangent(term, softmax), "product" in term.float16))

    if len(pairs) > 1:
        raise NoFormula
    return pairs.pop() if pairs else (None, None, False)


def _shifted_scores(eqn: JaxprEqn, terms: Sequence[Any], over: frozenset[Label]) -> Any:
    if terms[0] != terms[1].softmax.scores:
        raise NoFormula
    return _softmax_term(Kind.SHIFTED)(eqn, terms, over)


def _value_and_cotangent(product: Scores, softmax: Softmax) -> tuple[Leaf, Leaf]:
    """Their product is p_bar."""
    is_value = [softmax.key_position in leaf.labels for leaf in (product.left, product.right)]
    if sorted(is_value) != [False, True] or not product.labels <= softmax.labels:
        raise NoFormula
    value, cotangent = (product.left, product.right) if is_value[0] else (product.right, product.left)
    if value.labels & softmax.query_positions:
        raise NoFormula
    return _with_feature(value, product.feature), _with_feature(cotangent, product.feature)


def _with_feature(leaf: Leaf, feature: Label) -> Leaf:
    return replace(leaf, axes=tuple(VALUE_FEATURE if label == feature else label for label in leaf.axes))


def _inverse_square(eqn: JaxprEqn, terms: Sequence[Any], over: frozenset[Label]) -> Any:
    # In float16, 256^2 is infinite.
    is_large = _is_float16(eqn.outvars[0]) and _n_keys(terms[0].softmax) ** 2 > _MOST_IN_FLOAT16
    if eqn.params["y"] != -2 or is_large:
        raise NoFormula
    return _softmax_term(Kind.TOTAL_SQUARED)(eqn, terms, over)


def _lower_bound(eqn: JaxprEqn, terms: Sequence[Any], over: frozenset[Label]) -> Any:
    part, c = _other_and_number(terms)
    if c != -math.inf:
        raise NoFormula
    return part


def _hidden_under_mask(eqn: JaxprEqn, terms: Sequence[Any], over: frozenset[Label]) -> Any:
    mask, part, c = _choice(terms)
    if c != 0 or mask not in part.softmax.scores.masks or not part.is_whole or part.is_scaled:
        raise NoFormula
    return replace(part, hidden=part.hidden | {mask})


def _scaled_bar(eqn: JaxprEqn, terms: Sequence[Any], over: frozenset[Label]) -> Any:
    part, c = _other_and_number(terms)
    if not part.is_derivative or not part.is_whole or part.is_scaled or _factor(eqn, c) != part.softmax.scores.scale:
        raise NoFormula
    return replace(part, is_scaled=True)


# ---- results -------------------------------------------------------------------------------------------------------


def _product_with_probabilities(eqn: JaxprEqn, terms: Sequence[Any], over: frozenset[Label]) -> Any:
    """With values, summed over keys, or with the cotangent, summed over queries."""
    part, leaf = (terms[1], terms[0]) if isinstance(terms[0], Leaf) else terms
    softmax, key = part.softmax, part.softmax.key_position
    features = leaf.labels - softmax.labels
    if len(features) != 1 or features & over or not over or not over <= softmax.labels:
        raise NoFormula
    named = _with_feature(leaf, *features)
    labels = (softmax.labels | features) - over
    if key in over:
        if over != {key} or key not in leaf.labels or leaf.labels & softmax.query_positions:
            raise NoFormula
        return SoftmaxArray(kind=Kind.OUT, softmax=softmax, labels=labels, value=named)
    if key in leaf.labels:
        raise NoFormula
    return SoftmaxArray(kind=Kind.VALUE_BAR, softmax=softmax, labels=labels, cotangent=named)


def _operand_bar(eqn: JaxprEqn, terms: Sequence[Any], over: frozenset[Label]) -> Any:
    """A product of the scores' cotangent with keys, summed over keys, or with queries, summed over queries.

    The cotangent must be 0 under masks, have the scale of the scores, and be in float16 if their product is.
    """
    part, leaf = (terms[1], terms[0]) if isinstance(terms[0], Leaf) else terms
    softmax = part.softmax
    if not _is_scores_bar(eqn, part, eqn.invars[terms.index(part)]):
        raise NoFormula

    is_query = softmax.key_position in over
    other = softmax.key if is_query else softmax.query
    features = leaf.labels - softmax.labels
    if len(features) != 1 or features & over or not over or not over <= softmax.labels:
        raise NoFormula
    (feature,) = features
    if leaf != replace(other, axes=tuple(feature if label == softmax.feature else label for label in other.axes)):
        raise NoFormula
    kind = Kind.QUERY_BAR if is_query else Kind.KEY_BAR
    return replace(part, kind=kind, labels=(softmax.labels | features) - over, hidden=frozenset(), is_scaled=False)


def _is_scores_bar(eqn: JaxprEqn, part: SoftmaxArray, var: Any) -> bool:
    """Whether operand `var` is the cotangent of the product of queries and keys, with its scale and dtype."""
    scores = part.softmax.scores
    if not part.is_derivative or not part.is_whole or part.is_scaled != (scores.scale != 1):
        return False
    # With p_bar in float16, p (p_bar - sum_s p p_bar) is finite, also under a scale of at most 1.
    if _rounds_to_float16(eqn) and not (part.has_float16_bar and abs(scores.scale) <= 1):
        return False
    return _is_float16(var) == ("product" in scores.float16)


def _summed_gradient(eqn: JaxprEqn, terms: Sequence[Any], over: frozenset[Label]) -> Any:
    return replace(terms[0], labels=terms[0].labels - over)


# ---- identities ----------------------------------------------------------------------------------------------------


def _other_operand(number: float) -> Build:
    """If the number is one operand."""

    def build(eqn: JaxprEqn, terms: Sequence[Any], over: frozenset[Label]) -> Any:
        other, c = _other_and_number(terms)
        if c != number or over:
            raise NoFormula
        return other

    return build


def _other_and_number(terms: Sequence[Any]) -> tuple[Any, float]:
    first, second = terms
    return (second, first.value) if isinstance(first, Number) else (first, second.value)


def _first_that_builds(*builds: Build) -> Build:
    def build(eqn: JaxprEqn, terms: Sequence[Any], over: frozenset[Label]) -> Any:
        for one in builds[:-1]:
            try:
                return one(eqn, terms, over)
            except NoFormula:
                continue
        return builds[-1](eqn, terms, over)

    return build


# ---- conversions ---------------------------------------------------------------------------------------------------


def converted(term: Term, old: Any, new: Any) -> Term:
    """After a conversion between dtypes of floats. Raises NoFormula if the conversion changes the term.

    A wider dtype keeps the elements. Rounding to bfloat16, with the range of float32, is like a product in bfloat16;
    but a large bias would hide the scores. float16 may round results of a product in float16.
    """
    old, new = np.dtype(old), np.dtype(new)
    is_wider = has_all(new, old)
    if isinstance(term, Number):
        return Number(_rounded_number(term.value, new))
    if is_wider or isinstance(term, Leaf):
        if isinstance(term, Leaf) and not is_wider:
            raise NoFormula
        return term
    if kind_of(term) in RESULTS or kind_of(term) is Kind.PROBABILITY:
        return term
    if old != jnp.float32 or new not in (jnp.bfloat16, jnp.float16) or (isinstance(term, Scores) and term.biases):
        raise NoFormula
    if new == jnp.float16:
        term = _as_float16(term)
    if isinstance(term, Scores) and term.masks:
        return replace(term, masked_score=_rounded_number(term.masked_score, new))
    return term


def _as_float16(term: Scores | SoftmaxArray) -> Scores | SoftmaxArray:
    """Raises NoFormula unless the primitives round there, too."""
    if isinstance(term, Scores):
        if "product" not in term.float16:
            raise NoFormula
        return term if term.scale == 1 else replace(term, float16=term.float16 | {"scale"})
    has_range = term.softmax.is_float16 and term.kind in OF_QUERIES
    if not has_range and (term.kind is not Kind.SCORE_BAR or "product" not in term.softmax.scores.float16):
        raise NoFormula
    return term


def _rounded_number(value: float, dtype: Any) -> float:
    with np.errstate(over="ignore"):
        return float(np.asarray(value, dtype))


# ---- the table -----------------------------------------------------------------------------------------------------

K = Kind


def _row(primitive: str, operands: tuple[Kind, ...], result: Kind, build: Build | None = None) -> Rewrite:
    build = _softmax_term(result) if build is None else build
    return Rewrite(primitive=primitive, operands=operands, result=result, build=build)


def _rows_of_scores(scores: Kind) -> list[Rewrite]:
    """scores: PRODUCT or SCORE."""
    by_number = _first_that_builds(_other_operand(1.0), _scaled_scores) if scores is K.PRODUCT else _other_operand(1.0)
    return [
        _row("mul", (scores, K.NUMBER), K.SCORE, by_number),
        _row("mul", (K.NUMBER, scores), K.SCORE, by_number),
        _row("div", (scores, K.NUMBER), K.SCORE, by_number),
        _row("add", (scores, K.NUMBER), K.SCORE, _other_operand(0.0)),
        _row("add", (scores, K.LEAF), K.SCORE, _biased_scores),
        _row("add", (K.LEAF, scores), K.SCORE, _biased_scores),
        _row("sub", (scores, K.LEAF), K.SCORE, _biased_scores),
        _row("select_n", (K.LEAF, K.NUMBER, scores), K.SCORE, _masked_scores),
        _row("select_n", (K.LEAF, scores, K.NUMBER), K.SCORE, _masked_scores),
        _row("reduce_max", (scores,), K.MAXIMUM, _maximum),
        _row("sub", (scores, K.MAXIMUM), K.SHIFTED, _shifted_scores),
    ]


REWRITES: tuple[Rewrite, ...] = (
    _row("dot_general", (K.LEAF, K.LEAF), K.PRODUCT, _product),
    *_rows_of_scores(K.PRODUCT),
    *_rows_of_scores(K.SCORE),
    _row("max", (K.NUMBER, K.MAXIMUM), K.MAXIMUM, _lower_bound),
    _row("exp", (K.SHIFTED,), K.WEIGHT),
    _row("reduce_sum", (K.WEIGHT,), K.TOTAL),
    _row("div", (K.WEIGHT, K.TOTAL), K.PROBABILITY),
    _row("mul", (K.PROBABILITY, K.NUMBER), K.PROBABILITY, _other_operand(1.0)),
    *(
        _row("dot_general", operands, kind, _other_operand(1.0))
        for kind in (K.PROBABILITY, K.PRODUCT)
        for operands in ((kind, K.NUMBER), (K.NUMBER, kind))
    ),
    # OUT, or VALUE_BAR if the sum is over queries.
    _row("dot_general", (K.PROBABILITY, K.LEAF), K.OUT, _product_with_probabilities),
    _row("dot_general", (K.LEAF, K.PROBABILITY), K.OUT, _product_with_probabilities),
    # The derivative of a quotient, as jax writes it.
    _row("integer_pow", (K.TOTAL,), K.TOTAL_SQUARED, _inverse_square),
    _row("div", (K.PRODUCT, K.TOTAL), K.DIVIDED),
    _row("mul", (K.PRODUCT, K.TOTAL_SQUARED), K.DIVIDED_TWICE),
    _row("mul", (K.DIVIDED_TWICE, K.WEIGHT), K.WEIGHTED),
    _row("reduce_sum", (K.WEIGHTED,), K.MEAN),
    _row("neg", (K.MEAN,), K.MINUS_MEAN),
    _row("add_any", (K.DIVIDED, K.MINUS_MEAN), K.CENTRED),
    _row("mul", (K.CENTRED, K.WEIGHT), K.SCORE_BAR),
    _row("select_n", (K.LEAF, K.NUMBER, K.SCORE_BAR), K.SCORE_BAR, _hidden_under_mask),
    _row("select_n", (K.LEAF, K.SCORE_BAR, K.NUMBER), K.SCORE_BAR, _hidden_under_mask),
    _row("mul", (K.SCORE_BAR, K.NUMBER), K.SCORE_BAR, _scaled_bar),
    _row("mul", (K.NUMBER, K.SCORE_BAR), K.SCORE_BAR, _scaled_bar),
    _row("div", (K.SCORE_BAR, K.NUMBER), K.SCORE_BAR, _scaled_bar),
    # QUERY_BAR, or KEY_BAR if the sum is over queries.
    _row("dot_general", (K.SCORE_BAR, K.LEAF), K.QUERY_BAR, _operand_bar),
    _row("dot_general", (K.LEAF, K.SCORE_BAR), K.QUERY_BAR, _operand_bar),
    *(
        _row("reduce_sum", (kind,), kind, _summed_gradient)
        for kind in (K.SCORE_BAR, K.QUERY_BAR, K.KEY_BAR, K.VALUE_BAR)
    ),
)

_RULES = {(row.primitive, row.operands): row for row in REWRITES}
