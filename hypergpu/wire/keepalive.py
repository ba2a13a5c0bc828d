"""How soon gRPC notices a peer that stands still: the same for every channel and server."""

KEEPALIVE: tuple[tuple[str, int], ...] = (
    # Home routers drop idle mappings within a minute.
    ("grpc.keepalive_time_ms", 30_000),
    # The kernel's limit for sent bytes that nobody acknowledges.
    ("grpc.keepalive_timeout_ms", 10_000),
    # A stopped process's kernel still acknowledges: only the answer to a ping tells, for which
    # gRPC's core waits 60 s by default, whatever the keepalive timeout says.
    ("grpc.http2.ping_timeout_ms", 10_000),
)
"""Options of a channel or server: whoever does not answer is noticed within 40 s."""
