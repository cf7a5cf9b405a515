"""A process that trains on a Ray cluster, told by lines on its standard input what to do; it answers in JSON lines.

`python -m tests.runtime.ray.elastic_driver ADDRESS`, in the network of the cluster's head.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

import minialpa
from minialpa import WorkerError
from minialpa.session import current_session
from tests.runtime.ray.elastic import Elastic


def _do(training: Elastic, command: str) -> dict[str, Any]:
    match command:
        case "step":
            training.advance()
            return {"hosts": [host.ip for host in current_session().runtime.launcher.hosts]}
        case "endless step":
            print(json.dumps({"began": True}), flush=True)
            try:
                np.asarray(training.endless_step())
            except WorkerError as error:
                return {"lost": error.lost_hosts, "error": str(error)}
            raise AssertionError("the step has ended")
        case "available":
            return {"n": minialpa.available_hosts()}
        case "restart":
            minialpa.restart()
            return {"n": current_session().cluster.num_hosts}
        case _:
            raise ValueError(command)


def main(address: str) -> None:
    minialpa.init(cluster="ray", address=address, num_hosts=4)
    training = Elastic()
    for line in sys.stdin:
        begin = time.monotonic()
        answer = _do(training, line.strip())
        print(json.dumps({**answer, "at_s": time.monotonic(), "seconds": time.monotonic() - begin}), flush=True)
    minialpa.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
