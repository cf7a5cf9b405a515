"""The equations of a mesh and the specs of a plan in; the spec of each value out, or a VerifyError.

The program of a mesh trusts its specs. They compute the step, perhaps slowly, if operands and results of each equation
are one of its sharding candidates (`strategies/candidates.py`), and each value can be resharded for its readers.
Example: R,S0  S0,R -> R,R is no candidate of `dot_general`, whose result is R,R+P0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from jax.extend.core import JaxprEqn, Var

from minialpa.cluster import LogicalMesh
from minialpa.intra.graph.problem import MeshEquations
from minialpa.intra.strategies.balance import balance_of
from minialpa.intra.strategies.candidates import nearest_candidate
from minialpa.intra.strategies.compared import compared_values
from minialpa.intra.strategies.loops import ScanBody, scan_body
from minialpa.intra.strategies.reshard import forbidden_for, reshard_table
from minialpa.ir.equations import Atom, bytes_of, is_literal, shape_of
from minialpa.plan.verify import require
from minialpa.rules.common import is_summable
from minialpa.rules.known_rules import factors_of
from minialpa.sharding import EquationSpecs, Spec

#: Positions of the fields of `EquationSpecs` in a plan.
_OPERANDS, _MADE, _RESULTS, _BODY = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecsOfMesh:
    """The specs of one mesh in a plan.

    where: the stage, for errors, such as `plan.stages[0]`.
    forbidden: collectives that resharding may not use.
    inputs, equations: specs, in the order of `MeshEquations`.
    """

    where: str
    mesh: LogicalMesh
    forbidden: tuple[str, ...]
    inputs: tuple[Spec, ...]
    equations: tuple[EquationSpecs, ...]


def verify_specs(problem: MeshEquations, found: SpecsOfMesh) -> dict[Var, Spec]:
    """The spec of each value of a mesh. Raises VerifyError, with the name of the field, unless

    - each input and each equation has specs that fit its arrays;
    - inputs, and values in `MeshEquations.not_partial`, are no partial sums;
    - operands and results of each equation are one of its sharding candidates;
    - a loop carries each value in one spec, and splits no stacked array between iterations;
    - each value can be resharded for its readers.
    """
    known = _verify_inputs(problem, found)
    verifier = _Verifier(found.mesh, found.forbidden, problem.not_partial, problem.equal)
    verifier.equations(problem.eqns, found.equations, known, f"{found.where}.equation_specs")
    return known


def _verify_inputs(problem: MeshEquations, found: SpecsOfMesh) -> dict[Var, Spec]:
    where = f"{found.where}.input_specs"
    given, required = len(found.inputs), len(problem.inputs)
    require(given == required, where, f"a list of {given}", f"{required}, one for each input array of the stage")

    known: dict[Var, Spec] = {}
    for i, ((v, _), spec) in enumerate(zip(problem.inputs, found.inputs, strict=True)):
        check_spec(v, spec, found.mesh, f"{where}[{i}]")
        require(not spec.partial, f"{where}[{i}]", spec, "no partial sum: inputs of a stage are complete")
        known[v] = spec
    return known


def check_spec(v: Atom, spec: Spec, mesh: LogicalMesh, where: str) -> None:
    """Raise VerifyError unless `mesh` can hold `v` in `spec`."""
    expected = _lacking_property(spec, shape_of(v), mesh.shape)
    require(expected is None, where, spec, expected or "")
    require(not spec.partial or is_summable(v), where, spec, "no partial sum, as the elements are not numbers")


@functools.lru_cache(maxsize=4096)
def _lacking_property(spec: Spec, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> str | None:
    """The property that `spec` of an array of `shape` lacks, or None."""
    if not all(axis < len(mesh_shape) and mesh_shape[axis] > 1 for axis in (*spec.axes, *spec.partial)):
        return f"axes of a mesh of shape {mesh_shape} that have several devices"
    if not all(list(axes) == sorted(axes) for axes in (*spec.dims, spec.partial)):
        return "the axes of each dimension in ascending order"
    if len(spec.dims) != len(shape):
        return f"{len(shape)} dimensions, for an array of shape {shape}"
    return None if spec.fits(shape, mesh_shape) else f"equal parts of shape {shape} on a mesh of shape {mesh_shape}"


def check_resharding(v: Atom, src: Spec, dst: Spec, mesh: LogicalMesh, forbidden: tuple[str, ...], where: str) -> None:
    """where: the field of `dst`. Raises VerifyError."""
    if src != dst:
        forbidden = forbidden_for(v, forbidden)
        table = reshard_table(shape_of(v), bytes_of(v), mesh, forbidden)
        named = " or ".join(f"`{kind}`" for kind in forbidden)
        expected = f"a spec to which `{src}` can be resharded without {named}, which the options of the stage forbid"
        require(math.isfinite(table.cost(src, dst)), where, dst, expected)


@dataclass(frozen=True, slots=True)
class _Verifier:
    """For the fields, see `SpecsOfMesh` and `MeshEquations`."""

    mesh: LogicalMesh
    forbidden: tuple[str, ...]
    not_partial: Collection[Var]
    equal: Mapping[Var, Var]

    def equations(
        self, eqns: Sequence[JaxprEqn], specs: Sequence[EquationSpecs], known: dict[Var, Spec], where: str
    ) -> None:
        """In order; `known` has the specs of all variables so far, and gets the specs of results."""
        require(len(specs) == len(eqns), where, f"a list of {len(specs)}", f"{len(eqns)}, one for each equation")
        for i, (eqn, chosen) in enumerate(zip(eqns, specs, strict=True)):
            at = f"{where}[{i}]"
            self._check_arrays(eqn, chosen, at)
            self._check_operands(eqn, chosen, known, at)
            self._check_kind(eqn, chosen, at)
            self._check_results(eqn, chosen, known, at)

    def _check_operands(self, eqn: JaxprEqn, chosen: EquationSpecs, known: Mapping[Var, Spec], where: str) -> None:
        for k, (atom, spec) in enumerate(zip(eqn.invars, chosen.operands, strict=True)):
            if not is_literal(atom):
                self._check_resharding(atom, known[atom], spec, f"{where}[{_OPERANDS}][{k}]")

    def _check_results(self, eqn: JaxprEqn, chosen: EquationSpecs, known: dict[Var, Spec], where: str) -> None:
        for r, (v, made, left) in enumerate(zip(eqn.outvars, chosen.made, chosen.results, strict=True)):
            here = f"{where}[{_RESULTS}][{r}]"
            self._check_resharding(v, made, left, here)
            expected = f"no partial sum: result {r} of `{eqn.primitive.name}` is compared, read elsewhere or not summed"
            require(not left.partial or v not in self.not_partial, here, left, expected)
            known[v] = known[self.equal.get(v, v)] = left

    def _check_resharding(self, v: Atom, src: Spec, dst: Spec, where: str) -> None:
        check_resharding(v, src, dst, self.mesh, self.forbidden, where)

    def _check_arrays(self, eqn: JaxprEqn, chosen: EquationSpecs, where: str) -> None:
        groups = (
            (_OPERANDS, eqn.invars, chosen.operands, "operand"),
            (_MADE, eqn.outvars, chosen.made, "result"),
            (_RESULTS, eqn.outvars, chosen.results, "result"),
        )
        for place, arrays, specs, noun in groups:
            expected = f"{len(arrays)}, one for each {noun} of `{eqn.primitive.name}`"
            require(len(specs) == len(arrays), f"{where}[{place}]", f"a list of {len(specs)}", expected)
            for k, (atom, spec) in enumerate(zip(arrays, specs, strict=True)):
                check_spec(atom, spec, self.mesh, f"{where}[{place}][{k}]")

    def _check_kind(self, eqn: JaxprEqn, chosen: EquationSpecs, where: str) -> None:
        if chosen.body:
            body = scan_body(eqn)
            expected = f"an empty list, as `{eqn.primitive.name}` is no loop with planned equations"
            require(body is not None, f"{where}[{_BODY}]", f"a list of {len(chosen.body)}", expected)
            assert body is not None
            self._check_loop(eqn, body, chosen, where)
        elif eqn.primitive.name == "optimization_barrier":
            _check_barrier(chosen, where)
        elif eqn.effects and self.mesh.n_devices > 1:
            _check_replicated(eqn, chosen, where)
        else:
            self._check_candidate(eqn, chosen, where)
        self._check_balanced(eqn, chosen, where)

    def _check_candidate(self, eqn: JaxprEqn, chosen: EquationSpecs, where: str) -> None:
        operands, made = nearest_candidate(
            eqn, factors_of(eqn).on_mesh(), self.mesh.shape, chosen.operands, chosen.made
        )
        if (operands, made) == (chosen.operands, chosen.made):
            return

        for place, specs, nearest in ((_OPERANDS, chosen.operands, operands), (_MADE, chosen.made, made)):
            for k, (spec, expected) in enumerate(zip(specs, nearest, strict=True)):
                text = f"{expected} by the rule of `{eqn.primitive.name}`, next to {_specs_text(chosen)}"
                require(spec == expected, f"{where}[{place}][{k}]", spec, text)

    def _check_balanced(self, eqn: JaxprEqn, chosen: EquationSpecs, where: str) -> None:
        if chosen.is_balanced:
            balance = balance_of(factors_of(eqn), chosen.operands, chosen.made, self.mesh.shape)
            expected = f"no balanced equation: the devices of `{eqn.primitive.name}` have no halves to exchange"
            require(balance is not None, where, "balanced", expected)

    # ---- loops ------------------------------------------------------------------------------------------------------

    def _check_loop(self, eqn: JaxprEqn, body: ScanBody, chosen: EquationSpecs, where: str) -> None:
        for k, spec in enumerate(chosen.operands[body.n_lead :], body.n_lead):
            require(not spec.dims[0], f"{where}[{_OPERANDS}][{k}]", spec, "an unsplit dimension of iterations")

        for r, (made, left) in enumerate(zip(chosen.made, chosen.results, strict=True)):
            here = f"{where}[{_MADE}][{r}]"
            require(made == left, here, made, f"{left}, in which the loop leaves result {r}")
            if r < body.n_carry:
                came = chosen.operands[body.n_consts + r]
                require(made == came, here, made, f"{came}, in which the loop carries the value")
            else:
                require(not made.dims[0], here, made, "an unsplit dimension of iterations")

        self._check_iteration(eqn, body, chosen, where)

    def _complete_inside(self, eqn: JaxprEqn, body: ScanBody) -> list[Var]:
        """Values whose stacked results are complete."""
        stacked = zip(eqn.outvars[body.n_carry :], body.flat.outvars[body.n_carry :], strict=True)
        return [v for out, v in stacked if out in self.not_partial and not is_literal(v)]

    def _check_iteration(self, eqn: JaxprEqn, body: ScanBody, chosen: EquationSpecs, where: str) -> None:
        flat = body.flat
        known = {v: Spec.replicated(len(shape_of(v))) for v in flat.constvars}
        known.update((v, body.inner_operand(k, chosen.operands[k])) for k, v in enumerate(flat.invars))
        inside = replace(self, not_partial={*self._complete_inside(eqn, body), *compared_values(flat.eqns)})
        for k, v in enumerate(flat.invars):
            is_right = not known[v].partial or v not in inside.not_partial
            require(is_right, f"{where}[{_OPERANDS}][{k}]", known[v], "no partial sum: a comparison reads the value")
        inside.equations(flat.eqns, chosen.body, known, f"{where}[{_BODY}]")

        for r, atom in enumerate(flat.outvars):
            made = Spec.replicated(len(shape_of(atom))) if is_literal(atom) else known[atom]
            self._check_resharding(atom, made, body.inner_result(r, chosen.results[r]), f"{where}[{_RESULTS}][{r}]")


def _check_barrier(chosen: EquationSpecs, where: str) -> None:
    for k, (came, made) in enumerate(zip(chosen.operands, chosen.made, strict=True)):
        require(made == came, f"{where}[{_MADE}][{k}]", made, f"{came}, the spec in which the barrier gets the array")


def _check_replicated(eqn: JaxprEqn, chosen: EquationSpecs, where: str) -> None:
    expected = f"a replicated array, as `{eqn.primitive.name}` has side effects and runs once"
    for place, specs in ((_OPERANDS, chosen.operands), (_MADE, chosen.made)):
        for k, spec in enumerate(specs):
            require(not spec.axes and not spec.partial, f"{where}[{place}][{k}]", spec, expected)


def _specs_text(chosen: EquationSpecs) -> str:
    def texts(specs: Sequence[Spec]) -> str:
        return "[" + "] [".join(map(str, specs)) + "]"

    return f"{texts(chosen.operands)} -> {texts(chosen.made)}"
