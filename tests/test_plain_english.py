"""Docstrings, comments, error messages and Markdown have few matches of the patterns in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import functools
import io
import itertools
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("minialpa", "docs", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
OTHERS = ("tests", "benchmarks", "examples")

#: Matches per 10,000 words: of all of `PRODUCT`, of one file with at least `MIN_WORDS` words, of all of `OTHERS`.
PRODUCT_LIMIT, FILE_LIMIT, MIN_WORDS = 5.0, 50.0, 200
#: The present rate of `OTHERS`, rounded up. It only goes down: lower it with the rate.
OTHERS_LIMIT = 15.0
MOST_CODE_WORDS, MOST_ARCHITECTURE_BYTES = 110_000, 15 * 1024

#: Pattern, text with a match, text without one.
EXAMPLES = (
    ("clause for a noun", "the price of what it sends", "the price of a message"),
    ("those of, that of", "its bytes and those of its operands", "the bytes of the result and the operands"),
    ("again", "the layer computes the values again", "the layer recomputes the values"),
    ("says", "the plan says how many", "the plan records the number"),
    ("nobody, nothing", "an array that nobody reads", "an array without a reader"),
    ("behind", "the equations behind the loop", "the equations after the loop"),
    ("but for, else than", "all fields but for `n`", "all fields except `n`"),
    ("as it is", "a scan comes back as it is", "a scan comes back unchanged"),
    ("whoever", "gathered, whoever reads it", "gathered for each reader"),
    ("so that, first", "It waits.\nSo that copies end.", "It waits until the copies end, so that memory is free."),
    ("told", "the solver is told the limit", "the solver gets the limit"),
    ("wanted", "from the made to the wanted spec", "from the made to the required spec"),
    ("worth searching", "steps that are worth searching", "steps for which the search pays"),
    ("heavy operation", "a heavy equation", "an expensive equation"),
    ("room for a package", "the rooms of the planner", "the packages of the planner"),
    ("ending of a loop", "the endings of a loop", "the exits of a loop, without ending the session"),
    ("known once", "a value that is\nknown once", "a value is known once all loops have run"),
)


Text = tuple[int, str, bool]  # line, text, whether it is a docstring or comment


def texts_of_python(source: str) -> Iterator[Text]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [(t.start[0], t.string.lstrip("#:! ")) for t in tokens if t.type == tokenize.COMMENT]
    yield from ((line, text, True) for line, text in joined(comments))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if (text := ast.get_docstring(node, clean=False)) is not None:
                yield node.body[0].lineno, text, True
        elif isinstance(node, ast.Raise) and node.exc is not None:
            for part in ast.walk(node.exc):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
                    yield part.lineno, part.value, False


def texts_of_markdown(source: str) -> Iterator[Text]:
    """The paragraphs, without fenced code and without the table of bad examples in the section "Plain English"."""
    lines, fenced, heading = list[tuple[int, str]](), False, ""
    for number, line in enumerate(source.splitlines(), 1):
        is_fence = line.lstrip().startswith("```")
        fenced ^= is_fence
        if line.startswith("#") and not fenced:
            heading = line
        is_bad_example = heading == "## Plain English" and line.startswith("|")
        if line.strip() and not (fenced or is_fence or is_bad_example):
            lines.append((number, line))
    yield from ((line, text, False) for line, text in joined(lines))


def joined(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Successive lines as one text, so that patterns find sentences that a line break cuts."""
    for _, group in itertools.groupby(enumerate(lines), lambda item: item[1][0] - item[0]):
        numbers, texts = zip(*(line for _, line in group), strict=True)
        yield numbers[0], "\n".join(texts)


@functools.cache
def patterns() -> dict[str, re.Pattern[str]]:
    block = (ROOT / "CONTRIBUTING.md").read_text().split("```text\n")[1].split("```")[0]
    pairs = (line.split(": ", 1) for line in block.splitlines())
    return {name: re.compile(regex.replace(" ", r"\s+"), re.IGNORECASE) for name, regex in pairs}


class File(NamedTuple):
    rate: float
    n_words: int
    n_code_words: int
    places: list[str]


@functools.cache
def files(*places: str) -> list[File]:
    """The files, worst first."""
    paths = [p for place in places for p in ([ROOT / place, *(ROOT / place).rglob("*")]) if p.suffix in (".py", ".md")]
    return sorted(map(read, paths), key=lambda file: -file.rate)


def read(path: Path) -> File:
    n_words, n_code_words, places = 0, 0, list[str]()
    for line, text, is_code in (texts_of_markdown if path.suffix == ".md" else texts_of_python)(path.read_text()):
        own_words = len(re.findall("[A-Za-z]+", text))
        n_words += own_words
        n_code_words += own_words * is_code
        for name, pattern in patterns().items():
            for match in pattern.finditer(text):
                near = " ".join(text[max(match.start() - 40, 0) : match.end() + 40].split())
                at = line + text.count("\n", 0, match.start())
                places.append(f"{path.relative_to(ROOT)}:{at}: ...{near}... ({name})")
    return File(1e4 * len(places) / max(n_words, 1), n_words, n_code_words, places)


@pytest.mark.xdist_group("plain_english")  # one process reads the files
@pytest.mark.parametrize(("places", "limit"), [(PRODUCT, PRODUCT_LIMIT), (OTHERS, OTHERS_LIMIT)])
def test_sentences_are_plain(places: tuple[str, ...], limit: float) -> None:
    found = [place for file in files(*places) for place in file.places]
    rate = 1e4 * len(found) / sum(file.n_words for file in files(*places))
    assert rate <= limit, "\n".join([f"{rate:.1f} matches per 10,000 words; the worst files have", *found[:40]])


@pytest.mark.xdist_group("plain_english")
def test_each_file_of_the_product_is_plain() -> None:
    bad = [file for file in files(*PRODUCT) if file.n_words >= MIN_WORDS and file.rate > FILE_LIMIT]
    assert not bad, "\n".join(place for file in bad for place in file.places)


@pytest.mark.xdist_group("plain_english")
def test_docstrings_comments_and_architecture_are_short() -> None:
    assert sum(file.n_code_words for file in files("minialpa")) <= MOST_CODE_WORDS
    assert (ROOT / "ARCHITECTURE.md").stat().st_size <= MOST_ARCHITECTURE_BYTES


@pytest.mark.parametrize(("name", "before", "after"), EXAMPLES)
def test_a_pattern_finds_its_example(name: str, before: str, after: str) -> None:
    assert patterns()[name].search(before)
    assert not [other for other, pattern in patterns().items() if pattern.search(after)]


def test_each_pattern_has_an_example() -> None:
    assert [name for name, _, _ in EXAMPLES] == list(patterns())
