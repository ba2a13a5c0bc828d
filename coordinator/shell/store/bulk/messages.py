"""What the coordinator and its bulk processes say to each other, in frames over pipes."""

import msgspec

from hypergpu.ids import JobId, NodeId
from hypergpu.units import Bytes, Microseconds


class Certificates(msgspec.Struct, frozen=True):
    """Certificates and key for TLS, as PEM."""

    chain: bytes
    key: bytes
    client_authority: bytes


class BulkStart(msgspec.Struct, frozen=True, tag=True):
    """First message to a bulk process."""

    listener: int
    """Descriptor of the listening socket, which all bulk processes share."""
    blobs: str
    """Folder of the blobs."""
    uploads: str
    """Folder of the uploads."""
    secret: bytes
    certificates: Certificates | None = None
    """None: plaintext."""


class CloseUpload(msgspec.Struct, frozen=True, tag=True):
    """End every request that writes to an upload."""

    number: int
    """Comes back in the answer."""
    name: str


class UploadClosed(msgspec.Struct, frozen=True, tag=True):
    """The process writes to the upload no more."""

    number: int


class BytesServed(msgspec.Struct, frozen=True, tag=True):
    """Bytes went to a node for a purpose."""

    purpose: JobId
    size_bytes: Bytes


class BytesReceived(msgspec.Struct, frozen=True, tag=True):
    """Bytes of an upload were written since the last such message of their request."""

    sender: NodeId | None
    """None: a user."""
    request: int
    """Number of the request, which no other one of any process has."""
    size_bytes: Bytes
    at_us: Microseconds
    """Monotonic, which all processes of a machine share."""
    is_last: bool


ToProcess = BulkStart | CloseUpload
FromProcess = UploadClosed | BytesServed | BytesReceived
