"""Users' data as the evaluator reads it: a folder of hard links, laid out by a manifest."""

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from google.protobuf.message import DecodeError

from coordinator.shell.blobs.space import reject_when_full
from coordinator.shell.blobs.store import BlobStore
from hypergpu.dataset.manifest import checked_paths
from hypergpu.digest import digest_from_wire
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.statements.assignment import BlobRef
from hypergpu.v1 import tensor_pb2

MANIFEST_BYTES_MAX = 3 << 20
"""A manifest travels in one message of `CreateJob`, which is capped at 4 MiB."""
_UNFINISHED = ".part"


def packed_manifest(manifest: tensor_pb2.Manifest) -> bytes:
    """A manifest's canonical bytes: entries by path, protobuf's deterministic encoding.

    Raises:
        HyperGPUError: MANIFEST_INVALID, its paths make no folder, or it is too large.
    """
    checked_paths(entry.path for entry in manifest.entries)
    entries = sorted(manifest.entries, key=lambda entry: entry.path)
    packed = tensor_pb2.Manifest(entries=entries).SerializeToString(deterministic=True)
    if len(packed) > MANIFEST_BYTES_MAX:
        detail = f"the manifest has {len(packed)} bytes, over the limit of {MANIFEST_BYTES_MAX}"
        raise HyperGPUError(Reason.MANIFEST_INVALID, detail)
    return packed


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


def lay_out_dataset(blobs: BlobStore, manifest: BlobRef, datasets_dir: Path) -> Path:
    """Make the folder that a manifest describes, unless it is there, and return it. Blocks.

    Several threads may make the same one at once: the first to finish gives it its name.

    Raises:
        HyperGPUError: BLOB_UNKNOWN, a file is missing or damaged; DISK_FULL; MANIFEST_INVALID, an
            earlier version took a manifest whose paths make no folder.
    """
    folder = datasets_dir / manifest.digest
    if folder.is_dir():
        return folder
    unfinished = _unfinished_folder(datasets_dir, manifest.digest)
    try:
        with reject_when_full(f"dataset {manifest.digest}"):
            unfinished.mkdir(parents=True)
            _link_files(blobs, stored_manifest(blobs, manifest), unfinished)
            _rename_finished(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def laid_out_manifests(datasets_dir: Path) -> tuple[Digest, ...]:
    """Digests of the manifests that have a folder. Blocks."""
    folders = datasets_dir.glob("*")
    return tuple(Digest(each.name) for each in folders if each.suffix != _UNFINISHED)


def remove_layout(datasets_dir: Path, manifest: Digest) -> None:
    """Remove a manifest's folder; at no moment does a part of it bear its name. Blocks."""
    renamed = _unfinished_folder(datasets_dir, manifest)
    with suppress(FileNotFoundError):
        (datasets_dir / manifest).rename(renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def clear_unfinished(datasets_dir: Path) -> None:
    """Remove unfinished folders of an earlier process. Blocks."""
    for left in datasets_dir.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(left, ignore_errors=True)


def _unfinished_folder(datasets_dir: Path, manifest: Digest) -> Path:
    return datasets_dir / f"{manifest}.{secrets.token_hex(4)}{_UNFINISHED}"


def _link_files(blobs: BlobStore, manifest: tensor_pb2.Manifest, folder: Path) -> None:
    paths = checked_paths(entry.path for entry in manifest.entries)
    for path, entry in zip(paths, manifest.entries, strict=True):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        source = blobs.path(digest_from_wire(entry.blob.digest.value))
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)


def _rename_finished(unfinished: Path, folder: Path) -> None:
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
