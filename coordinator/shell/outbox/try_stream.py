"""`python -m coordinator.shell.outbox.try_stream` asks the stream that its stdin names whether it
takes entries, or says why it does not: for `hypergpu doctor`.
"""

import asyncio
import sys

from coordinator.shell.outbox.messages import StreamAwayError
from hypergpu.errors import HyperGPUError, missing_extra


def main() -> int:
    """Try the stream; returns the exit status."""
    try:
        from coordinator.shell.outbox.redis_stream import RedisStream, parse_address

        stream = RedisStream(parse_address(sys.stdin.readline().strip()))
    except HyperGPUError as error:
        sys.stdout.write(error.detail)
        return 1
    except ModuleNotFoundError as error:
        if (extra := missing_extra(error)) is None:
            raise
        sys.stdout.write(f"{extra.detail}: {extra.fix}")
        return 1
    try:
        asyncio.run(stream.check())
    except StreamAwayError as away:
        sys.stdout.write(str(away))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
