"""The intra-operator problem of one mesh, and its solution: a spec for every value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jax.extend.core import JaxprEqn, Var

from minialpa.sharding import EquationSpecs, Spec

Role = Literal["parameter", "state", "batch", "received"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshEquations:
    """What runs on one mesh.

    Attributes:
        eqns: equations, in order.
        times: how often per step each equation runs.
        in_update: whether each equation belongs to the update.
        inputs: variables that come from outside, and their roles; only the update reads `state`.
        aliases: pairs (input, result) of which the result takes the sharding of the input.
        equal: for each accumulated value, the total that has the same spec.
        batch_dims: the dimension of the examples, for variables that have one.
        not_partial: variables that may not be left as partial sums, because they leave the mesh, or because they are
            combined over micro-batches other than by a sum.
        paths: names of inputs.
        results: results of the step that this mesh makes, and their names.
    """

    eqns: tuple[JaxprEqn, ...]
    times: tuple[int, ...]
    in_update: tuple[bool, ...]
    inputs: tuple[tuple[Var, Role], ...]
    aliases: tuple[tuple[Var, Var], ...]
    equal: Mapping[Var, Var]
    batch_dims: Mapping[Var, int]
    not_partial: frozenset[Var]
    paths: Mapping[Var, str]
    results: tuple[tuple[Var, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSharding:
    """A solution of the problem of one mesh.

    Attributes:
        specs: the spec in which each variable is made.
        results: the spec in which each result of the step is left.
        equations: for each equation, the specs of what it reads and makes.
        compute_s: seconds of each equation, each time it runs.
        optimal: whether no sharding is proven cheaper, among those that treat repeated layers alike, where as many sums
            share each start as the prices say.
        gap: (cost - lower bound) / cost.
        bound_s: lower bound on the seconds per step of compute and collectives, at the prices of the graph.
        counted_bytes: the most bytes per device at any time, as the memory limit counts them; 0 without a limit, or if
            what it counts fits under all shardings.
    """

    specs: dict[Var, Spec]
    results: dict[Var, Spec]
    equations: tuple[EquationSpecs, ...]
    compute_s: tuple[float, ...]
    optimal: bool
    gap: float
    bound_s: float
    counted_bytes: float = 0.0
