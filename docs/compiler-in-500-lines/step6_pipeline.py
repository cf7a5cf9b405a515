"""Step 6: run the stages as a pipeline over micro-batches, in the order 1F1B.

A pass is F(k, b), micro-batch b forward through stage k, which waits for F(k - 1, b), or B(k, b), backward, which waits
for B(k + 1, b). Stage k of p begins with p - 1 - k forward passes, then alternates: at most p - k are in flight.
"""

import jax
import numpy as np
from step1_factors import example, forward, loss
from step3_ilp import make_plan
from step4_spmd import compiled
from step5_stages import BATCH, HIDDEN, N_MICRO, WIDTH, Stage, cheapest, mesh_of, stage_seconds


def one_f_one_b(k: int, p: int, n: int) -> list[tuple[str, int, int]]:
    """The passes of n micro-batches on stage k of p, in order."""
    first = min(p - 1 - k, n)
    pairs = [one for b in range(n - first) for one in (("F", k, first + b), ("B", k, b))]
    return [("F", k, b) for b in range(first)] + pairs + [("B", k, b) for b in range(n - first, n)]


def programs_of(stages: tuple[Stage, ...], params, x, y, n: int) -> dict:
    """The programs of F and B for each stage, on its devices. The last stage reads labels and computes the loss."""

    def forward_pass(params, x, *labels):
        return loss(params, x, *labels, n) if labels else forward(params, x)

    def backward_pass(params, x, *labels, gradient):
        return jax.vjp(lambda params, x: forward_pass(params, x, *labels), params, x)[1](gradient)

    programs, device = {}, 0
    for k, (i, j, size) in enumerate(stages):
        labels, gradient = ([y], np.float32(1)) if j == len(params) else ([], x)
        for kind, one, more in (("F", forward_pass, {}), ("B", backward_pass, {"gradient": gradient})):
            jaxpr = jax.make_jaxpr(one)(params[i:j], x, *labels, **more).jaxpr
            programs[kind, k] = compiled(make_plan(jaxpr, mesh_of(size)), device)
        device += size
    return programs


def main() -> None:
    params, x, y = example(BATCH, WIDTH, HIDDEN)
    xs, ys = np.split(x, N_MICRO), np.split(y, N_MICRO)
    _, stages = cheapest(stage_seconds(params, xs[0]))
    p, programs = len(stages), programs_of(stages, params, xs[0], ys[0], y.size)
    weights = [jax.tree.leaves(params[i:j]) for i, j, _ in stages]
    # What each pass sends to the next pass of its micro-batch. Outside of the pipeline begin the first ones.
    sent = {("F", -1, b): xs[b] for b in range(N_MICRO)} | {("B", p, b): np.float32(1) for b in range(N_MICRO)}
    queues, kept, ticks = [one_f_one_b(k, p, N_MICRO) for k in range(p)], {}, []
    sums = [[np.zeros_like(w) for w in stage] for stage in weights]
    while any(queues):
        heads = [queue[0] for queue in queues if queue]
        ticks.append([(kind, k, b) for kind, k, b in heads if (kind, k - 1 if kind == "F" else k + 1, b) in sent])
        assert ticks[-1], f"the stages wait for each other: {heads}"
        for kind, k, b in ticks[-1]:
            queues[k].pop(0)
            labels = [ys[b]] if k == p - 1 else []
            if kind == "F":
                kept[k, b] = sent.pop(("F", k - 1, b))
                (sent["F", k, b],) = programs["F", k](*weights[k], kept[k, b], *labels)
            else:
                gradient = sent.pop(("B", k + 1, b))
                *gradients, sent["B", k, b] = programs["B", k](*weights[k], kept.pop((k, b)), *labels, gradient)
                sums[k] = [total + gradient for total, gradient in zip(sums[k], gradients, strict=True)]
            assert sum(stage == k for stage, _ in kept) <= p - k
    for k, (i, j, size) in enumerate(stages):
        row = (next((f"{kind}{b}" for kind, stage, b in tick if stage == k), "..") for tick in ticks)
        print(f"layers {i}-{j - 1} on {size} devices: ", *row)
    results = [sum(sent["F", p - 1, b] for b in range(N_MICRO)), *(total for stage in sums for total in stage)]
    for parallel, serial in zip(results, jax.tree.leaves(jax.value_and_grad(loss)(params, x, y, y.size)), strict=True):
        np.testing.assert_allclose(parallel, serial, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
