"""Blobs whose folder is lost come back from the bucket, and nothing else does."""

from pathlib import Path

import pytest

from coordinator.shell.store.blobs.store import ABSENT_KEEP_S, BlobCopy, BlobStore
from coordinator.shell.store.blobs.writing import Space
from coordinator.shell.store.bulk.bucket import S3Bucket
from coordinator.shell.store.bulk.kept_blobs import KeptBlobs, copy_key
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.units import Bytes
from hypergpu.user.cluster.s3_server import S3Server
from tests.s3_buckets import bucket_of

CONTENT = bytes(range(256)) * 100
BLOB = BlobRef(digest_of(CONTENT), Bytes(len(CONTENT)))


class AgedBlobs(KeptBlobs):
    """Copies that were written some time ago."""

    def __init__(self, bucket: S3Bucket, age_s: int) -> None:
        super().__init__(bucket)
        self._age_s = age_s

    def copies(self) -> dict[Digest, BlobCopy]:
        return {
            digest: copy._replace(since_s=copy.since_s - self._age_s)
            for digest, copy in super().copies().items()
        }


class KeptBlobsKit:
    """One bucket, and the folders of coordinators that come after each other."""

    def __init__(self, folder: Path, server: S3Server) -> None:
        self._folder = folder
        self.bucket = bucket_of(server)
        self.kept = KeptBlobs(self.bucket)
        self.age_s = 0
        """Age of all copies when a coordinator starts."""

    def open(self, name: str) -> BlobStore:
        """The blobs of a coordinator that starts, with a folder of its own."""
        self.kept = AgedBlobs(self.bucket, self.age_s)
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        return BlobStore(folder, Space(folder), self.kept)

    def keys(self) -> list[str]:
        return [each.key for each in self.bucket.objects()]


@pytest.fixture
def kit(tmp_path: Path, s3_server: S3Server) -> KeptBlobsKit:
    return KeptBlobsKit(tmp_path, s3_server)


def test_a_blob_is_there_for_the_next_coordinator(kit: KeptBlobsKit) -> None:
    kit.open("first").put(CONTENT)
    blobs = kit.open("second")
    assert blobs.size(BLOB.digest) == BLOB.size_bytes
    assert blobs.path(BLOB.digest).read_bytes() == CONTENT
    assert blobs.space.used_bytes == BLOB.size_bytes


def test_what_may_be_computed_again_is_there_once_it_is_synced(kit: KeptBlobsKit) -> None:
    first = kit.open("first")
    work = first.work_path("fold")
    work.write_bytes(CONTENT)
    first.adopt_unsynced(work, BLOB)
    assert kit.open("second").size(BLOB.digest) is None
    first.sync(BLOB.digest)
    assert kit.open("third").size(BLOB.digest) == BLOB.size_bytes


def test_an_update_is_copied_from_where_its_node_wrote_it(
    kit: KeptBlobsKit, tmp_path: Path
) -> None:
    first = kit.open("first")
    (tmp_path / "sent").write_bytes(CONTENT)
    kit.bucket.write("uploads/secret", tmp_path / "sent")
    kit.kept.note_upload(BLOB.digest, "uploads/secret")
    work = first.work_path("update")
    work.write_bytes(CONTENT)
    first.adopt(work, BLOB)
    assert kit.keys() == [copy_key(BLOB.digest)]
    blobs = kit.open("second")
    blobs.bring([BLOB.digest])
    assert blobs.path(BLOB.digest).read_bytes() == CONTENT


def test_a_copy_that_is_something_else_is_no_blob(kit: KeptBlobsKit, tmp_path: Path) -> None:
    (tmp_path / "false").write_bytes(CONTENT[::-1])
    kit.bucket.write(copy_key(BLOB.digest), tmp_path / "false")
    blobs = kit.open("first")
    with pytest.raises(HyperGPUError) as failure:
        blobs.path(BLOB.digest)
    assert failure.value.reason is Reason.BLOB_UNKNOWN
    assert blobs.size(BLOB.digest) is None


def test_a_newer_copy_counts_where_the_first_was_doubted(kit: KeptBlobsKit, tmp_path: Path) -> None:
    for number, content in enumerate((CONTENT[::-1], CONTENT)):
        (tmp_path / "copy").write_bytes(content)
        kit.bucket.write(copy_key(BLOB.digest, number), tmp_path / "copy")
    assert kit.open("first").path(BLOB.digest).read_bytes() == CONTENT


