"""A peer that stands still and closes nothing is noticed by the ping that it does not answer."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from coordinator.shell.app import ports
from coordinator.shell.gateway import upstream
from gpu_node.shell.link import channel
from hypergpu.user.client import connection
from hypergpu.wire.keepalive import KEEPALIVE

Options = tuple[tuple[str, str | int], ...]
LISTS: dict[str, Options] = {
    "node": channel.OPTIONS,
    "gateway": upstream.OPTIONS,
    "user": connection.OPTIONS,
    "server": ports.OPTIONS,
}
SERVER = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
import grpc

def echo(requests, _context):
    yield from requests

server = grpc.server(ThreadPoolExecutor(4))
handlers = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
threading.Event().wait()
"""
QUICKER = 20
"""The real times divided by this: 1.5 s and 0.5 s, where gRPC's own limit of a ping is 60 s."""
NOTICED_WITHIN_S = 30


@pytest.mark.parametrize("name", LISTS)
def test_all_options_have_the_same_keepalive(name: str) -> None:
    assert set(KEEPALIVE) <= set(LISTS[name])


def test_a_process_that_stands_still_is_noticed_by_its_silence_after_a_ping() -> None:
    options = tuple((option, value // QUICKER) for option, value in KEEPALIVE)
    command, end_event = [sys.executable, "-c", SERVER], threading.Event()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            address = f"127.0.0.1:{int(child.stdout.readline())}"
            with grpc.insecure_channel(address, options=options) as channel:
                echo: Any = channel.stream_stream("/test/Echo")
                call = echo(one_then_silence(end_event), timeout=NOTICED_WITHIN_S)
                assert next(call) == b"here"
                os.kill(child.pid, signal.SIGSTOP)
                with pytest.raises(grpc.RpcError) as failure:
                    next(call)
            assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "ping" in str(failure.value.details()).lower()
        finally:
            end_event.set()
            child.kill()


def one_then_silence(ended: threading.Event) -> Iterator[bytes]:
    yield b"here"
    ended.wait()
