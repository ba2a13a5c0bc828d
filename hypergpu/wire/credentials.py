"""Tokens, and the coordinator's CA as seen from outside: fetched without trust, checked against
a token.

Whoever holds a token checks the CA before anything secret leaves the machine.

Tokens: what an operator hands to a node, a user or another operator.

Text form: ``hgpu1.`` and the unpadded base64url of a JSON object with addresses, authority (BLAKE3
of the coordinator's CA certificate in DER), role, id and secret. Whoever uses one checks the
authority's digest against what the address presents before the secret leaves the machine.
"""

import base64
import binascii
import contextlib
import ipaddress
import re
import selectors
import socket
import time
from collections.abc import Iterator
from enum import Enum

import msgspec
from cryptography.hazmat.primitives.serialization import Encoding
from OpenSSL import SSL

from hypergpu.digests import digest_of, is_digest
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, TokenId
from hypergpu.units import several

PREFIX = "hgpu1."
MAX_TEXT = 4096
_PASTE = "paste the whole line; if that is lost, ask for a new token: hypergpu token create"
_ID = re.compile(r"[0-9a-f]{12}", re.ASCII)
_SECRET = re.compile(r"[A-Za-z0-9_-]{16,128}", re.ASCII)
_ADDRESS = re.compile(r"[^\s:,@/]+:[0-9]{1,5}|\[[0-9A-Fa-f:.]+\]:[0-9]{1,5}", re.ASCII)


class Role(Enum):
    """Permissions of a token's holder.

    A node's token admits nodes, and sees and drains those that joined with it. A viewer sees all
    jobs and nodes. A user also creates jobs, and changes and exports its own. An operator may do
    everything.
    """

    NODE = "node"
    VIEWER = "viewer"
    USER = "user"
    OPERATOR = "operator"


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole token. It exists on the holder's side; the coordinator keeps a hash of the secret."""

    addresses: tuple[str, ...]
    """``host:port`` of the main listener, in the order to try them."""
    authority: Digest
    """Empty when the coordinator runs without TLS on loopback."""
    role: Role
    id: TokenId
    secret: str


class Credential(msgspec.Struct, frozen=True):
    """A token's id and secret, as a call presents them."""

    token_id: TokenId
    secret: str


def token_text(token: Token) -> str:
    """Return a token as the line that people pass on."""
    packed = base64.urlsafe_b64encode(msgspec.json.encode(token))
    return PREFIX + packed.rstrip(b"=").decode("ascii")


def parse_token(text: str) -> Token:
    """Read a token that a person pasted; surrounding white space is dropped.

    Raises:
        HyperGPUError: TOKEN_INVALID, with what is wrong but never with the secret.
    """
    text = text.strip()
    if not text.startswith(PREFIX) or len(text) > MAX_TEXT:
        raise HyperGPUError(Reason.TOKEN_INVALID, f"a token starts with {PREFIX!r}", fix=_PASTE)
    packed = text.removeprefix(PREFIX)
    try:
        raw = base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True)
        token = msgspec.json.decode(raw, type=Token)
    except (binascii.Error, ValueError, msgspec.DecodeError):
        detail = "the token was cut off or altered"
        raise HyperGPUError(Reason.TOKEN_INVALID, detail, fix=_PASTE) from None
    if problem := _problem(token):
        raise HyperGPUError(Reason.TOKEN_INVALID, problem)
    return token


def with_addresses(text: str, addresses: tuple[str, ...]) -> str:
    """The same token as a line that names other addresses, such as gateways'.

    Raises:
        HyperGPUError: REQUEST_INVALID, one is not ``host:port``.
    """
    for address in addresses:
        split_address(address)
    return token_text(msgspec.structs.replace(parse_token(text), addresses=addresses))


def _problem(token: Token) -> str:
    if not token.addresses:
        return "the token names no address"
    for address in token.addresses:
        if not _ADDRESS.fullmatch(address):
            return f"the token's address {address!r} is not host:port"
    if token.authority and not is_digest(token.authority):
        return "the token's authority is not a digest"
    if not _ID.fullmatch(token.id) or not _SECRET.fullmatch(token.secret):
        return "the token's id or secret is malformed"
    return ""


def authorization(token: Token) -> str:
    """Value of the metadata ``authorization`` that users and operators send with each call."""
    return f"Bearer {token.id}.{token.secret}"


def parse_authorization(value: str) -> Credential:
    """Read the metadata ``authorization``.

    Raises:
        HyperGPUError: TOKEN_INVALID, it is not ``Bearer ID.SECRET``.
    """
    codec, _, credential = value.partition(" ")
    token_id, _, secret = credential.partition(".")
    if codec.lower() != "bearer" or not _ID.fullmatch(token_id) or not _SECRET.fullmatch(secret):
        raise HyperGPUError(
            Reason.TOKEN_INVALID, "the metadata 'authorization' is 'Bearer ID.SECRET'"
        )
    return Credential(TokenId(token_id), secret)


TLS_NAME = "hypergpu-coordinator"
"""A name that every coordinator's certificate carries, whatever address it was dialled at."""


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port`` in its two parts.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is neither.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536):
        raise HyperGPUError(Reason.REQUEST_INVALID, f"an address is host:port, not {address!r}")
    return host, int(port)


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
    except (OSError, SSL.Error) as broken:
        detail = f"no TLS connection to {address}: {_why(broken)}"
        raise HyperGPUError(Reason.COORDINATOR_UNREACHABLE, detail) from broken
    for der, pem in chain:
        if digest_of(der) == expected:
            return pem
    found = several(len(chain), "certificate")
    detail = f"{address} presents {found}, none of them is CA {expected[:16]}..."
    raise HyperGPUError(Reason.AUTHORITY_MISMATCH, detail)


def _presented_chain(target: tuple[str, int], timeout_s: float) -> list[tuple[bytes, bytes]]:
    context = SSL.Context(SSL.TLS_CLIENT_METHOD)
    context.set_verify(SSL.VERIFY_NONE, None)
    context.set_alpn_protos([b"h2"])
    give_up_at_s = time.monotonic() + timeout_s
    with socket.create_connection(target, timeout=timeout_s) as plain:
        plain.setblocking(False)
        with _closing(SSL.Connection(context, plain)) as secured:
            secured.set_tlsext_host_name(TLS_NAME.encode("ascii"))
            secured.set_connect_state()
            _shake_hands(secured, plain, give_up_at_s)
            chain = secured.get_peer_cert_chain(as_cryptography=True) or []
            return [
                (found.public_bytes(Encoding.DER), found.public_bytes(Encoding.PEM))
                for found in chain
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
