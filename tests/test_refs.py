"""Refs in a step: each use trains as in plain jax under every method, and other uses are refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.random import stateful_rng

import minialpa
from minialpa import AutoLayerOption, CreateStateParallel, PipeshardParallel, ShardParallel, UniformStageOption
from minialpa.errors import CheckpointError, DeletedArrayError, MinialpaError, TraceError
from minialpa.methods import Method, Zero3Parallel
from minialpa.testing import assert_allclose
from tests.runtime.cluster.in_process_session import in_process_session

N, WIDTH, N_OUT, N_LAYERS = 16, 8, 4, 4
TWO_STAGES = PipeshardParallel(num_micro_batches=2, layer_option="manual")
METHODS: dict[str, Method | None] = {
    "none": None,
    "shard": ShardParallel(),
    "zero3": Zero3Parallel(),
    "micro-batches": ShardParallel(num_micro_batches=2),
    "stages": TWO_STAGES,
}

Grad = Callable[..., Any]
Mark = Callable[[], None]


def make_params() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    w, v = rng.standard_normal((WIDTH, WIDTH)) * 0.3, rng.standard_normal((WIDTH, N_OUT)) * 0.3
    return {"w": jnp.asarray(w, jnp.float32), "v": jnp.asarray(v, jnp.float32)}


def make_batch(number: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(number + 1)
    return {"x": rng.standard_normal((N, WIDTH), np.float32), "y": rng.standard_normal((N, N_OUT), np.float32)}


def refs_of(tree: Any) -> Any:
    return jax.tree.map(jax.new_ref, tree)


def values_in(refs: Any) -> Any:
    return jax.tree.map(lambda ref: np.asarray(ref[...]), refs)


def descent(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def error(params: Any, hidden: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


# ---- steps -----------------------------------------------------------------------------------------------------------
# Each is a function of `value_and_grad` and of the mark between its two layers, and returns the step and its Refs.


def parameters_in_refs(grad: Grad, mark: Mark) -> Any:
    """Parameters and momentum are Refs, in two arguments. A captured Ref has the sum of losses."""
    total = jax.new_ref(jnp.zeros(()))

    def step(refs: Any, batch: Any, momentum: Any) -> jax.Array:
        params = jax.tree.map(lambda ref: ref[...], refs)

        def loss(p: Any) -> jax.Array:
            hidden = jnp.tanh(batch["x"] @ p["w"])
            mark()
            return error(p, hidden, batch)

        value, grads = grad(loss)(params)
        for name, ref in refs.items():
            momentum[name][...] = 0.9 * momentum[name][...] + grads[name]
            ref[...] -= 0.1 * momentum[name][...]
        total.addupdate(value)
        return value

    refs, momentum = refs_of(make_params()), refs_of(jax.tree.map(jnp.zeros_like, make_params()))
    return lambda run, i: run(refs, make_batch(i), momentum), step, {"params": refs, "moments": momentum, "sum": total}


def with_state(refs: Any, step: Callable[..., Any]) -> Any:
    """A step on parameters, which it returns, and Refs in the same pytree."""
    state = {"params": make_params(), "refs": refs}

    def call(run: Callable[..., Any], number: int) -> Any:
        state["params"], value = run(dict(state), make_batch(number))
        return value

    return call, step, refs


def written_in_the_model(grad: Grad, mark: Mark) -> Any:
    """A running mean, per-example values, values of each layer of a scan, a recomputed layer, and a gradient."""

    @jax.custom_vjp
    def stashed(ref: Any, x: jax.Array) -> jax.Array:
        return x

    def stash(ref: Any, bar: jax.Array) -> Any:
        ref[...] = bar
        return None, bar

    stashed.defvjp(lambda ref, x: (x, ref), stash)

    def step(state: Any, batch: Any) -> Any:
        refs = state["refs"]

        def loss(p: Any) -> jax.Array:
            def layer(x: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
                x = jnp.tanh(x @ p["w"])
                refs["layers"][number] = jax.lax.stop_gradient(jnp.mean(x, 0))
                return x, None

            @jax.checkpoint
            def centered(x: jax.Array) -> jax.Array:
                refs["mean"][...] = 0.9 * refs["mean"][...] + 0.1 * jax.lax.stop_gradient(jnp.mean(x, 0))
                return x - refs["mean"][...][None]

            hidden = centered(jax.lax.scan(layer, batch["x"], jnp.arange(3))[0])
            refs["hidden"][...] = jax.lax.stop_gradient(hidden)
            mark()
            return error(p, stashed(refs["bar"], hidden), batch)

        value, grads = grad(loss)(state["params"])
        refs["n"][...] += N
        return descent(state["params"], grads), value

    shapes = {"layers": (3, WIDTH), "mean": (WIDTH,), "hidden": (N, WIDTH), "bar": (N, WIDTH)}
    refs = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    return with_state(refs_of({**refs, "n": jnp.zeros((), jnp.int32)}), step)


def written_in_loops_and_branches(grad: Grad, mark: Mark) -> Any:
    def step(state: Any, batch: Any) -> Any:
        log, n, key = (state["refs"][name] for name in ("log", "n", "key"))
        key[...], drawn = jax.random.split(key[...])

        def loss(p: Any) -> jax.Array:
            kept = jax.random.bernoulli(drawn, 0.8, (N, WIDTH))
            hidden = jnp.where(kept, jnp.tanh(batch["x"] @ p["w"]), 0.0)
            mark()
            return error(p, hidden, batch)

        value, grads = grad(loss)(state["params"])

        def double(i: jax.Array, x: jax.Array) -> jax.Array:
            log[i] += x
            return x * 2

        def less(x: jax.Array) -> jax.Array:
            n[...] += 1
            return x - 1

        @jax.jit
        def note(x: jax.Array) -> None:
            log[3] = x

        jax.lax.fori_loop(0, 3, double, value)
        jax.lax.while_loop(lambda x: (x > 0) & (n[...] < 8), less, value * 3)
        jax.lax.cond(value > 1.2, lambda: note(value), lambda: note(-value))

        inner = jax.new_ref(jnp.zeros(3))
        inner[1:] = jnp.stack([jax.ref.swap(log, 0, value), value])
        inner.addupdate(1.0, 0)
        log[1:] += jax.freeze(inner)
        return descent(state["params"], grads), value

    refs = {"log": jnp.zeros(4), "n": jnp.zeros((), jnp.int32), "key": jax.random.key(0)}
    return with_state(refs_of(refs), step)


def gradients_in_refs(grad: Grad, mark: Mark) -> Any:
    """Gradients of parts of the batch are added to Refs in a scan."""

    def step(state: Any, batch: Any) -> Any:
        params, sums = state["params"], state["refs"]
        for ref in sums.values():
            ref[...] = jnp.zeros_like(ref[...])

        def part(total: jax.Array, rows: Any) -> tuple[jax.Array, None]:
            value, pull = jax.vjp(lambda p: error(p, jnp.tanh(rows["x"] @ p["w"]), rows), params)
            pull.with_refs(sums)(jnp.float32(0.25))
            return total + value / 4, None

        parts = jax.tree.map(lambda x: x.reshape(4, N // 4, -1), batch)
        value, _ = jax.lax.scan(part, 0.0, parts)
        mark()
        return descent(params, jax.tree.map(lambda ref: ref[...], sums)), value

    return with_state(refs_of(jax.tree.map(jnp.zeros_like, make_params())), step)


def three_steps(make: Callable[[Grad, Mark], Any], parallel: Callable[..., Any], grad: Grad, mark: Mark) -> Any:
    call, step, refs = make(grad, mark)
    run = parallel(step)
    losses = [np.asarray(call(run, i)) for i in range(3)]
    if "key" in refs:
        refs = {**refs, "key": jax.new_ref(jax.random.key_data(refs["key"][...]))}
    return losses, values_in(refs)


STEPS = [parameters_in_refs, written_in_the_model, written_in_loops_and_branches, gradients_in_refs]


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("make", STEPS)
def test_three_steps_equal_plain_jax(make: Callable[[Grad, Mark], Any], method: Method | None) -> None:
    options = {} if method is None else {"method": method}
    expected = three_steps(make, jax.jit, jax.value_and_grad, lambda: None)

    def parallel(step: Callable[..., Any]) -> Any:
        return minialpa.parallelize(step, **options)

    found = three_steps(make, parallel, minialpa.value_and_grad, minialpa.mark_pipeline_boundary)
    assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def stacked(refs: Any, batch: Any) -> jax.Array:
    """A step on stacked layers in a Ref."""

    def loss(w: jax.Array) -> jax.Array:
        hidden, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch["x"], w)
        return jnp.mean(hidden**2)

    value, grad = minialpa.value_and_grad(loss)(refs["w"][...])
    refs["w"][...] -= 0.1 * grad
    return value


def test_a_ref_in_blocks_of_rows_on_two_meshes() -> None:
    layers, stages = AutoLayerOption(N_LAYERS), UniformStageOption(2)
    blocks = PipeshardParallel(num_micro_batches=2, layer_option=layers, stage_option=stages)
    weights = jnp.asarray(np.random.default_rng(0).standard_normal((N_LAYERS, WIDTH, WIDTH), np.float32) * 0.3)
    found, expected = {"w": jax.new_ref(weights)}, {"w": jax.new_ref(weights)}
    step, plain = minialpa.parallelize(stacked, method=blocks), jax.jit(stacked)
    for i in range(3):
        assert_allclose(step(found, make_batch(i)), plain(expected, make_batch(i)), rtol=1e-4, atol=1e-6)
        for ref in (found["w"], expected["w"]):
            ref[0] = ref[0] * 0.5
    assert step.get_last_executable().program.blocks
    assert_allclose(found["w"][...], expected["w"][...], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("n_hosts", "method"), [(1, ShardParallel()), (2, TWO_STAGES)], ids=["one mesh", "stages"])
def test_on_workers_a_ref_keeps_the_array_there_until_it_is_changed_here(n_hosts: int, method: Method) -> None:
    def step(params: Any, batch: Any, log: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            hidden = jnp.tanh(batch["x"] @ p["w"])
            minialpa.mark_pipeline_boundary()
            return error(p, hidden, batch)

        value, grads = minialpa.value_and_grad(loss)(params)
        log[...] = jnp.roll(log[...], 1)
        log[0] += value
        return descent(params, grads), value

    state, log = make_params(), jax.new_ref(jnp.zeros(3))
    expected, plain_log, plain = make_params(), jax.new_ref(jnp.zeros(3)), jax.jit(step)
    with in_process_session(n_hosts, 2):
        parallel = minialpa.parallelize(step, method=method)
        for i in range(4):
            state, value = parallel(state, make_batch(i), log)
            expected, wanted = plain(expected, make_batch(i), plain_log)
            assert_allclose(value, wanted, rtol=1e-4, atol=1e-6)
            if i == 1:
                assert_allclose(log[...], plain_log[...], rtol=1e-4, atol=1e-6)
            if i == 2:
                log[1] = plain_log[1] = 7.0
        assert_allclose(log[...], plain_log[...], rtol=1e-4, atol=1e-6)


# ---- calls -----------------------------------------------------------------------------------------------------------


def add_mean(ref: Any, x: jax.Array) -> None:
    ref[...] += jnp.mean(x, 0)


ONES = np.ones((8, 4), np.float32)


def test_the_second_call_moves_no_ref_and_donates_the_first_array() -> None:
    def step(ref: Any, batch: Any) -> jax.Array:
        ref[...] += batch["x"].T @ batch["x"]
        return jnp.sum(ref[...])

    ref, parallel = jax.new_ref(jnp.zeros((WIDTH, WIDTH))), minialpa.parallelize(step, method=ShardParallel())
    parallel(ref, make_batch())
    (spec,), _ = parallel.get_last_executable().get_input_placement_specs()[0].partition_specs, None
    before = ref.sharding
    assert before.spec == spec
    parallel(ref, make_batch())
    assert ref.sharding == before
    assert parallel.get_last_executable().program.donated_leaves == {0}


def test_a_type_of_a_ref_is_planned_and_its_program_runs() -> None:
    parallel, ref = minialpa.parallelize(add_mean), jax.new_ref(jnp.zeros(4))
    types = jax.typeof(ref), jax.ShapeDtypeStruct(ONES.shape, ONES.dtype)
    assert parallel.plan(*types).input_specs[0].shape == (4,)
    assert "a[...] <-" in str(parallel.trace(*types).jaxpr)
    parallel.lower(*types).compile()(ref, ONES)
    parallel.get_executable(*types)(ref, ONES)
    parallel(ref, ONES)
    assert_allclose(ref[...], np.full(4, 3.0))
    assert parallel.preshard_dynamic_args(ref, ONES)[0] is ref
    parallel.get_last_executable().profile_with_dummy_inputs(1)
    assert_allclose(ref[...], np.full(4, 3.0))
    with pytest.raises(TraceError, match=r"`ref` is float32\[4\] instead of float32\[4\] in a Ref"):
        parallel.get_last_executable()(jnp.zeros(4), ONES)


def test_captured_refs_are_no_part_of_arguments_and_results() -> None:
    total = jax.new_ref(jnp.zeros(4))
    parallel = minialpa.parallelize(lambda x: (add_mean(total, x), {"x": jnp.sum(x)})[1])
    assert parallel(ONES) == {"x": 32.0}
    executable = parallel.get_last_executable()
    executable.profile_with_dummy_inputs(1)
    assert executable.stage_timeline()
    executable(ONES)
    assert_allclose(total[...], np.full(4, 2.0))
    assert parallel.eval_shape(ONES)["x"].shape == ()
    assert list(executable.get_output_placement_specs()) == ["x"]
    for specs in (
        executable.get_input_placement_specs(),
        executable.get_input_targets(),
        parallel.export_specs(ONES)[0],
    ):
        assert len(specs) == 1
    assert [value.path for value in parallel.plan(ONES).outputs] == ["result['x']", "captured_refs[0][...]"]


def test_a_saved_plan_fits_a_step_with_refs() -> None:
    ref = jax.new_ref(jnp.zeros(4))
    plan = minialpa.parallelize(add_mean).plan(ref, ONES)
    minialpa.parallelize(add_mean, method=plan)(ref, ONES)
    assert_allclose(ref[...], np.ones(4))


def test_a_function_reads_a_ref_where_the_training_step_keeps_it() -> None:
    total = jax.new_ref(jnp.zeros(()))

    def step(params: Any, batch: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            hidden = jnp.tanh(batch["x"] @ p["w"])
            minialpa.mark_pipeline_boundary()
            return error(p, hidden, batch)

        value, grads = minialpa.value_and_grad(loss)(params)
        total[...] += value
        return descent(params, grads), value

    def evaluate(params: Any, batch: Any) -> jax.Array:
        return error(params, jnp.tanh(batch["x"] @ params["w"]), batch) + total[...]

    train_step = minialpa.parallelize(step, method=TWO_STAGES)
    params, _ = train_step(make_params(), make_batch())
    parallel = minialpa.parallelize(evaluate)
    value = parallel(params, make_batch(1))
    assert_allclose(value, evaluate(jax.device_get(params), make_batch(1)), rtol=1e-5, atol=1e-6)
    assert len(parallel.get_last_executable().get_parallel_plan().stages) == 2
    assert not parallel.get_last_executable().program.donated_leaves


def test_a_generator_with_a_counter_in_a_ref_draws_as_in_jax() -> None:
    def draw(rng: Any) -> jax.Array:
        return jax.random.normal(rng.key(), (4,))

    parallel, plain = minialpa.parallelize(draw), jax.jit(draw)
    found, expected = stateful_rng(0), stateful_rng(0)
    for _ in range(2):
        assert_allclose(parallel(found), plain(expected))


def test_threads_update_one_ref() -> None:
    ref, parallel = jax.new_ref(jnp.zeros(4)), minialpa.parallelize(add_mean)
    parallel(ref, ONES)
    threads = [threading.Thread(target=lambda: [parallel(ref, ONES) for _ in range(20)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_allclose(ref[...], np.full(4, 61.0))


def test_a_failed_step_changes_no_ref() -> None:
    ref, donated = jax.new_ref(jnp.zeros(4)), jnp.ones((8, 4)) + 0

    def fails(ref: Any, x: jax.Array) -> None:
        add_mean(ref, x)
        raise ValueError("in Python")

    with pytest.raises(ValueError, match="in Python"):
        minialpa.parallelize(fails)(ref, ONES)
    parallel = minialpa.parallelize(add_mean)
    parallel(jax.new_ref(jnp.zeros(4)), donated)
    donated.delete()
    with pytest.raises(DeletedArrayError):
        parallel(ref, donated)
    assert_allclose(ref[...], np.zeros(4))


def test_debug_nans_names_a_ref() -> None:
    def step(state: Any) -> None:
        state["log"][...] /= 0.0

    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"nan.*log.*step"):
        minialpa.parallelize(step)({"log": jax.new_ref(jnp.zeros(4))})


# ---- refusals --------------------------------------------------------------------------------------------------------


def frozen_twice(x: jax.Array) -> jax.Array:
    ref = jax.new_ref(x)
    return jax.freeze(ref) + ref[...]


REF = jax.new_ref(jnp.zeros(4))
REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "twice": (lambda a, b: a[...] + b[...], (REF, REF), "`a` and `b` are the same Ref"),
    "captured, too": (lambda a: a[...] + REF[...], (REF,), r"`a` and `captured_refs\[0\]` are the same Ref"),
    "frozen": (lambda a: jax.freeze(a), (REF,), r"`jax.freeze` at .*test_refs.py.*Read `ref\[\.\.\.\]` instead"),
    "after freeze": (frozen_twice, (jnp.ones(2),), r"`get` at .*frozen_twice.* uses a Ref after `jax.freeze`"),
    "returned": (lambda a: {"x": a}, (REF,), r"returns a Ref as `result\['x'\]`. Return its value"),
    "new": (jax.new_ref, (jnp.ones(2),), "returns a Ref as `result`"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_uses_are_refused_by_name(case: str) -> None:
    step, args, message = REFUSED[case]
    with pytest.raises(TraceError, match=message):
        minialpa.parallelize(step).plan(*args)


def test_two_refs_of_one_program_must_differ_in_later_calls_too() -> None:
    parallel = minialpa.parallelize(lambda a, b: a[...] + b[...])
    parallel(REF, jax.new_ref(jnp.ones(4)))
    with pytest.raises(TraceError, match="`a` and `b` are the same Ref"):
        parallel(REF, REF)


def test_a_ref_holds_no_examples() -> None:
    def step(params: Any, batch: Any) -> jax.Array:
        return jnp.mean(batch["x"][...] @ params["w"])

    batch = {"x": jax.new_ref(jnp.asarray(make_batch()["x"]))}
    with pytest.raises(TraceError, match=r"`batch\['x'\]` is a Ref, and its argument is a batch.*pass `ref"):
        minialpa.parallelize(step, batch_argnums=1).plan(make_params(), batch)
    with pytest.raises(TraceError, match="found no argument whose arrays hold the examples"):
        minialpa.parallelize(step, method=ShardParallel(num_micro_batches=2)).plan(make_params(), batch)


def test_checkpoints_and_creations_of_states_take_values_of_refs(tmp_path: Any) -> None:
    def step(params: Any, batch: Any) -> Any:
        value, grads = minialpa.value_and_grad(lambda p: error(p, batch["x"] @ p["w"], batch))(params)
        REF.addupdate(jnp.mean(batch["y"], 0))
        return descent(params, grads), value

    parallel = minialpa.parallelize(step)
    with pytest.raises(MinialpaError, match="updates a Ref that is not part of the state"):
        minialpa.train(parallel, make_params, [make_batch()], folder=tmp_path / "run")
    assert minialpa.train(parallel, make_params, [make_batch()]).n_steps == 1

    with pytest.raises(CheckpointError, match=r"`\['log'\]` is a Ref"):
        minialpa.save_checkpoint(tmp_path, {"log": REF}, step=0)
    minialpa.save_checkpoint(tmp_path, {"log": REF[...]}, step=0)
    with pytest.raises(CheckpointError, match=r"`\['log'\]` is a Ref"):
        minialpa.restore_checkpoint(tmp_path, {"log": REF})

    create = minialpa.parallelize(lambda: {"w": make_params()["w"], "v": jnp.stack([REF[...]] * WIDTH)})
    assert create()["v"].shape == (WIDTH, N_OUT)
    create = minialpa.parallelize(
        lambda: {"w": make_params()["w"], "v": jnp.stack([REF[...]] * WIDTH)},
        method=CreateStateParallel(parallel, (make_batch(),)),
    )
    with pytest.raises(TraceError, match="creates the state reads a Ref"):
        create()
