"""Manifests of users' data: paths and digests of the files of a folder."""

from google.protobuf.message import DecodeError

from coordinator.shell.store.blobs.store import BlobStore
from hypergpu.blobs import BlobRef
from hypergpu.data_paths import checked_paths
from hypergpu.digests import digest_from_wire
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.v1 import tensor_pb2

MANIFEST_BYTES_MAX = 3 << 20
"""A manifest travels in one message of `CreateJob`, which is capped at 4 MiB."""


def packed_manifest(manifest: tensor_pb2.Manifest) -> bytes:
    """A manifest's canonical bytes: entries by path, protobuf's deterministic encoding.

    Raises:
        HyperGPUError: MANIFEST_INVALID, its paths make no folder, or it is too large.
    """
    checked_paths(entry.path for entry in manifest.entries)
    entries = sorted(manifest.entries, key=lambda entry: entry.path)
    content = tensor_pb2.Manifest(entries=entries).SerializeToString(deterministic=True)
    if len(content) > MANIFEST_BYTES_MAX:
        detail = f"the manifest has {len(content)} bytes, over the limit of {MANIFEST_BYTES_MAX}"
        raise HyperGPUError(Reason.MANIFEST_INVALID, detail)
    return content


def manifest_digests(manifest: tensor_pb2.Manifest) -> frozenset[Digest]:
    """Digests of the files in a manifest.

    Raises:
        HyperGPUError: a digest is malformed.
    """
    return frozenset(digest_from_wire(entry.blob.digest.value) for entry in manifest.entries)


def stored_manifest(blobs: BlobStore, manifest: BlobRef) -> tensor_pb2.Manifest:
    """Read a manifest back. Blocks.

    Raises:
        HyperGPUError: BLOB_UNKNOWN, it is missing or damaged.
    """
    try:
        return tensor_pb2.Manifest.FromString(blobs.path(manifest.digest).read_bytes())
    except DecodeError:
        raise HyperGPUError(Reason.BLOB_UNKNOWN, f"{manifest.digest} is no manifest") from None
