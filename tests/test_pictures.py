"""The pictures in docs/pictures agree with the code."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import jax
import pytest

from minialpa.inter.phases import PHASES
from minialpa.inter.staging.staged_step import realise
from minialpa.sharding import Spec
from tests.pictures_doc import FOLDER, STEPS, data_flow, plan_on_a_mesh, planned, spec_words
from tests.skips import skip

_SVG = "{http://www.w3.org/2000/svg}"
_FLOW, _MESH = FOLDER / "data-flow.svg", FOLDER / "plan-on-a-mesh.svg"


def test_the_data_flow_is_up_to_date() -> None:
    assert _FLOW.read_text() == data_flow(), "python -m tests.pictures_doc"


def test_the_plan_is_up_to_date() -> None:
    text = _MESH.read_text()
    if f"jax {jax.__version__}." not in text:
        skip(f"{_MESH.name} was made with another jax than {jax.__version__}: python -m tests.pictures_doc")
    assert text == plan_on_a_mesh(planned()), "python -m tests.pictures_doc"


@pytest.mark.parametrize(("path", "most_bytes"), [(_FLOW, 20_000), (_MESH, 40_000)], ids=["data-flow", "plan"])
def test_a_picture_is_small_and_self_contained(path: Path, most_bytes: int) -> None:
    root = ElementTree.parse(path).getroot()
    assert root.tag == f"{_SVG}svg"
    assert root.get("width") == "900"
    assert path.stat().st_size < most_bytes
    assert {one.tag.removeprefix(_SVG) for one in root.iter()}.isdisjoint({"script", "image", "use", "foreignObject"})
    assert "url(http" not in path.read_text()


def test_the_data_flow_shows_all_phases_in_order() -> None:
    names = [phase.name for phase in PHASES]
    assert [phase for step in STEPS for phase in step.phases] == names
    assert [text for text in _texts(_FLOW) if text in names] == names


def test_the_data_flow_has_the_values_of_the_architecture_in_order() -> None:
    table = (FOLDER.parents[1] / "ARCHITECTURE.md").read_text().split("## Phases\n")[1]
    # The table has no row for the path of a saved plan.
    places = [table.find(f"`{step.value}`") for step in STEPS if step.makes is not realise]
    assert -1 not in places
    assert places == sorted(places)


def _texts(path: Path) -> list[str]:
    return [one.text or "" for one in ElementTree.parse(path).iter(f"{_SVG}text")]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("S0,R", "rows over axis 0, replicated over axis 1"),
        ("S1,S0", "rows over axis 1, columns over axis 0"),
        ("R,S01", "columns over axes 0, 1"),
        ("R,R", "replicated over axes 0, 1"),
    ],
)
def test_words_of_specs(spec: str, words: str) -> None:
    assert spec_words(Spec.parse(spec), 2) == words
