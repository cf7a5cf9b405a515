"""Tracing turns a Python step and the shapes of its arguments into a `TracedStep`: one flat full-batch program.

README.md explains the package.
"""
