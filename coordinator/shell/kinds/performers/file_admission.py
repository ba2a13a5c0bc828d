"""Files that a new job names: sent by its caller, and kept until the job is journalled."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from coordinator.shell.kinds.performers.packed_work import ForeignBlobs
from coordinator.shell.store.storage import Storage
from hypergpu.blobs import BlobRef
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.units import are, several


@asynccontextmanager
async def admit_files(
    storage: Storage, files: Iterable[BlobRef], foreign: ForeignBlobs
) -> AsyncIterator[None]:
    """Pin files until the context ends.

    Args:
        storage: Holds them.
        files: Those that the job names.
        foreign: Tells which blobs the caller has not shown to have.

    Raises:
        HyperGPUError: BLOB_UNKNOWN, the caller has not sent one, or it is gone.
    """
    blobs = {blob.digest: blob for blob in files}
    storage.pins.add(list(blobs))
    try:
        _refuse_foreign(foreign(blobs.keys()))
        await _require_stored(storage, blobs)
        yield
    finally:
        storage.pins.drop(list(blobs))


async def _require_stored(storage: Storage, blobs: dict[Digest, BlobRef]) -> None:
    def missing() -> list[Digest]:
        size = storage.blobs.size
        return [digest for digest, blob in blobs.items() if size(digest) != blob.size_bytes]

    async with storage.pins.collecting:
        absent = await asyncio.to_thread(missing)
    if absent:
        count = several(len(blobs), "file")
        detail = f"{len(absent)} of {count} {are(len(absent))} missing, such as {absent[0]}"
        raise HyperGPUError(Reason.BLOB_UNKNOWN, detail, fix="send them again")


def _refuse_foreign(foreign: frozenset[Digest]) -> None:
    if foreign:
        detail = f"{several(len(foreign), 'file')} {are(len(foreign))} not this token's"
        fix = "submit it again: whoever names a file has to have sent it since the last restart"
        raise HyperGPUError(Reason.BLOB_UNKNOWN, detail, fix=fix)
