"""Requests of farm jobs, whose items were sent before."""

import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.farm.item_chunks import (
    ItemChunk,
    ItemEncoding,
    ItemManifest,
    json_lines,
    manifest_bytes,
)
from hypergpu.farm.map_request import MAP_KIND, MapRequest
from hypergpu.packed_work import pack_work
from hypergpu.units import Bytes
from hypergpu.user.client.asynchronous import AsyncCoordinator
from hypergpu.user.client.resume import ignore
from hypergpu.user.client.upload import send_folder
from hypergpu.v1 import job_pb2
from hypergpu.wire.work import work_message


def item_chunks(items: Sequence[Any], chunk_items: int) -> tuple[list[bytes], bytes]:
    """The chunks of an input, and its manifest."""
    chunks = [
        json_lines(items[start : start + chunk_items])
        for start in range(0, len(items), chunk_items)
    ]
    manifest = ItemManifest(
        encoding=ItemEncoding.JSONL,
        chunks=tuple(
            ItemChunk(digest_of(chunk), Bytes(len(chunk)), chunk.count(b"\n")) for chunk in chunks
        ),
    )
    return chunks, manifest_bytes(manifest)


async def farm_request(
    client: AsyncCoordinator, texts: Sequence[Any], *, chunk_items: int = 1_000, **changes: Any
) -> job_pb2.CreateJobRequest:
    """Send the items, and ask for their checksums.

    Args:
        client: Whose job it is.
        texts: Items that are sent.
        chunk_items: Items of a chunk.
        changes: Fields of the request.
    """
    chunks, manifest = item_chunks(texts, chunk_items)
    with tempfile.TemporaryDirectory() as folder:
        for number, content in enumerate((*chunks, manifest)):
            (Path(folder) / str(number)).write_bytes(content)
        await send_folder(client._calls, Path(folder), ignore)
    request = MapRequest(
        item_kind="checksum",
        manifest=BlobRef(digest_of(manifest), Bytes(len(manifest))),
        items=len(texts),
    )
    work = pack_work(MAP_KIND, replace(request, **changes))
    return job_pb2.CreateJobRequest(work=work_message(work), request_id=uuid.uuid4().hex)
