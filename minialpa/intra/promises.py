"""Whether a solution keeps what ZeRO promises: optimizer state that is stored in parts is read in parts.

A mesh axis splits one factor of an equation. An update inside `lax.cond`, as that of `optax.apply_if_finite`, is one
equation that reads the state of all parameters, and gathers most of it.
"""

from __future__ import annotations

from typing import NamedTuple

from jax.extend.core import JaxprEqn

from minialpa.cluster import LogicalMesh
from minialpa.intra.graph.problem import MeshEquations, MeshSharding
from minialpa.ir.equations import is_literal, source_line

#: How many paths an error lists, so that it stays one readable paragraph.
_N_LISTED = 3


class GatheredState(NamedTuple):
    """Optimizer state that an equation gathers.

    Attributes:
        eqn: an equation of the update.
        paths: where the gathered arrays are in the arguments of the step.
    """

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
    """The equations that read optimizer state in fewer parts than it is stored in."""
    state = {v for v, role in problem.inputs if role == "state"}
    out = []
    for eqn, specs in zip(problem.eqns, sharding.equations, strict=True):
        operands = zip(eqn.invars, specs.operands, strict=True)
        read = [(atom, spec) for atom, spec in operands if not is_literal(atom) and atom in state]
        gathered = [v for v, spec in read if spec.n_shards(mesh.shape) < sharding.specs[v].n_shards(mesh.shape)]
        if gathered:
            out.append(GatheredState(eqn, tuple(problem.paths.get(v, "") for v in gathered)))
    return out
