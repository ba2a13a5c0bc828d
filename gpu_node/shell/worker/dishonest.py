"""A worker that turns its updates round from its job's third round on, ten times as long.

An attacker for demos and tests: `HYPERGPU_NODE_WORKER_MODULE=gpu_node.shell.worker.dishonest`, or
`...worker.dishonest_layer`, which turns the sign of one layer alone, from the first round on.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gpu_node.shell.worker.__main__ import serve
from hypergpu.digests import digest_of
from hypergpu.durable import fill_durably

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from gpu_node.core.events import TrainedUpdate
    from gpu_node.shell.worker.protocol import TrainShard
    from gpu_node.shell.worker.trainer import ShardCallbacks
    from gpu_node.shell.worker.trainers import Trainers
    from hypergpu.tensors.layout import Float32s, Layout

FIRST_LIE = 2
"""Number of the first round, from 0, in which whole updates are turned."""
FACTOR = -10.0


def turn_round(_layout: "Layout", update: "Float32s") -> None:
    """Turn the whole update round, ten times as long."""
    update *= FACTOR


def turn_first_matrix(layout: "Layout", update: "Float32s") -> None:
    """Turn the sign of the first matrix or kernel, and nothing else."""
    for tensor, start in zip(layout.tensors, layout.offsets, strict=True):
        if len(tensor.shape) > 1:
            update[start : start + tensor.count] *= -1
            return


def dishonest_trainers(
    lie: "Callable[[Layout, Float32s], None]", first_round: int
) -> "type[Trainers]":
    """Trainers whose updates are changed in their place by a lie, from a round on."""
    from gpu_node.shell.worker.trainers import Trainers
    from hypergpu.tensors.codec import decode_update, encode_update

    class DishonestTrainers(Trainers):
        """Trains as others do, and sends something else."""

        def train(self, request: "TrainShard", callbacks: "ShardCallbacks") -> "TrainedUpdate":
            """See `Trainers`."""
            honest = super().train(request, callbacks)
            if request.lease.round < first_round or self.layout is None:
                return honest
            path, codec = Path(request.update_path), request.task.codec
            update = decode_update(self.layout, codec, path.read_bytes())
            lie(self.layout, update.parameters)
            payload = encode_update(self.layout, codec, update).payload
            fill_durably(path, payload.tofile)
            return replace(honest, digest=digest_of(payload.data))

    return DishonestTrainers


def serve_lies(lie: "Callable[[Layout, Float32s], None]", first_round: int) -> "NoReturn":
    """Work until the daemon closes the pipe, and end the process."""
    status = serve(partial(dishonest_trainers, lie, first_round))
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve_lies(turn_round, FIRST_LIE)
