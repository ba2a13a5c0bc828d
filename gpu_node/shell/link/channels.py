"""Channels to the coordinator: certificates, options, and plaintext on loopback only."""

import ipaddress
from typing import NamedTuple

import grpc

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.wire.authority import TLS_NAME, split_address

OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", 4 << 20),
    # Home routers drop idle mappings within a minute; a dead path is noticed within forty seconds.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Many sessions of one process have a connection each.
    ("grpc.use_local_subchannel_pool", 1),
    # The session's own backoff decides when to dial again.
    ("grpc.enable_retries", 0),
    # Home networks' proxies speak no HTTP/2; the coordinator is dialled directly.
    ("grpc.enable_http_proxy", 0),
)


class TlsCredentials(NamedTuple):
    """Certificates and key of mutual TLS, as PEM."""

    authority: bytes
    key: bytes | None = None
    certificate: bytes | None = None
    """Both None before the node has a certificate."""


def open_channel(address: str, credentials: TlsCredentials | None) -> grpc.aio.Channel:
    """Open a channel to the coordinator, in plaintext without credentials.

    Raises:
        HyperGPUError: AUTHORITY_MISMATCH, plaintext to another machine.
    """
    if credentials is None:
        reject_distant_plaintext(address)
        return grpc.aio.insecure_channel(address, options=OPTIONS)
    secured = grpc.ssl_channel_credentials(
        root_certificates=credentials.authority,
        private_key=credentials.key,
        certificate_chain=credentials.certificate,
    )
    named = ("grpc.ssl_target_name_override", TLS_NAME)
    return grpc.aio.secure_channel(address, secured, options=(*OPTIONS, named))


def reject_distant_plaintext(address: str) -> None:
    """Reject plaintext to any other machine than this one.

    Raises:
        HyperGPUError: AUTHORITY_MISMATCH.
    """
    host, _ = split_address(address)
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not is_loopback:
        detail = f"the token names no CA, so {address} would be spoken to without encryption"
        raise HyperGPUError(Reason.AUTHORITY_MISMATCH, detail)
