"""What a formula says about an attention: `read_scores` reads its scores, `find_role` says which of its results it is.

The formulas of all results are built from those of query, key, value and the cotangent of the result, by the definition
in `attention/operation.py`, and compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Set
from dataclasses import dataclass

from minialpa.recognition.algebra import (
    Axes,
    Expr,
    Label,
    Leaf,
    LogSum,
    Mask,
    Masked,
    Monomial,
    NoFormula,
    Sum,
    add,
    common_names,
    exponential,
    leaves_of,
    multiply,
    of_atom,
    renamed,
    scaled,
    sum_over,
)
from minialpa.recognition.form import Form

#: Ratio of two numbers that are the same product of the program's constants, at most.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The scores of an attention.

    Attributes:
        log_sum: log sum exp of them, which names the index of key positions.
        scale: factor of the products of queries and keys.
        query: the array of queries.
        key: the array of keys.
        features: the indices that their product sums over.
        biases: arrays that are added, with their factors.
        masks: what masks them.
        masked_score: the score of what is masked.
    """

    log_sum: LogSum
    scale: float
    query: Leaf
    key: Leaf
    features: frozenset[Label]
    biases: tuple[tuple[Leaf, float], ...]
    masks: tuple[Mask, ...]
    masked_score: float

    @property
    def key_position(self) -> Label:
        return self.log_sum.label

    @property
    def query_positions(self) -> frozenset[Label]:
        """Indices of the queries that the keys do not have: positions, and heads that share keys."""
        return self.query.labels - self.key.labels

    @property
    def labels(self) -> frozenset[Label]:
        """All indices of a score."""
        return self.log_sum.expr.labels

    @property
    def batch(self) -> frozenset[Label]:
        """The indices that queries and keys share."""
        return self.labels - self.query_positions - {self.key_position}


def read_scores(log_sum: LogSum) -> Scores | None:
    """The scores of a softmax, if they are those of an attention.

    They are scale * sum_e query key + sum_i factor_i bias_i, under masks that all have the same number where they hide.
    """
    unmasked = _without_masks(log_sum.expr)
    terms = None if unmasked is None else _terms_of(unmasked.expr)
    if unmasked is None or terms is None:
        return None

    features = terms.product.over
    operands = _two_leaves(terms.product.inner)
    keys = [leaf for leaf in operands if log_sum.label in leaf.labels]
    if len(operands) != 2 or len(keys) != 1:
        return None
    (key,) = keys
    (query,) = (leaf for leaf in operands if leaf is not key)
    if len(features) != 1 or not features <= query.labels & key.labels:
        return None

    scores = Scores(
        log_sum=log_sum,
        scale=terms.scale,
        query=query,
        key=key,
        features=features,
        biases=terms.biases,
        masks=unmasked.masks,
        masked_score=unmasked.value,
    )
    return scores if scores.query_positions else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unmasked:
    """Scores, and what masks them.

    Attributes:
        expr: the scores that are not masked.
        masks: the masks, the last one first.
        value: the score of what is masked.
    """

    expr: Expr
    masks: tuple[Mask, ...]
    value: float


