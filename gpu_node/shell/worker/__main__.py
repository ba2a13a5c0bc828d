"""The worker process. Its real stdout carries frames; whatever is printed goes to stderr."""

import argparse
import os
import signal
import sys
from typing import BinaryIO

from gpu_node.shell.worker.protocol import (
    KINDS,
    LimitError,
    cap_memory,
    cap_threads,
    limits_from_environment,
)


def _own_stdout() -> BinaryIO:
    """Take stdout for frames and point descriptor 1 at stderr, so that no library can write into
    one.
    """
    frames = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return frames


def main() -> int:
    """Serve the daemon until its pipe closes."""
    parser = argparse.ArgumentParser(prog="gpu_node.shell.worker", description=__doc__)
    parser.add_argument("--kind", choices=KINDS, required=True)
    kind: str = parser.parse_args().kind
    # Ctrl-C reaches the whole process group; the daemon decides what becomes of the shard.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = _own_stdout()
    try:
        limits = limits_from_environment()
    except LimitError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    cap_threads(limits)
    if kind != "torch":
        cap_memory(limits)

    from gpu_node.shell.worker.loop import WorkerLoop
    from gpu_node.shell.worker.trainers import Trainers
    from hypergpu.workloads.workload import complaints

    loop = WorkerLoop(sys.stdin.buffer, replies, sys.stderr.buffer)
    for complaint in complaints():
        loop.log(complaint)
    return loop.run(Trainers(kind, limits))


if __name__ == "__main__":
    STATUS = main()
    sys.stderr.flush()
    # The listening thread may wait in a read, and the interpreter would abort over its lock.
    os._exit(STATUS)
