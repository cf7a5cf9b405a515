"""The rows of a batch that workers of meshes over several hosts read: the rows of their devices, together the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from minialpa.programs.mesh_program import ArrayType, MeshProgram, worker_places
from minialpa.programs.program import InputSlot, MeshShape
from minialpa.programs.resharding import shard_boxes
from minialpa.runtime.cluster.cluster_executable import read_order
from minialpa.runtime.cluster.cluster_program import worker_shards
from minialpa.runtime.workers.arguments import read_inputs
from minialpa.samples import BatchForm, merged_ranges
from minialpa.sharding import Spec

N_SAMPLES, WIDTH = 48, 4
DATA = np.arange(N_SAMPLES * WIDTH, dtype=np.float32).reshape(N_SAMPLES, WIDTH)
FORM = BatchForm("PyTreeDef(*)", ((WIDTH,),), (np.dtype(np.float32),))


def mesh_program(logical_shape: tuple[int, ...], spec: P, batch_size: int, n_micro_batches: int) -> MeshProgram:
    """A mesh that reads one leaf, in micro-batches."""
    size = batch_size // n_micro_batches
    slots = tuple(
        InputSlot(
            buffer=i,
            leaf=0,
            rows=None if n_micro_batches == 1 else (i * size, (i + 1) * size, 0),
            mesh=0,
            spec=spec,
        )
        for i in range(n_micro_batches)
    )
    kind = ArrayType((size, WIDTH), "float32")
    return MeshProgram(
        mesh=0,
        shape=MeshShape(0, logical_shape),
        functions=(),
        instructions=(),
        inputs=slots,
        constants=(),
        outputs=(),
        transfers={},
        types={slot.buffer: kind for slot in slots},
        specs={slot.buffer: spec for slot in slots},
        donated_leaves=frozenset(),
    )


SPECS = [P(), P("x"), P("y"), P(("x", "y")), P(None, "x"), P("x", "y"), P("y", "x")]


@given(
    spec=st.sampled_from(SPECS),
    logical_shape=st.sampled_from([(2, 2), (4, 1), (1, 4), (2, 4)]),
    devices_per_host=st.sampled_from([1, 2, 4]),
    n_micro_batches=st.sampled_from([1, 2]),
    k=st.integers(0, 2),
)
def test_workers_read_the_rows_of_their_devices_and_no_others(
    spec: P, logical_shape: tuple[int, ...], devices_per_host: int, n_micro_batches: int, k: int
) -> None:
    batch_size = 16
    program = mesh_program(logical_shape, spec, batch_size, n_micro_batches)
    places = worker_places([program.shape], devices_per_host)
    shards = worker_shards(program, places)
    batch = DATA[k * batch_size : (k + 1) * batch_size]
    size = batch_size // n_micro_batches
    boxes = shard_boxes((size, WIDTH), Spec.of(spec, 2), program.shape)

    for number, place in enumerate(places):
        read: set[int] = set()

        def samples(start: int, stop: int, n: int, read: set[int] = read) -> Iterator[Any]:
            assert n == stop - start and not read & set(range(start, stop)), "each row is read once"
            read |= set(range(start, stop))
            yield DATA[start:stop]

        order = read_order(program, [of_input[number] for of_input in shards], {0: 0}, FORM)
        found = read_inputs(samples, order, k * batch_size)
        needed = set()
        for micro, shards_read in enumerate(found):
            for device, shard in zip(place.devices, shards_read.shard_of_device, strict=True):
                rows, columns = boxes[device]
                first = micro * size
                np.testing.assert_array_equal(
                    shards_read.shards[shard], batch[first + rows[0] : first + rows[1], slice(*columns)]
                )
                needed |= {k * batch_size + first + row for row in range(*rows)}
        assert read == needed


def test_a_batch_split_along_hosts_is_read_in_one_call_of_each() -> None:
    program = mesh_program((4, 1), P("x"), 16, 1)
    shards = worker_shards(program, worker_places([program.shape], 2))
    ranges = [read_order(program, [of_input[k] for of_input in shards], {0: 0}, FORM).ranges for k in range(2)]
    assert ranges == [((0, 8),), ((8, 16),)]


def test_ranges_that_touch_are_read_at_once() -> None:
    assert merged_ranges([(4, 8), (0, 4), (9, 12), (2, 6)]) == ((0, 8), (9, 12))
    assert merged_ranges([]) == ()
