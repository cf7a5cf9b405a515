"""The solver: chooses one strategy for each node of a graph of costs, within limits on what the choices use.

It knows nothing of shardings. Start with cost_graph.py, which states the problem, and solve.py, which lists the phases.
Imports: `support`, `errors`.
"""
