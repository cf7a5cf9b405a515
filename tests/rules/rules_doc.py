"""Makes docs/rules.md from the table of rules: `python -m tests.rules.rules_doc` writes it.

It writes a Markdown table with one equation of each primitive, from rule_programs.py.
"""

from __future__ import annotations

from pathlib import Path

import jax

import minialpa.rules.table  # noqa: F401 (fills the rule table)
from minialpa.rules.known_rules import known_primitives
from tests.rules.rule_laws import notation
from tests.rules.rule_programs import PROGRAMS, equations

PATH = Path(__file__).parents[2] / "docs" / "rules.md"
_HEAD = f"""# Rules

The dimensions of each operation that may be split. `tests/rules/rules_doc.py` made this page from
`minialpa/rules/*.py` with jax {jax.__version__}.

Letters are the factors of one equation: a mesh axis that splits a factor splits every dimension with this factor. A
small letter may be split, a capital letter may not. `A'`, a capital letter with a prime, may be split over devices,
which then know their position or pass slices to each other, but not inside a loop or over micro-batches. `sum(b)` means
that splitting `b`, which the result lacks, leaves partial sums; `max(b)` and the others are similar. `(a b)` is one
dimension of two factors, the first outermost. A `scan` with matrix products is planned equation by equation instead,
with collectives in each iteration.

The rows of `pallas_call`, `custom_partitioning`, `ffi_call` and `minialpa_function` are examples: their factors depend
on the kernel, see [kernels.md](kernels.md). Every device computes unlisted primitives in full, with one warning that
names them.

| primitive | an equation |
|---|---|
"""


def table() -> str:
    """The whole document."""
    # Attention of cuDNN, which no CPU computes: examples, and heads of keys and values (`rules/attention.py`).
    q, k, v, bias = "[a B (c D) E]", "[a F c E]", "[a F c G]", "[a (c D) B F]"
    out, statistics = "[a B (c D) G]", "[a (c D) B]"
    first: dict[str, str] = {
        "dot_product_attention_fwd_wrapper": f"{q}, {k}, {v}, {bias}, ... -> {out}, {statistics}",
        "dot_product_attention_bwd_wrapper": f"{q}, {k}, {v}, {bias}, ..., {out} -> {q}, {k}, {v}",
    }
    for program in PROGRAMS:
        for eqn in equations(program):
            text, name = notation(eqn).strip(), eqn.primitive.name
            if (len(text) > len(first.get(name, "")) and len(text) <= 90) or name not in first:
                first[name] = text if len(text) <= 90 else text[:87] + "..."
    return _HEAD + "".join(f"| `{name}` | {_code(first.get(name, ''))} |\n" for name in known_primitives())


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    PATH.write_text(table())
