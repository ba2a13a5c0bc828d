"""gRPC channels to a coordinator, and what their errors say."""

from typing import NamedTuple

import grpc

from hypergpu.errors import HyperGPUError, Reason, RemoteFailureError
from hypergpu.line_limits import INLINE_BYTES_MAX
from hypergpu.wire.authority import TLS_NAME, reject_distant_plaintext
from hypergpu.wire.errors import error_in
from hypergpu.wire.keepalive import KEEPALIVE

DIAL_MS_MAX = 90_000
"""Time limit of a dial to a process of thousands of nodes, and of any attempt to connect."""
OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", 4 << 20),
    *KEEPALIVE,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Bulk bytes go elsewhere: nothing here needs a window that follows the line, and the pings that
    # measure it were most of what an idle node sends.
    ("grpc.http2.bdp_probe", 0),
    # Yet the largest message comes without a round trip for leave to go on.
    ("grpc.http2.lookahead_bytes", 2 * INLINE_BYTES_MAX),
    # Many sessions of one process have a connection each.
    ("grpc.use_local_subchannel_pool", 1),
    # How long an attempt to connect may take (gRPC's own limit is 20 s): dials have limits of
    # their own, the longest where thousands wait for their turn.
    ("grpc.min_reconnect_backoff_ms", DIAL_MS_MAX),
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
    channel_credentials = grpc.ssl_channel_credentials(
        root_certificates=credentials.authority,
        private_key=credentials.key,
        certificate_chain=credentials.certificate,
    )
    name_option = ("grpc.ssl_target_name_override", TLS_NAME)
    return grpc.aio.secure_channel(address, channel_credentials, options=(*OPTIONS, name_option))


def rejection_in(broken: Exception) -> HyperGPUError | None:
    """The numbered error, if it is one or the coordinator rejected a call with one."""
    if isinstance(broken, HyperGPUError):
        return broken
    if not isinstance(broken, grpc.aio.AioRpcError):
        return None
    numbered_error = error_in(broken.trailing_metadata())
    if isinstance(numbered_error, RemoteFailureError):
        # A newer coordinator has reasons that this node does not know: its text is complete.
        return HyperGPUError(
            Reason.CALL_BROKEN,
            f"{numbered_error.number}: {numbered_error.detail}",
            fix=numbered_error.fix,
        )
    return numbered_error


def describe_error(broken: Exception) -> str:
    """A broken call in a few words."""
    if (rejection := rejection_in(broken)) is not None:
        return f"{rejection.reason.name} ({rejection.reason.number}): {rejection.detail}"
    if isinstance(broken, grpc.aio.AioRpcError):
        return f"{broken.code().name}: {broken.details() or 'no details'}"
    return f"{type(broken).__name__}: {broken}"
