"""What the coordinator and its bulk processes say to each other, in frames over pipes."""

import msgspec

from hypergpu.ids import JobId, NodeId
from hypergpu.part_file import Span
from hypergpu.units import Bytes, Microseconds
from hypergpu.wire.update_requests import UpdateAnswer


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


class UpdateSender(msgspec.Struct, frozen=True):
    """Who sends an update, as far as its request tells."""

    node: str
    """By its certificate; by its word where there is no TLS."""
    protocol: str
    """Protocol that it says to speak."""


class UpdateOffered(msgspec.Struct, frozen=True, tag=True):
    """A request brings an update, or asks what is missing of it: no byte of it was read."""

    number: int
    """Comes back in the answer; no other question of the process has it."""
    sender: UpdateSender
    offer: bytes
    """An `OfferUpdateRequest`, as it came."""


class UpdateBrought(msgspec.Struct, frozen=True, tag=True):
    """All bytes of an update that was let in have come: have it checked and accepted."""

    number: int
    sender: UpdateSender
    offer: bytes


class UpdateLetIn(msgspec.Struct, frozen=True, tag=True):
    """Answer to `UpdateOffered`: take what is missing of it."""

    number: int
    name: str
    """Name of the upload."""
    size_bytes: Bytes
    missing: tuple[Span, ...]


class UpdateAnswered(msgspec.Struct, frozen=True, tag=True):
    """Last answer to `UpdateOffered` or `UpdateBrought`."""

    number: int
    answer: UpdateAnswer


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


ToProcess = BulkStart | CloseUpload | UpdateLetIn | UpdateAnswered
FromProcess = UploadClosed | BytesServed | BytesReceived | UpdateOffered | UpdateBrought
