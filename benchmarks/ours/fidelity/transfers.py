"""A gRPC service that streams bytes, and who pulls them; both are run as programs."""

import sys
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import msgspec

CHUNK = bytes(512 << 10)
ECHOES = 20
OPTIONS = (
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
TIMEOUT_S = 600.0


class Pulled(msgspec.Struct, frozen=True):
    """What one client saw over one connection, in this order."""

    echo_ms: float
    """Median of small calls."""
    pull_s: list[float]
    """Seconds for each size."""


def serve(address: str) -> None:
    """Serve until standard input ends; the first line printed is the port."""
    server = grpc.server(futures.ThreadPoolExecutor(4), options=OPTIONS)
    methods: dict[str, Any] = {
        "Pull": grpc.unary_stream_rpc_method_handler(_chunks),
        "Echo": grpc.unary_unary_rpc_method_handler(lambda request, _context: request),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Bytes", methods),))
    port = server.add_insecure_port(address)
    server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop(None)


def _chunks(request: bytes, _context: Any) -> Iterator[bytes]:
    left_bytes = int(request)
    while left_bytes > 0:
        yield CHUNK[:left_bytes]
        left_bytes -= len(CHUNK)


def pull(address: str, sizes_bytes: list[int]) -> Pulled:
    """Small calls first, then one stream of each size."""
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        echo: Any = channel.unary_unary("/Bytes/Echo")
        stream: Any = channel.unary_stream("/Bytes/Pull")
        echo(b"", timeout=TIMEOUT_S, wait_for_ready=True)
        echoes_ms = sorted(1000 * _timed(echo, b"x" * 100) for _ in range(ECHOES))
        return Pulled(
            echo_ms=echoes_ms[ECHOES // 2],
            pull_s=[
                _timed(lambda size: _drain(stream(size, timeout=TIMEOUT_S)), str(size).encode())
                for size in sizes_bytes
            ],
        )


def _drain(stream: Any) -> None:
    for _ in stream:
        pass


def _timed(call: Any, request: bytes) -> float:
    started_s = time.monotonic()
    call(request)
    return time.monotonic() - started_s


def main() -> None:
    """Be the end that the command line names."""
    end, address, *sizes = sys.argv[1:]
    if end == "serve":
        serve(address)
        return
    sys.stdout.write(msgspec.json.encode(pull(address, [int(each) for each in sizes])).decode())


if __name__ == "__main__":
    main()
