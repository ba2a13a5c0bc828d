"""Frames of the feed, as text. The types give the schema of docs/feed.md."""

from typing import Any, Literal

import msgspec

from dashboard_api.core.changes import Change
from dashboard_api.core.state import FeedState

PROTOCOL = 1


class HelloFrame(msgspec.Struct, tag_field="type", tag="hello", forbid_unknown_fields=True):
    """First frame of a connection."""

    proto: int
    epoch: str
    """Name of the history that sequence numbers belong to."""
    seq: int
    """Newest sequence number."""
    role: Literal["operator", "user", "viewer", "node"]
    address: str
    recorded: bool = False


class SnapshotFrame(msgspec.Struct, tag_field="type", tag="snapshot", forbid_unknown_fields=True):
    """The whole state."""

    seq: int
    at_ms: int
    """Unix time."""
    state: FeedState


class DeltaFrame(msgspec.Struct, tag_field="type", tag="delta", forbid_unknown_fields=True):
    """Changes since the frame before; ``seq`` is that frame's plus 1."""

    seq: int
    at_ms: int
    changes: list[Change]


def hello_frame(hello: HelloFrame) -> bytes:
    """The first frame of a connection."""
    return msgspec.json.encode(hello)


def snapshot_frame(seq: int, at_ms: int, tree: dict[str, Any]) -> bytes:
    """A frame with the whole state."""
    return msgspec.json.encode({"type": "snapshot", "seq": seq, "at_ms": at_ms, "state": tree})


def delta_frame(seq: int, at_ms: int, changes: list[Change]) -> bytes:
    """A frame with changes."""
    return msgspec.json.encode({"type": "delta", "seq": seq, "at_ms": at_ms, "changes": changes})


def frame_schema() -> dict[str, Any]:
    """JSON schema of every frame that the server sends."""
    return msgspec.json.schema(HelloFrame | SnapshotFrame | DeltaFrame)
