"""The evaluator process. Its real stdout carries frames; other output goes to stderr."""

import os
import resource
import signal
import sys
from pathlib import Path

import msgspec

from coordinator.shell.evaluator.threads import LIBRARY_THREADS, library_threads
from hypergpu.frames import frame, read_frame
from hypergpu.sandbox.confinement import ConfinementError, confine_if_told

_GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def main() -> int:
    """Answer until the coordinator closes the pipe."""
    # Ctrl-C reaches the whole process group; the coordinator closes the pipe when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        confine_if_told()
    except ConfinementError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    os.environ.update(zip(LIBRARY_THREADS, library_threads(), strict=True))

    # Imported only now, since numerical libraries read those when they are imported.
    from coordinator.shell.evaluator.answer import Evaluator, import_builder
    from coordinator.shell.evaluator.process import MEMORY_BYTES, Order, Warm, Warmed

    _cap_memory(int(os.environ.get(MEMORY_BYTES, "0")))
    evaluator = Evaluator()
    while (payload := read_frame(sys.stdin.buffer)) is not None:
        order = msgspec.msgpack.decode(payload, type=Order)
        if isinstance(order, Warm):
            import_builder(order.workload)
            replies.write(frame(msgspec.msgpack.encode(Warmed())))
        else:
            replies.write(frame(msgspec.msgpack.encode(evaluator.answer(order))))
        replies.flush()
    return 0


def _cap_memory(most_bytes: int) -> None:
    """Make allocations beyond the cap fail at once, so that the answer can say so.

    Drivers of GPUs map memory that they do not take: there the coordinator's look at what is taken
    is the only cap.
    """
    if most_bytes and not any(Path(each).exists() for each in _GPU_DEVICES):
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))


if __name__ == "__main__":
    sys.exit(main())
