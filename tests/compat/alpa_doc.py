"""Makes docs/alpa.md from the tables of names and settings: `python -m tests.compat.alpa_doc` writes it."""

from __future__ import annotations

from pathlib import Path

from minialpa.compat.alpa import names, options, util
from minialpa.compat.alpa.api import EXECUTABLE_INSTEAD
from minialpa.compat.alpa.global_env import GlobalConfig
from minialpa.compat.alpa.settings import Adjustable

PATH = Path(__file__).parents[2] / "docs" / "alpa.md"

#: The classes with settings.
ADJUSTABLE: tuple[type[Adjustable], ...] = (
    options.AutoShardingOption,
    options.AutoLayerOption,
    options.ManualLayerOption,
    options.AutoStageOption,
    options.ManualStageOption,
    options.UniformStageOption,
    GlobalConfig,
)

_HEAD = """# Scripts for Alpa

A script that was written for [Alpa](https://github.com/alpa-projects/alpa) runs after one line of it has changed:

```python
import jax
import jax.numpy as jnp
import minialpa.compat.alpa as alpa  # was: import alpa

alpa.init(cluster="local")
as_option = alpa.AutoShardingOption()
as_option.force_data_parallel = True


@alpa.parallelize(method=alpa.ShardParallel(num_micro_batches=2, auto_sharding_option=as_option))
def train_step(params, batch):
    def loss_func(params):
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) - batch["y"]) ** 2)

    loss, grads = alpa.value_and_grad(loss_func)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


params = {"w": jnp.ones((16, 16))}
batch = {"x": jnp.ones((32, 16)), "y": jnp.ones((32, 16))}
params, loss = train_step(params, batch)
alpa.shutdown()
```

Each name of Alpa does what it did, or raises an error that says what to use instead. `tests/compat/alpa_doc.py` made
this page from the tables that these errors come from.

Scripts without calls into Alpa's internals often run after `import minialpa as alpa`, too. `minialpa.compat.alpa` adds:

- Options that the script changes after it has made them. A method reads them when a step is planned.
- Alpa's defaults: `parallelize` without a method uses `ShardParallel()`, `init` connects to Ray, and
  `PipeshardParallel` sets `prefer_reduce_scatter`.
- Meshes and clusters as objects, which methods take as `devices`.
- `executable.get_hlo_text()` is one text if there is no pipeline. In a pipeline, it and `get_stage_execution_info()`
  have one entry for the forward pass, the backward pass and the update of each stage. What minialpa runs between
  these, such as adding up gradients, is left out.
- Methods that the script changes after it has made them: `method.devices = mesh`, until a step is planned by them.
- Executables that are called on the arguments or on their leaves: `executable(*leaves)`.
- Placement specs that are equal if shape, dtype, meshes and shardings are, for all arguments. Loaders take
  them.

## What changes

- The script needs jax 0.10.2 or later, and no patched jaxlib. Names that jax has dropped since Alpa's time, such as
  `jax.tree_map`, are the script's to replace.
- Modules of the package with Alpa's names are `device_mesh`, `global_env`, `parallel_method`, `testing`, `timer` and
  `util`. Everything else is imported from the package itself.
- `ManualShardingOption` follows `pjit`: `None` replicates, and what is left out is the planner's choice, also under
  `enable_auto_sharding=False`, where Alpa let the compiler derive it. Axes are named in the order of the logical mesh.
  A stage without a logical shape has one axis, with the last of the names. An axis that only other stages have splits
  nothing.
- A bare PartitionSpec in `jax.lax.with_sharding_constraint` may name these axes.
- `preshard_dynamic_args` returns batches in micro-batches, if the step has several: arrays with `sharding` and
  `addressable_shards`, which NumPy reads.
- A step of `MeshDriverDataLoader` reads the samples in their order, in every session.
- Nothing is profiled before a step is planned: costs follow from the figures of devices and links.
- Random numbers depend on the keys that the step gets, as on one device. Dropout needs a key.
- A step over micro-batches equals the full-batch step: sums stay sums, and auxiliary results are those of the full
  batch.
- `get_execution_time_costs()` has the seconds of calls while `global_config.shard_parallel_sync_for_timer` or
  `global_config.pipeline_sync_for_timer` is True. Before any, it has those of `profile_with_dummy_inputs()`, or raises.
- `get_stage_execution_info()` runs a step on zeros and measures that one.
"""


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cells).replace("|  |", "| |") + " |" for cells in lines).replace("  |", " |")


def page() -> str:
    """The text of docs/alpa.md."""
    works = [(f"`{name}`", note) for name, note in sorted(names.WORKS.items())]
    later = [
        (f"`{name}`", f"That of minialpa, if it has one. Else: {text}") for name, text in names.FROM_MINIALPA.items()
    ]
    instead = [(f"`{name}`", text) for name, text in sorted(names.INSTEAD.items())]
    attributes = [(f"`executable.{name}`", text) for name, text in sorted(EXECUTABLE_INSTEAD.items())]
    settings = [
        (f"`{owner.__name__}.{name}`", "error" if setting.is_refused else "warning", setting.sentence)
        for owner in ADJUSTABLE
        for name, setting in sorted(owner.SETTINGS.items())
    ]
    utilities = ", ".join(f"`{name}`" for name in util.__all__)
    return "\n\n".join(
        (
            _HEAD.rstrip(),
            "## Names that work",
            _table(("name", "what differs"), works),
            f"In `util`: {utilities}.",
            "## Names that minialpa may have",
            _table(("name", "what it is"), later),
            "## Names that are not here",
            "They can be imported. Using one raises a `MinialpaError` with this sentence.",
            _table(("name", "what to use"), instead),
            _table(("attribute", "what to use"), attributes),
            "## Settings without an equal",
            "Another value than Alpa's default gets a warning if ignoring it does no harm, and else an error.",
            _table(("setting", "gets", "because"), settings) + "\n",
        )
    )


if __name__ == "__main__":
    PATH.write_text(page(), encoding="utf-8")
