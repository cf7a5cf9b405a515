"""Recognition turns a `TracedStep` into the same step with each attention as one operation.

README.md explains the package.
"""
