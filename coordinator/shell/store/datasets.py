"""Users' data as the evaluator reads them: folders of hard links to blobs."""

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from coordinator.shell.store.blobs.manifests import stored_manifest
from coordinator.shell.store.blobs.store import BlobStore
from coordinator.shell.store.blobs.writing import reject_when_full
from hypergpu.blobs import BlobRef
from hypergpu.data_paths import checked_paths
from hypergpu.digests import digest_from_wire
from hypergpu.ids import Digest
from hypergpu.v1 import tensor_pb2

_UNFINISHED = ".part"


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
    partial_folder = _unfinished_folder(datasets_dir, manifest.digest)
    try:
        with reject_when_full(f"dataset {manifest.digest}"):
            partial_folder.mkdir(parents=True)
            _link_files(blobs, stored_manifest(blobs, manifest), partial_folder)
            _rename_finished(partial_folder, folder)
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)
    return folder


def laid_out_manifests(datasets_dir: Path) -> tuple[Digest, ...]:
    """Digests of the manifests that have a folder. Blocks."""
    folders = datasets_dir.glob("*")
    return tuple(Digest(each.name) for each in folders if each.suffix != _UNFINISHED)


def remove_dataset(datasets_dir: Path, manifest: Digest) -> None:
    """Remove a manifest's folder; at no moment does a part of it bear its name. Blocks."""
    partial_folder = _unfinished_folder(datasets_dir, manifest)
    with suppress(FileNotFoundError):
        (datasets_dir / manifest).rename(partial_folder)
    shutil.rmtree(partial_folder, ignore_errors=True)


def clear_unfinished(datasets_dir: Path) -> None:
    """Remove unfinished folders of an earlier process. Blocks."""
    for leftover in datasets_dir.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(leftover, ignore_errors=True)


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
