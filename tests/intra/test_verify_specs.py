"""The verifier of shardings: candidates of an equation, and specs that are not candidates. See also test_verify_fit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from minialpa import LogicalMesh, VerifyError
from minialpa.inter.staging.mesh_problem import mesh_equations
from minialpa.inter.staging.staged_step import stage_step
from minialpa.intra.strategies.candidates import enumerate_candidates, nearest_candidate
from minialpa.intra.strategies.reshard import partial_specs_of
from minialpa.intra.verify_specs import SpecsOfMesh, verify_specs
from minialpa.ir.equations import shape_of
from minialpa.rules.known_rules import factors_of
from minialpa.sharding import EquationSpecs, Spec
from tests.helpers import trace
from tests.rules.rule_programs import PROGRAMS, equations

MESH = LogicalMesh((2, 2))


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_candidate_of_an_equation_passes(program: str) -> None:
    for eqn in equations(program):
        factors = factors_of(eqn).on_mesh()
        candidates = enumerate_candidates(
            eqn, factors, MESH.shape, {}, {0: 2, 1: 2}, scatter=False, most_splits=False
        )  # fmt: skip
        for s, choice in enumerate(candidates.strategies):
            operands = tuple(column[s] for column in candidates.operands)
            for w in choice:
                made = tuple(column[w if candidates.has_choice else s] for column in candidates.made)
                assert nearest_candidate(eqn, factors, MESH.shape, operands, made) == (operands, made)


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_nearest_to_any_specs_is_a_candidate(program: str, seed: int) -> None:
    """And so it is nearest to itself."""
    rng = np.random.default_rng(seed)

    def any_spec(v: Any) -> Spec:
        specs = list(partial_specs_of(shape_of(v), MESH.shape))
        return specs[rng.integers(len(specs))]

    for eqn in equations(program):
        factors = factors_of(eqn).on_mesh()
        for _ in range(10):
            drawn = (tuple(map(any_spec, eqn.invars)), tuple(map(any_spec, eqn.outvars)))
            candidate = nearest_candidate(eqn, factors, MESH.shape, *drawn)
            assert nearest_candidate(eqn, factors, MESH.shape, *candidate) == candidate


def test_what_has_side_effects_runs_on_replicated_arrays() -> None:
    def step(x: jax.Array, batch: jax.Array) -> jax.Array:
        jax.debug.callback(lambda total: None, jnp.sum(batch))
        return x + 1

    traced = trace(step, jnp.ones(4), jnp.ones(4))
    problem = mesh_equations(stage_step(traced, 1, (), (0,)), 0)
    kinds = [eqn.primitive.name for eqn in problem.eqns]
    replicated = {name: EquationSpecs((Spec(((),)),), (Spec(((),)),), (Spec(((),)),)) for name in kinds}
    replicated["add"] = EquationSpecs((Spec(((),)), Spec(())), (Spec(((),)),), (Spec(((),)),))
    replicated["reduce_sum"] = EquationSpecs((Spec(((),)),), (Spec(()),), (Spec(()),))
    for partial in ((), (0,)):
        replicated["debug_callback"] = EquationSpecs((Spec((), partial),), (), ())
        specs = SpecsOfMesh(
            where="stages[0]",
            mesh=MESH,
            forbidden=(),
            inputs=(Spec(((),)), Spec(((),))),
            equations=tuple(replicated[name] for name in kinds),
        )
        if partial:
            with pytest.raises(
                VerifyError, match=r"\[0\]\[0\]` is \+P0; expected a replicated array, as `debug_callback`"
            ):
                verify_specs(problem, specs)
        else:
            assert set(verify_specs(problem, specs)) >= {v for v, _ in problem.inputs}
