"""Messages between workers: parts of arrays go in under a tag, and arrive at a peer. See README.md."""
