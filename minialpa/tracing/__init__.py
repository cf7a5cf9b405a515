"""Tracing: a Python function and the shapes of its arguments in, a flat program with marks out (`TracedStep`).

Also what is known of one equation, and the fingerprint of a program. Imports: `support` and `errors`.
"""
