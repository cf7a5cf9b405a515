"""`read_body` turns a scan into a `Body`, and `scan_of` a `Body` into the equations of a scan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn, Var

from minialpa.ir.equations import Atom, aval_of, fresh_var, is_literal, operand_vars, reading, renamed, scan_counts
from minialpa.recognition.rewriting import with_named_results
from minialpa.support.private_jax import with_source_of
from minialpa.tracing.evaluation import eval_named
from minialpa.tracing.flattening import flatten_calls
from minialpa.tracing.new_equations import equations_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A scan with its body, which reads variables of the outer program.

    carries: variables of the carry, in the body.
    rows: pairs (variable of a row in the body, stacked array).
    stacked: pairs (value in the body, stacked array).
    """

    eqn: JaxprEqn
    carries: tuple[Var, ...]
    rows: tuple[tuple[Var, Atom], ...]
    eqns: tuple[JaxprEqn, ...]
    new_carries: tuple[Atom, ...]
    stacked: tuple[tuple[Atom, Var], ...]
    consts: dict[Var, Any]

    @property
    def variables(self) -> dict[Var, None]:
        """In order."""
        made = (var for eqn in self.eqns for var in eqn.outvars)
        return dict.fromkeys([*self.carries, *(var for var, _ in self.rows), *made])

    @property
    def results(self) -> list[Atom]:
        """The next carry, then the stacked values."""
        return [*self.new_carries, *(atom for atom, _ in self.stacked)]

    @property
    def read(self) -> dict[Var, None]:
        operands = [var for eqn in self.eqns for var in operand_vars(eqn)]
        return dict.fromkeys([*operands, *variables_in(self.results)])


def variables_in(atoms: Sequence[Atom]) -> list[Var]:
    return [atom for atom in atoms if not is_literal(atom)]


def read_body(eqn: JaxprEqn, linked: Mapping[Atom, Atom]) -> Body:
    """linked: for a stacked array, the value of the same iteration in another body."""
    closed = eqn.params["jaxpr"]
    flat = flatten_calls(closed.jaxpr, tuple(closed.consts))
    n_consts, n_carry = scan_counts(eqn)
    carries = [fresh_var(aval_of(var)) for var in flat.invars[n_consts : n_consts + n_carry]]

    rows, values = [], []
    for var, operand in zip(flat.invars[n_consts + n_carry :], eqn.invars[n_consts + n_carry :], strict=True):
        if not is_literal(operand) and operand in linked:
            values.append(linked[operand])
            continue
        row = fresh_var(aval_of(var))
        rows.append((row, operand))
        values.append(row)

    # Bodies of one function may share variables.
    names: dict[Var, Atom] = dict(zip(flat.invars, [*eqn.invars[:n_consts], *carries, *values], strict=True))
    names |= {var: fresh_var(aval_of(var)) for var in flat.constvars}
    eqns = []
    for one in flat.eqns:
        names |= {var: fresh_var(aval_of(var)) for var in one.outvars}
        eqns.append(reading(one, names).replace(outvars=[names[var] for var in one.outvars]))
    results = renamed(flat.outvars, names)
    return Body(
        eqn=eqn,
        carries=tuple(carries),
        rows=tuple(rows),
        eqns=tuple(eqns),
        new_carries=tuple(results[:n_carry]),
        stacked=tuple(zip(results[n_carry:], eqn.outvars[n_carry:], strict=True)),
        consts={names[var]: value for var, value in zip(flat.constvars, flat.consts, strict=True)},
    )


def with_rows(body: Body, rows: Sequence[tuple[Var, Var, Atom]]) -> Body:
    """rows: variable, row, stacked array."""
    names: dict[Var, Atom] = {var: row for var, row, _ in rows}
    return replace(
        body,
        rows=(*body.rows, *((row, array) for _, row, array in rows)),
        eqns=tuple(reading(eqn, names) for eqn in body.eqns),
        new_carries=tuple(renamed(body.new_carries, names)),
        stacked=tuple((renamed([atom], names)[0], array) for atom, array in body.stacked),
    )


# ---- from a body to a scan -----------------------------------------------------------------------------------------


def scan_of(body: Body) -> list[JaxprEqn]:
    _, n_carry = scan_counts(body.eqn)
    outer = _outer_variables(body)

    def compute(*arrays: Any) -> list[Any]:
        return _scan(body, dict(zip(outer, arrays, strict=True)))

    eqns, atoms = equations_for(compute, *outer)
    targets = [*body.eqn.outvars[:n_carry], *(var for _, var in body.stacked)]
    named, _ = with_named_results(eqns, atoms, targets)
    return [with_source_of(eqn, body.eqn) for eqn in named]


def _outer_variables(body: Body) -> list[Var]:
    made = body.variables.keys() | body.consts.keys()
    stacked = [array for _, array in body.rows]
    captured = [var for var in body.read if var not in made]
    return list(dict.fromkeys([*variables_in([*_first_carries(body), *stacked]), *captured]))


def _first_carries(body: Body) -> list[Atom]:
    n_consts, n_carry = scan_counts(body.eqn)
    return list(body.eqn.invars[n_consts : n_consts + n_carry])


def _scan(body: Body, env: Mapping[Var, Any]) -> list[Any]:
    """env: values of the variables from outside."""
    params, n_carry = body.eqn.params, len(body.carries)
    read = body.read
    rows = [(row, array) for row, array in body.rows if row in read]

    def iterate(carry: Any, xs: Any) -> tuple[list[Any], list[Any]]:
        inner = {**env, **body.consts, **dict(zip(body.carries, carry, strict=True))}
        inner |= dict(zip([row for row, _ in rows], xs, strict=True))
        found = run(body.eqns, body.results, inner)
        carries = [_with_dtype_of(new, old) for new, old in zip(found[:n_carry], carry, strict=True)]
        stacked = [_with_dtype_of(x, aval_of(var)) for x, (_, var) in zip(found[n_carry:], body.stacked, strict=True)]
        return carries, stacked

    first = [_with_dtype_of(value_of(atom, env), aval_of(var))
             for atom, var in zip(_first_carries(body), body.carries, strict=True)]  # fmt: skip
    end, stacked = lax.scan(
        iterate,
        first,
        [value_of(array, env) for _, array in rows],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*end, *stacked]


def run(eqns: Sequence[JaxprEqn], outvars: Sequence[Atom], env: Mapping[Var, Any]) -> list[Any]:
    values = dict(env)
    for eqn in eqns:
        results = eval_named(eqn, [value_of(atom, values) for atom in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
    return [value_of(atom, values) for atom in outvars]


def value_of(atom: Atom, env: Mapping[Var, Any]) -> Any:
    return atom.val if is_literal(atom) else env[atom]


def _with_dtype_of(x: Any, other: Any) -> Any:
    return lax.convert_element_type(x, other.dtype)
