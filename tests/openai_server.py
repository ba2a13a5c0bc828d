"""A server of a node's owner: llama.cpp's own, and one that answers whatever a test wants."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar


@contextmanager
def llama_server(file: Path, name: str, key: str = "") -> Iterator[str]:
    """llama.cpp's server with a GGUF file, by its base URL."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = str(file)
    settings.model_alias = {name}
    settings.n_ctx, settings.n_parallel = 512, 2
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.warmup, settings.fit_params = False, False
    settings.verbosity = -1
    if key:
        settings.api_keys = [key]
    server = xllamacpp.Server(settings)
    yield f"{server.listening_address}/v1"
    del server


class ScriptedHandler(BaseHTTPRequestHandler):
    """Answers by a function of path and body, and notes what it was sent."""

    answer: ClassVar[Callable[[str, Any], tuple[int, dict[str, str], bytes]]]
    requests: ClassVar[list[tuple[str, str | None]]]

    def answer_get(self) -> None:
        """Answer without a body."""
        self._answer(None)

    def answer_post(self) -> None:
        """Answer a body of JSON."""
        size = int(self.headers["content-length"])
        self._answer(json.loads(self.rfile.read(size)))

    def _answer(self, body: Any) -> None:
        self.requests.append((self.path, self.headers.get("authorization")))
        status, headers, content = type(self).answer(self.path, body)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Write nothing."""


@contextmanager
def scripted_server(
    answer: Callable[[str, Any], tuple[int, dict[str, str], bytes]],
) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """A server by its base URL, and the paths and keys that it was sent."""
    requests: list[tuple[str, str | None]] = []
    members = {
        "answer": staticmethod(answer),
        "requests": requests,
        "do_GET": ScriptedHandler.answer_get,
        "do_POST": ScriptedHandler.answer_post,
    }
    handler = type("Handler", (ScriptedHandler,), members)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", requests
    server.shutdown()
    server.server_close()
    thread.join()
