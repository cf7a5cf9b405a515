"""One worker of a mesh: mesh programs and calls go in; kept arrays, messages and failures come out. See README.md."""
