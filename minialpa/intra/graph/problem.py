"""The intra-operator problem of one mesh, and its solution: equations and inputs in, a spec for every value out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jax.extend.core import JaxprEqn, Var

from minialpa.sharding import EquationSpecs, Spec

Role = Literal["parameter", "state", "batch", "received"]


@dataclass(frozen=True, slots=True)
class MeshEquations:
    """What runs on one mesh.

    eqns, times, in_update: equations in order, how often per step each runs, and whether it belongs to the update.
    inputs: variables that come from outside, and their roles; `state` is read by the update only.
    aliases: inputs, and the results that take their shardings.
    equal: pairs of variables (accumulated, total) with one spec.
    batch_dims: dimension of the examples, for variables that have one. whole: variables that leave the mesh, or are
    combined over micro-batches other than by a sum, and so may not be left as partial sums. paths: names of inputs.
    results: results of the step on this mesh, with their names.
    """

    eqns: tuple[JaxprEqn, ...]
    times: tuple[int, ...]
    in_update: tuple[bool, ...]
    inputs: tuple[tuple[Var, Role], ...]
    aliases: tuple[tuple[Var, Var], ...]
    equal: Mapping[Var, Var]
    batch_dims: Mapping[Var, int]
    whole: frozenset[Var]
    paths: Mapping[Var, str]
    results: tuple[tuple[Var, str], ...]


@dataclass(frozen=True, slots=True)
class MeshSharding:
    """Solution for one mesh.

    results: specs in which results of the step are left. compute_s: seconds of each equation, whenever it runs.
    optimal: proven, among the shardings that are alike in repeated layers. gap: (cost - lower bound) / cost.
    """

    specs: dict[Var, Spec]
    results: dict[Var, Spec]
    equations: tuple[EquationSpecs, ...]
    compute_s: tuple[float, ...]
    optimal: bool
    gap: float
