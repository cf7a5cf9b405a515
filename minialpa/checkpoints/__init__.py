"""The state of a training run goes to files in orbax's format, and comes back under any plan. See README.md."""
