"""Step 3: one strategy for each equation at the least seconds, as an integer program.

A node is an equation, or a leaf: an argument or a result. An edge is an array that one node makes and another reads.

    minimise    sum_v c_v . s_v + sum_(v,w) E_vw . e_vw
    subject to  sum_i s_v[i] = 1                                             a node has one strategy
                sum_j e_vw[i, j] = s_v[i],  sum_i e_vw[i, j] = s_w[j]        an edge has the strategies of its nodes
                sum_v m_v . s_v <= limit                                     bytes of the state on each device
"""

import itertools
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import coo_array
from step1_factors import example, forward, train_step
from step2_strategies import ITEM_BYTES, Mesh, Strategy, kind_of, reshard_s, strategies


class Graph(NamedTuple):
    nodes: list[list[Strategy]]  # arguments, equations, and results that replace no argument
    edges: dict[tuple[int, int, int], np.ndarray]  # of v, w, operand of w: [strategy of v, strategy of w], seconds
    results: list[int]  # the leaf of each result

    def seconds(self, choice: tuple[int, ...]) -> float:
        work_s = sum(node[i].seconds for node, i in zip(self.nodes, choice, strict=True))
        return work_s + sum(cost[choice[v], choice[w]] for (v, w, _), cost in self.edges.items())


class Plan(NamedTuple):
    jaxpr: Jaxpr
    mesh: Mesh
    arguments: list[str]
    equations: list[Strategy]
    results: list[str]
    kinds: list[str]  # of all reshardings
    seconds: float


def graph_of(jaxpr: Jaxpr, mesh: Mesh, n_state: int) -> Graph:
    """The first `n_state` results replace as many arguments: they return to their leaves."""

    def leaf(var, state_bytes: float = 0.0) -> list[Strategy]:
        shares = {"R": 1.0} | {f"S{d}": 1 / mesh.n for d, size in enumerate(var.aval.shape) if size % mesh.n == 0}
        return [Strategy("-", [spec], spec, 0.0, share * state_bytes) for spec, share in shares.items()]

    nodes = [leaf(var, ITEM_BYTES * var.aval.size * (i < n_state)) for i, var in enumerate(jaxpr.invars)]
    nodes += [strategies(eqn, mesh) for eqn in jaxpr.eqns]
    maker = {var: v for v, var in enumerate([*jaxpr.invars, *(eqn.outvars[0] for eqn in jaxpr.eqns)])}
    reads = [(a, w, k) for w, eqn in enumerate(jaxpr.eqns, len(jaxpr.invars)) for k, a in enumerate(eqn.invars)]
    results = [*range(n_state), *range(len(nodes), len(nodes) + len(jaxpr.outvars) - n_state)]
    nodes += [leaf(var) for var in jaxpr.outvars[n_state:]]
    reads += [(var, w, 0) for var, w in zip(jaxpr.outvars, results, strict=True)]
    edges = {}
    for atom, w, k in (read for read in reads if not isinstance(read[0], Literal)):
        n_bytes, v = ITEM_BYTES * atom.aval.size, maker[atom]
        cost = [[reshard_s(made.result, one.operands[k], n_bytes, mesh) for one in nodes[w]] for made in nodes[v]]
        edges[v, w, k] = np.array(cost)
    return Graph(nodes, edges, results)


def solve(graph: Graph, limit: float) -> tuple[int, ...]:
    """The number of the strategy of each node. A column of the program is an entry of some s_v or e_vw."""
    costs = [[one.seconds for one in node] for node in graph.nodes] + [cost.ravel() for cost in graph.edges.values()]
    ends, n = np.cumsum([len(cost) for cost in costs]), len(graph.nodes)
    columns = np.split(np.arange(ends[-1]), ends[:-1])
    rows = [dict.fromkeys(s_v, 1.0) for s_v in columns[:n]]
    for (v, w, _), e_vw in zip(graph.edges, columns[n:], strict=True):
        table = e_vw.reshape(len(columns[v]), len(columns[w]))
        for s_v, pairs in ((columns[v], table), (columns[w], table.T)):
            rows += [{s: -1.0} | dict.fromkeys(pair, 1.0) for s, pair in zip(s_v, pairs, strict=True)]
    rows += [{s: one.state_bytes for s, one in enumerate(itertools.chain(*graph.nodes))}]

    a, r, c = zip(*((a, r, c) for r, row in enumerate(rows) for c, a in row.items()), strict=True)
    matrix, right = coo_array((a, (r, c)), (len(rows), ends[-1])), np.array([1] * n + [0] * (len(rows) - n))
    limits = LinearConstraint(matrix.tocsr(), right, [*right[:-1], limit])
    found = milp(np.concatenate(costs), integrality=np.arange(ends[-1]) < ends[n - 1], constraints=limits)
    assert found.x is not None, f"no shardings keep the state within {limit:.0f} bytes"
    return tuple(int(found.x[s_v].argmax()) for s_v in columns[:n])


def make_plan(jaxpr: Jaxpr, mesh: Mesh, n_state: int = 0, limit: float = np.inf) -> Plan:
    graph, n = graph_of(jaxpr, mesh, n_state), len(jaxpr.invars)
    choice = solve(graph, limit)
    chosen = [node[i] for node, i in zip(graph.nodes, choice, strict=True)]
    kinds = [kind_of(chosen[v].result, chosen[w].operands[k]) for v, w, k in graph.edges]
    arguments, results = [one.result for one in chosen[:n]], [chosen[leaf].result for leaf in graph.results]
    return Plan(jaxpr, mesh, arguments, chosen[n : n + len(jaxpr.eqns)], results, kinds, graph.seconds(choice))


def main() -> None:
    small = graph_of(jax.make_jaxpr(forward)(*example(64, 64, [256])[:2]).jaxpr, Mesh(4), 0)
    choices = itertools.product(*(range(len(node)) for node in small.nodes))
    assert np.isclose(small.seconds(solve(small, np.inf)), min(map(small.seconds, choices)))
    print("examples   state on a device     time       w   v   w   v   x   y")
    for batch, limit in ((1024, np.inf), (64, np.inf), (1024, 2**16)):
        plan = make_plan(jax.make_jaxpr(train_step)(*example(batch, 64, [256, 256])).jaxpr, Mesh(4), 4, limit)
        specs = " ".join(f"{spec:>3}" for spec in plan.arguments)
        print(f"{batch:8}         <= {limit / 1024:3.0f} KiB {1e6 * plan.seconds:9.0f} us   {specs}")


if __name__ == "__main__":
    main()
