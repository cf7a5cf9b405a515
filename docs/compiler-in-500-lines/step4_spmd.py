"""Step 4: run a plan. Each device runs all equations on its shards; the reshardings of the plan are its collectives."""

import jax
import numpy as np
from jax.extend.core import Literal
from jax.sharding import NamedSharding, PartitionSpec
from step1_factors import example, run, train_step
from step2_strategies import Mesh, kind_of
from step3_ilp import Plan, make_plan


def reshard(x: jax.Array, source: str, target: str, n: int) -> jax.Array:
    kind, old, new = kind_of(source, target), int(source[1:] or 0), int(target[1:] or 0)
    if kind == "cut":
        size = x.shape[new] // n
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("d") * size, size, new)
    if kind == "all-gather":
        return jax.lax.all_gather(x, "d", axis=old, tiled=True)
    if kind == "all-to-all":
        return jax.lax.all_to_all(x, "d", split_axis=new, concat_axis=old, tiled=True)
    if kind == "reduce-scatter":
        return jax.lax.psum_scatter(x, "d", scatter_dimension=new, tiled=True)
    return jax.lax.psum(x, "d") if kind == "all-reduce" else x


def compiled(plan: Plan, first_device: int = 0):
    """From the leaves of the arguments, which may be on other devices, to the leaves of the results."""

    def on_shards(*shards):
        values = dict(zip(plan.jaxpr.invars, zip(shards, plan.arguments, strict=True), strict=True))

        def read(atom, spec: str):
            return atom.val if isinstance(atom, Literal) else reshard(*values[atom], spec, plan.mesh.n)

        for eqn, chosen in zip(plan.jaxpr.eqns, plan.equations, strict=True):
            operands = map(read, eqn.invars, chosen.operands)
            values[eqn.outvars[0]] = run(eqn, operands, {chosen.factor: plan.mesh.n}), chosen.result
        return tuple(map(read, plan.jaxpr.outvars, plan.results))

    mesh = jax.sharding.Mesh(jax.devices()[first_device : first_device + plan.mesh.n], "d")
    of_jax = {"R": PartitionSpec(), "S0": PartitionSpec("d"), "S1": PartitionSpec(None, "d")}
    inputs, outputs = (tuple(of_jax[spec] for spec in specs) for specs in (plan.arguments, plan.results))
    program = jax.jit(jax.shard_map(on_shards, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False))
    return lambda *arrays: program(*jax.device_put(arrays, tuple(NamedSharding(mesh, spec) for spec in inputs)))


def main() -> None:
    for batch, limit in ((1024, np.inf), (64, np.inf), (1024, 2**16)):
        arguments = example(batch, 64, [256, 256])
        plan = make_plan(jax.make_jaxpr(train_step)(*arguments).jaxpr, Mesh(4), 4, limit)
        step, leaves = compiled(plan), jax.tree.leaves(arguments)
        for parallel, serial in zip(step(*leaves), jax.tree.leaves(train_step(*arguments)), strict=True):
            np.testing.assert_allclose(parallel, serial, rtol=1e-4, atol=1e-5)
        text = jax.jit(step).lower(*leaves).as_text()
        counts = {kind: plan.kinds.count(kind) for kind in sorted({*plan.kinds} - {"", "cut"})}
        assert all(text.count(f"stablehlo.{kind.replace('-', '_')}") == n for kind, n in counts.items())
        print(f"{batch:4} examples, state <= {limit / 1024:3.0f} KiB: {counts}")


if __name__ == "__main__":
    main()
