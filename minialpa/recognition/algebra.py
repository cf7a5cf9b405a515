"""Formulas of array elements in a normal form: what a program computes, whichever way it is written.

An `Expr` is a sum of terms, each a number times a `Monomial`:

    coefficient * product of atoms^power * exp(exponent)

Each atom and each exponent is a function of indices, which `Label`s name. Atoms are arrays (`Leaf`), sums of products
over indices (`Sum`), masks that are 0 or 1 (`Mask`), masked scores (`Masked`) and `LogSum`s. The rules that make
different programs equal are

    sum_s exp(x + c) = exp(c + log sum_s exp(x))          if c does not depend on s
    sum_s c y        = c sum_s y                          likewise
    sum_e a sum_s b  = sum_(e s) a b
    mask exp(x)      = exp(x)                             if x is -inf where the mask is False

so that exp(x - m) / sum exp(x - m) and exp(x - logsumexp(x)) are the same, for every m.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

#: The name of an index.
Label = Hashable
Axes = tuple[Label | None, ...]

#: Terms and factors of a formula at most; what grows beyond is no attention, and would take long.
_MOST_TERMS, _MOST_ATOMS = 12, 12
#: Two terms cancel if their sum is smaller than this share of them; they are products of the same few numbers.
_ROUNDING = 1e-12


class NoFormula(Exception):
    """A value has no formula in this algebra."""


class Node:
    """A part of a formula. Equal parts are equal values; the hash is kept, since parts are deep."""

    __slots__ = ("_hash", "_key", "labels")

    def __init__(self, key: Hashable, labels: frozenset[Label]) -> None:
        self._key, self.labels = key, labels
        self._hash = hash((type(self).__name__, key))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(self) is type(other) and self._hash == other._hash and self._key == other._key


class Leaf(Node):
    """An array of the program.

    Attributes:
        number: equal arrays have equal numbers.
        axes: the index that each dimension stands for; None for a dimension of length 1.
        var: the variable; arrays with one number may be in several.
    """

    __slots__ = ("axes", "number", "var")

    def __init__(self, number: int, axes: Axes, var: Any) -> None:
        super().__init__((number, axes), frozenset(label for label in axes if label is not None))
        self.number, self.axes, self.var = number, axes, var


class Mask(Node):
    """1 where a boolean array is `positive`, and 0 elsewhere."""

    __slots__ = ("leaf", "positive")

    def __init__(self, leaf: Leaf, positive: bool) -> None:
        super().__init__((leaf, positive), leaf.labels)
        self.leaf, self.positive = leaf, positive


class Masked(Node):
    """`expr` where a mask is 1, and the number `value` elsewhere."""

    __slots__ = ("expr", "mask", "value")

    def __init__(self, expr: Expr, mask: Mask, value: float) -> None:
        super().__init__((expr, mask, value), expr.labels | mask.labels)
        self.expr, self.mask, self.value = expr, mask, value


class LogSum(Node):
    """log sum_label exp(expr)."""

    __slots__ = ("expr", "label")

    def __init__(self, expr: Expr, label: Label) -> None:
        super().__init__((expr, label), expr.labels - {label})
        self.expr, self.label = expr, label


class Sum(Node):
    """sum over the indices `over` of a product."""

    __slots__ = ("inner", "over")

    def __init__(self, inner: Monomial, over: frozenset[Label]) -> None:
        super().__init__((inner, over), inner.labels - over)
        self.inner, self.over = inner, over


class Monomial(Node):
    """product of atoms^power * exp(exponent)."""

    __slots__ = ("atoms", "exponent")

    def __init__(self, atoms: Mapping[Node, int], exponent: Expr | None = None) -> None:
        if exponent is not None and not exponent.terms:
            exponent = None
        parts = [atom.labels for atom in atoms] + ([] if exponent is None else [exponent.labels])
        super().__init__((frozenset(atoms.items()), exponent), frozenset().union(*parts))
        self.atoms, self.exponent = atoms, exponent


class Expr(Node):
    """sum of coefficient * monomial."""

    __slots__ = ("terms",)

    def __init__(self, terms: Mapping[Monomial, float]) -> None:
        self.terms: Mapping[Monomial, float] = terms
        if any(math.isnan(c) for c in terms.values()):
            raise NoFormula
        if len(terms) > _MOST_TERMS or any(len(monomial.atoms) > _MOST_ATOMS for monomial in terms):
            raise NoFormula
        super().__init__(frozenset(terms.items()), frozenset().union(*(monomial.labels for monomial in terms)))

    @property
    def constant(self) -> float | None:
        """The number that this is; None if it is none."""
        if not self.terms:
            return 0.0
        return self.terms.get(ONE) if len(self.terms) == 1 else None


ONE = Monomial({})
ZERO = Expr({})


def number(value: float) -> Expr:
    return Expr({ONE: value}) if value != 0 else ZERO


def of_atom(atom: Node) -> Expr:
    return Expr({Monomial({atom: 1}): 1.0})


def scaled(x: Expr, factor: float) -> Expr:
    return Expr({monomial: c * factor for monomial, c in x.terms.items()}) if factor != 0 else ZERO


def add(x: Expr, y: Expr, factor: float = 1.0) -> Expr:
    """x + factor * y."""
    terms = dict(x.terms)
    for monomial, c in y.terms.items():
        old, new = terms.pop(monomial, 0.0), factor * c
        if abs(old + new) > _ROUNDING * max(abs(old), abs(new)):
            terms[monomial] = old + new
    return Expr(terms)


def multiply(x: Expr, y: Expr) -> Expr:
    product = ZERO
    if len(x.terms) * len(y.terms) > _MOST_TERMS:
        raise NoFormula
    for a, c in x.terms.items():
        for b, d in y.terms.items():
            product = add(product, Expr({_times(a, b): c * d}))
    return product


def power(x: Expr, n: int) -> Expr:
    """x^n. Only products have powers other than 1 and 2."""
    if n == 1:
        return x
    if n == 2:
        return multiply(x, x)
    if len(x.terms) != 1:
        raise NoFormula
    ((monomial, c),) = x.terms.items()
    if n <= 0 and any(isinstance(atom, Mask) for atom in monomial.atoms):
        raise NoFormula
    atoms = {atom: n * p for atom, p in monomial.atoms.items()} if n else {}
    exponent = None if monomial.exponent is None else scaled(monomial.exponent, n)
    return Expr({_monomial(atoms, exponent): c**n})


def exponential(x: Expr) -> Expr:
    return Expr({_monomial({}, x): 1.0})


def logarithm(x: Expr) -> Expr:
    """log x, for a positive number times an exponential."""
    if len(x.terms) != 1:
        raise NoFormula
    ((monomial, c),) = x.terms.items()
    if monomial.atoms or c <= 0:
        raise NoFormula
    return add(monomial.exponent or ZERO, number(math.log(c)))


def is_positive(x: Expr) -> bool:
    """Whether this is a sum of exponentials."""
    return bool(x.terms) and all(not monomial.atoms and c > 0 for monomial, c in x.terms.items())


def renamed(x: Expr, names: Mapping[Label, Label]) -> Expr:
    """x with other names for some of its indices."""
    return _renamed(x, names)  # type: ignore[return-value]


def sum_over(x: Expr, label: Label, size: int, fixed: Iterable[Label]) -> Expr:
    """sum_label x, where the index runs over `size` values. fixed: names of indices that stay as they are."""
    known = frozenset(fixed)
    total = ZERO
    for monomial, c in x.terms.items():
        if label in monomial.labels:
            total = add(total, _sum_of_product(monomial, label, known), c)
        else:
            total = add(total, Expr({monomial: c * size}))
    return total


def _sum_of_product(monomial: Monomial, label: Label, fixed: frozenset[Label]) -> Expr:
    atoms = {atom: p for atom, p in monomial.atoms.items() if label in atom.labels}
    outside = {atom: p for atom, p in monomial.atoms.items() if label not in atom.labels}
    exponent = monomial.exponent or ZERO
    inner_exponent = Expr({m: c for m, c in exponent.terms.items() if label in m.labels})
    outer_exponent = Expr({m: c for m, c in exponent.terms.items() if label not in m.labels})

    if not atoms:
        log_sum = of_atom(LogSum(inner_exponent, label))
        return Expr({_monomial(outside, add(outer_exponent, log_sum)): 1.0})

    # sum_e a sum_s b is one sum, unless s is an index of a.
    inner, over = _monomial({}, inner_exponent), frozenset({label})
    sums = [atom for atom in atoms if isinstance(atom, Sum) and atoms[atom] == 1]
    taken = inner.labels.union(*(atom.labels for atom in atoms)) | over
    for atom in sums:
        if not atom.over & taken:
            del atoms[atom]
            inner, over, taken = _times(inner, atom.inner), over | atom.over, taken | atom.over
    inner = _times(inner, Monomial(atoms))
    summed = Sum(*_with_common_names(inner, over, fixed))
    return Expr({_times(_monomial(outside, outer_exponent), Monomial({summed: 1})): 1.0})


def _with_common_names(
    inner: Monomial, over: frozenset[Label], fixed: frozenset[Label]
) -> tuple[Monomial, frozenset[Label]]:
    """Name the indices of a sum after the arrays that have them, so that equal sums are equal."""
    names = common_names(inner, over - fixed, "sum")
    renamed_over = frozenset(names.get(label, label) for label in over)
    if len(renamed_over) != len(over) or renamed_over & (inner.labels - over):
        raise NoFormula
    return _renamed(inner, names), renamed_over  # type: ignore[return-value]


def common_names(inner: Node, labels: Iterable[Label], kind: str) -> dict[Label, Label]:
    """A name for each index that follows from the arrays which have it."""
    places: dict[Label, tuple[int, int]] = {}
    for leaf in leaves_of(inner):
        for dim, label in enumerate(leaf.axes):
            if label is not None:
                places[label] = min(places.get(label, (leaf.number, dim)), (leaf.number, dim))
    return {label: (kind, *places[label]) for label in labels if label in places}


def leaves_of(node: Node) -> list[Leaf]:
    """All arrays in a formula, but for those in exponents."""
    if isinstance(node, Leaf):
        return [node]
    if isinstance(node, Sum):
        return leaves_of(node.inner)
    if isinstance(node, Monomial):
        return [leaf for atom in node.atoms for leaf in leaves_of(atom)]
    if isinstance(node, Expr):
        return [leaf for monomial in node.terms for leaf in leaves_of(monomial)]
    return []


def _times(a: Monomial, b: Monomial) -> Monomial:
    atoms = dict(a.atoms)
    for atom, p in b.atoms.items():
        atoms[atom] = atoms.get(atom, 0) + p
        if atoms[atom] == 0:
            del atoms[atom]
    exponent = b.exponent if a.exponent is None else a.exponent if b.exponent is None else add(a.exponent, b.exponent)
    return _monomial(atoms, exponent)


def _monomial(atoms: Mapping[Node, int], exponent: Expr | None) -> Monomial:
    """A product in normal form: a mask counts once, and not at all where the exponential is 0 anyway."""
    masks = {atom for atom in atoms if isinstance(atom, Mask)}
    if masks:
        implied = set() if exponent is None else _hidden_by(exponent)
        atoms = {atom: 1 if atom in masks else p for atom, p in atoms.items() if atom not in implied}
        if any(Mask(atom.leaf, not atom.positive) in masks for atom in masks):
            raise NoFormula
    return Monomial(atoms, exponent)


def _hidden_by(exponent: Expr) -> set[Node]:
    """The masks where this exponent is -inf."""
    found: set[Node] = set()
    for monomial, c in exponent.terms.items():
        atoms = list(monomial.atoms.items())
        if c <= 0 or len(atoms) != 1 or monomial.exponent is not None:
            continue
        atom, p = atoms[0]
        if isinstance(atom, Masked) and p == 1:
            if atom.value == -math.inf:
                found.add(atom.mask)
            found |= _hidden_by(atom.expr)
    return found


def _renamed(node: Node, names: Mapping[Label, Label]) -> Node:
    if not any(label in names for label in node.labels):
        return node
    match node:
        case Leaf(number=n, axes=axes, var=var):
            return Leaf(n, tuple(names.get(label, label) for label in axes), var)
        case Mask(leaf=leaf, positive=positive):
            return Mask(_renamed(leaf, names), positive)  # type: ignore[arg-type]
        case Masked(expr=expr, mask=mask, value=value):
            return Masked(_renamed(expr, names), _renamed(mask, names), value)  # type: ignore[arg-type]
        case LogSum(expr=expr, label=label):
            _check_apart(names, frozenset({label}))
            return LogSum(_renamed(expr, names), label)  # type: ignore[arg-type]
        case Sum(inner=inner, over=over):
            _check_apart(names, over)
            return Sum(_renamed(inner, names), over)  # type: ignore[arg-type]
        case Monomial(atoms=atoms, exponent=exponent):
            new = {_renamed(atom, names): p for atom, p in atoms.items()}
            if len(new) != len(atoms):
                raise NoFormula
            return Monomial(new, None if exponent is None else _renamed(exponent, names))  # type: ignore[arg-type]
        case Expr(terms=terms):
            return Expr({_renamed(monomial, names): c for monomial, c in terms.items()})  # type: ignore[misc]
    raise AssertionError(node)


def _check_apart(names: Mapping[Label, Label], own: frozenset[Label]) -> None:
    """An index that is summed over is no other one."""
    if own & names.keys() or own & set(names.values()):
        raise NoFormula
