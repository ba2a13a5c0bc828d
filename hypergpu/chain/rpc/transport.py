"""One HTTP connection to an RPC: a body goes out, a body of bounded size comes back in time."""

import ipaddress
import time
from typing import Protocol

import urllib3
from urllib3.exceptions import HTTPError, LocationParseError
from urllib3.util import Retry, Timeout, Url, parse_url

from hypergpu.chain.rpc.errors import (
    RpcGarbledError,
    RpcLimitedError,
    RpcUnreachableError,
)

ANSWER_BYTES_MAX = 64 << 20
_PIECE_BYTES = 1 << 16
_TOO_MANY = 429
_UNAVAILABLE = 503
_RETRY_AFTER_MAX_S = 3600


class Transport(Protocol):
    """Carries one request at a time."""

    where: str
    """The RPC for people: without what may be a secret in its path."""

    def post(self, body: bytes) -> bytes:
        """Send a request and return the answer's body.

        Raises:
            RpcError: unreachable, limited or garbled.
        """

    def close(self) -> None:
        """Let go of the connection."""


class HttpTransport:
    """Keeps a connection open between calls; used by one thread."""

    def __init__(
        self, url: str, *, timeout_s: float = 30.0, answer_bytes_max: int = ANSWER_BYTES_MAX
    ) -> None:
        """Dial nothing yet.

        Args:
            url: ``http://`` or ``https://``; keys of providers are often in its path.
            timeout_s: For the whole of one call, however slowly its bytes drip.
            answer_bytes_max: More than this is not read.

        Raises:
            ValueError: it is no such address; the address is not repeated.
        """
        parsed = _parsed(url)
        self.where = _where(parsed)
        self.is_loopback = _is_loopback(parsed.host or "")
        """Whether it is this machine that answers, or passes on what it is asked."""
        self._url = url
        self._timeout_s = timeout_s
        self._answer_bytes_max = answer_bytes_max
        self._pool = urllib3.PoolManager(maxsize=1, retries=Retry(0, redirect=False))

    def post(self, body: bytes) -> bytes:
        deadline_s = time.monotonic() + self._timeout_s
        try:
            response = self._pool.request(
                "POST",
                self._url,
                body=body,
                headers={"Content-Type": "application/json"},
                timeout=Timeout(total=self._timeout_s),
                preload_content=False,
                redirect=False,
            )
        except HTTPError as error:
            raise RpcUnreachableError(
                f"the chain's RPC at {self.where} did not answer: {_cause(error)}"
            ) from None
        try:
            answer = self._read(response, deadline_s)
        except HTTPError as error:
            response.close()
            raise RpcUnreachableError(
                f"the chain's RPC at {self.where} broke off its answer: {_cause(error)}"
            ) from None
        except BaseException:
            # What is left in the pipe would be taken for the next answer.
            response.close()
            raise
        response.release_conn()
        self._check_status(response.status, response.headers.get("Retry-After", ""), answer)
        return answer

    def _read(self, response: urllib3.BaseHTTPResponse, deadline_s: float) -> bytes:
        pieces = bytearray()
        while piece := response.read(_PIECE_BYTES):
            pieces += piece
            if len(pieces) > self._answer_bytes_max:
                raise RpcGarbledError(
                    f"the chain's RPC at {self.where} sends more than "
                    f"{self._answer_bytes_max} bytes for one answer"
                )
            if time.monotonic() > deadline_s:
                raise RpcUnreachableError(
                    f"the chain's RPC at {self.where} took more than {self._timeout_s:g} s"
                )
        return bytes(pieces)

    def _check_status(self, status: int, retry_after: str, answer: bytes) -> None:
        if status in {_TOO_MANY, _UNAVAILABLE}:
            wait_s = int(retry_after) if retry_after.isdecimal() else 0
            raise RpcLimitedError(
                f"the chain's RPC at {self.where} asks for fewer calls (HTTP {status})",
                1000 * min(wait_s, _RETRY_AFTER_MAX_S),
            )
        # Several clients put a JSON-RPC error into a 4xx or 5xx answer: that is an answer.
        if status != 200 and not answer.lstrip().startswith((b"{", b"[")):
            raise RpcUnreachableError(f"the chain's RPC at {self.where} answered HTTP {status}")

    def close(self) -> None:
        self._pool.clear()


def open_address(url: str) -> str:
    """An RPC's address, if it is no more than scheme, host and port; else empty.

    Whatever else is in one, such as a login, a path or a query, may be its owner's secret.
    """
    try:
        parsed = _parsed(url)
    except ValueError:
        return ""
    has_more = parsed.auth or parsed.query or parsed.fragment or parsed.path not in {None, "/"}
    return "" if has_more else _where(parsed)


def _parsed(url: str) -> Url:
    try:
        parsed = parse_url(url)
    except LocationParseError:
        parsed = Url()
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise ValueError("an RPC's address begins with http:// or https:// and names a host")
    return parsed


def _where(parsed: Url) -> str:
    return f"{parsed.scheme}://{(parsed.netloc or '').rpartition('@')[2]}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _cause(error: HTTPError) -> str:
    """The innermost reason, without the URL that urllib3 repeats and its key with it."""
    reason = getattr(error, "reason", None) or error
    words = {
        "ConnectTimeoutError": "no connection in time",
        "NameResolutionError": "its name is not known",
        "NewConnectionError": "nobody listens there",
        "ProtocolError": "what listens there speaks no HTTP, or hung up",
        "ReadTimeoutError": "no answer in time",
        "SSLError": "its certificate is not valid",
    }
    return words.get(type(reason).__name__, type(reason).__name__)
