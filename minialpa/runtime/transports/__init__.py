"""Messages between workers: parts of arrays go in under a tag, and arrive at a peer.

What comes out is arrays, or an error that names the peer. Knows neither programs nor Ray.
Imports: errors, support.
"""
