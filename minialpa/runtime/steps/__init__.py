"""One step of a program: instructions and compiled functions go in, arrays in numbered buffers come out.

README.md explains the package.
"""
