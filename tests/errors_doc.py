"""Makes docs/errors.md from errors that calls raise: `python -m tests.errors_doc` writes it.

Each example is a wrong call. Its message, and the docstring of its class, are on the page.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import minialpa
from minialpa import (
    AutoShardingOption,
    ClusterSpec,
    PipeshardParallel,
    Plan,
    ShardParallel,
    UniformStageOption,
    Zero3Parallel,
    errors,
)
from minialpa.errors import MinialpaError
from tests.test_training import Room, session_on

ROOT = Path(__file__).parents[1]
PATH = ROOT / "docs" / "errors.md"
N_EXAMPLES, WIDTH = 16, 8

_HEAD = """# Errors

The errors that minialpa raises, with messages of wrong calls. A message has the value that arrived, the expected value
and the change. `tests/errors_doc.py` made this page, and the tests check it.

Each error is a `MinialpaError`. Most are also an error of Python, so `except ValueError` catches a `TraceError`. A
wrong call changes no state: arguments stay valid, and a right call works afterwards.
[troubleshooting.md](troubleshooting.md) starts from symptoms.
"""


# ---- a step and wrong calls ------------------------------------------------------------------------------------------


def step(params: Any, batch: Any) -> Any:
    def loss_of(params: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2)

    loss, grads = minialpa.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def arguments(n: int = N_EXAMPLES, width: int = WIDTH) -> tuple[Any, Any]:
    params = {"w": jnp.ones((width, width)), "v": jnp.ones((width, width))}
    return params, {"x": jnp.ones((n, width)), "y": jnp.ones((n, width))}


def planned(method: Any, n: int = N_EXAMPLES, width: int = WIDTH) -> Plan:
    shapes = jax.eval_shape(lambda: arguments(n, width))
    return minialpa.plan(step, shapes, cluster=ClusterSpec.preset("cpu", devices_per_host=4), method=method)


def ambiguous_batch() -> None:
    def towers(users: Any, params: Any, items: Any) -> Any:
        return jnp.mean(jnp.tanh(users @ params["w"])), jnp.mean(jnp.tanh(items @ params["w"]))

    params, batch = arguments()
    minialpa.parallelize(towers, method=ShardParallel(num_micro_batches=2))(batch["x"], params, batch["y"][:4])


def uneven_micro_batches() -> None:
    minialpa.parallelize(step, method=ShardParallel(num_micro_batches=5), on_ragged="error")(*arguments())


def call_inside_jit() -> None:
    jax.jit(minialpa.parallelize(step))(*arguments())


def statistic_and_reduction() -> None:
    def mixed(params: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            y = batch["x"] @ params["w"]
            own = minialpa.per_micro_batch(jnp.mean(y, axis=0))
            return jnp.mean(jnp.exp(jnp.mean(y, axis=0)) * own)

        return minialpa.value_and_grad(loss_of)(params)

    minialpa.parallelize(mixed, method=ShardParallel(num_micro_batches=2))(*arguments())


def unknown_devices() -> None:
    ShardParallel(devices="h100")  # type: ignore[arg-type]


def unknown_argument() -> None:
    fixed = {"params['weight']": jax.sharding.PartitionSpec("x")}
    planned(ShardParallel(auto_sharding_option=AutoShardingOption(fixed_specs=fixed)))


def contradiction() -> None:
    AutoShardingOption(force_data_parallel=True, allow_replicated_parameters=False)


def too_large() -> None:
    planned(ShardParallel(auto_sharding_option=AutoShardingOption(memory_limit_bytes=1e5)), width=1024)


def too_large_stage() -> None:
    option = AutoShardingOption(memory_limit_bytes=1e5)
    stages = UniformStageOption(num_stages=2)
    planned(PipeshardParallel(stage_option=stages, default_auto_sharding_option=option), width=1024)


def too_large_pipeline() -> None:
    option = AutoShardingOption(memory_limit_bytes=1e5)
    planned(PipeshardParallel(stage_option="auto", default_auto_sharding_option=option), width=1024)


def uneven_batch() -> None:
    planned(Zero3Parallel(), n=10)


def other_shapes() -> None:
    minialpa.parallelize(step, method=planned(ShardParallel()))(*arguments(n=64))


def edited_plan() -> None:
    text = planned(PipeshardParallel()).to_json()
    Plan.from_json(text.replace('"submesh":[1,2]', '"submesh":[1,3]'))


def lost_host() -> None:
    hosts = Room(2)
    with session_on(hosts):
        train_step = minialpa.parallelize(step, method=PipeshardParallel(num_micro_batches=2))
        params, _ = train_step(*arguments())
        hosts.lose(1)
        float(train_step(params, arguments()[1])[1])


def donated_state() -> None:
    train_step = minialpa.parallelize(step)
    params, batch = train_step.preshard_dynamic_args(*arguments())
    train_step(params, batch)
    train_step(params, batch)


def no_checkpoint() -> None:
    minialpa.restore_checkpoint("run", arguments()[0])


def train_without_parallelize() -> None:
    minialpa.train(step, dict, [])  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Example:
    """title: of the example. advice: beyond the message; may be empty."""

    title: str
    call: Callable[[], object]
    advice: str = ""


#: Public classes and the internal classes below them, in the order of the page.
EXAMPLES: dict[str, tuple[Example, ...]] = {
    "TraceError": (
        Example("It is not clear which arguments hold examples", ambiguous_batch),
        Example(
            'The micro-batches do not divide the batch, with `on_ragged="error"`',
            uneven_micro_batches,
            "Without the option, the step runs in fewer micro-batches, with a warning.",
        ),
        Example("A parallelized function inside `jax.jit`", call_inside_jit),
        Example(
            "A micro-batch reads its own statistic and a reduction of the whole batch",
            statistic_and_reduction,
            "See [micro_batches.md](micro_batches.md#what-is-refused).",
        ),
    ),
    "ShardingError": (
        Example("A name in place of devices", unknown_devices),
        Example("An option names an unknown argument", unknown_argument),
        Example("Two options contradict each other", contradiction),
    ),
    "InfeasibleError": (
        Example("The step does not fit in memory", too_large, "See [tuning.md](tuning.md#memory)."),
        Example("A stage does not fit in memory", too_large_stage),
        Example("No pipeline fits in memory", too_large_pipeline),
        Example(
            "The devices do not divide the examples",
            uneven_batch,
            'A `DataLoader` with `on_ragged="drop"` leaves such batches out.',
        ),
    ),
    "VerifyError": (
        Example("A saved plan meets other shapes", other_shapes, "See [plans.md](plans.md#another-step-other-shapes)."),
        Example("A plan was edited, or is damaged", edited_plan),
    ),
    "WorkerError": (
        Example(
            "A host is lost",
            lost_host,
            "Positions of the other workers follow. See [clusters.md](clusters.md#when-something-fails).",
        ),
    ),
    "DeletedArrayError": (Example("A donated state is passed a second time", donated_state),),
    "CheckpointError": (Example("There is no checkpoint", no_checkpoint),),
    "MinialpaError": (Example("A wrong argument of a function without a class of its own", train_without_parallelize),),
}


# ---- classes ---------------------------------------------------------------------------------------------------------


def public() -> set[str]:
    """The names of the classes of `minialpa.errors`."""
    return {name for name, one in vars(errors).items() if inspect.isclass(one) and issubclass(one, MinialpaError)}


@functools.cache
def subclasses() -> dict[str, tuple[str, str]]:
    """Base and docstring of each class below `MinialpaError` that is not in `minialpa.errors`, by name."""
    found: dict[str, tuple[str, str]] = {}
    for path in sorted((ROOT / "minialpa").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and path.name != "errors.py":
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                if public().intersection(bases):
                    found[node.name] = bases[0], ast.get_docstring(node) or ""
    return found


def raised(call: Callable[[], object]) -> MinialpaError:
    try:
        call()
    except MinialpaError as error:
        return error
    raise AssertionError(f"{call.__name__} raised no MinialpaError")


def message(error: Exception) -> str:
    """The text, with a line of a model in place of lines of this file, and without the positions of other workers."""
    text = re.sub(r"^Worker 0, .*\n", "", str(error), flags=re.MULTILINE)
    text = re.sub(r"[\w./-]*errors_doc\.py:\d+ \([^)]*\)", "model.py:41", text)
    return re.sub(r"process \d+", "process 4711", text)


# ---- the page --------------------------------------------------------------------------------------------------------


def _first_sentence(text: str) -> str:
    return " ".join(text.split(".")[0].split()) + "."


def _section(name: str, found: dict[str, MinialpaError]) -> Iterator[str]:
    kind = getattr(errors, name)
    others = [base for base in kind.__bases__ if not issubclass(base, MinialpaError) and base is not Exception]
    also = f" It is also {'an' if others[0].__name__[0] in 'AEIOU' else 'a'} `{others[0].__name__}`." if others else ""
    yield f"## `{name}`\n\n{textwrap.fill(_first_sentence(kind.__doc__) + also, 120)}\n"
    below = {one: doc for one, (base, doc) in subclasses().items() if base == name}
    if below:
        yield "Below it:\n"
    for one, doc in below.items():
        yield textwrap.fill(f"- `{one}`: {_first_sentence(doc)}", 120, subsequent_indent="  ")
    if below:
        yield ""
    for example in EXAMPLES[name]:
        error = found[example.title]
        yield (
            f"**{example.title}**: `{type(error).__name__}`\n" if type(error) is not kind else f"**{example.title}**\n"
        )
        lines = (textwrap.fill(line, 110, subsequent_indent="    ") for line in message(error).splitlines())
        yield "\n".join(("```text", *lines, "```\n"))
        if example.advice:
            yield f"{example.advice}\n"


def page() -> str:
    found = {one.title: raised(one.call) for examples in EXAMPLES.values() for one in examples}
    return "\n".join([_HEAD, *(line for name in EXAMPLES for line in _section(name, found))]).rstrip() + "\n"


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    jax.config.update("jax_platforms", "cpu")
    os.chdir(tempfile.mkdtemp())
    PATH.write_text(page(), encoding="utf-8")
