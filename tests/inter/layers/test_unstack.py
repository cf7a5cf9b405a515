"""Unstacking: the rewritten step equals the step, for any scan, update and blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minialpa
from minialpa.inter.layers.layered_step import LayeredStep, cut_scans, with_longer_scans
from minialpa.inter.layers.remat import rematerialise
from minialpa.inter.layers.stacks import find_stacks
from minialpa.inter.layers.unstack import unstack, with_row_blocks
from minialpa.options import AutoLayerOption
from minialpa.testing import assert_allclose
from minialpa.tracing.evaluation import eval_flat
from minialpa.tracing.trace import TracedStep
from tests.helpers import trace

WIDTH, BATCH = 4, 6
#: Stacked inputs that are not weights; weights that pass through an elementwise operation first; a weight of all
#: layers; gradients by jax itself.
EXTRAS = ("keys", "scaled", "shared", "plain gradient")


@dataclass(frozen=True)
class Model:
    """A scan over `length` layers, with its loss and update.

    again: `jax.checkpoint` on the body. aux: use of the stacked results of the scan. extras: some of `EXTRAS`.
    second: a second scan after it, over as many layers; `residual` reads the first one's stacked results.
    """

    length: int = 5
    reverse: bool = False
    again: bool = False
    aux: str = "none"
    extras: frozenset[str] = frozenset()
    second: str = "none"
    optimizer: str = "adam"

    def params(self) -> dict[str, Any]:
        rng = np.random.default_rng(0)

        def weight(*shape: int) -> jax.Array:
            return jnp.asarray(0.5 * rng.standard_normal(shape, np.float32))

        out = {"w": weight(self.length, WIDTH, WIDTH), "b": weight(self.length, WIDTH), "head": weight(WIDTH)}
        if "shared" in self.extras:
            out["shared"] = weight(WIDTH, WIDTH)
        if self.second != "none":
            out["v"] = weight(self.length + (self.second == "longer"), WIDTH, WIDTH)
        return out

    def loss(self, params: Any, batch: Any) -> jax.Array:
        def body(x: jax.Array, row: Any) -> tuple[jax.Array, jax.Array]:
            h = jnp.dot(x, row["w"]) + row["b"][None]
            if "shared" in self.extras:
                h = h + jnp.dot(x, params["shared"])
            if "keys" in self.extras:
                h = jnp.where(jax.random.bernoulli(row["key"], 0.8, (1, WIDTH)), h, jnp.zeros_like(h))
            x = jnp.tanh(h) + 0.5 * x
            return x, jnp.mean(x * x, axis=1)

        rows: dict[str, Any] = {"w": params["w"], "b": params["b"]}
        if "scaled" in self.extras:
            rows["w"] = 0.9 * rows["w"] + 0.01
        if "keys" in self.extras:
            rows["key"] = jax.random.split(jax.random.key(3), self.length)
        step = jax.checkpoint(body, prevent_cse=False) if self.again else body
        x, ys = jax.lax.scan(step, batch["x"], rows, reverse=self.reverse)
        if self.second != "none":
            x = self._second(params["v"], x, ys)
        out = jnp.mean((jnp.dot(x, params["head"]) - batch["y"]) ** 2)
        match self.aux:
            case "sum":
                out = out + 0.1 * jnp.sum(ys)
            case "mixed":
                out = out + jnp.sum(jnp.cumsum(ys, axis=0)[::2])
        return out

    def _second(self, weights: jax.Array, x: jax.Array, ys: jax.Array) -> jax.Array:
        if self.second == "residual":

            def body(x: jax.Array, row: Any) -> tuple[jax.Array, None]:
                return jnp.tanh(jnp.dot(x, row[0])) * row[1][:, None], None

            return jax.lax.scan(body, x, (weights, 1.0 + ys), reverse=not self.reverse)[0]
        return jax.lax.scan(lambda x, w: (jnp.tanh(jnp.dot(x, w)), None), x, weights)[0]

    def step(self, transform: optax.GradientTransformation) -> Callable[..., Any]:
        value_and_grad = jax.value_and_grad if "plain gradient" in self.extras else minialpa.value_and_grad

        def step(state: Any, batch: Any) -> Any:
            params, moments = state
            value, grads = value_and_grad(self.loss)(params, batch)
            if self.optimizer == "mixing":  # rows of different layers meet in the update
                grads = jax.tree.map(lambda g: g + 0.1 * jnp.cumsum(g, axis=0), grads)
            updates, moments = transform.update(grads, moments, params)
            return (optax.apply_updates(params, updates), moments), {"loss": value, "grads": grads}

        return step

    def transform(self) -> optax.GradientTransformation:
        if self.optimizer == "adam":
            return optax.adamw(0.1, eps=1e-2)
        if self.optimizer == "clip":
            return optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))
        return optax.sgd(0.1)

    def traced(self) -> tuple[TracedStep, list[Any]]:
        transform = self.transform()
        params = self.params()
        rng = np.random.default_rng(1)
        x, y = rng.standard_normal((BATCH, WIDTH), np.float32), rng.standard_normal(BATCH, np.float32)
        args = (params, transform.init(params)), {"x": jnp.asarray(x), "y": jnp.asarray(y)}
        with jax.numpy_dtype_promotion("standard"):
            return trace(self.step(transform), *args), jax.tree.leaves(args)


MODELS = st.builds(
    Model,
    length=st.integers(2, 5),
    reverse=st.booleans(),
    again=st.booleans(),
    aux=st.sampled_from(["none", "sum", "mixed"]),
    extras=st.frozensets(st.sampled_from(EXTRAS)),
    second=st.sampled_from(["none", "equal", "longer", "residual"]),
    optimizer=st.sampled_from(["sgd", "adam", "clip", "mixing"]),
)


def run(step: TracedStep, leaves: list[Any]) -> list[Any]:
    """Run a step on whole leaves; results are joined from their parts."""
    parts = [step.argument(i) for i in range(len(step.flat.invars))]
    args = [leaves[p.leaf] if p.rows is None else leaves[p.leaf][slice(*p.rows)] for p in parts]
    found: dict[int, list[Any]] = {}
    for i, value in enumerate(jax.jit(functools.partial(eval_flat, step.flat))(args)):
        found.setdefault(step.result(i).leaf, []).append(value)
    return [values[0] if len(values) == 1 else jnp.concatenate(values) for _, values in sorted(found.items())]


def composition(data: st.DataObject, n: int) -> tuple[int, ...]:
    """Positive numbers that add up to `n`."""
    cuts = sorted(data.draw(st.sets(st.integers(1, n - 1))))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True))


def test_weights_gradients_and_moments_are_never_whole() -> None:
    traced, _ = Model(extras=frozenset({"scaled"}), optimizer="clip").traced()
    step = with_row_blocks(traced, ((2, 3),)).step
    leading = [v.aval.shape[0] for eqn in step.flat.eqns for v in eqn.outvars if len(v.aval.shape) == 3]
    assert set(leading) <= {2, 3}
    assert not any(eqn.primitive.name == "concatenate" for eqn in step.flat.eqns)
    assert [eqn.params["length"] for eqn in step.flat.eqns if eqn.primitive.name == "scan"] == [2, 3, 3, 2]


def test_what_a_checkpoint_computes_again_is_not_kept() -> None:
    def kept(model: Model) -> int:
        """Arrays of examples from the forward to the backward pass of the step in single rows."""
        step = with_row_blocks(model.traced()[0], ((1,) * 5,)).step
        pairs = list(zip(step.flat.eqns, step.origins, strict=True))
        made = {v for eqn, o in pairs if o.direction == "forward" for v in eqn.outvars}
        read = {
            v for eqn, o in pairs if o.direction == "backward" for v in eqn.invars if isinstance(v, jax.extend.core.Var)
        }
        return sum(v.aval.shape == (BATCH, WIDTH) for v in made & read)

    assert kept(Model(again=True)) < kept(Model())


def test_a_block_of_rows_keeps_only_what_other_layers_read() -> None:
    """Its scan leaves a carry for the next block and residuals for its backward pass: only the carry is kept."""
    traced, leaves = Model().traced()
    cut = with_row_blocks(traced, ((2, 3),))
    again = rematerialise(cut.step, [0] + [1] * (len(cut.groups) - 1), ("full", "full"))
    for step, lengths in ((cut.step, [2, 3, 3, 2]), (again, [2, 3, 3, 3, 2, 2])):
        assert [eqn.params["length"] for eqn in step.flat.eqns if eqn.primitive.name == "scan"] == lengths
    assert kept_rows(again) == 0 < kept_rows(cut.step)
    assert_allclose(run(again, leaves), run(traced, leaves), rtol=2e-5, atol=2e-6)


def kept_rows(step: TracedStep) -> int:
    """Stacked residuals that the forward pass leaves for the backward pass."""
    made = {
        v for eqn, o in zip(step.flat.eqns, step.origins, strict=True) if o.direction == "forward" for v in eqn.outvars
    }
    read = {
        v
        for eqn, o in zip(step.flat.eqns, step.origins, strict=True)
        if o.direction == "backward"
        for v in eqn.invars
        if isinstance(v, jax.extend.core.Var)
    }
    return sum(v.aval.ndim == 3 and v.aval.shape[1:] == (BATCH, WIDTH) for v in made & read)


def test_recurrent_models_have_no_stacks() -> None:
    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            def cell(h: jax.Array, row: Any) -> tuple[jax.Array, jax.Array]:
                x, position = row
                h = jnp.tanh(jnp.dot(h, params["w"]) + jnp.dot(x + position[None], params["u"]))
                return h, h

            rows = jnp.swapaxes(batch, 0, 1), params["positions"]
            return jnp.mean(jax.lax.scan(cell, jnp.zeros((BATCH, WIDTH)), rows)[1])

        value, grads = minialpa.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {"w": jnp.eye(WIDTH), "u": jnp.eye(WIDTH), "positions": jnp.ones((7, WIDTH))}
    assert find_stacks(trace(step, params, jnp.ones((BATCH, 7, WIDTH)))).lengths == ()


def _joins_again(model: Model) -> None:
    step, args = model.traced()
    cut = cut_scans(LayeredStep(plain=step, fingerprint=step.fingerprint), AutoLayerOption(2, remat="auto"))
    if cut is None:
        return
    assert with_longer_scans(cut, (0, 1)).n_layers == 2
    longer = with_longer_scans(cut, (0, 0))
    assert longer.n_layers == 1
    # One chunk has the arguments and results of the step.
    assert_allclose(eval_flat(longer.step.flat, args), eval_flat(step.flat, args), rtol=1e-5, atol=1e-5)


def test_a_constant_that_each_row_had_a_copy_of_has_a_layer() -> None:
    _joins_again(Model(4, aux="mixed", extras=frozenset(EXTRAS), second="residual", optimizer="mixing"))


@pytest.mark.slow  # tests/test_unstacked_training.py trains with such blocks
@settings(max_examples=10)
@given(MODELS, st.booleans(), st.data())
def test_blocks_compute_what_the_scan_does_and_chunks_join_again(
    model: Model, inline: bool, data: st.DataObject
) -> None:
    traced, leaves = model.traced()
    stacks = find_stacks(traced)
    assert len(stacks.lengths) >= 1
    blocks = [composition(data, n) for n in stacks.lengths]
    cut = unstack(traced, stacks, blocks, inline=inline)
    assert_allclose(run(cut.step, leaves), run(traced, leaves), rtol=2e-5, atol=2e-6)
    assert sorted({o.group for o in cut.step.origins if o.group is not None}) == list(range(len(cut.groups)))
    for i, alias in enumerate(cut.step.aliases):  # rows of an argument are replaced by the same rows
        if alias is not None:
            assert cut.step.argument(alias).rows == cut.step.result(i).rows
            assert cut.step.flat.outvars[i].aval.shape == cut.step.flat.invars[alias].aval.shape
    again = rematerialise(cut.step, range(len(cut.groups)), ("full",) * len(cut.groups))
    assert_allclose(run(again, leaves), run(traced, leaves), rtol=2e-5, atol=2e-6)
    _joins_again(model)
