"""Runs programs of instructions on argument leaves, and returns result leaves.

Modules at this level run them in this process and define an executable; the rooms run them on the workers of a cluster.

Imports: `programs`, `plan` and the values at the top level; no module that plans.
"""
