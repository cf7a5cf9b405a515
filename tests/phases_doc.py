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

What the planner makes of a training step, phase by phase. The text of each phase is what `minialpa plan MODEL --dump`
writes; a test makes this page (jax {jax.__version__}) and compares.

The step trains a network of two layers with AdamW on four GPUs. The first two run the first layer, the other two the
second one. A batch of 8,192 examples is cut into 2 micro-batches, and both layers compute their activations again in
the backward pass.

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

`f32[8,16]` is the type of a value and `%12` the result of operation 12. Further columns are facts that the phase has
found.
"""

#: What each phase does, and what to look at.
_SENTENCES = {
    "trace": "The Python function becomes one list of operations on the whole batch, without calls and marks. Each "
    "operation knows the part of the step that it is from, and the forward operation whose derivative it is.",
    "layers": "Each forward operation gets a layer, and its derivatives belong to the same one; the update has none. "
    "Here the boundary in the model separates the layers; by default the planner clusters operations by their cost.",
    "rematerialise": "Before the backward pass of a layer, copies of its forward operations compute again what it "
    "reads. An `optimization_barrier` keeps the compiler from merging the copies with the originals.",
    "microbatch": "Operations on examples run once for each micro-batch, on its rows; the update runs once, "
    "afterwards. Gradients are sums over the micro-batches, since each mean divides by the number of all examples.",
    "stages": "Operations become tasks: the forward pass and the backward pass of each stage, and its update. What a "
    "task leaves for a task of another mesh is sent there.",
    "shardings": "Each value has a spec on its mesh: `S0,R` splits dimension 0 over mesh axis 0, `R` splits nothing. "
    "`+P0` is a value whose devices hold summands, so that an all-reduce has to follow where it is read whole.",
    "instructions": "The runtime executes this list, which names buffers by number, once per step. The order is that "
    "of the schedule 1F1B: the last stage begins the backward pass of a micro-batch as soon as its forward pass ends.",
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
