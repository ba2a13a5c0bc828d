"""A worker that turns its updates round from its job's third round on, ten times as long.

An attacker for demos and tests: `HYPERGPU_NODE_WORKER_MODULE=gpu_node.shell.worker.dishonest`.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gpu_node.shell.worker.__main__ import serve
from hypergpu.digests import digest_of
from hypergpu.durable import fill_durably

if TYPE_CHECKING:
    from gpu_node.core.events import TrainedUpdate
    from gpu_node.shell.worker.protocol import TrainShard
    from gpu_node.shell.worker.trainer import ShardCallbacks
    from gpu_node.shell.worker.trainers import Trainers

FIRST_LIE = 2
"""Number of the first round, from 0, in which it lies."""
FACTOR = -10.0


def _dishonest_trainers() -> "type[Trainers]":
    from gpu_node.shell.worker.trainers import Trainers
    from hypergpu.tensors.codec import decode_update, encode_update

    class DishonestTrainers(Trainers):
        """Trains as others do, and sends something else."""

        def train(self, request: "TrainShard", callbacks: "ShardCallbacks") -> "TrainedUpdate":
            """See `Trainers`."""
            honest = super().train(request, callbacks)
            if request.lease.round < FIRST_LIE or self.layout is None:
                return honest
            path, codec = Path(request.update_path), request.task.codec
            update = decode_update(self.layout, codec, path.read_bytes())
            update.parameters[:] *= FACTOR
            payload = encode_update(self.layout, codec, update).payload
            fill_durably(path, payload.tofile)
            return replace(honest, digest=digest_of(payload.data))

    return DishonestTrainers


if __name__ == "__main__":
    STATUS = serve(_dishonest_trainers)
    sys.stderr.flush()
    os._exit(STATUS)