def _without_masks(expr: Expr) -> _Unmasked | None:
    """Scores without their masks; None if what is masked has several values."""
    masks, values = [], set()
    while (atom := _only_atom(expr)) is not None and isinstance(atom, Masked):
        masks.append(atom.mask)
        values.add(atom.value)
        expr = atom.expr
    if len(values) > 1:
        return None
    return _Unmasked(expr=expr, masks=tuple(masks), value=values.pop() if values else -math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """Scores as a sum.

    Attributes:
        product: the product of two matrices.
        scale: its factor.
        biases: arrays that are added, with their factors.
    """

    product: Sum
    scale: float
    biases: tuple[tuple[Leaf, float], ...]


def _terms_of(expr: Expr) -> _Terms | None:
    """One product of matrices and any number of arrays; None if there is anything else."""
    products: list[tuple[Sum, float]] = []
    biases: list[tuple[Leaf, float]] = []
    for monomial, c in expr.terms.items():
        atom = _atom_of(monomial)
        if isinstance(atom, Sum):
            products.append((atom, c))
        elif isinstance(atom, Leaf):
            biases.append((atom, c))
        else:
            return None
    if len(products) != 1:
        return None
    ((product, scale),) = products
    return _Terms(product=product, scale=scale, biases=tuple(biases))


def _only_atom(x: Expr) -> object:
    """The atom that a formula is; None if it is more than one, or a multiple."""
    if len(x.terms) != 1:
        return None
    ((monomial, c),) = x.terms.items()
    return _atom_of(monomial) if c == 1 else None


def _atom_of(monomial: Monomial) -> object:
    """The atom that a product consists of; None if there are several, or a power."""
    is_atom = monomial.exponent is None and list(monomial.atoms.values()) == [1]
    return next(iter(monomial.atoms)) if is_atom else None


def _two_leaves(inner: Monomial) -> list[Leaf]:
    if inner.exponent is not None or not all(isinstance(atom, Leaf) and p == 1 for atom, p in inner.atoms.items()):
        return []
    return [atom for atom in inner.atoms if isinstance(atom, Leaf)]


# ---- results of an attention ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What a value is to an attention: its log sum exp, its result, or the gradient of one of its operands.

    Attributes:
        name: "logsumexp", "out", "query", "key", "value", or "bias" for gradients.
        scores: the attention's scores.
        value: the array of values; None for "logsumexp", and where only its gradient is known.
        cotangent: the cotangent of the result; None in the forward pass.
        bias: number of the bias.
        axes: for each dimension of the value, the index in terms of the operands.
        ratio: the value, divided by what the attention computes.
    """

    name: str
    scores: Scores
    axes: Axes
    ratio: float = 1.0
    value: Leaf | None = None
    cotangent: Leaf | None = None
    bias: int = 0


def find_log_sum(x: Expr) -> LogSum | None:
    """The log sum exp that normalises probabilities in a formula."""
    for monomial in x.terms:
        found = _log_sum_in(monomial)
        if found is not None:
            return found
    return None


def _log_sum_in(monomial: Monomial) -> LogSum | None:
    if monomial.exponent is not None:
        for term in monomial.exponent.terms:
            for atom in term.atoms:
                if isinstance(atom, LogSum):
                    return atom
    for atom in monomial.atoms:
        if isinstance(atom, LogSum):
            return atom
        if isinstance(atom, Sum):
            found = _log_sum_in(atom.inner)
            if found is not None:
                return found
    return None


def find_role(form: Form, fixed: frozenset[Label]) -> Role | None:
    """What a value with this form is to an attention; None if it is none of its results."""
    log_sum = find_log_sum(form.expr)
    scores = None if log_sum is None else read_scores(log_sum)
    if log_sum is None or scores is None:
        return None
    if form.expr == of_atom(log_sum):
        return Role(name="logsumexp", scores=scores, axes=form.axes)
    try:
        form = _with_common_names(form, fixed)
        return _result(form, scores, fixed) or _gradient(form, scores, fixed)
    except NoFormula:
        return None


def _with_common_names(form: Form, fixed: frozenset[Label]) -> Form:
    """The form, with its indices of features named after the arrays that have them."""
    free = [label for label in form.axes if label is not None and label not in fixed]
    names = common_names(form.expr, free, "free")
    axes = tuple(label if label is None else names.get(label, label) for label in form.axes)
    return Form(axes, renamed(form.expr, names), form.sources)


def _result(form: Form, scores: Scores, fixed: frozenset[Label]) -> Role | None:
    """sum_s p value."""
    leaves = set(leaves_of(form.expr))
    values = [leaf for leaf in leaves if scores.key_position in leaf.labels and leaf.labels & set(form.axes)]
    if len(form.expr.terms) != 1 or len(leaves) != 1 or len(values) != 1:
        return None
    (value,) = values
    if value.labels & scores.query_positions:
        return None
    if not _fits(form, scores.batch | scores.query_positions, fixed):
        return None
    expected = _summed(multiply(_probabilities(scores), of_atom(value)), {scores.key_position}, fixed)
    ratio = _ratio(form.expr, expected)
    return None if ratio is None else Role(name="out", scores=scores, value=value, axes=form.axes, ratio=ratio)


def _gradient(form: Form, scores: Scores, fixed: frozenset[Label]) -> Role | None:
    pair = _value_and_cotangent(form, scores, fixed)
    if pair is None:
        return None
    value, cotangent = pair
    found = {"scores": scores, "value": value, "cotangent": cotangent, "axes": form.axes}

    if value is None:
        if not _fits(form, scores.batch | {scores.key_position}, fixed):
            return None
        expected = _of_axes(multiply(_probabilities(scores), of_atom(cotangent)), form, fixed)
        ratio = _ratio(form.expr, expected)
        return None if ratio is None else Role(name="value", ratio=ratio, **found)  # type: ignore[arg-type]

    score_bar = _score_bar(scores, value, cotangent, fixed)
    for name, other in (("query", scores.key), ("key", scores.query)):
        product = renamed(multiply(score_bar, of_atom(other)), common_names(other, scores.features, "free"))
        own = scores.query_positions if name == "query" else {scores.key_position}
        if not _fits(form, scores.batch | own, fixed) or not set(form.axes) - {None} <= product.labels:
            continue
        ratio = _ratio(form.expr, scaled(_of_axes(product, form, fixed), scores.scale))
        if ratio is not None:
            return Role(name=name, ratio=ratio, **found)  # type: ignore[arg-type]
    for i, (bias, factor) in enumerate(scores.biases):
        if set(form.axes) - {None} != bias.labels:
            continue
        ratio = _ratio(form.expr, scaled(_of_axes(score_bar, form, fixed), factor))
        if ratio is not None:
            return Role(name="bias", bias=i, ratio=ratio, **found)  # type: ignore[arg-type]
    return None


def _fits(form: Form, labels: Set[Label], fixed: frozenset[Label]) -> bool:
    """Whether an array has one index of features, and besides it only these."""
    own = set(form.axes) - {None}
    return len(own - fixed) == 1 and own & fixed <= labels


def _of_axes(x: Expr, form: Form, fixed: frozenset[Label]) -> Expr:
    """x, summed over all indices but those that the form's axes have."""
    return _summed(x, x.labels - set(form.axes), fixed)


def _summed(x: Expr, labels: Iterable[Label], fixed: frozenset[Label]) -> Expr:
    for label in sorted(labels, key=str):
        x = sum_over(x, label, 1, fixed)
    return x


def _probabilities(scores: Scores) -> Expr:
    return exponential(add(scores.log_sum.expr, of_atom(scores.log_sum), -1.0))


def _score_bar(scores: Scores, value: Leaf, cotangent: Leaf, fixed: frozenset[Label]) -> Expr:
    """p (p_bar - sum_s p p_bar), 0 where the score is masked."""
    p = _probabilities(scores)
    features = (value.labels & cotangent.labels) - fixed
    p_bar = _summed(multiply(of_atom(value), of_atom(cotangent)), features, fixed)
    mean = _summed(multiply(p, p_bar), {scores.key_position}, fixed)
    score_bar = multiply(p, add(p_bar, mean, -1.0))
    for mask in scores.masks:
        score_bar = multiply(score_bar, of_atom(mask))
    return score_bar


def _value_and_cotangent(form: Form, scores: Scores, fixed: frozenset[Label]) -> tuple[Leaf | None, Leaf] | None:
    """The arrays of values and of the result's cotangent: what p_bar is the product of."""
    leaves = dict.fromkeys(leaves_of(form.expr))
    pairs = []
    for value in leaves:
        for cotangent in leaves:
            shared = (value.labels & cotangent.labels) - fixed - set(form.axes)
            is_pair = shared and scores.key_position in value.labels and scores.key_position not in cotangent.labels
            if is_pair and not value.labels & scores.query_positions:
                pairs.append((value, cotangent))
    if len(pairs) == 1:
        return pairs[0]

    if len(leaves) == 1 and not pairs:
        (cotangent,) = leaves
        is_for_value = scores.key_position in form.axes and scores.key_position not in cotangent.labels
        return (None, cotangent) if is_for_value and cotangent.labels & set(form.axes) - fixed else None
    return None


def _ratio(x: Expr, y: Expr) -> float | None:
    """x / y, if that is a number."""
    if not y.terms or x.terms.keys() != y.terms.keys():
        return None
    ratios = [c / y.terms[monomial] for monomial, c in x.terms.items()]
    is_one = all(abs(ratio - ratios[0]) <= _ROUNDING * abs(ratios[0]) for ratio in ratios)
    return ratios[0] if is_one else None
