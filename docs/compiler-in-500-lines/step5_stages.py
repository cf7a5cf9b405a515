"""Step 5: cut the layers into stages, and give each stage a submesh, by dynamic programming.

    minimise  T = sum_k t_k + sum of transfers between stages + (B - 1) max_k t_k          for B micro-batches

t_k is the time of one micro-batch on stage k. Under an upper bound tau of all t_k, the least sum is f[0, 0], where
f[i, p] is the least sum of the layers from i on, on the devices from p on:

    f[i, p] = min over j, n of  transfer(p) + t(i, j, n) + f[j, p + n]        layers i to j - 1 on n devices
"""

import functools
import math

import jax
from step1_factors import example, forward
from step2_strategies import ITEM_BYTES, Mesh
from step3_ilp import make_plan

N_DEVICES, HOST, BETWEEN = 8, 4, (2e-4, 1e-8)  # two hosts of four devices; alpha and beta of the link between them
BATCH, N_MICRO, WIDTH, HIDDEN = 512, 8, 64, [512, 512, 256, 256, 256, 256]
Stage = tuple[int, int, int]  # first layer, end, number of devices


def mesh_of(n: int) -> Mesh:
    return Mesh(n) if n <= HOST else Mesh(n, *BETWEEN)


def transfer_s(p: int) -> float:
    """To the stage that starts at device p: an activation, and a gradient back."""
    _, alpha, beta = Mesh(2) if p % HOST else Mesh(2, *BETWEEN)
    return 2 * (alpha + beta * ITEM_BYTES * (BATCH // N_MICRO) * WIDTH) if p else 0.0


def stage_seconds(params, x) -> dict[Stage, float]:
    """t(i, j, n), the sum over the layers of a stage, forward and backward."""

    def both_passes(params, x, gradient):
        y, pull_back = jax.vjp(forward, params, x)
        return y, pull_back(gradient)

    layers = [jax.make_jaxpr(both_passes)([layer], x, x).jaxpr for layer in params]
    seconds = {n: [make_plan(layer, mesh_of(n)).seconds for layer in layers] for n in (1, 2, 4, 8)}
    return {(i, j, n): sum(seconds[n][i:j]) for n in seconds for j in range(len(layers) + 1) for i in range(j)}


def next_stages(t: dict[Stage, float], i: int, p: int) -> list[Stage]:
    return [stage for stage in t if stage[0] == i and p % stage[2] == 0 and p + stage[2] <= N_DEVICES]


def cheapest(t: dict[Stage, float]) -> tuple[float, tuple[Stage, ...]]:
    def under(tau: float) -> tuple[float, tuple[Stage, ...]]:
        @functools.cache
        def f(i: int, p: int) -> tuple[float, tuple[Stage, ...]]:
            found = [(0.0 if (i, p) == (len(HIDDEN), N_DEVICES) else math.inf, ())]
            for stage in next_stages(t, i, p):
                if t[stage] <= tau:
                    rest_s, rest = f(stage[1], p + stage[2])
                    found.append((transfer_s(p) + t[stage] + rest_s, (stage, *rest)))
            return min(found)

        return f(0, 0)[0] + (N_MICRO - 1) * tau, f(0, 0)[1]

    return min(map(under, t.values()))


def every(t: dict[Stage, float], i: int = 0, p: int = 0):
    """Each pipeline of the layers from i on: sum, maximum, stages."""
    if (i, p) == (len(HIDDEN), N_DEVICES):
        yield 0.0, 0.0, ()
    for stage in next_stages(t, i, p):
        for sum_s, most_s, rest in every(t, stage[1], p + stage[2]):
            yield transfer_s(p) + t[stage] + sum_s, max(t[stage], most_s), (stage, *rest)


def main() -> None:
    t = stage_seconds(*example(BATCH // N_MICRO, WIDTH, HIDDEN)[:2])
    for n in (1, 2, 4, 8):
        print(f"{n} devices:", *(f"{1e3 * t[i, i + 1, n]:6.2f}" for i in range(len(HIDDEN))), "ms per layer")
    ranked = sorted((sum_s + (N_MICRO - 1) * most_s, stages) for sum_s, most_s, stages in every(t))
    assert math.isclose(cheapest(t)[0], ranked[0][0])
    for seconds, stages in (*ranked[:3], next(one for one in ranked if len(one[1]) == 1)):
        print(f"{1e3 * seconds:.2f} ms:", *(f"[layers {i}-{j - 1} on {n}]" for i, j, n in stages))


if __name__ == "__main__":
    main()
