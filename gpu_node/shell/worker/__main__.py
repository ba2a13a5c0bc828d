"""The worker process. Its real stdout carries frames; whatever is printed goes to stderr."""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

from gpu_node.shell.worker.performers import PERFORMERS, Performers
from gpu_node.shell.worker.protocol import (
    KINDS,
    SPARE,
    LimitError,
    SpareReady,
    UseSpare,
    cap_memory,
    cap_threads,
    decode_request,
    encode,
    limits_from_environment,
)
from hypergpu.frames import frame, read_frame
from hypergpu.sandbox.confinement import ConfinementError, confine_if_told

if TYPE_CHECKING:
    from gpu_node.shell.worker.trainers import Trainers


def _own_stdout() -> BinaryIO:
    """Take stdout for frames and point descriptor 1 at stderr, so that no library can write into
    one.
    """
    frames = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return frames


def main() -> int:
    """Serve the daemon until its pipe closes."""
    return serve()


def _usual_trainers() -> "type[Trainers]":
    from gpu_node.shell.worker.trainers import Trainers

    return Trainers


def serve(
    load: "Callable[[], type[Trainers]]" = _usual_trainers, performers: Performers = PERFORMERS
) -> int:
    """Serve the daemon until its pipe closes.

    Args:
        performers: What does work of kinds other than training; they import as late as trainers.
        load: Imports what trains: numerical libraries read their thread counts as they are
            imported, which is after the owner's caps are set here.
    """
    parser = argparse.ArgumentParser(prog="gpu_node.shell.worker", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, required=True)
    kind: str = parser.parse_args().kind
    # Ctrl-C reaches the whole process group; the daemon decides what becomes of the shard.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = _own_stdout()
    try:
        confine_if_told()
        limits = limits_from_environment()
    except (ConfinementError, LimitError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    cap_threads(limits)
    if kind != "torch":
        cap_memory(limits)

    from gpu_node.shell.worker.loop import WorkerLoop
    from hypergpu.workloads.registry import complaints

    if os.environ.pop(SPARE, "") and not _wait_for_use(kind, load, replies):
        return 0
    loop = WorkerLoop(sys.stdin.buffer, replies, sys.stderr.buffer, performers)
    for complaint in complaints():
        loop.log(complaint)
    return loop.run(load()(kind, limits))


def _wait_for_use(kind: str, load: "Callable[[], type[Trainers]]", replies: BinaryIO) -> bool:
    """Import what training needs, touch no device, and wait; tells whether there is work."""
    load()
    if kind == "torch":
        importlib.import_module("gpu_node.shell.worker.torch_engine")
    replies.write(frame(encode(SpareReady())))
    replies.flush()
    payload = read_frame(sys.stdin.buffer)
    return payload is not None and isinstance(decode_request(payload), UseSpare)


if __name__ == "__main__":
    STATUS = main()
    sys.stderr.flush()
    # The listening thread may wait in a read, and the interpreter would abort over its lock.
    os._exit(STATUS)
