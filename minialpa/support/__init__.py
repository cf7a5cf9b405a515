"""Small helpers that know nothing of steps or devices: files, caches, compiled loops, progress bars.

In and out: plain values. Imports: nothing of minialpa but `errors`.
"""
