from __future__ import annotations
import math
from dataclasses import dataclass
from minialpa.intra.fusion import kernels_of, run_order
from minialpa.intra.operations import Recorder
from minialpa.intra.spmd import Interpreter, ShardedEquations, walk, n_splits
from minialpa.intra.factors import localize
from minialpa.jaxprs import *


def record(program):
    mesh = program.mesh.shape
    rec = Recorder()
    inputs = []
    for v in program.invars:
        shape = program.specs[v].shard_shape(shape_of(v), mesh)
        from minialpa.intra.operations import local_bytes
        inputs.append(rec.value(local_bytes(v, shape), shape, dtype_name(v), "input"))
    def literal(a):
        return rec.value(0.0, shape_of(a), dtype_name(a), "constant")
    def run(eqn, factors, chosen, operands):
        shapes = [s.shard_shape(shape_of(v), mesh) for v, s in zip(eqn.outvars, chosen.made, strict=True)]
        scratch = 0.0
        if sub_jaxprs(eqn) and eqn.primitive.name in ("scan","while","cond"):
            params = localize(eqn, factors, n_splits(factors, chosen, mesh))
            scratch = body_bytes(params)
        return rec.equation(eqn, operands, shapes, scratch)
    results = walk(program, inputs, Interpreter(literal, lambda x, st, v: rec.step(x, st, v, mesh), run))
    return rec, inputs, results

def body_bytes(params):
    from jax.extend import core as jex
    return max((jaxpr_bytes(j) for j in jex.jaxprs_in_params(params)), default=0.0)

def jaxpr_bytes(jaxpr):
    flat = flatten_calls(jaxpr, [None]*len(jaxpr.constvars))
    rec = Recorder(); env = {}
    ins = []
    for v in (*flat.constvars, *flat.invars):
        env[v] = rec.value(bytes_of(v), shape_of(v), dtype_name(v), "input"); ins.append(env[v])
    for eqn in flat.eqns:
        reads = [rec.value(0.0, shape_of(a), dtype_name(a), "constant") if is_literal(a) else env[a] for a in eqn.invars]
        scratch = body_bytes(eqn.params) if sub_jaxprs(eqn) else 0.0
        env.update(zip(eqn.outvars, rec.equation(eqn, reads, [shape_of(v) for v in eqn.outvars], scratch)))
    outs = [env[v] for v in flat.outvars if not is_literal(v)]
    return simulate(rec, ins, outs, ())[0]

def combine(rec, results):
    """all-reduces that do not depend on each other become one"""
    for key in dict.fromkeys(rec.combinable.values()):
        merged(rec, results, key)

def merged(rec, results, key):
    ops = rec.operations
    maker = {v: p for p, op in enumerate(ops) for v in op.writes}
    post, seen = [], set()
    for r in results:
        stack = [(maker[r], 0)] if r in maker else []
        while stack:
            p, i = stack.pop()
            if i == 0:
                if p in seen: continue
                seen.add(p)
            reads = [maker[v] for v in ops[p].reads if v in maker]
            if i < len(reads):
                stack.append((p, i + 1))
                if reads[i] not in seen: stack.append((reads[i], 0))
            else: post.append(p)
    below = {}
    for p, op in enumerate(ops):
        b = 0
        for v in op.reads:
            if v in maker: b |= below[maker[v]] | 1 << maker[v]
        below[p] = b
    groups=[]
    for p in post:
        if rec.combinable.get(ops[p].writes[0]) == key:
            if groups and not any(below[p] >> q & 1 for q in groups[-1]): groups[-1].append(p)
            else: groups.append([p])
    drop=set()
    from minialpa.intra.fusion import Operation
    new = list(ops)
    for g in groups:
        g=sorted(g)
        last=g[-1]
        new[last] = Operation("own", tuple(v for p in g for v in ops[p].reads), tuple(v for p in g for v in ops[p].writes))
        drop.update(g[:-1])
    kept=[op for p,op in enumerate(new) if p not in drop]
    made={v for op in kept for v in op.writes}; ready=set(); out=[]; pending=kept
    have=lambda op: all(v in ready or v not in made for v in op.reads)
    while pending:
        rest=[]
        for op in pending:
            if have(op): out.append(op); ready.update(op.writes)
            else: rest.append(op)
        assert len(rest)<len(pending)
        pending=rest
    rec.operations=out

def simulate(rec, inputs, results, pairs):
    aliased={results[o] for _,o in pairs}; outset=set(results)
    combine(rec, results)
    sizes = [v.n_bytes for v in rec.values]
    kernels = kernels_of(rec.operations, results, sizes)
    order = run_order(kernels, inputs)
    root = {}
    def find(v):
        while v in root: v = root[v]
        return v
    inset=set(inputs)
    for k in kernels:
        if k.alias is not None and (rec.operations[k.operation].in_place is None or k.alias not in inset): root[k.writes[0]] = k.alias
    inset=set(inputs)
    start, end = {}, {}
    T = len(order)
    for t, k in enumerate(order):
        kernel = kernels[k]
        for v in kernel.reads: end[find(v)] = t
        if kernel.writes[0] not in root:
            for v in kernel.writes: start[v] = t; end.setdefault(v, t)
    roots = {find(v) for v in outset}
    live_out = {find(v) for v in aliased}
    bufs, outs = [], []
    for i, o in pairs:
        v, w = inputs[i], find(results[o])
        if w in start and end.get(v, -1) > start[w]: bufs.append((sizes[v], 0, end[v], v))
    for v, t in start.items():
        s = math.ceil(sizes[v] / 64) * 64
        if v in live_out: continue
        if v in roots: outs.append((s, [(t, T)]))
        else: bufs.append((s, t, end[v], v))
    left = []
    for s, a, b, v in sorted(bufs, reverse=True):
        fit = next((o for o in outs if o[0] >= s and all(b < x or a > y for x, y in o[1])), None)
        if fit: fit[1].append((a, b))
        else: left.append((s, a, b, v))
    d = [0.0] * (T + 2)
    for s, a, b, v in left: d[a] += s; d[b + 1] -= s
    for t, k in enumerate(order):
        if kernels[k].scratch_bytes: d[t] += kernels[k].scratch_bytes; d[t+1] -= kernels[k].scratch_bytes
    m, c, at = 0.0, 0.0, 0
    for t, x in enumerate(d):
        c += x
        if c > m: m, at = c, t
    return m, kernels, order, left, at
