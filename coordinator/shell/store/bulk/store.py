"""What every store of bulk bytes does, whether its bytes come to this machine or to a bucket."""

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from coordinator.shell.store.blobs.upload_store import OpenUpload
from coordinator.shell.store.bulk.messages import Certificates, UpdateSender
from hypergpu.blobs import BlobRef
from hypergpu.ids import Digest, NodeId
from hypergpu.v1 import tensor_pb2
from hypergpu.wire.update_requests import UpdateAnswer


class UpdateTaker(Protocol):
    """Judges updates that come to a store of the coordinator's own."""

    async def let_in(self, sender: UpdateSender, offer: bytes) -> OpenUpload | UpdateAnswer:
        """Check an offer before a byte of its update is read.

        Returns:
            The upload that takes the bytes, or the last answer.

        Raises:
            HyperGPUError: The update is refused, with the reason.
        """

    async def accept(self, sender: UpdateSender, offer: bytes) -> UpdateAnswer:
        """Check an update whose bytes are all here; it is accepted and durable on return.

        Raises:
            HyperGPUError: The update is refused, with the reason.
        """


class BulkStore(Protocol):
    """Where nodes and users fetch blobs and leave uploads.

    The coordinator's folder holds every blob; a store elsewhere only carries copies of them, and is
    never believed.
    """

    port: int
    """Port to dial at the coordinator's host; 0: tickets name another host."""

    @property
    def known_address(self) -> str:
        """An address like those of tickets, which opens nothing; empty: they are not alike."""

    @property
    def obstacle(self) -> str:
        """Numbered reason for which jobs wait for the store; empty: they do not."""

    async def bind(self, host: str, port: int, certificates: Certificates | None) -> None:
        """Make ready to serve. Embedded stores take the port.

        Raises:
            HyperGPUError: ADDRESS_UNUSABLE; or ARGUMENT_INVALID, the bucket is not to be used.
        """

    async def run(self) -> None:
        """Serve until cancelled."""

    async def ticket(
        self, node: NodeId | None, blob: BlobRef, purpose: str = ""
    ) -> tensor_pb2.Ticket:
        """A ticket to fetch a blob.

        Args:
            node: Its bearer; None: a user.
            blob: The blob, which is stored and checked.
            purpose: Job whose model a node fetches; empty for other blobs.

        Raises:
            HyperGPUError: NOT_READY, it is on its way to the store; STORE_UNREACHABLE.
        """

    def ready_ticket(self, node: NodeId, blob: BlobRef, purpose: str) -> tensor_pb2.Ticket | None:
        """A ticket for which nothing has to be waited for; None: ask for one. See `ticket`."""

    async def upload_ticket(self, node: NodeId | None, upload: OpenUpload) -> tensor_pb2.Ticket:
        """A ticket to send what is missing of an upload.

        Args:
            node: Its bearer; None: a user.
            upload: The upload.

        Raises:
            HyperGPUError: STORE_UNREACHABLE.
        """

    async def receive_upload(self, name: str, blob: BlobRef) -> Path:
        """Have all bytes of an upload here, in a sealed file to which nobody writes any more.

        Raises:
            HyperGPUError: OFFSET_MISMATCH, bytes are missing; DISK_FULL; STORE_UNREACHABLE.
        """

    async def doubt(self, digest: Digest) -> None:
        """Look after a blob that somebody did not find, or got as something else.

        Raises:
            HyperGPUError: STORE_UNREACHABLE.
        """

    def take_updates(self, taker: UpdateTaker) -> None:
        """Let updates in that come to the store itself, where it takes any."""

    def remove(self, digests: Collection[Digest]) -> None:
        """Drop copies of blobs that were removed here, in the background."""
