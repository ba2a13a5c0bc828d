from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coordinator.shell.blobs.space import Space
from coordinator.shell.blobs.store import BlobStore
from coordinator.shell.commands.datasets import (
    clear_unfinished,
    lay_out_dataset,
    packed_manifest,
    remove_layout,
)
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.v1 import tensor_pb2
from hypergpu.wire.assignment import blob_message


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path, Space(tmp_path))


def manifest(blobs: BlobStore, files: dict[str, bytes]) -> tensor_pb2.Manifest:
    """A manifest of stored files."""
    return tensor_pb2.Manifest(
        entries=[
            tensor_pb2.ManifestEntry(path=path, blob=blob_message(blobs.put(content)))
            for path, content in files.items()
        ]
    )


def test_a_manifest_is_laid_out_as_the_folder_it_describes(
    blobs: BlobStore, tmp_path: Path
) -> None:
    files = {"a.txt": b"one", "deep/er/b.txt": b"two"}
    stored = blobs.put(packed_manifest(manifest(blobs, files)))

    folder = lay_out_dataset(blobs, stored, tmp_path / "datasets")
    found = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert found == files
    assert lay_out_dataset(blobs, stored, tmp_path / "datasets") == folder


def test_the_order_of_entries_does_not_change_a_manifests_bytes(blobs: BlobStore) -> None:
    there = manifest(blobs, {"a": b"1", "b": b"2"})
    back = manifest(blobs, {"b": b"2", "a": b"1"})
    assert packed_manifest(there) == packed_manifest(back)


def test_a_dataset_wanted_twice_at_once_is_laid_out_for_both(
    blobs: BlobStore, tmp_path: Path
) -> None:
    files = {f"{number}/file.txt": b"%d" % number for number in range(300)}
    stored = blobs.put(packed_manifest(manifest(blobs, files)))
    datasets = tmp_path / "datasets"
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: lay_out_dataset(blobs, stored, datasets), range(4)))

    assert list(datasets.iterdir()) == list(folders)
    assert len(list(datasets.rglob("file.txt"))) == 300


def test_a_dataset_that_lacks_a_file_leaves_nothing_behind(
    blobs: BlobStore, tmp_path: Path
) -> None:
    stored = blobs.put(packed_manifest(manifest(blobs, {"a": b"1", "b": b"2"})))
    blobs.path(digest_of(b"2")).unlink()
    with pytest.raises(HyperGPUError, match="BLOB_UNKNOWN"):
        lay_out_dataset(blobs, stored, tmp_path / "datasets")
    assert list((tmp_path / "datasets").iterdir()) == []


def test_unfinished_and_removed_datasets_are_gone(blobs: BlobStore, tmp_path: Path) -> None:
    datasets = tmp_path / "datasets"
    stored = blobs.put(packed_manifest(manifest(blobs, {"a": b"1"})))
    folder = lay_out_dataset(blobs, stored, datasets)
    (datasets / "other.00000000.part").mkdir()
    clear_unfinished(datasets)
    assert list(datasets.iterdir()) == [folder]
    for _ in range(2):
        remove_layout(datasets, stored.digest)
    assert list(datasets.iterdir()) == []


def test_a_manifest_whose_paths_make_no_folder_is_refused() -> None:
    entries = [tensor_pb2.ManifestEntry(path=path) for path in ("a", "a/b")]
    with pytest.raises(HyperGPUError, match="MANIFEST_INVALID"):
        packed_manifest(tensor_pb2.Manifest(entries=entries))
