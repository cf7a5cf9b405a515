"""Tracing: turns a Python function and the shapes of its arguments into a flat program with marks (`TracedStep`).

Also fingerprints of programs. Imports: `arrays`, `errors` and `ir`.
"""
