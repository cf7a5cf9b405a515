"""The solver: chooses one strategy for each node of a graph of costs, within a limit on their usage.

It knows no shardings. cost_graph.py states the problem, solve.py lists the phases.
Imports: `support`, `errors`.
"""
