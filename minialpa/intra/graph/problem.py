"""The sharding problem of one mesh (`MeshEquations`) and its solution, a spec for every value (`MeshSharding`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import LogicalMesh
from minialpa.ir.equations import is_literal, source_line
from minialpa.ir.repeats import NO_REPEATS, Repeats
from minialpa.sharding import EquationSpecs, Spec

_N_LISTED = 3
#: `batch` has examples; `received` comes from another mesh.
Role = Literal["parameter", "state", "batch", "received"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshEquations:
    """The problem.

    Attributes:
        times: runs per step of each equation, and of the equations that it stands for.
        inputs: variables from outside of the mesh, and their roles; only the update reads `state`.
        aliases: pairs (argument, result): the result takes the spec of the donated argument.
        equal: for each accumulated value, its accumulator, which has the same spec.
        added: accumulated values that each micro-batch adds to the accumulator.
        batch_dims: the dimension of the examples of each variable with examples.
        not_partial: variables that may not be partial sums: they leave the mesh, micro-batches do not sum them, or a
            comparison reads them (`compared_values`).
        paths: of inputs, such as `params['w']`.
        results: of the step, that this mesh makes, with paths.
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
    """The solution.

    Attributes:
        specs: in which variables are made.
        results: the specs in which results of the step are left.
        compute_s: seconds per run of each equation.
        optimal: whether it is proven the cheapest, at the prices of the graph and with repeated layers sharded alike.
        bound_s: lower bound on the seconds per step, at the prices of the graph.
        counted_bytes: peak bytes per device, as the memory limit counts; 0 without a limit, or if all shardings fit.
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
    """A warning: an equation of the update gathers the optimizer state `paths`."""

    eqn: JaxprEqn
    paths: tuple[str, ...]

    def __str__(self) -> str:
        others = ", ..." if len(self.paths) > _N_LISTED else ""
        listed = ", ".join(f"`{path}`" for path in self.paths[:_N_LISTED]) + others
        return (
            f"`{self.eqn.primitive.name}` at {source_line(self.eqn)} gathers optimizer state that is stored in shards "
            f"({listed}), because a mesh axis splits only one dimension of the arrays of an operation. The results are "
            "right but take more memory. To keep the shards, update the state outside of it, with `jnp.where` on the "
            "results in place of `lax.cond`."
        )


def gathered_state(problem: MeshEquations, sharding: MeshSharding, mesh: LogicalMesh) -> list[GatheredState]:
    """The equations that read optimizer state in fewer shards than it is stored in.

    A mesh axis splits one factor of an equation. So a `lax.cond` with the update (`optax.apply_if_finite`), which reads
    the state of all parameters, gathers most of it.
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
