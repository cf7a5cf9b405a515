"""Makes docs/a-step-in-phases.md from a planned step: `python -m tests.phases_doc` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import minialpa
from minialpa import ClusterSpec, ManualStageOption, PipeshardParallel

PATH = Path(__file__).parents[1] / "docs" / "a-step-in-phases.md"

_HEAD = f"""# A step in phases

This page shows a training step after each phase of planning, in the text of `minialpa plan MODEL --dump`. A test makes
the page (jax {jax.__version__}) and compares.

The step trains two layers with AdamW on four GPUs: two GPUs run the first layer, and two the second. The 8,192 examples
of a batch form 2 micro-batches, and both layers recompute their activations in the backward pass.

```python
def train_step(state, batch):
    def loss(params):
        hidden = jax.nn.relu(batch["x"] @ params["w1"])
        minialpa.mark_pipeline_boundary()
        return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)

    params, opt_state = state
    value, grads = minialpa.value_and_grad(loss)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value
```

`f32[8,16]` is the type of a value, `%12` the result of operation 12, and `%18.0` the first result of operation 18.
Further columns are results of the phase.
"""

_SENTENCES = {
    "trace": "Tracing turns the Python function into one list of operations on the whole batch, with calls inlined "
    "and pipeline boundaries removed. A forward operation and its derivatives are a *forward group*: `forward 2` is "
    "the product `%3`, and `backward 2` are its derivatives `%12` to `%14`. Operations of the optimizer, such as "
    "`%20`, have no group. `minialpa_gradient` marks a gradient of `value_and_grad`.",
    "layers": "Forward operations receive layers, by the boundary in `loss` or, by default, by a clustering of "
    "costs. A derivative joins its forward operation: `%16` joins `%1` in layer 0. The update has no layer.",
    "rematerialise": "The backward pass of a layer recomputes activations from its inputs: `%12` to `%14` copy `%3`, "
    "`%4` and `%6`. The `optimization_barrier` `%11` keeps the compiler from merging copies and originals.",
    "microbatch": "The list becomes a loop over 2 micro-batches, with 4,096 rows of the batch each, and an update "
    "that runs once. The loss still divides by 8.388608e+06, the elements of the whole batch, so the sum of `%24` "
    "over the micro-batches is the gradient of the whole batch. The update reads such sums. A constant such as `%11` "
    "joins the group of its reader, and `name %13` is a copy for several products.",
    "stages": "Each stage becomes tasks on its mesh: forward, backward and update. Compare `leaves` with `reads` to "
    "find the values that cross meshes: the activations `%1` go to mesh 1, and their cotangent `%17` comes back.",
    "shardings": "The solver gives each value a spec on its mesh: `S0,R` splits dimension 0 over mesh axis 0, and "
    "`R` replicates. Each line has the specs of results, then of operands. `+P0` is a partial sum: each device has a "
    "summand of the loss `%5`. A third spec in the middle is the spec before a collective: `%15` is a partial sum "
    "that a reduce-scatter turns into `R,S0`. A value that is read in another spec is resharded first: `%64` is "
    "sliced for `%65`, and the result `w2` is gathered at the end. Mesh 0 splits the columns of `w1`; mesh 1 splits "
    "the examples, and the optimizer state of `w2`.",
    "instructions": "The runtime executes this list once per step, over numbered buffers. The schedule is 1F1B: "
    "`backward1` of one micro-batch precedes `forward1` of the next. `zeros1` makes an accumulator, to which the "
    "passes add inside their functions. A transfer names its target sharding: `P('x',)` splits dimension 0 over axis "
    "0.",
}


def planned() -> dict[str, str]:
    """The phases of the step of the page."""
    optimizer = optax.adamw(1e-3)

    def train_step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            hidden = jax.nn.relu(batch["x"] @ params["w1"])
            minialpa.mark_pipeline_boundary()
            return jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2)

        params, opt_state = state
        value, grads = minialpa.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    params = {"w1": _array(1024, 4096), "w2": _array(4096, 1024)}
    args = ((params, jax.eval_shape(optimizer.init, params)), {"x": _array(8192, 1024), "y": _array(8192, 1024)})
    method = PipeshardParallel(
        num_micro_batches=2,
        layer_option=minialpa.ManualLayerOption(remat="full"),
        stage_option=ManualStageOption(((0,), (1,)), ((1, 2), (1, 2)), ((2,), (2,))),
    )
    cluster = ClusterSpec.preset("a100-80gb", devices_per_host=4)
    with jax.numpy_dtype_promotion("standard"):
        return minialpa.phases(minialpa.plan(train_step, args, cluster=cluster, method=method), train_step, args)


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def page() -> str:
    """The whole document."""
    sections = [f"## {name}\n\n{_SENTENCES[name]}\n\n```\n{_body(text)}\n```\n" for name, text in planned().items()]
    return "\n".join((_HEAD, *sections))


def _body(text: str) -> str:
    """The text of a phase without its title, which the page has as a heading."""
    return text.partition("\n\n")[2].strip("\n")


if __name__ == "__main__":
    PATH.write_text(page())
