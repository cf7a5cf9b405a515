"""Calls that have each worker read its own samples of a batch, so that no data passes through this process."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from minialpa.programs.mesh_program import MeshProgram
from minialpa.runtime.arrays import MicroRows
from minialpa.runtime.cluster.cluster_program import ClusterProgram, WorkerShards
from minialpa.runtime.cluster.cluster_runtime import ClusterRuntime
from minialpa.runtime.cluster.launcher import Reply, WorkerHandle
from minialpa.runtime.workers.sample_reads import InputRead, ReadOrder
from minialpa.samples import BatchForm, SampleFunction, UnreadArray, merged_ranges


class FunctionsSent:
    """The functions that workers of a session have: each is sent to a worker once."""

    def __init__(self, runtime: ClusterRuntime) -> None:
        self._runtime = runtime
        self._sent: weakref.WeakKeyDictionary[SampleFunction, tuple[int, set[int]]] = weakref.WeakKeyDictionary()

    def number(self, function: SampleFunction) -> int:
        """The number by which workers know a function."""
        if function not in self._sent:
            number = self._runtime.new_number()
            self._sent[function] = number, set()
            weakref.finalize(function, self._runtime.dropped.append, number)
        return self._sent[function][0]

    def has(self, worker: WorkerHandle, function: SampleFunction) -> bool:
        """Whether a worker has a function that has a number."""
        return worker.number in self._sent[function][1]

    def note(self, worker: WorkerHandle, function: SampleFunction) -> None:
        """A worker has answered a call that brought it the function."""
        self._sent[function][1].add(worker.number)


def read_calls(
    program: ClusterProgram,
    functions: FunctionsSent,
    leaves: Sequence[Any],
    numbers: Mapping[tuple[int, MicroRows], int],
) -> dict[Reply, WorkerHandle]:
    """Have workers read the leaves of a batch that is not read yet. To be called in a turn, on loaded meshes.

    They read in a thread of their own, beside the steps under way.

    numbers: those under which to keep what each input reads, by leaf and rows.
    """
    unread = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, UnreadArray)}
    batches = {leaf.batch for leaf in unread.values()}
    if not batches:
        return {}
    assert len(batches) == 1, "the leaves of a batch are read together"
    (batch,) = batches
    function = functions.number(batch.function)

    calls: dict[Reply, WorkerHandle] = {}
    for own, mesh, shards in zip(program.programs, program.meshes, program.shards, strict=True):
        for k, worker in enumerate(mesh.workers):
            leaf_of = {number: leaf.leaf for number, leaf in unread.items()}
            order = read_order(own, [of_input[k] for of_input in shards], leaf_of, batch.form)
            if not order.inputs:
                continue
            slots = [own.inputs[x.input] for x in order.inputs]
            kept = [numbers[slot.leaf, slot.rows] for slot in slots]
            sent = None if functions.has(worker, batch.function) else batch.function.read
            calls[worker.actor.call_aside("read", function, sent, program.number, order, batch.first, kept)] = worker
    return calls


def note_functions(functions: FunctionsSent, leaves: Sequence[Any], workers: Iterable[WorkerHandle]) -> None:
    """The calls that `read_calls` has made for these leaves were answered by these workers."""
    for function in {leaf.batch.function for leaf in leaves if isinstance(leaf, UnreadArray)}:
        for worker in workers:
            functions.note(worker, function)


def read_order(
    program: MeshProgram, shards: Sequence[WorkerShards], leaf_of: Mapping[int, int], form: BatchForm
) -> ReadOrder:
    """What one worker reads of a batch: the rows that its devices hold, of the micro-batches that its mesh reads.

    Args:
        program: of the mesh.
        shards: of the worker, for each input.
        leaf_of: the number in the batch of each argument leaf that is to be read.
        form: what the batch is made of.
    """
    inputs = [
        InputRead(
            input=i,
            leaf=leaf_of[slot.leaf],
            dtype=program.types[slot.buffer].dtype,
            boxes=tuple(_in_leaf(box, slot.rows) for box in of_worker.boxes),
            shard_of_device=of_worker.shard_of_device,
        )
        for i, (slot, of_worker) in enumerate(zip(program.inputs, shards, strict=True))
        if slot.leaf in leaf_of
    ]
    return ReadOrder(form, merged_ranges([box[0] for x in inputs for box in x.boxes]), tuple(inputs))


def _in_leaf(box: Any, rows: MicroRows) -> Any:
    """A box of the rows of a micro-batch, as a box of the leaf."""
    if rows is None:
        return box
    first, _, dim = rows
    return tuple((a + first, b + first) if i == dim else (a, b) for i, (a, b) in enumerate(box))
