"""Runs a `Program`: argument leaves go in, result leaves come out, and a call does not wait for devices.

README.md explains the package.
"""
