"""Step 2: the ways to split an equation over a row of devices, and the collectives between two shardings.

A spec is the sharding of an array. "S0" splits dimension 0, "S1" splits dimension 1. "R" is an equal copy on each
device. "P" is a partial sum: each device has a summand. A strategy splits one factor, which fixes the specs.
"""

import math
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import JaxprEqn
from step1_factors import example, in_parts, rule_of

# Slow devices, so that small arrays take time: operations and bytes per second.
FLOPS, BANDWIDTH, ITEM_BYTES = 1e10, 1e11, 4
KINDS = {"RS": "cut", "SR": "all-gather", "SS": "all-to-all", "PR": "all-reduce", "PS": "reduce-scatter"}


class Mesh(NamedTuple):
    """n devices in a row. A collective takes alpha + beta b seconds if b bytes leave each device."""

    n: int
    alpha: float = 5e-5
    beta: float = 1e-9


class Strategy(NamedTuple):
    factor: str  # split over the devices; "-" if each device computes the whole
    operands: list[str]
    result: str
    seconds: float
    state_bytes: float = 0.0  # stored on each device


def strategies(eqn: JaxprEqn, mesh: Mesh) -> list[Strategy]:
    rule, shapes = rule_of(eqn), [atom.aval.shape for atom in (*eqn.invars, *eqn.outvars)]
    sizes = dict(zip("".join(rule), sum(shapes, ()), strict=True))
    flops = math.prod(sizes.values()) * (2 if eqn.primitive.name == "dot_general" else 1)
    work_s = max(flops / FLOPS, ITEM_BYTES * math.prod(shapes[-1]) / BANDWIDTH)
    found = [Strategy("-", ["R"] * len(eqn.invars), "R", work_s)]
    for factor in (factor for factor, size in sizes.items() if size % mesh.n == 0):
        *operands, made = (f"S{letters.index(factor)}" if factor in letters else "R" for letters in rule)
        found.append(Strategy(factor, operands, made if factor in rule[-1] else "P", work_s / mesh.n))
    return found


def kind_of(source: str, target: str) -> str:
    """The collective from one spec to another. No target is a partial sum."""
    return "" if source == target else KINDS[source[0] + target[0]]


def reshard_s(source: str, target: str, n_bytes: float, mesh: Mesh) -> float:
    """On a ring, each of n devices sends (n - 1) / n of the whole array, or of its shard, once or twice."""
    times = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1 / mesh.n}
    sent_bytes = times.get(kind_of(source, target), 0) * n_bytes * (mesh.n - 1) / mesh.n
    return mesh.alpha + mesh.beta * sent_bytes if sent_bytes else 0.0


def main() -> None:
    mesh = Mesh(4)
    [(w, _)], x, _ = example(batch=256, width=64, hidden=[256])
    (eqn,) = jax.make_jaxpr(jax.numpy.matmul)(x, w).eqns
    print("x[256,64] @ w[64,256] on 4 devices, in microseconds\n x   w     x @ w           as R      as S0     as S1")
    for one in strategies(eqn, mesh):
        total = (one.seconds + reshard_s(one.result, spec, 4 * 256 * 256, mesh) for spec in ("R", "S0", "S1"))
        specs = "".join(f" {spec:3}" for spec in (*one.operands, "->", one.result))
        print(f"{specs}{1e6 * one.seconds:6.0f}", *(f"{1e6 * seconds:9.0f}" for seconds in total))
        joined = in_parts(eqn, [x, w], one.factor, mesh.n if one.factor != "-" else 1)
        np.testing.assert_allclose(joined, x @ w, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
