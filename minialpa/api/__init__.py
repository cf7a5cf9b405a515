"""Calls: a step and its arguments go in, the results of a program on all devices come out. See README.md."""
