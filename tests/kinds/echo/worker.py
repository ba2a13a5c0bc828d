"""A worker that trains as all do, and gives items back: `tests.kinds.echo.worker` as its module."""

import os
import sys
import threading
from typing import TYPE_CHECKING

from gpu_node.shell.worker.__main__ import serve
from gpu_node.shell.worker.performers import PERFORMERS, Perform, Performer, WorkOutput
from gpu_node.shell.worker.protocol import DoWork
from hypergpu.packed_work import pack_work, unpack_work
from tests.kinds.echo.core.state import KIND, VERSION, EchoItem

if TYPE_CHECKING:
    from gpu_node.shell.worker.trainer import ShardCallbacks

MODULE = "tests.kinds.echo.worker"
REFUSAL = "refuse:"
"""How an item begins that a worker gives back undone; its reason follows."""
_PART_S = 0.02


def _load() -> Perform:
    return echo_item


def echo_item(request: DoWork, callbacks: "ShardCallbacks") -> WorkOutput:
    """Keep an item for a while, then give it back."""
    from gpu_node.shell.worker.trainer import ShardError

    item = unpack_work(request.work, KIND, EchoItem)
    if item.text.startswith(REFUSAL):
        raise ShardError(item.text.removeprefix(REFUSAL))
    pause = threading.Event()
    for _ in range(round(item.keep_ms / 1000 / _PART_S)):
        callbacks.raise_if_aborted()
        pause.wait(_PART_S)
    return WorkOutput(pack_work(KIND, item))


ECHO_PERFORMER = Performer(KIND, VERSION, load=_load)

if __name__ == "__main__":
    STATUS = serve(performers=PERFORMERS.with_performer(ECHO_PERFORMER))
    sys.stderr.flush()
    # As of the module that it stands in for.
    os._exit(STATUS)
