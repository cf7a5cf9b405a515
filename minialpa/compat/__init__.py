"""Interfaces of other systems, for scripts that were written for them.

Each of them stands on the public names of minialpa, and no other part of minialpa imports one.
"""
