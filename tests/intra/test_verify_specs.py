"""The verifier of shardings: every way of every equation passes, and each claim that is not so is refused by name."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rule_programs import PROGRAMS, cases

import minialpa
from minialpa import LogicalMesh, ShardParallel, VerifyError
from minialpa.intra.factors import factors_of
from minialpa.intra.problem import MeshEquations
from minialpa.intra.reshard import partial_specs_of
from minialpa.intra.verify_specs import SpecsOfMesh, verify_specs
from minialpa.intra.ways import enumerate_ways, nearest_way
from minialpa.jaxprs import is_literal, shape_of
from minialpa.sharding import EquationSpecs, Spec
from tests.helpers import trace

MESH = LogicalMesh((2, 2))


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_way_of_an_equation_passes(program: str) -> None:
    for case in cases(program):
        eqn, factors = case.eqn, factors_of(case.eqn).on_mesh()
        ways = enumerate_ways(
            eqn, factors, MESH.shape, {}, {0: 2, 1: 2}, scatter=False, most_splits=False
        )  # fmt: skip
        for s, choice in enumerate(ways.strategies):
            operands = tuple(column[s] for column in ways.operands)
            for w in choice:
                made = tuple(column[w if ways.has_choice else s] for column in ways.made)
                assert nearest_way(eqn, factors, MESH.shape, operands, made) == (operands, made)


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_is_nearest_to_any_specs_is_a_way(program: str, seed: int) -> None:
    """And so it is nearest to itself."""
    rng = np.random.default_rng(seed)

    def any_spec(v: Any) -> Spec:
        specs = list(partial_specs_of(shape_of(v), MESH.shape))
        return specs[rng.integers(len(specs))]

    for case in cases(program):
        eqn, factors = case.eqn, factors_of(case.eqn).on_mesh()
        for _ in range(10):
            drawn = (tuple(map(any_spec, eqn.invars)), tuple(map(any_spec, eqn.outvars)))
            way = nearest_way(eqn, factors, MESH.shape, *drawn)
            assert nearest_way(eqn, factors, MESH.shape, *way) == way
