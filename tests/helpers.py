"""Helpers of the tests: traces of plain steps, and direct runs of split steps, one micro-batch after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from minialpa.cluster import LogicalMesh
from minialpa.inter.microbatch.rewrite import split_micro_batches
from minialpa.inter.microbatch.split_step import SplitStep, is_loop
from minialpa.intra.memory.compiler import Compiler
from minialpa.intra.memory.recording import record_equations
from minialpa.intra.shard_arrays import shard_program
from minialpa.intra.spmd import ShardedEquations
from minialpa.intra.strategies.combining import ALONE
from minialpa.intra.strategies.strategies import StrategySet
from minialpa.intra.strategies.strategy_cache import StrategyCache
from minialpa.ir.equations import is_literal, shape_of
from minialpa.methods import Method, PipeshardParallel, ShardParallel
from minialpa.sharding import AXIS_NAMES, EquationSpecs, Spec
from minialpa.testing import assert_allclose
from minialpa.tracing.evaluation import eval_equation
from minialpa.tracing.flattening import flatten_calls
from minialpa.tracing.trace import TracedStep, trace_step

#: The ways to run a step that has one pipeline boundary.
METHODS: dict[str, Method] = {
    "shard": ShardParallel(),
    "accumulate": ShardParallel(num_micro_batches=2),
    "pipeline": PipeshardParallel(num_micro_batches=2, layer_option="manual"),
}

COMBINE: dict[str, Callable[..., Any]] = {
    "sum": lambda *xs: sum(xs[1:], xs[0]),
    "max": lambda *xs: jnp.stack(xs).max(0),
    "min": lambda *xs: jnp.stack(xs).min(0),
    "and": lambda *xs: jnp.stack(xs).all(0),
    "or": lambda *xs: jnp.stack(xs).any(0),
    "prod": lambda *xs: jnp.stack(xs).prod(0),
}


def trace(fun: Callable[..., Any], *args: Any, batch: tuple[int, ...] = (1,), donate: Any = "auto") -> TracedStep:
    """Trace `fun(*args)` with the arguments numbered in `batch` as batches."""
    leaves, tree = jax.tree.flatten(args)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(args)]
    arg_of = [p[0].idx for p, _ in jax.tree_util.tree_leaves_with_path(args)]
    return trace_step(
        lambda *xs: fun(*jax.tree.unflatten(tree, xs)),
        leaves,
        in_paths=paths,
        is_batch=[a in batch for a in arg_of],
        arg_of_leaf=arg_of,
        donate=donate,
    )


def strategies_of(eqn: JaxprEqn, mesh: LogicalMesh) -> StrategySet:
    """All strategies of an equation on a mesh."""
    cache = StrategyCache()
    return cache.of(mesh, (), ALONE).enumerate(eqn, cache.kind_of(eqn), {}, {}, scatter=True)


def temporary_bytes(fun: Callable[..., Any], arguments: Sequence[Any], compiler: Compiler) -> float:
    """Temporary bytes of a function on one device, by the model of a compiler."""
    closed = jax.make_jaxpr(fun)(*arguments)
    flat = flatten_calls(closed.jaxpr, tuple(closed.consts))
    inputs = (*flat.constvars, *flat.invars)
    recording, _ = record_equations(flat.eqns, inputs, flat.outvars, compiler, waits_at_barriers=False)
    return sum(recording.temporaries())


def program_of(eqn: JaxprEqn, chosen: EquationSpecs, mesh: LogicalMesh) -> ShardedEquations:
    """A program of one equation with replicated operands and results."""
    operands, results = tuple(v for v in eqn.invars if not is_literal(v)), tuple(eqn.outvars)
    replicated = {v: Spec.replicated(len(shape_of(v))) for v in (*operands, *results)}
    return ShardedEquations(
        eqns=(eqn,),
        invars=operands,
        outvars=results,
        specs=replicated | dict(zip(results, chosen.results, strict=True)),
        equations={eqn: chosen},
        out_specs=tuple(replicated[v] for v in results),
        mesh=mesh,
    )


def compiled_shards(program: ShardedEquations, operands: list[Any]) -> Any:
    """From whole arrays to whole arrays, on the first devices of this machine."""
    mesh_shape = program.mesh.shape
    devices = np.array(jax.devices()[: program.mesh.n_devices]).reshape(mesh_shape)
    names = AXIS_NAMES[: len(mesh_shape)]
    replicated = NamedSharding(Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names)), P())
    fun = jax.jit(shard_program(program), in_shardings=replicated, out_shardings=replicated)
    return fun.lower(*operands).compile()


def run_split(split: SplitStep, args: Any) -> Any:
    """Run a split step on full-batch arguments. Every executor must reproduce these results."""
    return jax.jit(functools.partial(_run_split, split))(args)


def _run_split(split: SplitStep, args: Any) -> Any:
    flat = split.traced.flat
    env: dict[Any, Any] = dict(zip(flat.constvars, flat.consts, strict=True))
    env.update(zip(flat.invars, jax.tree.leaves(args), strict=True))

    def run(segment: int, env: dict[Any, Any]) -> None:
        for op in split.in_segment(segment):
            out = eval_equation(op.eqn, [v.val if is_literal(v) else env[v] for v in op.eqn.invars])
            env.update(zip(op.eqn.outvars, out, strict=True))

    kept: list[dict[Any, Any]] = [{} for _ in range(split.n_micro_batches)]  # values for later loops
    for segment in range(2 * split.n_loops + 1):
        if not is_loop(segment):
            run(segment, env)
            continue
        for m in range(split.n_micro_batches):
            local = {**env, **kept[m]}
            for full, micro in split.micro_inputs:
                size = micro.aval.shape[split.batch_dims[micro]]
                local[micro] = env[full][m * size : (m + 1) * size]
            if split.micro_index is not None:
                local[split.micro_index] = np.int32(m)
            run(segment, local)
            kept[m] = {v: x for v, x in local.items() if v not in env}
        if split.n_micro_batches == 1:
            env.update(kept[0])
        for acc in split.accumulators:
            if acc.loop in kept[0] and acc.complete not in env:
                env[acc.complete] = COMBINE[acc.reduction](*[r[acc.loop].astype(acc.complete.aval.dtype) for r in kept])
        for joined in split.concatenations:
            if joined.loop in kept[0] and joined.complete not in env:
                env[joined.complete] = jnp.concatenate([r[joined.loop] for r in kept], joined.dim)
    outs = [v.val if is_literal(v) else env[v] for v in split.outvars]
    return jax.tree.unflatten(split.traced.out_tree, outs)


def split_equals_serial(
    step: Callable[..., Any], *args: Any, n: int = 4, rtol: float = 2e-5, atol: float = 1e-6
) -> SplitStep:
    """The step over `n` micro-batches, after a check of its results; also with kept per-example values."""
    traced, expected = trace(step, *args), jax.jit(step)(*args)
    split = split_micro_batches(traced, n)
    forms = [split]
    if split.recomputes_values:
        forms.append(split_micro_batches(traced, n, keep_activations=True))
        assert not forms[1].recomputes_values
    for form in forms:
        found = run_split(form, args)
        assert_allclose(found, expected, rtol=rtol, atol=atol)
        assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(expected)]
    return split


def descent_step(loss_fn: Callable[[Any, Any], jax.Array], value_and_grad: Any) -> Callable[[Any, Any], Any]:
    """A step of gradient descent: (params, batch) -> (params, loss)."""

    def step(params: Any, batch: Any) -> Any:
        loss, grads = value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step
