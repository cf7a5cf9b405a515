"""What if: models, clusters, batches and memory in; the best plan of each combination as a table, a page and files out.

if __name__ == "__main__":
    found = what_if(["gpt-1.3b"], gpus=(8, 16, 32), clusters=("h100", "a100-80gb"), prices={"h100": 2.5})
    print(found.text())
    found.save_html("what-if.html")
"""

from minialpa.what_if.grid import Case, cases, factors, memory_sizes, numbers, prices
from minialpa.what_if.outcomes import CaseOutcome
from minialpa.what_if.planning import METHODS, run
from minialpa.what_if.result import WhatIf, what_if

__all__ = [
    "METHODS",
    "Case",
    "CaseOutcome",
    "WhatIf",
    "cases",
    "factors",
    "memory_sizes",
    "numbers",
    "prices",
    "run",
    "what_if",
]
