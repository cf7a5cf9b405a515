"""Comparison of runs of a training step: the rounding noise of the serial run, and whether another run agrees with it.

A step takes `(state, *others)` and returns `(new_state, results)`. Floats of the state are compared as the *update*,
new minus old, because a wrong gradient is a small part of a large parameter. Each leaf has a tolerance

    ROUNDINGS * noise + RELATIVE * |value| + half a last place of the new state         (2-norms over the leaf)

The noise is the change of the serial run when each float argument is rounded differently, which is also the difference
between two orders of summation in XLA. A leaf with only noise (the gradient of a bias before a norm) has a wide
tolerance. A leaf with little noise must agree to 5 digits, so that a factor of 1.01 on a gradient never passes.
Integers must be equal, except where the serial run differs on rounded inputs, such as the index of the largest of
scores that are zero up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

#: Multiple of the noise of the serial run, and fraction of the norm, by which a leaf may differ.
ROUNDINGS, RELATIVE = 16.0, 2e-5
#: Runs on differently rounded inputs that measure the noise; and the number if the noise is large or decides.
N_RUNS, MANY_RUNS = 3, 40


@dataclass(frozen=True, eq=False)
class Leaf:
    """A result of the serial run.

    Its path, its value in double precision (for floats of the state: the update), its dtype, and the largest distance
    that counts as equal. `is_known`: for integers, whether all roundings give the same.
    """

    path: str
    value: np.ndarray
    dtype: np.dtype[Any]
    tolerance: float
    is_known: np.ndarray

    @property
    def norm(self) -> float:
        return _norm(self.value)

    @property
    def is_sharp(self) -> bool:
        """Whether a factor of 1.01 on this leaf is detected. A leaf that is zero up to noise has no factor."""
        return self.tolerance < 0.005 * self.norm


@dataclass(frozen=True, slots=True)
class Difference:
    """A leaf that is off by `error`, with the allowed `tolerance` and its `norm`; or a note that names the fault."""

    path: str
    error: float
    tolerance: float
    norm: float
    note: str = ""

    def __str__(self) -> str:
        if self.note:
            return f"{self.path}: {self.note}"
        return f"{self.path}: off by {self.error:.2g} of {self.norm:.2g} (allowed: {self.tolerance:.1g})"

    @property
    def relative(self) -> float:
        """The error as a fraction of the norm."""
        return self.error / self.norm if self.norm else np.inf


@dataclass(frozen=True, eq=False)
class Reference:
    """The results of a serial run, leaf by leaf, and its first state."""

    leaves: tuple[Leaf, ...]
    state: Any

    @property
    def is_sharp(self) -> bool:
        """Whether a factor of 1.01 on the whole update is detected; without an update, on all results."""
        floats = [leaf for leaf in self.leaves if leaf.value.dtype.kind == "f" and leaf.norm]
        updates = [leaf for leaf in floats if leaf.path.startswith("state['params']")]
        return any(leaf.is_sharp for leaf in updates or floats)


def reference(step: Callable[..., Any], args: Sequence[Any], seed: int = 0, n_runs: int = N_RUNS) -> Reference:
    """The serial run of `step` on `args`, with tolerances from `n_runs` runs on differently rounded inputs."""
    jitted = jax.jit(step)
    args = jax.tree.map(host, tuple(args))
    serial = _values(jitted(*args), args[0])
    rng = np.random.default_rng(seed)

    def rounded_run() -> list[_Result]:
        rounded = jax.tree.map(lambda x: _round_differently(x, rng), args)
        return _values(jitted(*rounded), rounded[0])

    runs = [rounded_run() for _ in range(n_runs)]
    if n_runs < MANY_RUNS and any(_is_noisy(result, [run[k] for run in runs]) for k, result in enumerate(serial)):
        runs += [rounded_run() for _ in range(MANY_RUNS - n_runs)]
    leaves = [_leaf(result, [run[k].value for run in runs]) for k, result in enumerate(serial)]
    return Reference(tuple(leaves), args[0])


def differences(found: Any, expected: Reference) -> list[Difference]:
    """The leaves in which the results `(new_state, results)` of a run differ from the serial ones, worst first."""
    values = _values(found, expected.state)
    if [value.path for value in values] != [leaf.path for leaf in expected.leaves]:
        return [Difference("", np.inf, 0, 0, "the results have another structure")]
    wrong = [_difference(leaf, value) for value, leaf in zip(values, expected.leaves, strict=True)]
    return sorted((d for d in wrong if d), key=lambda d: -d.relative)


@dataclass(frozen=True, eq=False)
class _Result:
    """A result of a run. `rounding`: the largest rounding error of an update when the new state is stored."""

    path: str
    value: np.ndarray
    dtype: np.dtype[Any]
    rounding: float = 0.0


def _is_noisy(result: _Result, others: Sequence[_Result]) -> bool:
    is_float = result.value.dtype.kind == "f"
    return not is_float and any(not np.array_equal(other.value, result.value) for other in others)


def _leaf(result: _Result, others: list[np.ndarray]) -> Leaf:
    value = result.value
    if value.dtype.kind != "f":
        is_known = np.logical_and.reduce([other == value for other in others])
        return Leaf(result.path, value, result.dtype, 0.0, is_known)
    noise = max(_norm(_minus(other, value)) for other in others)
    tolerance = ROUNDINGS * noise + RELATIVE * _norm(value) + result.rounding
    return Leaf(result.path, value, result.dtype, tolerance, np.full(value.shape, True))


def _difference(leaf: Leaf, result: _Result) -> Difference | None:
    value = result.value
    if value.shape != leaf.value.shape or result.dtype != leaf.dtype:
        note = f"{result.dtype}{value.shape} in place of {leaf.dtype}{leaf.value.shape}"
        return Difference(leaf.path, np.inf, 0, 0, note)
    if leaf.value.dtype.kind != "f":
        if np.array_equal(value[leaf.is_known], leaf.value[leaf.is_known]):
            return None
        return Difference(leaf.path, np.inf, 0, 0, f"{_short(value)} in place of {_short(leaf.value)}")
    error = _norm(_minus(value, leaf.value))
    return Difference(leaf.path, error, leaf.tolerance, leaf.norm) if error > leaf.tolerance else None


def _short(value: np.ndarray) -> str:
    return np.array2string(value, threshold=6, edgeitems=3).replace("\n", "")


def _norm(value: np.ndarray) -> float:
    return float(np.linalg.norm(value[np.isfinite(value)]))


def _minus(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`a - b`. Equal infinities, and two NaN, have difference 0; a single one has a difference above all bounds."""
    with np.errstate(invalid="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        return np.where(same, 0, np.where(np.isfinite(a) & np.isfinite(b), a - b, 1e30))


def _values(out: Any, state: Any) -> list[_Result]:
    """Results in order; floats in double precision, in the new state less the old state."""
    new_state, results = out
    old = {jax.tree_util.keystr(path): host(x) for path, x in jax.tree_util.tree_leaves_with_path(state)}
    found = []
    for name, tree in (("state", new_state), ("results", results)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            key, value = jax.tree_util.keystr(path), host(leaf)
            dtype, before, rounding = value.dtype, old.get(key) if name == "state" else None, 0.0
            if before is not None and before.dtype == value.dtype and before.shape == value.shape and _is_float(value):
                rounding = 0.5 * float(jax.numpy.finfo(dtype).eps) * _norm(value.astype(np.float64))
                value = value.astype(np.float64) - before
            elif _is_float(value):
                value = value.astype(np.float64)
            found.append(_Result(name + key, value, dtype, rounding))
    return found


def _is_float(value: np.ndarray) -> bool:
    return bool(jax.numpy.issubdtype(value.dtype, jax.numpy.floating))


def host(leaf: Any) -> np.ndarray:
    """The value of a leaf (the integers of typed keys) in separate memory."""
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.array(leaf)


def _round_differently(leaf: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """`leaf` times 1 plus or minus up to two roundings; whole numbers (masks and counts) stay."""
    if not _is_float(leaf):
        return leaf
    values = leaf.astype(np.float64)
    factor = 1 + rng.uniform(-1, 1, leaf.shape) * 2 * float(jax.numpy.finfo(leaf.dtype).eps)
    return np.where(values == np.round(values), values, values * factor).astype(leaf.dtype)
