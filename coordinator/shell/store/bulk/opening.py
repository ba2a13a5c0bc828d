"""Which store carries bulk bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from coordinator.shell.store.blobs.store import BlobStore
from coordinator.shell.store.blobs.upload_store import UploadStore
from coordinator.shell.store.bulk.embedded import EmbeddedStore
from coordinator.shell.store.bulk.messages import BytesReceived, BytesServed
from coordinator.shell.store.bulk.store import BulkStore

if TYPE_CHECKING:
    from coordinator.shell.store.bulk.kept_blobs import KeptBlobs


class BulkPlace(NamedTuple):
    """Where bulk bytes go."""

    folder: Path
    """The coordinator's."""
    address: str
    """Address of an object store; empty: the embedded store."""
    owner: str
    """Name of this coordinator among others that share a bucket."""


def open_kept(place: BulkPlace) -> "KeptBlobs":
    """The part of the object store where blobs outlive this machine. Nothing is asked of it yet.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, the address names none.
        ModuleNotFoundError: The extra of object stores is not installed.
    """
    from coordinator.shell.store.bulk.bucket import S3Bucket
    from coordinator.shell.store.bulk.kept_blobs import KeptBlobs

    return KeptBlobs(S3Bucket(place.address, place.owner))


def open_store(
    place: BulkPlace,
    blobs: BlobStore,
    uploads: UploadStore,
    on_bytes: Callable[[BytesServed | BytesReceived], None],
    kept: "KeptBlobs | None" = None,
) -> BulkStore:
    """Open the store. Nothing is asked of it yet.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, the address names none.
        ModuleNotFoundError: The extra of object stores is not installed.
    """
    if not place.address:
        return EmbeddedStore(place.folder, uploads, on_bytes)
    from coordinator.shell.store.bulk.bucket import S3Bucket
    from coordinator.shell.store.bulk.object_store import ObjectStore

    part = kept or S3Bucket(place.address, place.owner)
    return ObjectStore(part, place.folder, blobs, uploads, on_bytes)
