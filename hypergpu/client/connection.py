"""From settings to an open channel: which token, which address, whose CA.

The secret travels only after the CA's digest was checked against the token.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path

import grpc
import msgspec

from hypergpu.client.settings import (
    ResolvedSetting,
    cache_folder,
    resolve_settings,
    timeout_s,
    token_setting,
)
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.wire.authority import TLS_NAME, fetch_authority, split_address
from hypergpu.wire.token import Role, Token, parse_token

CONNECT_TIMEOUT_S = 5.0
HANDSHAKE_TIMEOUT_S = 20.0
"""Deadline for the handshake of a coordinator that is busy."""
OPTIONS = (
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Home networks' proxies speak no HTTP/2; the coordinator is dialled directly.
    ("grpc.enable_http_proxy", 0),
    # A new connection does not inherit the back-off of an earlier one that failed.
    ("grpc.use_local_subchannel_pool", 1),
)


class ConnectionTarget(msgspec.Struct, frozen=True):
    """Whom to call, and as whom."""

    address: str
    token: Token
    timeout_s: float


def find_target(flags: Mapping[str, str | None], profile: Path | None = None) -> ConnectionTarget:
    """The coordinator that flags, environment and files name.

    Raises:
        HyperGPUError: None is named, the token is no token, or nobody listens there.
    """
    found = resolve_settings(flags, profile)
    token = parse_token(_token_text(found))
    if token.role is Role.NODE:
        detail = "the token is one for nodes: hypergpu join takes it"
        raise HyperGPUError(Reason.ROLE_FORBIDDEN, detail)
    named = found["address"].value
    address = listening((named,) if named else token.addresses)
    return ConnectionTarget(address, token, timeout_s(found))


def _token_text(found: Mapping[str, ResolvedSetting]) -> str:
    name, setting = token_setting(found)
    if name == "token" and setting.value:
        return setting.value
    if not setting.value:
        detail = "no coordinator is known: no token, no token file, no `up` on this machine"
        raise HyperGPUError(Reason.COORDINATOR_UNNAMED, detail)
    try:
        return Path(setting.value).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as broken:
        why = broken.strerror if isinstance(broken, OSError) else "it is not text"
        detail = f"the token file {setting.value} (from {setting.origin}): {why}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from broken


def listening(addresses: tuple[str, ...]) -> str:
    """The first address that accepts a TCP connection."""
    failures = []
    for address in addresses:
        try:
            socket.create_connection(split_address(address), CONNECT_TIMEOUT_S).close()
        except OSError as broken:
            failures.append(f"{address}: {broken.strerror or broken}")
        else:
            return address
    raise HyperGPUError(
        Reason.COORDINATOR_UNREACHABLE, f"no coordinator listens at {'; '.join(failures)}"
    )


async def open_channel(to: ConnectionTarget) -> grpc.aio.Channel:
    """A channel to the coordinator that the token names, and to no other.

    Raises:
        HyperGPUError: AUTHORITY_MISMATCH, or no TLS; for a token without a CA, an address that is
            not this machine.
    """
    if not to.token.authority:
        _check_loopback(to.address)
        return grpc.aio.insecure_channel(to.address, options=OPTIONS)
    authority = await asyncio.to_thread(_authority, to.address, to.token.authority)
    options = (*OPTIONS, ("grpc.ssl_target_name_override", TLS_NAME))
    credentials = grpc.ssl_channel_credentials(root_certificates=authority)
    return grpc.aio.secure_channel(to.address, credentials, options=options)


def check_who_answers(to: ConnectionTarget) -> None:
    """Look again at who listens there: the CA may have come from the cache.

    Raises:
        HyperGPUError: AUTHORITY_MISMATCH, another coordinator than the token's;
            COORDINATOR_UNREACHABLE, it is the port for nodes.
    """
    if not to.token.authority:
        return
    try:
        pem = fetch_authority(to.address, to.token.authority, timeout_s=HANDSHAKE_TIMEOUT_S)
    except HyperGPUError as refused:
        # Of nobody listening, the call that failed says more.
        if refused.reason is Reason.AUTHORITY_MISMATCH:
            raise
        return
    if _hangs_up(to.address, pem):
        fix = "name its main port, 7700 unless it was told another"
        detail = f"{to.address} is that coordinator's port for nodes"
        raise HyperGPUError(Reason.COORDINATOR_UNREACHABLE, detail, fix=fix)


def _hangs_up(address: str, pem: bytes) -> bool:
    """Whether it shakes hands and leaves, as the node port does without a node's certificate.

    The main port says something first: HTTP/2 begins with the server's settings.
    """
    context = ssl.create_default_context(cadata=pem.decode("ascii"))
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection(split_address(address), HANDSHAKE_TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=TLS_NAME) as secured,
        ):
            return secured.recv(1) == b""
    except TimeoutError:
        return False
    except (ssl.SSLError, ConnectionError):
        return True
    except OSError:
        return False


def _check_loopback(address: str) -> None:
    host, _ = split_address(address)
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not is_loopback:
        detail = f"the token names no CA, so {address} would be spoken to without encryption"
        raise HyperGPUError(Reason.AUTHORITY_MISMATCH, detail)


def _authority(address: str, expected: Digest) -> bytes:
    """The CA named by the token, from the cache when it is there and right."""
    kept = cache_folder() / f"authority-{expected}.pem"
    try:
        pem = kept.read_bytes()
        if digest_of(ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))) == expected:
            return pem
    except (OSError, ValueError):
        pass
    pem = fetch_authority(address, expected, timeout_s=HANDSHAKE_TIMEOUT_S)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(pem)
    except OSError:
        pass  # Only a cache: a read-only home must not keep anybody from working.
    return pem
