"""Checks that fetched chunks are of the data that a user signed."""

from pathlib import Path

from hypergpu.assignment import PackedAssignment
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.bundles import Bundle
from hypergpu.farm.item_chunks import read_manifest
from hypergpu.farm.work_spec import chunk_conflict
from hypergpu.packed_work import unpack_work


def check_signed_data(assignment: PackedAssignment, paths: tuple[Path, ...]) -> None:
    """Check the chunks of signed work by its manifest. Blocks.

    Args:
        assignment: Its spec was checked.
        paths: Files of its inputs, in their order, whose digests were checked.

    Raises:
        HyperGPUError: OWNER_SPEC, a chunk is of other data; MANIFEST_INVALID.
    """
    if assignment.spec is None:
        return
    bundle = unpack_work(assignment.work, assignment.work.kind, Bundle)
    if bundle.manifest is None:
        return
    files = dict(zip((blob.digest for blob in assignment.inputs), paths, strict=True))
    manifest = read_manifest(files[bundle.manifest.digest].read_bytes())
    if reason := chunk_conflict(manifest, bundle):
        raise HyperGPUError(Reason.OWNER_SPEC, reason)
