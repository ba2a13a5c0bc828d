"""The coordinator's CA as seen from outside: fetched without trust, checked against a token."""

import contextlib
import ipaddress
import selectors
import socket
import time
from collections.abc import Iterator

from cryptography.hazmat.primitives.serialization import Encoding
from OpenSSL import SSL

from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.units import several
from hypergpu.wire.credentials import split_address

TLS_NAME = "hypergpu-coordinator"
"""A name that every coordinator's certificate carries, whatever address it was dialled at."""


def fetch_authority(address: str, expected: Digest, *, timeout_s: float = 10.0) -> bytes:
    """Ask ``address`` for its certificate chain and pick the CA that the token names.

    Blocks for one TCP and TLS handshake. Nothing that is received is trusted beyond ``expected``.

    Args:
        address: ``host:port`` of the coordinator's main listener.
        expected: BLAKE3 of the CA certificate's DER, from the token.
        timeout_s: For connecting and shaking hands together.

    Returns:
        The CA certificate, PEM.

    Raises:
        HyperGPUError: COORDINATOR_UNREACHABLE when nobody speaks TLS there, AUTHORITY_MISMATCH when
            another CA answers.
    """
    try:
        chain = _presented_chain(split_address(address), timeout_s)
    except (OSError, SSL.Error) as error:
        detail = f"no TLS connection to {address}: {_why(error)}"
        raise HyperGPUError(Reason.COORDINATOR_UNREACHABLE, detail) from error
    for der, pem in chain:
        if digest_of(der) == expected:
            return pem
    count_text = several(len(chain), "certificate")
    detail = f"{address} presents {count_text}, none of them is CA {expected[:16]}..."
    raise HyperGPUError(Reason.AUTHORITY_MISMATCH, detail)


def _presented_chain(target: tuple[str, int], timeout_s: float) -> list[tuple[bytes, bytes]]:
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    context.set_verify(SSL.VERIFY_NONE, None)
    context.set_alpn_protos([b"h2"])
    give_up_at_s = time.monotonic() + timeout_s
    with socket.create_connection(target, timeout=timeout_s) as plain:
        plain.setblocking(False)
        with _closing(SSL.Connection(context, plain)) as connection:
            connection.set_tlsext_host_name(TLS_NAME.encode("ascii"))
            connection.set_connect_state()
            _shake_hands(connection, plain, give_up_at_s)
            chain = connection.get_peer_cert_chain(as_cryptography=True) or []
            return [
                (certificate.public_bytes(Encoding.DER), certificate.public_bytes(Encoding.PEM))
                for certificate in chain
            ]


@contextlib.contextmanager
def _closing(secured: SSL.Connection) -> Iterator[SSL.Connection]:
    try:
        yield secured
    finally:
        # A polite close_notify is not worth waiting for; the socket closes right after.
        with contextlib.suppress(SSL.Error):
            secured.shutdown()


def _shake_hands(secured: SSL.Connection, plain: socket.socket, give_up_at_s: float) -> None:
    while True:
        left_s = give_up_at_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the TLS handshake took too long")
        try:
            secured.do_handshake()
            return
        except SSL.WantReadError:
            _wait_for(plain, selectors.EVENT_READ, left_s)
        except SSL.WantWriteError:
            _wait_for(plain, selectors.EVENT_WRITE, left_s)


def _wait_for(plain: socket.socket, readiness: int, timeout_s: float) -> None:
    # Not select(): it takes no descriptor from 1024 on, and a gateway has thousands.
    with selectors.DefaultSelector() as selector:
        selector.register(plain, readiness)
        selector.select(timeout_s)


def _why(broken: Exception) -> str:
    if isinstance(broken, SSL.SysCallError):
        return "the connection broke off"
    if isinstance(broken, SSL.Error):
        return "it does not speak TLS (a coordinator started with --plaintext, or another program)"
    return str(broken) or type(broken).__name__


def is_loopback(host: str) -> bool:
    """Whether only this machine can dial the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def reject_distant_plaintext(address: str) -> None:
    """Reject plaintext to any other machine than this one.

    Raises:
        HyperGPUError: AUTHORITY_MISMATCH.
    """
    host, _ = split_address(address)
    if not is_loopback(host):
        detail = f"the token names no CA, so {address} would be spoken to without encryption"
        raise HyperGPUError(Reason.AUTHORITY_MISMATCH, detail)
