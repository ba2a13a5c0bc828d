"""A gRPC service that streams bytes, and its client; both are run as programs."""

import sys
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import msgspec

CHUNK = bytes(512 << 10)
OPTIONS = (
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
TIMEOUT_S = 600.0


def serve(address: str) -> None:
    """Serve until standard input ends; the first line printed is the port."""
    server = grpc.server(futures.ThreadPoolExecutor(4), options=OPTIONS)
    methods: dict[str, Any] = {"Pull": grpc.unary_stream_rpc_method_handler(_chunks)}
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


def pull(address: str, sizes: list[str]) -> list[float]:
    """Pull one stream of each size in bytes over one connection; return the seconds of each."""
    seconds = []
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        stream: Any = channel.unary_stream("/Bytes/Pull")
        grpc.channel_ready_future(channel).result(TIMEOUT_S)
        for size in sizes:
            started_s = time.monotonic()
            for _ in stream(size.encode(), timeout=TIMEOUT_S):
                pass
            seconds.append(time.monotonic() - started_s)
    return seconds


def main() -> None:
    """Be the end that the command line names."""
    end, address, *sizes = sys.argv[1:]
    if end == "serve":
        serve(address)
    else:
        sys.stdout.write(msgspec.json.encode(pull(address, sizes)).decode())


if __name__ == "__main__":
    main()