def test_blobs_from_before_are_copied_once_they_are_synced(
    kit: KeptBlobsKit, tmp_path: Path
) -> None:
    (tmp_path / "first").mkdir()
    BlobStore(tmp_path / "first", Space(tmp_path / "first")).put(CONTENT)
    blobs = kit.open("first")
    assert kit.keys() == []  # Nobody has to wait for it before a coordinator drives.
    assert blobs.unsynced_blobs == {BLOB.digest}
    blobs.sync(BLOB.digest)
    assert kit.keys() == [copy_key(BLOB.digest)]


def test_what_nobody_needs_goes_here_and_there(kit: KeptBlobsKit) -> None:
    kit.open("first").put(CONTENT)
    kit.age_s = ABSENT_KEEP_S
    blobs = kit.open("second")
    assert blobs.collect(frozenset(), spares_older=True).digests == ()
    assert blobs.collect(frozenset({BLOB.digest})).digests == ()
    assert blobs.collect(frozenset()).digests == (BLOB.digest,)
    assert blobs.size(BLOB.digest) is None
    assert kit.kept.take_forgotten() == [copy_key(BLOB.digest)]


def test_a_file_that_was_just_uploaded_outlives_its_coordinator(kit: KeptBlobsKit) -> None:
    kit.open("first").put(CONTENT, keep_s=24 * 3600)
    blobs = kit.open("second")
    assert blobs.collect(frozenset()).digests == ()
    assert blobs.path(BLOB.digest).read_bytes() == CONTENT


def test_a_blob_that_is_needed_again_is_not_deleted_with_its_former_copy(
    kit: KeptBlobsKit,
) -> None:
    first = kit.open("first")
    first.put(CONTENT, keep_s=-1)
    first.collect(frozenset())
    forgotten_keys = kit.kept.take_forgotten()
    first.put(CONTENT)
    kit.bucket.delete(forgotten_keys)
    kit.kept.end_deletion(forgotten_keys)
    assert kit.open("second").path(BLOB.digest).read_bytes() == CONTENT
    assert kit.kept.begin_deletion(kit.keys()) == []


def test_a_sound_blob_takes_the_place_of_a_damaged_copy(kit: KeptBlobsKit, tmp_path: Path) -> None:
    (tmp_path / "false").write_bytes(CONTENT[::-1])
    kit.bucket.write(copy_key(BLOB.digest), tmp_path / "false")
    first = kit.open("first")
    first.bring([BLOB.digest])
    first.put(CONTENT, keep_s=-1)
    assert kit.open("second").path(BLOB.digest).read_bytes() == CONTENT


def test_a_deletion_that_failed_is_tried_by_somebody_else(kit: KeptBlobsKit) -> None:
    first = kit.open("first")
    first.put(CONTENT, keep_s=-1)
    first.collect(frozenset())
    forgotten_keys = kit.kept.take_forgotten()
    assert kit.kept.begin_deletion(forgotten_keys) == []
    kit.kept.abandon_deletion(forgotten_keys)
    first.put(CONTENT)
    assert kit.keys() == [*forgotten_keys, copy_key(BLOB.digest, 1)]
    assert kit.kept.begin_deletion(kit.keys()) == forgotten_keys


def test_a_damaged_copy_is_deleted_with_its_blob(kit: KeptBlobsKit, tmp_path: Path) -> None:
    (tmp_path / "false").write_bytes(CONTENT[::-1])
    kit.bucket.write(copy_key(BLOB.digest), tmp_path / "false")
    first = kit.open("first")
    first.bring([BLOB.digest])
    first.put(CONTENT, keep_s=-1)
    assert kit.kept.begin_deletion(kit.keys()) == []
    first.collect(frozenset())
    assert sorted(kit.kept.take_forgotten()) == sorted(kit.keys())


def test_a_blob_that_is_damaged_here_is_fetched(kit: KeptBlobsKit) -> None:
    kit.open("first").path(kit.open("first").put(CONTENT).digest).write_bytes(b"damaged")
    blobs = kit.open("first")
    assert blobs.path(BLOB.digest).read_bytes() == CONTENT
    assert blobs.space.used_bytes == BLOB.size_bytes
