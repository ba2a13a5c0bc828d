"""`python -m netsim.proxy`: proxies in a process of their own, so that nobody's loop delays them.

The first line on standard input is the plan, each line after it a request; each is answered with
one line, JSON. It ends when its input does, however its owner went, and nothing is left over. With
a file's name as argument the plan is read from there, and requests from standard input as before.
"""

import asyncio
import contextlib
import gc
import os
import resource
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

import msgspec

from netsim.emulation.requests import Request, RequestFailed
from netsim.link.error import NetsimError
from netsim.proxy.messages import ProxiesOpened, ProxyAnswer, ProxyPlan
from netsim.proxy.proxies import Proxies

_LINE_BYTES_MAX = 64 << 20
"""A plan with long traces."""
_FILES = 32
"""Open files of the process itself."""
_FILES_A_FORWARD = 3
"""What listens, and both sockets of one connection."""
_FIX = "see the structs in netsim/emulation/requests.py and netsim/proxy/messages.py"


def main() -> None:
    """Serve until standard input ends."""
    # What was imported need not be looked through again: the collector's pauses are lateness.
    gc.freeze()
    # Where the system permits it, the proxy goes before what it is a network for.
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        plan = Path(sys.argv[1]).read_bytes() if len(sys.argv) > 1 else b""
    except OSError as error:
        _say(
            sys.stdout,
            RequestFailed(f"the plan cannot be read: {error}", "name a file that exists"),
        )
        sys.exit(2)
    sys.exit(asyncio.run(_serve(plan, sys.stdout)))


async def _serve(text: bytes, out: TextIO) -> int:
    lines = _standard_input()
    try:
        plan: ProxyPlan = _decode(text or await lines.get(), ProxyPlan)
        _require_files(plan)
        async with Proxies(plan) as proxies:
            ports = {node.name: proxies.ports(node.name) for node in plan.nodes}
            _say(out, ProxiesOpened(ports=ports))
            while line := await lines.get():
                _say(out, _answer(proxies, line))
    except NetsimError as refused:
        _say(out, RequestFailed(refused.detail, refused.fix))
        return 2
    return 0


def _require_files(plan: ProxyPlan) -> None:
    """Raise the limit of open files as far as it goes, and see that it is enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    needed = _FILES + _FILES_A_FORWARD * sum(len(node.forwards) for node in plan.nodes)
    if soft != resource.RLIM_INFINITY and needed > soft:
        raise NetsimError(
            f"{len(plan.nodes)} proxied nodes take {needed} open files, and {soft} are allowed",
            f"raise the limit (ulimit -Hn {needed}) or proxy fewer nodes",
        )


def _answer(proxies: Proxies, line: bytes) -> ProxyAnswer:
    try:
        return proxies.obey(_decode(line, Request))
    except NetsimError as error:
        return RequestFailed(error.detail, error.fix)


def _decode(text: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NetsimError(f"the proxy does not understand this line: {error}", _FIX) from error


def _standard_input() -> asyncio.Queue[bytes]:
    """Its lines, the empty one last. A loop waits for pipes only; a thread for files as well."""
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        # Not `sys.stdin`, whose lock a reader that waits would hold when the interpreter ends.
        # After a refusal the loop is gone and nobody wants what is read.
        with open(0, "rb", closefd=False) as pipe, contextlib.suppress(RuntimeError):
            for line in iter(lambda: pipe.readline(_LINE_BYTES_MAX), b""):
                loop.call_soon_threadsafe(lines.put_nowait, line)
            loop.call_soon_threadsafe(lines.put_nowait, b"")

    threading.Thread(target=read, daemon=True).start()
    return lines


def _say(out: TextIO, answer: ProxyAnswer) -> None:
    out.write(msgspec.json.encode(answer).decode() + "\n")
    out.flush()


if __name__ == "__main__":
    main()
