"""A bulk process. Its stdout carries frames; its logs go to stderr."""

import asyncio
import signal

from coordinator.shell.rate import LineLimiter
from coordinator.shell.store.bulk.server import serve
from hypergpu.process import configure_logs, make_way

if __name__ == "__main__":
    # Ctrl-C reaches the whole process group; the coordinator closes stdin when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logs(limiter=LineLimiter())
    make_way()
    asyncio.run(serve())
