"""Files of removed blobs are written over, and nobody ever sees the older bytes."""

from pathlib import Path

import pytest

from coordinator.shell.blobs.space import Space
from coordinator.shell.blobs.spare_files import SPARE_BYTES_MIN
from coordinator.shell.blobs.store import BlobStore
from coordinator.shell.blobs.upload_store import UploadStore
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.statements.assignment import BlobRef
from hypergpu.units import Bytes

SIZE_BYTES = SPARE_BYTES_MIN
OLD = b"o" * SIZE_BYTES
NEW = b"n" * SIZE_BYTES
BLOB = BlobRef(digest_of(NEW), Bytes(SIZE_BYTES))
HALF = SIZE_BYTES // 2


class SpareBench:
    """A store whose only blob was just removed."""

    def __init__(self, folder: Path, quota_bytes: int = 0) -> None:
        self.folder = folder
        self.space = Space(folder, quota_bytes)
        self.blobs = BlobStore(folder, self.space)
        self.quarantine = UploadStore(folder, self.blobs, self.space)
        self.blobs.put(OLD, keep_s=-1)
        self.blobs.collect(frozenset())

    def reopen(self) -> UploadStore:
        """The quarantine of a process that follows one that was killed."""
        space = Space(self.folder)
        return UploadStore(self.folder, BlobStore(self.folder, space), space)

    def store_blob(self) -> bytes:
        """The new blob."""
        return self.blobs.path(BLOB.digest).read_bytes()


@pytest.fixture
def store(tmp_path: Path) -> SpareBench:
    return SpareBench(tmp_path)


def test_a_removed_blobs_file_is_given_away_once_and_by_its_exact_size(store: SpareBench) -> None:
    path = store.blobs.work_path("over")
    assert not store.blobs.reuse(path, SIZE_BYTES - 1)
    assert store.blobs.reuse(path, SIZE_BYTES)
    assert path.read_bytes() == OLD
    assert not store.blobs.reuse(store.blobs.work_path("again"), SIZE_BYTES)


def test_a_removed_blob_that_somebody_reads_is_not_given_away(store: SpareBench) -> None:
    blob = store.blobs.put(NEW, keep_s=-1)
    assert store.blobs.reuse(store.blobs.work_path("older"), SIZE_BYTES)
    reader = store.blobs.open(blob.digest)
    store.blobs.collect(frozenset())
    assert not store.blobs.reuse(store.blobs.work_path("over"), SIZE_BYTES)
    assert reader.read(2 * SIZE_BYTES) == NEW
    reader.close()


def test_spares_count_as_used_until_room_is_short(tmp_path: Path) -> None:
    store = SpareBench(tmp_path, quota_bytes=SIZE_BYTES + 10)
    assert store.space.used_bytes == SIZE_BYTES
    store.blobs.put(NEW)
    assert store.space.used_bytes == SIZE_BYTES
    assert not store.blobs.reuse(store.blobs.work_path("over"), SIZE_BYTES)


def test_an_upload_written_over_an_older_file_becomes_its_own_blob(store: SpareBench) -> None:
    upload = store.quarantine.open("key", BLOB)
    upload.append(0, NEW[:HALF])
    assert store.quarantine.committed_offset("key") == HALF
    upload.append(HALF, NEW[HALF:])
    upload.finish()
    assert store.store_blob() == NEW
    assert store.space.used_bytes == SIZE_BYTES
    assert not list((store.folder / "quarantine").iterdir())


def test_an_attempt_that_ends_leaves_only_its_own_bytes(store: SpareBench) -> None:
    upload = store.quarantine.open("key", BLOB)
    upload.append(0, NEW[:HALF])
    upload.close()
    assert store.quarantine.committed_offset("key") == HALF
    again = store.quarantine.open("key", BLOB)
    assert again.committed_offset == HALF
    again.append(HALF, NEW[HALF:])
    again.finish()
    assert store.store_blob() == NEW


def test_after_a_kill_only_the_uploads_own_bytes_count(store: SpareBench) -> None:
    store.quarantine.open("key", BLOB).append(0, NEW[:HALF])
    quarantine = store.reopen()
    assert quarantine.committed_offset("key") == HALF
    again = quarantine.open("key", BLOB)
    again.append(HALF, NEW[HALF:])
    again.finish()
    assert store.store_blob() == NEW


def test_a_kill_before_the_first_byte_leaves_an_empty_upload(store: SpareBench) -> None:
    store.quarantine.open("key", BLOB)
    assert store.reopen().committed_offset("key") == 0


def test_a_newer_attempt_takes_over_what_an_older_one_stored(store: SpareBench) -> None:
    older = store.quarantine.open("key", BLOB)
    older.append(0, NEW[:HALF])
    newer = store.quarantine.open("key", BLOB)
    assert newer.committed_offset == HALF
    with pytest.raises(HyperGPUError):
        older.append(HALF, NEW[HALF:])
    newer.append(HALF, NEW[HALF:])
    newer.finish()
    assert store.store_blob() == NEW
