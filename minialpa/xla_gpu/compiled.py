"""What XLA has made of one function: the bytes that it needs on each GPU, and the program as text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProgram:
    """A compiled function.

    Attributes:
        argument_bytes: of the arguments, on each device.
        output_bytes: of the results.
        temporary_bytes: of all else, in XLA's own assignment of buffers.
        alias_bytes: of results that take the place of donated arguments.
        text: the scheduled program, with what XLA estimates each kernel to take.
    """

    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    alias_bytes: int
    text: str

    @property
    def peak_bytes(self) -> int:
        """Memory of a device while the function runs, as XLA's `memory_analysis` has it."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes - self.alias_bytes
