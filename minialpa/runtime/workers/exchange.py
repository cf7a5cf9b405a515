"""Moves the arrays of a mesh program on one worker.

- `Send` starts in the background, and keeps its array until the transport has read it.
- `Receive` waits for messages, joins them into the shard of each device, and relays shards to other workers of this
  mesh.
- `Relayout` stays on the mesh: a jitted identity.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from minialpa.programs.mesh_program import ArrayType, MeshProgram, Message, Place, Receive, Relayout, Send, messages
from minialpa.programs.resharding import Box
from minialpa.runtime.steps.interpreter import Action, Buffers
from minialpa.runtime.steps.step_trace import FUNCTIONS, StepTrace
from minialpa.runtime.transports.transport import ExpectedPart, Part, Transport
from minialpa.sharding import placed

#: The track of the thread that issues instructions.
INSTRUCTIONS = "instructions"


class Exchange:
    """The tag of a message is step << 32 | number of the transfer."""

    def __init__(
        self,
        *,
        program: MeshProgram,
        places: Sequence[Place],
        me: int,
        devices: Sequence[jax.Device],
        mesh: Mesh,
        transport: Transport,
        compiled: MutableMapping[Any, Any],
        timeout_s: float,
    ) -> None:
        """`compiled` has relayouts by sharding, which programs share.

        Args:
            places: all workers, as the transport numbers them; `me` is one.
            devices: of this worker, in the order of its place.
        """
        self.step = -1
        self._program, self._places, self._me = program, tuple(places), me
        self._local = dict(zip(places[me].devices, devices, strict=True))
        self._mesh, self._transport = mesh, transport
        self._compiled, self._timeout_s = compiled, timeout_s
        self._messages = {number: messages(t, places) for number, t in program.transfers.items()}
        self._sending: dict[int, list[Future[None]]] = {}

    def begin(self, step: int) -> None:
        """Begin `step`, without the sends of a failed step."""
        self.step = step
        self._sending.clear()

    # ---- see `interpreter.Backend` ----------------------------------------------------------------------------------

    def action(self, instruction: Any) -> Action:
        match instruction:
            case Send(source, number):
                return lambda buffers: self._send(number, source, buffers[source])
            case Receive(target, number):
                return _fill_action(target, lambda _: self._receive(number))
            case Relayout(source, target, spec):
                in_host = self._program.types[target].in_host
                relayout = self._relayout(placed(self._mesh, spec, in_host=in_host))
                return _fill_action(target, lambda buffers: relayout(buffers[source]))
        raise AssertionError(instruction)

    def settle(self, buffers: Sequence[int]) -> None:
        for b in buffers:
            for sent in self._sending.pop(b, ()):
                sent.result()

    def settle_all(self) -> None:
        self.settle(list(self._sending))

    def describe(self, instruction: Any) -> str:
        match instruction:
            case Send(_, number):
                return f"to stage {self._program.transfers[number].target}"
            case Receive(_, number):
                return f"from stage {self._program.transfers[number].source}"
        return "on its mesh"

    def note(
        self, trace: StepTrace, instruction: Any, buffers: Buffers, *, name: str, begun_s: float, issued_s: float
    ) -> None:
        mesh = self._program.mesh
        if isinstance(instruction, Relayout):
            trace.note_array(mesh, FUNCTIONS, "relayout", issued_s, buffers[instruction.target])
        trace.note(mesh, INSTRUCTIONS, name, begun_s)

    # ---- transfers ------------------------------------------------------------------------------------------------

    def _send(self, number: int, source: int, array: jax.Array) -> None:
        """Post this worker's messages, except relayed ones."""
        transfer = self._program.transfers[number]
        shards = self._shards(array, transfer.type)
        boxes = dict(transfer.resharding.source_boxes)
        self._sending.setdefault(source, []).extend(
            self._post(number, message, shards, boxes)
            for message in self._messages[number]
            if message.source == self._me and not message.moves[0].relayed
        )

    def _post(self, number: int, message: Message, shards: dict[int, Any], boxes: dict[int, Box]) -> Future[None]:
        """shards, boxes: by device, source shards and their places in the array."""
        first = self._places[message.target].first_device
        parts = [Part(shards[m.source], _index_in(m.box, boxes[m.source]), m.targets[0] - first) for m in message.moves]
        return self._transport.send(message.target, self._tag(number), parts)

    def _receive(self, number: int) -> jax.Array:
        transfer = self._program.transfers[number]
        boxes = {d: box for d, box in transfer.resharding.landing_boxes if d in self._local}
        arrived: dict[int, list[tuple[Box, Any]]] = {d: [] for d in boxes}
        for message in self._messages[number]:
            if message.target == self._me:
                self._take(number, message, np.dtype(transfer.type.dtype), arrived)

        landed = [_joined_parts(arrived[d], boxes[d], transfer.type.dtype) for d in boxes]
        type_ = transfer.type
        devices = [self._local[d] for d in boxes]
        sharding = placed(self._mesh, transfer.resharding.landing, in_host=type_.in_host)
        shards = type_.shards(landed, devices)

        # A part for several workers of this mesh crosses once; one relays it over faster links.
        for message in self._messages[number]:
            if message.source == self._me and message.moves[0].relayed:
                self._post(number, message, dict(zip(boxes, shards, strict=True)), boxes)

        return type_.joined(shards, sharding)

    def _take(
        self, number: int, message: Message, dtype: np.dtype[Any], arrived: dict[int, list[tuple[Box, Any]]]
    ) -> None:
        first = min(self._local)
        expected = [ExpectedPart(_shape(m.box), dtype, m.targets[0] - first) for m in message.moves]
        arrays = self._transport.receive(message.source, self._tag(number), expected, self._timeout_s)
        for move, array in zip(message.moves, arrays, strict=True):
            for device in move.targets:
                # A transport between GPUs delivers to the first device.
                mine = jax.device_put(array, self._local[device]) if isinstance(array, jax.Array) else array
                arrived[device].append((move.box, mine))

    def _tag(self, number: int) -> int:
        return self.step << 32 | number

    def _shards(self, array: jax.Array, type_: ArrayType) -> dict[int, Any]:
        """By device number."""
        by_device = {shard.device: shard.data for shard in type_.data(array).addressable_shards}
        if type_.in_host:  # NCCL reads device memory
            place = functools.partial(SingleDeviceSharding, memory_kind="device")
            by_device = {device: jax.device_put(data, place(device)) for device, data in by_device.items()}
        return {number: by_device[device] for number, device in self._local.items()}

    def _relayout(self, sharding: NamedSharding) -> Any:
        made = self._compiled.get(sharding) or jax.jit(lambda x: x, out_shardings=sharding)
        self._compiled[sharding] = made
        return made


def _fill_action(target: int, value: Callable[[Buffers], Any]) -> Action:
    def fill(buffers: Buffers) -> None:
        buffers[target] = value(buffers)

    return fill


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def _index_in(box: Box, outer: Box) -> tuple[slice, ...] | None:
    """None for all of `outer`."""
    if box == outer:
        return None
    return tuple(slice(start - base, stop - base) for (start, stop), (base, _) in zip(box, outer, strict=True))


def _joined_parts(parts: list[tuple[Box, Any]], outer: Box, dtype: str) -> Any:
    if len(parts) == 1 and parts[0][0] == outer:
        return parts[0][1]

    if parts and isinstance(parts[0][1], jax.Array):
        joined = jnp.zeros(_shape(outer), dtype, device=parts[0][1].device)
        for box, array in parts:
            joined = joined.at[_index_in(box, outer) or ...].set(array)
        return joined

    out = np.empty(_shape(outer), dtype)
    for box, array in parts:
        out[_index_in(box, outer) or ...] = array
    return out
