"""The solver: chooses one strategy for each node of a graph of costs, within limits on what the choices use.

It knows nothing of shardings, and imports `support` and `errors` only. Start with cost_graph.py, which states the
problem, and solve.py, which lists the phases.
"""
