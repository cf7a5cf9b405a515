"""The files of `dump_debug_info`: Alpa's names, each program once, transfers, and the strategies of each operation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import JaxprEqn

import minialpa
from minialpa.inter.strategies_text import specs_text
from minialpa.tracing.flattening import trace_flat
from tests.helpers import METHODS, strategies_of
from tests.runtime.cluster.in_process_session import in_process_session

Session = Callable[[], AbstractContextManager[Any]]

LOCAL: Session = nullcontext
ON_WORKERS: Session = lambda: in_process_session(2, 4)  # noqa: E731


def train_step(params: Any, batch: Any) -> Any:
    def loss(p: Any) -> jax.Array:
        h = jnp.tanh(batch["x"] @ p["w"])
        minialpa.mark_pipeline_boundary()
        return jnp.mean((h @ p["v"] - batch["y"]) ** 2)

    value, grads = minialpa.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments() -> tuple[Any, Any]:
    params = {name: jnp.ones((16, 16)) for name in ("w", "v")}
    return params, {name: np.ones((16, 16), np.float32) for name in ("x", "y")}


def step_by(method: Any) -> Any:
    return minialpa.parallelize(train_step, method=method, donate_argnums=())


def dumped(executable: Any, folder: Path) -> dict[str, str]:
    executable.dump_debug_info(folder)
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(params=[LOCAL, ON_WORKERS], ids=["local", "workers"])
def session(request: pytest.FixtureRequest) -> Iterator[str]:
    minialpa.shutdown()
    with request.param():
        yield request.node.callspec.id


def test_a_pipeline_has_alpas_files(session: str, tmp_path: Path) -> None:
    executable = step_by(METHODS["pipeline"]).get_executable(*arguments())
    files = dumped(executable, tmp_path / "deep" / "info")

    # Each program once, with the first one under the name of the stage.
    programs = {name: text for name, text in files.items() if name.endswith(".hlo")}
    assert {"train_step_stage_0.hlo", "train_step_stage_1.hlo", "train_step_stage_0_backward0.hlo"} <= programs.keys()
    meshes = (function.mesh for function in executable.program.functions)
    distinct = set(zip(meshes, executable.get_hlo_text(), strict=True))
    assert sorted(programs.values()) == sorted(text for _, text in distinct)

    for k, n_bytes in enumerate(executable.get_stage_allocation_size()):
        text = files[f"train_step_stage_{k}.mem_usage.txt"]
        assert text.startswith(f"total_allocation_size: {n_bytes / 1024**3:.3f} GB\n") and f": {n_bytes} bytes" in text
    assert "total_allocation_size: 0.000 GB" in files["train_step_mem_usage.txt"]

    inputs = files["train_step_input_placement_specs.txt"].splitlines()
    assert inputs == [str(spec) for spec in jax.tree.leaves(executable.get_input_placement_specs())]
    assert "result[1] float32[]: mesh" in files["train_step_output_placement_specs.txt"]

    # Activations go to the second mesh, and their gradients come back, for each micro-batch.
    there, back = files["train_step_resharding_tasks.txt"].split("\n\n")
    assert re.match(r"2 times: result \d+ of forward0 float32\[8, 16\], 512 B\n  from mesh 0 .*\n  to mesh 1 ", there)
    assert re.match(r"2 times: result \d+ of backward1 float32\[8, 16\], 512 B\n  from mesh 1 .*\n  to mesh 0 ", back)
    how = "by `jax.device_put` in this process" if session == "local" else r"device 0 sends \[0:\d+, 0:\d+\] to 4"
    assert re.search(f"\n  {how}", there)


def test_the_readme_lists_all_files_and_phases_are_those_of_the_step(tmp_path: Path) -> None:
    step, args = step_by(METHODS["pipeline"]), arguments()
    executable = step.get_executable(*args)
    files = dumped(executable, tmp_path)
    listed = [line.split(": ")[0] for line in files["README.txt"].splitlines()]
    assert sorted([*listed, "README.txt"]) == sorted(files)

    phases = {f"phases/{i}-{name}.txt": text for i, (name, text) in enumerate(step.phases(*args).items())}
    assert {name: files[name] for name in phases} == phases
    assert "dot_general" in files["jaxpr.txt"] and "test_debug_files.py:" in files["jaxpr.txt"]
    assert f"jax {jax.__version__}\n" in files["versions.txt"]
    assert minialpa.Plan.from_json(files["plan.json"]) == executable.get_parallel_plan()
    assert "Stage 1" in files["summary.txt"] and "params['w']" in files["placements.txt"]
    assert "forward0 Run" in files["instructions.txt"] and "accumulate1 Accumulate" in files["instructions.txt"]


def test_a_step_on_one_mesh_has_one_program_and_no_transfer(tmp_path: Path) -> None:
    files = dumped(step_by(METHODS["shard"]).get_executable(*arguments()), tmp_path)
    assert [name for name in files if name.endswith(".hlo")] == ["train_step.hlo"]
    assert sorted(path.name for path in tmp_path.glob("*mem_usage.txt")) == [
        "train_step.mem_usage.txt",
        "train_step_mem_usage.txt",
    ]
    assert files["train_step_resharding_tasks.txt"] == "No array moves between meshes.\n"


def test_steps_by_saved_plans_followers_and_created_states_have_their_files(session: str, tmp_path: Path) -> None:
    train, (params, batch) = step_by(METHODS["pipeline"]), arguments()
    plan = train.get_executable(params, batch).get_parallel_plan()
    saved = dumped(step_by(plan).get_executable(params, batch), tmp_path / "saved")
    assert "* " in saved["strategies.txt"]

    def evaluate(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2)

    follow = minialpa.parallelize(evaluate, method=minialpa.FollowParallel(train))
    followed = dumped(follow.get_executable(params, batch), tmp_path / "followed")
    assert {"evaluate_stage_0.hlo", "evaluate_stage_1.hlo", "phases/5-shardings.txt"} <= followed.keys()

    def create() -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    creator = minialpa.parallelize(create, method=minialpa.CreateStateParallel(train, batch))
    created = dumped(creator.get_executable(), tmp_path / "created")
    assert {"create_stage_0.hlo", "create_stage_1.hlo", "jaxpr.txt"} <= created.keys()
    # The training step decides where the state lies.
    assert created["training_step/strategies.txt"] == saved["strategies.txt"]


def test_the_strategies_of_a_product_are_its_candidates_and_the_plans_is_marked(tmp_path: Path) -> None:
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    x = jax.ShapeDtypeStruct((64, 64), np.float32)
    step = minialpa.parallelize(product, method=minialpa.ShardParallel(logical_shape=(2, 4)), batch_argnums=())
    executable = step.get_executable(x, x)
    text = dumped(executable, tmp_path)["strategies.txt"]
    (heading, *rows) = text.partition("stage 0, 2 x 4 devices:\n")[2].splitlines()
    assert heading.startswith("%0  f32[64,64]  dot_general[1x0] x, w")

    found = [re.fullmatch(r"  ([* ]) (.*?) +(\d[^ ]* \w+) .*", row) for row in rows]
    specs = [one[2] for one in found if one is not None]
    (eqn,) = _equations(product, x, x)
    strategies = strategies_of(eqn, executable.get_parallel_plan().cluster.logical_mesh((1, 8), (2, 4)))
    candidates = [strategies.read(s) for s in range(len(strategies.seconds))]
    assert sorted(specs) == sorted({specs_text(one) for one in candidates if not one.results[0].partial})

    (chosen,) = (one[2] for one in found if one is not None and one[1] == "*")
    assert chosen == specs_text(executable.get_parallel_plan().stages[0].equation_specs[0])


def test_operations_in_a_loop_have_their_strategies(tmp_path: Path) -> None:
    def scanned(x: jax.Array, ws: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]

    args = jnp.ones((16, 16)), jnp.ones((4, 16, 16))
    step = minialpa.parallelize(scanned, method=minialpa.ShardParallel(), batch_argnums=())
    lines = dumped(step.get_executable(*args), tmp_path)["strategies.txt"].splitlines()
    start = next(i for i, line in enumerate(lines) if " scan[" in line)
    inner = [line for line in lines[start + 1 :] if line.startswith("    ")]
    assert any("dot_general" in line for line in inner) and sum(line.startswith("      * ") for line in inner) >= 2
    assert any("tanh" in line and "follows %" in line for line in inner)


def _equations(fun: Callable[..., Any], *args: Any) -> tuple[JaxprEqn, ...]:
    return trace_flat(fun, *args)[0].eqns
