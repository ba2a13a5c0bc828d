"""`python -m hypergpu.engine.worker` computes one task after the other, from stdin."""

import os
import signal
import sys

from hypergpu.engine.tasks import compute_encoded
from hypergpu.frames import frame, read_frame
from hypergpu.process import keep_bulk_memory, make_way


def main() -> int:
    """Compute until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep_bulk_memory()
    make_way()
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while (payload := read_frame(sys.stdin.buffer)) is not None:
        answers.write(frame(compute_encoded(payload)))
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
