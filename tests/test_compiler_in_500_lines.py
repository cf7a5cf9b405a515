"""The six steps of docs/compiler-in-500-lines run. Each step compares itself with the serial step."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from xml.etree import ElementTree

import jax
import pytest
import scipy

from tests.pages import DOCS

FOLDER = DOCS / "compiler-in-500-lines"
STEPS = sorted(path.stem for path in FOLDER.glob("*.py"))
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
#: Other versions may print another of several equally fast plans.
HAS_VERSIONS = f"jax {jax.__version__} and scipy {scipy.__version__}" in PAGE


@pytest.mark.parametrize("step", STEPS)
def test_a_step_runs_and_prints_the_output_on_the_page(
    step: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    importlib.import_module(step).main()
    printed = capsys.readouterr().out
    (shown,) = re.findall(rf"^\$ python {step}\.py\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert all(part in printed for part in shown.split("...\n")) or not HAS_VERSIONS


def test_the_six_steps_have_at_most_500_lines() -> None:
    assert len(STEPS) == 6
    assert sum(len((FOLDER / f"{step}.py").read_text(encoding="utf-8").splitlines()) for step in STEPS) <= 500


def test_the_six_steps_need_no_minialpa() -> None:
    imports = re.compile("^(import|from) minialpa", re.MULTILINE)
    assert not [step for step in STEPS if imports.search((FOLDER / f"{step}.py").read_text(encoding="utf-8"))]


def test_the_picture_of_the_pipeline_has_the_passes_on_the_page() -> None:
    passes = re.findall(r"\b[FB]\d\b", PAGE[PAGE.index("$ python step6") :].split("```")[0])
    texts = [one.text or "" for one in ElementTree.parse(FOLDER / "1f1b.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if re.fullmatch(r"[FB]\d", text)] == passes


@pytest.mark.parametrize("page", [FOLDER / "README.md", DOCS / "how-it-decides.md"], ids=lambda page: page.parent.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    assert links
    assert not [link for link in links if not (page.parent / link).exists()]
