"""The evaluator process. Its real stdout carries frames; other output goes to stderr."""

import os
import signal
import sys

import msgspec

from coordinator.shell.evaluator.threads import LIBRARY_THREADS, library_threads
from hypergpu.streams import frame, read_frame


def main() -> int:
    """Answer until the coordinator closes the pipe."""
    # Ctrl-C reaches the whole process group; the coordinator closes the pipe when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.environ.update(zip(LIBRARY_THREADS, library_threads(), strict=True))

    # Imported only now, since numerical libraries read those when they are imported.
    from coordinator.shell.evaluator.answer import Evaluator
    from coordinator.shell.evaluator.process import Request

    evaluator = Evaluator()
    while (payload := read_frame(sys.stdin.buffer)) is not None:
        request = msgspec.msgpack.decode(payload, type=Request)
        replies.write(frame(msgspec.msgpack.encode(evaluator.answer(request))))
        replies.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
