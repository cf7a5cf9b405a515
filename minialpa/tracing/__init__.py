"""Tracing: turns a Python function and the shapes of its arguments into a flat program with marks (`TracedStep`).

Also helpers for single equations, and fingerprints of programs. Imports: `arrays` and `errors`.
"""
