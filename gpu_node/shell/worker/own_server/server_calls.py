"""Calls to a server that speaks OpenAI's protocol: one address, no redirect, bounded answers."""

import contextlib
import http.client
import os
import socket
import ssl
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from gpu_node.core.own_server import OwnServer, is_loopback

_TIMEOUT_S = 120.0
_LINE_BYTES_MOST = 1 << 20
_ANSWER_BYTES_MOST = 1 << 20
_REASON_LENGTH_MOST = 200
_EVENT = b"data:"
_DONE = b"[DONE]"


class ServerError(Exception):
    """The server does not answer as it should. The text says what it did, without its key."""

    is_lasting = False


class ServerRefusalError(ServerError):
    """The server refuses the call itself, so that asking again would be in vain."""

    is_lasting = True


def server_key(server: OwnServer) -> str:
    """The server's API key; empty: it asks for none.

    Raises:
        ServerError: The key's file cannot be read, or others may read it.
    """
    if not server.key_file:
        return ""
    path = Path(server.key_file).expanduser()
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise ServerError(f"others may read {path}. Fix: chmod 600 {path}")
            key = file.read(4_096).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ServerError(f"{path} is no file with a key: {type(error).__name__}") from error
    if not key or not key.isprintable() or " " in key:
        raise ServerError(f"{path} holds no key: one word is wanted")
    return key


class ServerCalls:
    """Calls to the owner's server.

    Args:
        server: As the owner's file names it.
        key: Its key; empty: none is sent.
    """

    def __init__(self, server: OwnServer, key: str) -> None:
        parts = urlsplit(server.url)
        host = parts.hostname or ""
        # A name is not looked up for this machine, as it could be another's.
        self._host = "127.0.0.1" if host == "localhost" else host
        self._port = parts.port
        self._is_tls = parts.scheme == "https"
        self._base = parts.path.rstrip("/")
        self._headers = {"content-type": "application/json", "accept": "*/*"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        if not (server.beyond_loopback or is_loopback(host)):
            raise ServerError(f"{host} is another machine, and its owner did not say so")

    def _connection(self) -> http.client.HTTPConnection:
        if self._is_tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=_TIMEOUT_S, context=context
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)

    def answer(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of an answer.

        Raises:
            ServerError: There is none.
        """
        with ServerAnswer(self._connection(), self._headers) as answer:
            answer.begin(method, f"{self._base}{path}", body)
            return answer.json()

    def open(self, path: str, body: Mapping[str, Any]) -> "ServerAnswer":
        """Begin an answer that comes in events.

        Raises:
            ServerError: There is none.
        """
        answer = ServerAnswer(self._connection(), self._headers)
        try:
            answer.begin("POST", f"{self._base}{path}", body)
        except BaseException:
            answer.close()
            raise
        return answer


class ServerAnswer:
    """One answer, on a connection of its own."""

    def __init__(self, connection: http.client.HTTPConnection, headers: Mapping[str, str]) -> None:
        self._connection = connection
        self._headers = headers
        self._response: http.client.HTTPResponse | None = None

    def __enter__(self) -> "ServerAnswer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, method: str, path: str, body: Mapping[str, Any] | None) -> None:
        """Ask, and read the answer's head.

        Raises:
            ServerError: It is no success: redirects are followed nowhere.
        """
        content = None if body is None else msgspec.json.encode(body)
        try:
            self._connection.request(method, path, content, dict(self._headers))
            response = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            name = type(error).__name__
            raise ServerError(f"the owner's server does not answer: {name}") from error
        self._response = response
        if response.status == http.client.OK:
            return
        if 300 <= response.status < 400:
            raise ServerError("the owner's server sends callers elsewhere, which is not followed")
        detail = f"the owner's server answers with {response.status}: {_message(self._body())}"
        is_of_call = response.status in {400, 404, 413, 422}
        raise (ServerRefusalError if is_of_call else ServerError)(detail)

    def json(self) -> Any:
        """The whole body.

        Raises:
            ServerError: It is no JSON, or too long.
        """
        try:
            return msgspec.json.decode(self._body())
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ServerError("the owner's server answers without JSON") from error

    def events(self) -> Iterator[Any]:
        """The JSON of each event, until the last one.

        Raises:
            ServerError: The answer breaks off, or is malformed.
        """
        while True:
            line = self._line()
            if not line:
                raise ServerError("the owner's server broke its answer off")
            content = line.strip().removeprefix(_EVENT).strip()
            if not line.startswith(_EVENT) or not content:
                continue
            if content == _DONE:
                return
            try:
                yield msgspec.json.decode(content)
            except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                raise ServerError("an event of the owner's server is no JSON") from error

    def _line(self) -> bytes:
        line = self._read(lambda response: response.readline(_LINE_BYTES_MOST + 1))
        if len(line) > _LINE_BYTES_MOST:
            raise ServerError("an event of the owner's server is too long")
        return line

    def _body(self) -> bytes:
        body = self._read(lambda response: response.read(_ANSWER_BYTES_MOST + 1))
        if len(body) > _ANSWER_BYTES_MOST:
            raise ServerError("an answer of the owner's server is too long")
        return body

    def _read(self, read: Callable[[http.client.HTTPResponse], bytes]) -> bytes:
        if self._response is None:
            raise ServerError("the owner's server was not asked")
        try:
            content = read(self._response)
        except (OSError, ValueError, AttributeError, http.client.HTTPException) as error:
            # Another thread may have closed the connection.
            raise ServerError("the owner's server broke its answer off") from error
        return content

    def close(self) -> None:
        """Go away: the server need not go on."""
        if self._connection.sock is not None:
            # Closing alone would wait for a thread that reads.
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _message(body: bytes) -> str:
    """What an error of OpenAI's form says; else nothing."""
    try:
        content = msgspec.json.decode(body)
        error = content.get("error", "")
        text = error.get("message", "") if isinstance(error, dict) else error
    except (msgspec.MsgspecError, UnicodeError, RecursionError, AttributeError):
        return "no reason"
    return str(text)[:_REASON_LENGTH_MOST] or "no reason"
