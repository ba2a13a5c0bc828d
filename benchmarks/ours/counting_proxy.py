"""A TCP forwarder that counts bytes, both ways. It reads nothing of what it passes on."""

import selectors
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

_CHUNK_BYTES = 1 << 16


class CountingProxy:
    """Forwards ports of one address to the same ports of another, two threads a connection."""

    def __init__(self, listen: str, target: str) -> None:
        self._listen = listen
        self._target = target
        self._lock = threading.Lock()
        self._bytes = [0, 0]

    @property
    def counts(self) -> tuple[int, int]:
        """Bytes towards the target and back so far: of TCP's payload, TLS included."""
        with self._lock:
            return self._bytes[0], self._bytes[1]

    @contextmanager
    def serve(self, ports: Sequence[int]) -> Iterator[None]:
        """Take connections within the block. Those that are open outlive it until an end closes."""
        with ExitStack() as owner:
            selector = owner.enter_context(selectors.DefaultSelector())
            for port in ports:
                listener = owner.enter_context(socket.create_server((self._listen, port)))
                selector.register(listener, selectors.EVENT_READ)
            reader, writer = socket.socketpair()
            owner.enter_context(reader)
            selector.register(reader, selectors.EVENT_READ)
            accept_thread = threading.Thread(target=self._accept, args=(selector, reader))
            accept_thread.start()
            owner.callback(accept_thread.join)
            owner.enter_context(writer)
            yield

    def _accept(self, selector: selectors.BaseSelector, ended: socket.socket) -> None:
        while True:
            for key, _ in selector.select():
                if key.fileobj is ended:
                    return
                if isinstance(key.fileobj, socket.socket):
                    self._forward(key.fileobj.accept()[0], key.fileobj.getsockname()[1])

    def _forward(self, caller: socket.socket, port: int) -> None:
        try:
            target_socket = socket.create_connection((self._target, port))
        except OSError:
            caller.close()
            return
        for source, sink, way in ((caller, target_socket, 0), (target_socket, caller, 1)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._pump, args=(source, sink, way), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, way: int) -> None:
        with suppress(OSError):
            while chunk := source.recv(_CHUNK_BYTES):
                with self._lock:
                    self._bytes[way] += len(chunk)
                sink.sendall(chunk)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
