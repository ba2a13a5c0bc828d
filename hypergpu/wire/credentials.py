"""Tokens: what an operator hands to a node, a user or another operator.

Text form: ``hgpu1.`` and the unpadded base64url of a JSON object with addresses, authority (BLAKE3
of the coordinator's CA certificate in DER), role, id and secret. Whoever uses one checks the
authority's digest against what the address presents before the secret leaves the machine.
"""

import base64
import binascii
import re
from enum import Enum

import msgspec

from hypergpu.digests import is_digest
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, TokenId

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
    encoded_token = base64.urlsafe_b64encode(msgspec.json.encode(token))
    return PREFIX + encoded_token.rstrip(b"=").decode("ascii")


def parse_token(text: str) -> Token:
    """Read a token that a person pasted; surrounding white space is dropped.

    Raises:
        HyperGPUError: TOKEN_INVALID, with what is wrong but never with the secret.
    """
    text = text.strip()
    if not text.startswith(PREFIX) or len(text) > MAX_TEXT:
        raise HyperGPUError(Reason.TOKEN_INVALID, f"a token starts with {PREFIX!r}", fix=_PASTE)
    encoded_token = text.removeprefix(PREFIX)
    try:
        raw = base64.b64decode(
            encoded_token + "=" * (-len(encoded_token) % 4), altchars=b"-_", validate=True
        )
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
