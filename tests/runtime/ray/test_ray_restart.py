"""Going on after a loss: a host is killed, the session starts again on the other one, and on both once it is back."""

from __future__ import annotations

import time

import numpy as np
import pytest

import minialpa
from minialpa.session import current_session
from tests.runtime.ray.elastic import Elastic
from tests.runtime.ray.faults import told_of
from tests.runtime.ray.ray_cluster import WORKER_ENV, ray_nodes, resize

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]


def test_training_goes_on_with_the_hosts_that_answer() -> None:
    with ray_nodes(2, 2) as cluster:
        arguments = {"address": cluster.address, "num_hosts": 2, "worker_env": WORKER_ENV}
        minialpa.init("ray", **arguments)
        training = Elastic()
        training.advance()
        assert minialpa.available_hosts() == 2

        # Its raylet and its workers are killed, and for a while Ray lists the node as alive.
        (lost,) = cluster.worker_nodes
        hosts = [host.node_id for host in current_session().runtime.launcher.hosts]
        told = told_of(
            lambda: cluster.remove_node(lost, allow_graceful=False), lambda: np.asarray(training.endless_step()), 1.0
        )
        assert told.seconds < 8.0 and told.error.lost_hosts == (hosts.index(lost.node_id),)
        assert "its host is lost" in str(told.error) and "`minialpa.restart()`" in str(told.error)
        assert minialpa.available_hosts() == 1

        begin_s = time.monotonic()
        minialpa.restart()
        assert time.monotonic() - begin_s < 15.0
        assert current_session().cluster.num_hosts == 1
        training.advance()

        # The first arguments are still those of the session.
        minialpa.init("ray", **arguments)
        assert current_session().cluster.num_hosts == minialpa.available_hosts() == 1

        resize(cluster, 2, 2)
        begin_s = time.monotonic()
        assert minialpa.available_hosts() == 2
        assert time.monotonic() - begin_s < 0.5
        minialpa.restart()
        assert current_session().cluster.num_hosts == 2
        training.advance()
