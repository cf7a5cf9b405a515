"""A report as a reader finds it: plans to draw, and the elements and tables of a page."""

from __future__ import annotations

import functools
from html.parser import HTMLParser

import jax

import minialpa
from minialpa import AutoLayerOption, ClusterSpec, PipeshardParallel, Plan, ShardParallel
from minialpa.models import build

#: Elements without an end tag.
_EMPTY = {"br", "input", "link", "meta", "wbr"}


@functools.cache
def gpt_plan(n_stages: int) -> Plan:
    """A small GPT on two hosts with four devices each."""
    case = build("gpt", hidden=256, n_layers=4, n_heads=4, seq_len=64, vocab_size=128)
    state = jax.eval_shape(case.init, jax.random.key(0))
    pipeline = PipeshardParallel(num_micro_batches=8, layer_option=AutoLayerOption(layer_num=4), stage_option="uniform")
    return minialpa.plan(
        case.train_step(minialpa.value_and_grad),
        (state, case.make_batch(0, 64)),
        cluster=ClusterSpec.preset("h100", num_hosts=2, devices_per_host=4),
        method=pipeline if n_stages > 1 else ShardParallel(num_micro_batches=2),
    )


class Element:
    """An element with its attributes and everything inside."""

    def __init__(self, tag: str, attributes: dict[str, str | None]) -> None:
        self.tag, self.attributes = tag, attributes
        self.inside: list[Element | str] = []

    @property
    def text(self) -> str:
        texts = (one if isinstance(one, str) else one.text for one in self.inside)
        return " ".join("".join(texts).split())

    def all(self, *tags: str) -> list[Element]:
        """The elements inside, in the order of the page; all without `tags`."""
        found: list[Element] = []
        for one in (one for one in self.inside if isinstance(one, Element)):
            found += [one] if not tags or one.tag in tags else []
            found += one.all(*tags)
        return found

    def by_id(self, name: str) -> Element:
        return next(one for one in self.all() if one.attributes.get("id") == name)

    def rows(self, table: str) -> list[list[str]]:
        """The texts of the cells of the body of a table."""
        body = self.by_id(table).all("tbody")[0]
        return [[cell.text for cell in row.all("th", "td")] for row in body.all("tr")]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("page", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self.open[-1].inside.append(element)
        if tag not in _EMPTY:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].inside.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> ends <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].inside.append(data)


def read_page(text: str) -> Element:
    """The elements of a page. Fails if an end tag is missing."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert len(reader.open) == 1, f"<{reader.open[-1].tag}> has no end"
    return reader.open[0]
