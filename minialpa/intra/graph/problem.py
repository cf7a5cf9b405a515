"""The intra-operator problem of one mesh, and its solution: a spec for every value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import LogicalMesh
from minialpa.ir.equations import is_literal, source_line
from minialpa.ir.repeats import NO_REPEATS, Repeats
from minialpa.sharding import EquationSpecs, Spec

#: How many paths a warning lists.
_N_LISTED = 3
Role = Literal["parameter", "state", "batch", "received"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshEquations:
    """The equations of one mesh.

    Attributes:
        times: how often per step each equation, and the equations that it stands for, run.
        inputs: variables that come from outside, and their roles; only the update reads `state`.
        aliases: pairs (input, result); the result takes the sharding of the input.
        equal: for each accumulated value, the total that has the same spec.
        added: the accumulated values that each micro-batch adds to their totals.
        batch_dims: the dimension of the examples of each variable that has one.
        not_partial: variables that may not be left as partial sums: they leave the mesh, or are combined over
            micro-batches other than by a sum.
        results: results of the step that this mesh makes, and their names.
        repeats: the equations that stand for several.
    """

    eqns: tuple[JaxprEqn, ...]
    times: tuple[int, ...]
    in_update: tuple[bool, ...]
    inputs: tuple[tuple[Var, Role], ...]
    aliases: tuple[tuple[Var, Var], ...]
    equal: Mapping[Var, Var]
    added: frozenset[Var]
    batch_dims: Mapping[Var, int]
    not_partial: frozenset[Var]
    paths: Mapping[Var, str]
    results: tuple[tuple[Var, str], ...]
    repeats: Repeats = NO_REPEATS


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSharding:
    """A solution of the problem of one mesh.

    Attributes:
        specs: the spec in which each variable is made.
        results: the spec in which each result of the step is left.
        equations: for each equation, the specs of what it reads and makes.
        compute_s: seconds of each equation, each time it runs.
        optimal: whether it is proven to be the cheapest, at the prices of the graph and with repeated layers alike.
        gap: (cost - lower bound) / cost.
        bound_s: lower bound on the seconds per step of compute and collectives, at the prices of the graph.
        counted_bytes: most bytes per device at any time, as the memory limit counts them; 0 without a limit, or if all
            shardings keep to it.
    """

    specs: dict[Var, Spec]
    results: dict[Var, Spec]
    equations: tuple[EquationSpecs, ...]
    compute_s: tuple[float, ...]
    optimal: bool
    gap: float
    bound_s: float
    counted_bytes: float = 0.0


class GatheredState(NamedTuple):
    """An equation of the update, and the paths of the optimizer state that it gathers."""

    eqn: JaxprEqn
    paths: tuple[str, ...]

    def __str__(self) -> str:
        others = ", ..." if len(self.paths) > _N_LISTED else ""
        listed = ", ".join(f"`{path}`" for path in self.paths[:_N_LISTED]) + others
        return (
            f"`{self.eqn.primitive.name}` at {source_line(self.eqn)} gathers optimizer state that is stored in parts "
            f"({listed}), since a mesh axis splits one dimension of the arrays of an operation. The numbers are right; "
            "to keep the state in parts, take the update out of it (`jnp.where` on the results in place of `lax.cond`)."
        )


def gathered_state(problem: MeshEquations, sharding: MeshSharding, mesh: LogicalMesh) -> list[GatheredState]:
    """The equations that read optimizer state in fewer parts than it is stored in.

    A mesh axis splits one factor of an equation. So an update inside `lax.cond`, as in `optax.apply_if_finite`, which
    reads the state of all parameters, gathers most of it.
    """
    state = {v for v, role in problem.inputs if role == "state"}
    out = []
    for eqn, specs in zip(problem.eqns, sharding.equations, strict=True):
        operands = zip(eqn.invars, specs.operands, strict=True)
        read = [(atom, spec) for atom, spec in operands if not is_literal(atom) and atom in state]
        gathered = [v for v, spec in read if spec.n_shards(mesh.shape) < sharding.specs[v].n_shards(mesh.shape)]
        if gathered:
            out.append(GatheredState(eqn, tuple(problem.paths.get(v, "") for v in gathered)))
    return out
