"""Optimizers of whole matrices: models with a list of matrices, updated one by one and on stacks, planned and compiled.

Muon is optax's. Shampoo takes roots of statistics by `eigh`, and SOAP follows their eigenvectors by `qr`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import minialpa
from benchmarks.registry import Rows, Size, benchmark
from minialpa import ClusterSpec, Plan
from minialpa.options import PlanOptions

Tree = Any
#: (new updates, new memory) of gradients, memory and weights.
Update = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]

MUON = optax.contrib.muon(0.02, weight_decay=0.01)
#: (optimizer, shapes of the matrices of each layer, layers, rows of the batch, hosts, devices of a host)
CASES = [
    ("muon", [(2048, 8192), (8192, 2048)], 8, 65536, 1, 8),
    ("muon", [(2048, 8192), (8192, 2048)], 5, 65536, 1, 8),
    ("muon", [(2048, 2048), (2048, 8192), (8192, 2048)], 4, 65536, 1, 8),
    ("muon", [(2048, 8192), (8192, 2048)], 8, 65536, 2, 8),
    ("muon", [(2048, 8192), (8192, 2048)], 10, 65536, 2, 8),
    ("shampoo", [(1024, 1024)], 8, 65536, 1, 8),
    ("shampoo", [(1024, 1024)], 8, 65536, 2, 8),
    ("soap", [(1024, 4096), (4096, 1024)], 8, 65536, 1, 8),
    ("soap", [(1024, 4096), (4096, 1024)], 8, 65536, 2, 8),
]
_TINY = [("muon", [(32, 64), (64, 32)], 2, 64, 1, 2)]


def list_step(update: Update) -> Callable[..., Any]:
    """A step of a model whose layers are lists of matrices, which a row of the batch passes one after the other."""

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = batch["x"]
        for layer in params:
            y = x
            for w in layer:
                y = jnp.tanh(y) @ w
            x = x + y
        return jnp.mean(jnp.square((x - batch["y"]).astype(jnp.float32)))

    def step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        params, memory = state
        value, gradients = minialpa.value_and_grad(loss)(params, batch)
        with jax.numpy_dtype_promotion("standard"):
            updates, memory = update(gradients, memory, params)
            params = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)
        return (params, memory), value

    return step


def stacking(method: Any, n: int = 8) -> Any:
    """The method with stacks for n devices, or with n = 0 one by one, which it otherwise chooses by time."""
    kind: Any = type(method)

    class Stacking(kind):
        def options(self) -> PlanOptions:
            options: PlanOptions = kind.options(self)
            return dataclasses.replace(options, stack_matrices=n)

    return Stacking(**{field.name: getattr(method, field.name) for field in dataclasses.fields(method)})


# ---- optimizers that optax lacks -------------------------------------------------------------------------------------


def shampoo(gradients: Tree, memory: Tree, _: Tree) -> tuple[Tree, Tree]:
    """Preconditioners from statistics of rows and columns; new ones in every second step."""
    count, leaves = memory

    def root(x: jax.Array) -> jax.Array:
        values, vectors = jnp.linalg.eigh(x)
        scaled: jax.Array = vectors * (jnp.maximum(values, 0.0) + 0.1)[None] ** -0.25
        return jnp.matmul(scaled, vectors.T)

    def leaf(g: jax.Array, old: Tree) -> tuple[jax.Array, Tree]:
        left, right = 0.9 * old["left"] + g @ g.T, 0.9 * old["right"] + g.T @ g
        roots = jax.lax.cond(
            count % 2 == 0, lambda: (root(left), root(right)), lambda: (old["left_root"], old["right_root"])
        )
        new = {"left": left, "right": right, "left_root": roots[0], "right_root": roots[1]}
        step = roots[0] @ g @ roots[1]
        return -0.01 * step * jnp.linalg.norm(g) / (jnp.linalg.norm(step) + 1e-6), new

    flat, tree = jax.tree.flatten(gradients)
    results = [leaf(g, old) for g, old in zip(flat, leaves, strict=True)]
    return jax.tree.unflatten(tree, [u for u, _ in results]), (count + 1, [new for _, new in results])


def shampoo_memory(params: Tree) -> Tree:
    def leaf(p: jax.Array) -> Tree:
        left, right = (jnp.eye(n) for n in p.shape)
        return {"left": left, "right": right, "left_root": left + 0, "right_root": right + 0}

    return jnp.int32(0), [leaf(p) for p in jax.tree.leaves(params)]


def soap(gradients: Tree, memory: Tree, _: Tree) -> tuple[Tree, Tree]:
    """Adam in the eigenvectors of both statistics, which one QR iteration follows in each step."""

    def leaf(g: jax.Array, old: Tree) -> tuple[jax.Array, Tree]:
        left, right = 0.9 * old["left"] + 0.1 * g @ g.T, 0.9 * old["right"] + 0.1 * g.T @ g
        rows, columns = jnp.linalg.qr(left @ old["rows"])[0], jnp.linalg.qr(right @ old["columns"])[0]
        turned = rows.T @ g @ columns
        second = 0.9 * old["second"] + 0.1 * turned**2
        new = {"left": left, "right": right, "rows": rows, "columns": columns, "second": second}
        return -0.01 * rows @ (turned / (jnp.sqrt(second) + 1e-3)) @ columns.T, new

    flat, tree = jax.tree.flatten(gradients)
    results = [leaf(g, old) for g, old in zip(flat, memory, strict=True)]
    return jax.tree.unflatten(tree, [u for u, _ in results]), [new for _, new in results]


def soap_memory(params: Tree) -> Tree:
    def leaf(p: jax.Array) -> Tree:
        left, right = (jnp.eye(n) for n in p.shape)
        return {"left": left, "right": right, "rows": left + 0, "columns": right + 0, "second": jnp.zeros(p.shape)}

    return [leaf(p) for p in jax.tree.leaves(params)]


OPTIMIZERS: dict[str, tuple[Update, Callable[[Tree], Tree]]] = {
    "muon": (MUON.update, MUON.init),
    "shampoo": (shampoo, shampoo_memory),
    "soap": (soap, soap_memory),
}


# ---- plans beside programs -------------------------------------------------------------------------------------------


@benchmark("muon")
def muon(size: Size) -> Rows:
    """Steps with updates of whole matrices: one by one, and as planned, beside the programs that XLA compiles."""
    rows: Rows = []
    for name, shapes, n_layers, n_rows, hosts, per_host in CASES if size == "full" else _TINY:
        update, memory_of = OPTIMIZERS[name]
        params = [[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes] for _ in range(n_layers)]
        batch = {key: jax.ShapeDtypeStruct((n_rows, shapes[0][0]), jnp.float32) for key in "xy"}
        step, given = list_step(update), ((params, jax.eval_shape(memory_of, params)), batch)
        cluster = ClusterSpec.preset("h100", num_hosts=hosts, devices_per_host=per_host)
        for method in (stacking(minialpa.ShardParallel(), 0), minialpa.ShardParallel()):
            plan = minialpa.plan(step, given, cluster=cluster, method=method)
            rows.append(
                {
                    "optimizer": name,
                    "shapes": " ".join(f"{m}x{n}" for m, n in shapes),
                    "matrices": len(shapes) * n_layers,
                    "devices": f"{hosts}x{per_host}",
                    "stacks": plan.stack_matrices,
                    **_compiled(plan, step, given),
                }
            )
    return rows


def _compiled(plan: Plan, step: Callable[..., Any], given: Tree) -> dict[str, Any]:
    (stage,) = plan.check(step, given).stages
    kinds = sorted(stage.planned_collectives | stage.compiled_collectives)
    found = (stage.planned_collectives, stage.compiled_collectives)
    return {
        "planned_ms": 1e3 * plan.cost.total_s,
        "compiled_ms": 1e3 * stage.compiled_s,
        "planned_memory_gb": stage.planned_bytes / 1e9,
        "compiled_memory_gb": stage.compiled_bytes / 1e9,
        "planned and compiled MB": ", ".join(
            f"{kind} {'/'.join(f'{of.get(kind, 0.0) / 1e6:.0f}' for of in found)}" for kind in kinds
        ),
    }
