"""`python -m netsim.proxy`: proxies in a process of their own, so that nobody's loop delays them.

The first line on standard input is the plan, each line after it a request; each is answered with
one line, JSON. It ends when its input, a pipe, does, however its owner went.
"""

import asyncio
import contextlib
import gc
import os
import resource
import sys
from typing import TextIO

import msgspec

from netsim.emulation.requests import LinkRequest, LinkRequestFailed, answer_line, decode_line
from netsim.link import NetsimError
from netsim.proxy.process import ProxiesOpened, ProxyPlan
from netsim.proxy.proxies import Proxies

_LINE_BYTES_MAX = 64 << 20
"""A plan with long traces."""
_FILES = 32
"""Open files of the process itself."""
_FILES_A_FORWARD = 3
"""What listens, and both sockets of one connection."""


def main() -> None:
    """Serve until standard input ends."""
    # What was imported need not be looked through again: the collector's pauses are lateness.
    gc.freeze()
    # Where the system permits it, the proxy goes before what it is a network for.
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    sys.exit(asyncio.run(_serve(sys.stdout)))


async def _serve(out: TextIO) -> int:
    lines = asyncio.StreamReader(limit=_LINE_BYTES_MAX)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    try:
        plan: ProxyPlan = decode_line(await lines.readline(), ProxyPlan)
        _require_files(plan)
        async with Proxies(plan) as proxies:
            ports = {node.name: proxies.ports(node.name) for node in plan.nodes}
            _say(out, ProxiesOpened(ports=ports))
            while line := await lines.readline():
                _say(out, await answer_line(line, LinkRequest, proxies.obey))
    except NetsimError as error:
        _say(out, LinkRequestFailed(error.detail, error.fix))
        return 2
    return 0


def _require_files(plan: ProxyPlan) -> None:
    """Raise the limit of open files as far as it goes, and see that it is enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    file_count = _FILES + _FILES_A_FORWARD * sum(len(node.forwards) for node in plan.nodes)
    if soft != resource.RLIM_INFINITY and file_count > soft:
        raise NetsimError(
            f"{len(plan.nodes)} proxied nodes take {file_count} open files, and {soft} are allowed",
            f"raise the limit (ulimit -Hn {file_count}) or proxy fewer nodes",
        )


def _say(out: TextIO, answer: object) -> None:
    out.write(msgspec.json.encode(answer).decode() + "\n")
    out.flush()


if __name__ == "__main__":
    main()
