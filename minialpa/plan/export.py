"""A plan in; its placements on one mesh out, as PartitionSpecs by path or Python source.

`jax.jit` with these shardings computes the same numbers. XLA then chooses the shardings inside the step.
Micro-batches and pipeline stages are not exported.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from jax.sharding import PartitionSpec

from minialpa.errors import ShardingError
from minialpa.plan.record import ExportedSpecs, PlacedValue, PlanRecord
from minialpa.plan.text import header, layers_text
from minialpa.sharding import AXIS_NAMES


def export_specs(plan: PlanRecord, mesh: int = 0) -> ExportedSpecs:
    if not 0 <= mesh < len(plan.stages):
        raise ShardingError(
            f"The plan has the meshes 0 to {len(plan.stages) - 1}, one for each stage; got `mesh={mesh}`."
        )
    return ExportedSpecs(_specs_on_mesh(plan.inputs, mesh), _specs_on_mesh(plan.outputs, mesh))


def _specs_on_mesh(values: Sequence[PlacedValue], mesh: int) -> dict[str, PartitionSpec]:
    """A value in several blocks has the spec of its first block there. An argument that no equation reads is
    replicated.
    """
    out = {}
    for value in values:
        if mesh in value.mesh_ids:
            out[value.path] = value.specs[value.mesh_ids.index(mesh)].partition_spec()
        elif not value.mesh_ids:
            out[value.path] = PartitionSpec()
    return out


def to_python(plan: PlanRecord, mesh: int = 0) -> str:
    """Python source that defines `mesh`, `in_specs`, `out_specs` and `shardings`, for `jax.jit`."""
    specs = export_specs(plan, mesh)
    stage = plan.stages[mesh]
    names = AXIS_NAMES[: len(stage.logical_shape)]
    args = dict.fromkeys(_argument_of(v.path) for v in plan.inputs)

    return _SOURCE.format(
        header=header(plan),
        warnings="".join(f"\n{line}\n" for line in _warnings_for(plan, mesh)),
        devices=f"{stage.first_device}:{stage.first_device + stage.n_devices}",
        shape=stage.logical_shape,
        names="(" + ", ".join(f'"{name}"' for name in names) + ",)",
        inputs=_table(specs.inputs),
        outputs=_table(specs.outputs),
        in_shardings="".join(f'shardings(in_specs, "{arg}", {arg}), ' for arg in args).strip(),
        args=", ".join(args),
        host=_host_table(plan),
        kind=", memory_kind=memory_kinds.get(name + key)" if _host_table(plan) else "",
    )


def _argument_of(path: str) -> str:
    """The argument's name, or `args[0]` for a step without argument names."""
    found = re.match(r"args\[\d+\]|\w+", path)
    return found.group() if found else path


def _warnings_for(plan: PlanRecord, mesh: int) -> list[str]:
    """Decisions that the source does not contain."""
    lines = []
    if len(plan.stages) > 1:
        lines.append(
            f"Mesh {mesh} of {len(plan.stages)} ({layers_text(plan.stages[mesh].layers)}): only its own arguments and "
            "results are listed. Stages and transfers are not\nexported, so a whole step needs `minialpa.parallelize`."
        )
    if plan.n_micro_batches > 1:
        lines.append(
            f"The plan accumulates gradients over {plan.n_micro_batches} micro-batches, which is not exported: this "
            "step needs more\nmemory."
        )
    return lines


def _host_table(plan: PlanRecord) -> str:
    values = (value for value in (*plan.inputs, *plan.outputs) if value.memory_kind != "device")
    lines = "".join(f"    {value.path!r}: {value.memory_kind!r},\n" for value in values)
    return f"\n#: Other arrays are in device memory.\nmemory_kinds = {{\n{lines}}}\n" if lines else ""


def _table(specs: dict[str, PartitionSpec]) -> str:
    return "".join(f"    {path!r}: PartitionSpec({', '.join(map(repr, spec))}),\n" for path, spec in specs.items())


_SOURCE = '''"""Shardings that minialpa planned for {header}.
{warnings}
Arguments and results are named by path, over the axes of `mesh`. For example

    in_shardings = ({in_shardings})
    out_shardings = shardings(out_specs, "result", jax.eval_shape(step, {args}))
    step = jax.jit(step, in_shardings=in_shardings, out_shardings=out_shardings)

XLA chooses the shardings inside the step, so its collectives may differ from the plan.
"""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

mesh = Mesh(np.asarray(jax.devices()[{devices}]).reshape{shape}, {names})

in_specs = {{
{inputs}}}

out_specs = {{
{outputs}}}
{host}

def shardings(specs, name, tree):
    """`tree` with a sharding in place of each leaf. name: of the argument, or "result"."""

    def sharding(path, _):
        key = jax.tree_util.keystr(path)
        return NamedSharding(mesh, specs[name + key]{kind})

    return jax.tree_util.tree_map_with_path(sharding, tree)
'''
