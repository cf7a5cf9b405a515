"""Rules of grouped products: batches, blocks, rows, groups and features may all be split.

    product: [b x m k], [b g k n], starts [b x g], ends [b x g], positions [m] -> [b x m n]     sum(g), sum(k)
    sum:     [b x m k], [b x m n], starts [b x g], ends [b x g], positions [m] -> [b g k n]     sum(x), sum(m)

The matrices of a product may also be [b g n k] (`summed`).
flops = 2 b x (m + g t / 2) k n with tiles of t rows.
"""

from __future__ import annotations

from jax.extend.core import JaxprEqn

from minialpa.grouped import rows_of_tile
from minialpa.ir.equations import shape_of
from minialpa.rules.common import FactorTable
from minialpa.rules.factors import Factors
from minialpa.rules.known_rules import rule


@rule("minialpa_grouped_product")
def _product(eqn: JaxprEqn) -> Factors:
    return _factors(eqn, is_sum=False)


@rule("minialpa_grouped_sum")
def _sum(eqn: JaxprEqn) -> Factors:
    return _factors(eqn, is_sum=True)


def _factors(eqn: JaxprEqn, *, is_sum: bool) -> Factors:
    lhs, rhs, bounds = map(shape_of, eqn.invars[:3])
    table = FactorTable()
    b = table.dim(lhs[0])
    x, m = (table.dim(size, reduction="sum" if is_sum else None) for size in lhs[1:3])
    g, k = (table.dim(size, reduction=None if is_sum else "sum") for size in (bounds[2], lhs[3]))
    n = table.dim(rhs[3] if is_sum else rhs[5 - eqn.params["summed"]])

    tile = rows_of_tile(lhs[2], eqn.params["n_rows"], eqn.params["n_groups"])
    n_rows = lhs[0] * lhs[1] * (lhs[2] + bounds[2] * tile / 2)
    rows, matrices = (b, x, m), (b, g, k, n) if is_sum or eqn.params["summed"] == 2 else (b, g, n, k)
    return table.build(
        eqn,
        [(*rows, k), (*rows, n) if is_sum else matrices, (b, x, g), (b, x, g), (m,)],
        [matrices if is_sum else (*rows, n)],
        linear="each",
        linear_operands=(0, 1),
        flops=2.0 * n_rows * table.sizes[k[0]] * table.sizes[n[0]],
    )
