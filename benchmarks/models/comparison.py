"""Whether a training run agrees with the serial run, leaf by leaf.

Floats of the state are compared by the update over all steps, new minus old. A leaf may differ by

    ROUNDINGS * noise + LAST_PLACES * eps * |update| + half a last place of the new state     (2-norms over the leaf)

The noise is the distance between the serial run and serial runs whose inputs are rounded differently, or whose compiler
does not optimise. Integers must be equal, except the ones in which these serial runs differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

ROUNDINGS = 16.0
#: By bytes of the float. 32 bits: small enough to find a factor of 1.0001 on a gradient, if the noise is smaller.
LAST_PLACES = {8: 1e4, 4: 170.0, 2: 4.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A run against the serial run.

    Attributes:
        difference: 2-norm of a leaf's difference, relative to the norm of its update; the median over leaves of floats.
        noise: the same number between the serial runs, the greatest.
        wrong: the leaves that differ by more than the formula allows, worst first.
    """

    difference: float
    noise: float
    wrong: tuple[str, ...]


Leaves = list[tuple[str, np.ndarray]]


def compare(found: Any, serial: Any, others: Sequence[Any], start: Any) -> Compared:
    """Compare `(state, results)` of a run with the serial run, and with `others`, the serial runs that give the noise.

    start: the state before the first step.
    """
    before = dict(_leaves(start, "state"))
    wanted, got = _run_leaves(serial), _run_leaves(found)
    if [path for path, _ in wanted] != [path for path, _ in got]:
        return Compared(difference=np.inf, noise=0.0, wrong=("the results have another structure",))

    noisy = [dict(_run_leaves(other)) for other in others]
    faults, measured = list[_Fault | None](), list[_Measured]()
    for (path, value), (_, own) in zip(wanted, got, strict=True):
        again = [one[path] for one in noisy]
        if value.dtype != own.dtype or value.shape != own.shape:
            faults.append(_Fault(np.inf, f"{path}: {own.dtype}{own.shape} in place of {value.dtype}{value.shape}"))
        elif not _is_float(value):
            faults.append(_integer_fault(path, own, value, again))
        else:
            leaf = _measured(own, value, again, before.get(path))
            faults.append(_float_fault(path, leaf, value))
            measured.append(leaf)

    wrong = sorted((fault for fault in faults if fault is not None), key=lambda fault: -fault.excess)
    difference, noise = _medians(measured)
    return Compared(difference=difference, noise=noise, wrong=tuple(fault.told for fault in wrong))


@dataclass(frozen=True, slots=True)
class _Fault:
    """A wrong leaf. excess: difference / allowed difference; infinite if there is no such number."""

    excess: float
    told: str


@dataclass(frozen=True, slots=True)
class _Measured:
    """2-norms over a leaf of floats.

    Attributes:
        error: of the difference to the serial run.
        noise: of the differences between the other serial runs and this serial run.
        size: of the update; of the value, if there is no update.
    """

    error: float
    noise: list[float]
    size: float


def _integer_fault(path: str, own: np.ndarray, value: np.ndarray, others: Sequence[np.ndarray]) -> _Fault | None:
    """Integers must be equal where all serial runs are equal."""
    known = np.logical_and.reduce([one == value for one in others])
    if np.array_equal(value[known], own[known]):
        return None
    return _Fault(np.inf, f"{path}: {_short(own)} in place of {_short(value)}")


def _measured(own: np.ndarray, value: np.ndarray, others: Sequence[np.ndarray], old: np.ndarray | None) -> _Measured:
    is_update = old is not None and old.shape == value.shape and old.dtype == value.dtype
    return _Measured(
        error=_norm(_minus(own, value)),
        noise=[_norm(_minus(one, value)) for one in others],
        size=_norm(_minus(value, old) if old is not None and is_update else _wide(value)),
    )


def _float_fault(path: str, leaf: _Measured, value: np.ndarray) -> _Fault | None:
    """Floats may differ by the formula of the module."""
    allowed = ROUNDINGS * max(leaf.noise, default=0.0) + _last_places(value) * leaf.size + _half_a_place(value)
    if leaf.error <= allowed:
        return None
    told = f"{path}: off by {leaf.error:.2g} of {leaf.size:.2g} (allowed: {allowed:.1g})"
    return _Fault(leaf.error / max(allowed, 1e-200), told)


def _medians(leaves: Sequence[_Measured]) -> tuple[float, float]:
    """Relative difference and noise of a run, see `Compared`.

    It is a median because one leaf may be far greater than all others (a loss scale), and because leaves whose
    gradients are zero have only rounding errors (the biases of keys in attention).
    """
    # A leaf without an update in any run does not measure the precision of updates.
    moving = [leaf for leaf in leaves if leaf.size or leaf.error or any(leaf.noise)]
    differences = [_relative(leaf.error, leaf.size) for leaf in moving]
    noises = [[_relative(one, leaf.size) for one in leaf.noise] for leaf in moving]
    return float(np.median(differences or [0.0])), float(np.max(np.median(noises or [[0.0]], axis=0), initial=0.0))


def rounded_differently(tree: Any, seed: int, eps: float | None = None) -> Any:
    """Floats times 1 plus or minus up to a rounding; whole numbers (masks and counts) stay.

    eps: the rounding, relative to the value; None for the rounding of the dtype.
    """
    rng = np.random.default_rng(seed)

    def one(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype") or not _is_float(leaf):
            return leaf
        values = _wide(np.asarray(leaf))
        factor = 1 + rng.uniform(-1, 1, values.shape) * (eps or float(jax.numpy.finfo(leaf.dtype).eps))
        return np.where(values == np.round(values), values, values * factor).astype(leaf.dtype)

    return jax.tree.map(one, tree)


def _run_leaves(run: Any) -> Leaves:
    state, results = run
    return _leaves(state, "state") + _leaves(results, "results")


def _leaves(tree: Any, name: str) -> Leaves:
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float):
            found.append((name + jax.tree_util.keystr(path), np.asarray(leaf)))
    return found


def _is_float(value: Any) -> bool:
    return bool(jax.numpy.issubdtype(value.dtype, jax.numpy.inexact))


def _norm(value: np.ndarray) -> float:
    """The norm of the finite numbers: `_minus` turns non-finite differences into large numbers."""
    return float(np.linalg.norm(value[np.isfinite(value)]))


def _relative(difference: float, size: float) -> float:
    """At most 1, which means a difference of the size of the value."""
    return difference / max(size, difference, 1e-300)


def _minus(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`a - b`. Equal infinities, and two NaN, have difference 0; a single one has a difference above all bounds."""
    a, b = _wide(a), _wide(b)
    with np.errstate(invalid="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        return np.where(same, 0, np.where(np.isfinite(a) & np.isfinite(b), a - b, 1e30))


def _last_places(value: np.ndarray) -> float:
    eps = float(jax.numpy.finfo(value.dtype).eps)
    width = value.dtype.itemsize // (2 if np.iscomplexobj(value) else 1)
    return LAST_PLACES[width] * eps


def _half_a_place(value: np.ndarray) -> float:
    """The largest rounding error when the result is stored."""
    return 0.5 * float(jax.numpy.finfo(value.dtype).eps) * _norm(_wide(value))


def _wide(value: np.ndarray) -> np.ndarray:
    return value.astype(np.complex128 if np.iscomplexobj(value) else np.float64)


def _short(value: np.ndarray) -> str:
    return np.array2string(value, threshold=6, edgeitems=3).replace("\n", "")
