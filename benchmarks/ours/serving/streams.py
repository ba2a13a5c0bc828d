"""Callers that open streams and never read: what they take of the API's memory, and of others."""

import json
import socket
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil

from benchmarks.ours.serving.overhead import running_api
from benchmarks.ours.serving.random_model import save_random_base
from benchmarks.ours.serving.served import served_model
from benchmarks.ours.table import PartFigures
from hypergpu.process import require_descriptors
from hypergpu.serving.calls import ModelCall, Sampling

_ADDRESSES = 100
_RECEIVE_BYTES = 4_096
_WATCH_S = 20.0
_LOOK_S = 0.5


def stream_figures(streams: int) -> PartFigures:
    """Open streams of long answers from a hundred addresses, and read none of them."""
    require_descriptors(streams + 256)
    with tempfile.TemporaryDirectory() as name, ExitStack() as owner:
        base = save_random_base(Path(name) / "base", width=64, layers=2)
        run = owner.enter_context(served_model(Path(name) / "run", base, ("one",)))
        http = owner.enter_context(running_api(Path(name), run.client))
        api = _api_process(http)
        before_bytes = api.memory_info().rss
        request = _request(http)
        callers = [
            owner.enter_context(_silent_caller(http, number % _ADDRESSES, request))
            for number in range(streams)
        ]
        most_bytes, end_s = before_bytes, time.monotonic() + _WATCH_S
        while time.monotonic() < end_s:
            most_bytes = max(most_bytes, api.memory_info().rss)
            time.sleep(_LOOK_S)
        connection_count = len(api.net_connections("tcp"))
        for caller in callers:
            caller.close()
        call = ModelCall(tokens=(1, 2, 3), sampling=Sampling(temperature=0.0), new_tokens_most=1)
        answer_s = run.answer(call).at_s[0]
    return PartFigures(
        rows=[
            (
                f"most memory of the API with {streams:,} callers who read nothing",
                f"{most_bytes / 1e6:,.0f} MB",
                f"1,000 MB; {before_bytes / 1e6:,.0f} MB without",
            ),
            ("their connections after 20 s", f"{connection_count:,}", ""),
            ("first token once they are gone", f"{answer_s:.2f} s", ""),
        ],
        metrics={"stream_memory_mb": most_bytes / 1e6, "stream_callers": streams},
        notes=["from 100 addresses of loopback; at most 1,024 are answered, the others get 503."],
    )


def _api_process(http: httpx.Client) -> psutil.Process:
    """The process that listens where the client calls."""
    (listener,) = [
        each
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr[1:] == (http.base_url.port,)
    ]
    return psutil.Process(listener.pid)


def _request(http: httpx.Client) -> bytes:
    body = json.dumps(
        {"model": "bench", "prompt": [1, 2, 3], "max_tokens": 400, "temperature": 0, "stream": True}
    )
    lines = (
        "POST /v1/completions HTTP/1.1",
        f"Host: 127.0.0.1:{http.base_url.port}",
        f"Authorization: {http.headers['authorization']}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode()


def _silent_caller(http: httpx.Client, number: int, request: bytes) -> socket.socket:
    caller = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
    caller.bind((f"127.0.1.{number + 1}", 0))
    caller.connect(("127.0.0.1", http.base_url.port or 0))
    caller.sendall(request)
    return caller
