"""One step of a program: instructions and compiled functions go in, and arrays in numbered buffers come out.

Both runtimes run their steps here, each with a back end of its own. Imports: programs, support.
"""
