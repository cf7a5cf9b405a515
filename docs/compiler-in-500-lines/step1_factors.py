"""Step 1: trace a training step to a jaxpr, and give each equation its factors.

A factor is a letter for dimensions that are split together. The rule of a product is `ab bc -> ac`: to split a is to
split the rows of the first operand and of the result. The result lacks b, so b is summed: parts along b are summands.
"""

import os
from string import ascii_lowercase

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

# All steps run on eight virtual devices of the CPU. XLA reads the variable when jax first uses a device.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
jax.config.update("jax_platforms", "cpu")
ELEMENTWISE = {"add", "add_any", "sub", "mul", "div", "tanh", "integer_pow", "one_minus_square"}


def forward(params, x):
    for w, v in params:
        x = x + jnp.tanh(x @ w) @ v
    return x


def loss(params, x, y, n):
    """n: elements of the whole batch, so that the losses of its parts add up."""
    return jnp.sum((forward(params, x) - y) ** 2) / n


def train_step(params, x, y):
    value, gradients = jax.value_and_grad(loss)(params, x, y, y.size)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def example(batch: int, width: int, hidden: list[int]):
    """Arguments of `train_step`, with a layer for each of `hidden`."""
    random = np.random.default_rng(0)
    draw = lambda *shape: random.normal(scale=width**-0.5, size=shape).astype(np.float32)  # noqa: E731
    return [(draw(width, h), draw(h, width)) for h in hidden], draw(batch, width), draw(batch, width)


def rule_of(eqn: JaxprEqn) -> list[str]:
    """A letter for each dimension of each operand and, last, of the result: ["ab", "bc", "ac"]."""
    ranks, name, params = [atom.aval.ndim for atom in eqn.invars], eqn.primitive.name, eqn.params
    a, more = ascii_lowercase[: max(ranks)], iter(ascii_lowercase[ranks[0] :])
    if name in ELEMENTWISE:
        return [a if rank else "" for rank in ranks] + [a]
    if name == "transpose":
        return [a, "".join(a[d] for d in params["permutation"])]
    if name == "reduce_sum":
        return [a, "".join(letter for d, letter in enumerate(a) if d not in params["axes"])]
    if name == "broadcast_in_dim":
        made = ascii_lowercase[: len(params["shape"])]
        return ["".join(made[d] for d in params["broadcast_dimensions"]), made]
    if name == "dot_general" and params["dimension_numbers"][1] == ((), ()):
        sums, sums_b = params["dimension_numbers"][0]
        b = "".join(a[sums[sums_b.index(d)]] if d in sums_b else next(more) for d in range(ranks[1]))
        return [a, b, "".join(letter for letter in a + b if letter not in [a[d] for d in sums])]
    raise NotImplementedError(f"`rule_of` has no rule for `{name}`.")


def run(eqn: JaxprEqn, operands, n_parts: dict[str, int]) -> jax.Array:
    """The equation on parts of its operands. Only a broadcast has the shape of its result as a parameter."""
    params = dict(eqn.params)
    if "shape" in params:
        sizes = zip(params["shape"], rule_of(eqn)[-1], strict=True)
        params["shape"] = tuple(size // n_parts.get(factor, 1) for size, factor in sizes)
    return eqn.primitive.bind(*operands, **params)


def in_parts(eqn: JaxprEqn, operands, factor: str, n: int) -> jax.Array:
    """The equation in n parts along a factor. The parts of the result are joined: concatenated, or added."""
    *rule, made = rule_of(eqn)
    cut = lambda x, letters: np.split(x, n, letters.index(factor)) if factor in letters else [x] * n  # noqa: E731
    parts = [run(eqn, part, {factor: n}) for part in zip(*map(cut, operands, rule), strict=True)]
    return np.concatenate(parts, made.index(factor)) if factor in made else sum(parts)


def main() -> None:
    arguments = example(batch=16, width=8, hidden=[32])
    jaxpr = jax.make_jaxpr(train_step)(*arguments).jaxpr
    values = dict(zip(jaxpr.invars, jax.tree.leaves(arguments), strict=True))
    for eqn in jaxpr.eqns:
        *rule, made = rule_of(eqn)
        operands = [atom.val if isinstance(atom, Literal) else values[atom] for atom in eqn.invars]
        whole = values[eqn.outvars[0]] = run(eqn, operands, {})
        for factor in dict.fromkeys("".join(rule) + made):
            np.testing.assert_allclose(in_parts(eqn, operands, factor, 2), whole, rtol=1e-4, atol=1e-5)
        formula = " ".join(letters or "." for letters in (*rule, "->", made))
        print(f"{eqn.outvars[0].aval.str_short(True):12}{eqn.primitive.name:18}{formula}")
    for var, serial in zip(jaxpr.outvars, jax.tree.leaves(train_step(*arguments)), strict=True):
        np.testing.assert_allclose(values[var], serial, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
