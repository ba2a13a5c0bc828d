"""Which store carries bulk bytes."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from coordinator.shell.blobs.store import BlobStore
from coordinator.shell.blobs.upload_store import UploadStore
from coordinator.shell.bulk.embedded import EmbeddedStore
from coordinator.shell.bulk.messages import BytesReceived, BytesServed
from coordinator.shell.bulk.store import BulkStore


class BulkPlace(NamedTuple):
    """Where bulk bytes go."""

    folder: Path
    """The coordinator's."""
    address: str
    """Address of an object store; empty: the embedded store."""
    owner: str
    """Name of this coordinator among others that share a bucket."""


def open_store(
    place: BulkPlace,
    blobs: BlobStore,
    uploads: UploadStore,
    on_bytes: Callable[[BytesServed | BytesReceived], None],
) -> BulkStore:
    """Open the store. Nothing is asked of it yet.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, the address names none.
        ModuleNotFoundError: The extra of object stores is not installed.
    """
    if not place.address:
        return EmbeddedStore(place.folder, uploads, on_bytes)
    from coordinator.shell.bulk.bucket import S3Bucket
    from coordinator.shell.bulk.object_store import ObjectStore

    bucket = S3Bucket(place.address, place.owner)
    return ObjectStore(bucket, place.folder, blobs, uploads, on_bytes)
