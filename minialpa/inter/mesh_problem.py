"""From the tasks of a staged step to the intra-operator problem of one mesh, and what the mesh must keep in memory."""

from __future__ import annotations

from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from minialpa.inter.split import StagedStep, Task
from minialpa.intra.graph import MeshEquations, MeshSharding, Role
from minialpa.jaxprs import bytes_of, is_literal


def mesh_equations(staged: StagedStep, mesh: int) -> MeshEquations:
    """The equations that run on `mesh`, each once even if several tasks run it, and the roles of its inputs."""
    n = staged.split.n_micro_batches
    tasks = [task for task in staged.tasks if task.mesh == mesh]
    eqns: dict[int, tuple[JaxprEqn, int, bool]] = {}
    for task in tasks:
        for eqn in task.eqns:
            eqns.setdefault(id(eqn), (eqn, n if task.per_micro_batch else 1, task.kind == "update"))
    made = {v for eqn, _, _ in eqns.values() for v in eqn.outvars}
    equal = {a.loop: a.total for a in staged.split.accumulators if a.loop in made}
    equal.update({s.loop: s.total for s in staged.split.stacks if s.loop in made})
    made.update(equal.values())
    traced = staged.split.traced
    offset = len(traced.flat.constvars)
    aliases = tuple(
        (traced.flat.invars[alias], atom)
        for atom, alias in zip(staged.split.outvars, traced.aliases, strict=True)
        if alias is not None and not is_literal(atom) and atom in made and mesh in staged.input_meshes[offset + alias]
    )
    inputs = tuple((v, role) for v, role in _inputs(staged, tasks, mesh) if v not in made)
    return MeshEquations(
        tuple(e for e, _, _ in eqns.values()),
        tuple(t for _, t, _ in eqns.values()),
        tuple(u for _, _, u in eqns.values()),
        inputs,
        aliases,
        equal,
        staged.split.batch_dims,
    )


def _inputs(staged: StagedStep, tasks: list[Task], mesh: int) -> list[tuple[Var, Role]]:
    """Inputs of the step on this mesh in order, then what other meshes send."""
    traced = staged.split.traced
    in_loop = {
        v for task in tasks if task.kind != "update" for eqn in task.eqns for v in eqn.invars if not is_literal(v)
    }
    if all(task.kind == "step" for task in tasks) and staged.split.n_micro_batches == 1:
        in_loop = {v for op in staged.split.ops if op.phase.value == "loop" for v in op.eqn.invars if not is_literal(v)}
    batch = {v for v, dim in zip(traced.flat.invars, traced.batch_dims, strict=True) if dim is not None}
    out: dict[Var, Role] = {}
    for var, meshes in zip(staged.inputs, staged.input_meshes, strict=True):
        if mesh in meshes:
            out[var] = "batch" if var in batch else "parameter" if var in in_loop else "state"
    micro = {v for _, v in staged.split.micro_inputs}
    for task in tasks:
        for v in task.invars:
            if v not in out:
                out[v] = "batch" if v in micro else "received"
    return list(out.items())


@dataclass(frozen=True, slots=True)
class MeshMemory:
    """Bytes per device: what stays for the whole step, and what each micro-batch in flight adds."""

    fixed_bytes: float
    in_flight_bytes: float


def mesh_memory(staged: StagedStep, mesh: int, sharding: MeshSharding, mesh_shape: tuple[int, ...]) -> MeshMemory:
    """Parameters, optimizer state, accumulated gradients; and the values that the forward leaves for the backward."""
    problem_inputs = {v for v, meshes in zip(staged.inputs, staged.input_meshes, strict=True) if mesh in meshes}
    fixed = problem_inputs | {a.loop for a in staged.split.accumulators if a.loop in sharding.specs}
    residuals: set[Var] = set()
    forward_made: set[Var] = set()
    for task in staged.tasks:
        if task.mesh == mesh and task.kind == "forward":
            forward_made.update(task.outvars)
        if task.mesh == mesh and task.kind == "backward":
            residuals.update(v for v in task.invars if v in forward_made)

    def local(variables: set[Var]) -> float:
        return sum(bytes_of(v) / sharding.specs[v].n_shards(mesh_shape) for v in variables if v in sharding.specs)

    return MeshMemory(local(fixed), local(residuals))
