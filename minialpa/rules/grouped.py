"""Rules of grouped products: batches, blocks, rows, groups and features may all be split.

    product: [b x m k], [b g k n], starts [b x g], ends [b x g], positions [m] -> [b x m n]     sum(g), sum(k)
    sum:     [b x m k], [b x m n], starts [b x g], ends [b x g], positions [m] -> [b g k n]     sum(x), sum(m)

The matrices of a product may also be [b g n k] (`summed`).
flops = 2 b (x m + g t / 2) k n with tiles of t rows.

In slots (`minialpa.routed`), bounds of all foreign slots are on each device that shares owners:

    product: [y x c k], [y e k n], [y x e], [y x e], [c], [w x g], [w x g] -> [y x c n]     sum(k)
    sum:     [y x c k], [y x c n], [y x e], [y x e], [c], [w x g], [w x g] -> [y e k n]     sum(x)

c, e, w and g are blocked.
"""

from __future__ import annotations

from jax.extend.core import JaxprEqn

from minialpa.grouped import rows_of_tile
from minialpa.ir.equations import shape_of
from minialpa.rules.common import FactorTable
from minialpa.rules.factors import Factors
from minialpa.rules.known_rules import rule


@rule("minialpa_grouped_product", "minialpa_routed_product", "minialpa_grouped_sum", "minialpa_routed_sum")
def _grouped(eqn: JaxprEqn) -> Factors:
    is_sum = eqn.primitive.name in ("minialpa_grouped_sum", "minialpa_routed_sum")
    lhs, rhs, bounds = map(shape_of, eqn.invars[:3])
    table, of_foreign = FactorTable(), [shape_of(atom) for atom in eqn.invars[5:6]]
    b = table.dim(lhs[0])
    x = table.dim(lhs[1], reduction="sum" if is_sum else None)
    m = table.dim(lhs[2], blocked=bool(of_foreign), reduction="sum" if is_sum and not of_foreign else None)
    g = table.dim(bounds[2], blocked=bool(of_foreign), reduction=None if is_sum or of_foreign else "sum")
    k = table.dim(lhs[3], reduction=None if is_sum else "sum")
    n = table.dim(rhs[3] if is_sum else rhs[5 - eqn.params["summed"]])

    n_whole_rows = lhs[1] * eqn.params["n_rows"]
    tile = rows_of_tile(lhs[1] * lhs[2], n_whole_rows, eqn.params["n_groups"])
    n_rows = lhs[0] * (min(lhs[1] * lhs[2], n_whole_rows) + bounds[2] * tile / 2)
    foreign = [(table.dim(w, blocked=True), x, table.dim(groups, blocked=True)) for w, _, groups in of_foreign]
    rows, matrices = (b, x, m), (b, g, k, n) if is_sum or eqn.params["summed"] == 2 else (b, g, n, k)
    return table.build(
        eqn,
        [(*rows, k), (*rows, n) if is_sum else matrices, (b, x, g), (b, x, g), (m,), *2 * foreign],
        [matrices if is_sum else (*rows, n)],
        linear="each",
        linear_operands=(0, 1),
        flops=2.0 * n_rows * table.sizes[k[0]] * table.sizes[n[0]],
    )
