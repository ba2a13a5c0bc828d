import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coordinator.shell.blobs.space import Space
from coordinator.shell.blobs.store import BlobStore
from coordinator.shell.blobs.upload_store import UploadStore
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.statements.assignment import BlobRef
from hypergpu.units import Bytes

QUOTA_BYTES = 1000
CONTENT = bytes(range(200))
BLOB = BlobRef(digest_of(CONTENT), Bytes(len(CONTENT)))
KEY = "job/1/node/7"


@pytest.fixture
def space(tmp_path: Path) -> Space:
    return Space(tmp_path, QUOTA_BYTES)


@pytest.fixture
def blobs(tmp_path: Path, space: Space) -> BlobStore:
    return BlobStore(tmp_path, space)


@pytest.fixture
def quarantine(tmp_path: Path, blobs: BlobStore, space: Space) -> UploadStore:
    return UploadStore(tmp_path, blobs, space)


def whole(blobs: BlobStore, blob: BlobRef) -> bytes:
    reader = blobs.open(blob.digest)
    content = reader.read(blob.size_bytes + 1)
    reader.close()
    return content


def work_file(blobs: BlobStore, content: bytes) -> Path:
    path = blobs.work_path("a-file")
    path.write_bytes(content)
    return path


def refusal(reason: Reason) -> pytest.RaisesExc[HyperGPUError]:
    return pytest.RaisesExc(HyperGPUError, check=lambda error: error.reason is reason)


def test_a_blob_is_named_by_its_bytes(blobs: BlobStore) -> None:
    assert blobs.put(CONTENT) == BLOB
    assert blobs.size(BLOB.digest) == len(CONTENT)
    assert whole(blobs, BLOB) == CONTENT


def test_an_empty_blob_is_a_blob(blobs: BlobStore) -> None:
    assert whole(blobs, blobs.put(b"")) == b""


def test_a_blob_is_read_from_an_offset_in_pieces(blobs: BlobStore) -> None:
    blobs.put(CONTENT)
    reader = blobs.open(BLOB.digest, 150)
    assert [reader.read(30), reader.read(30), reader.read(30)] == [
        CONTENT[150:180],
        CONTENT[180:],
        b"",
    ]
    assert reader.size_bytes == len(CONTENT)
    reader.close()


def test_a_file_is_adopted_and_gone(blobs: BlobStore) -> None:
    path = work_file(blobs, CONTENT)
    blobs.adopt(path, BLOB)
    assert not path.exists()
    assert whole(blobs, BLOB) == CONTENT


def test_a_file_of_another_size_is_not_adopted(blobs: BlobStore) -> None:
    with refusal(Reason.DIGEST_MISMATCH):
        blobs.adopt(work_file(blobs, CONTENT[:-1]), BLOB)
    assert blobs.size(BLOB.digest) is None
    assert blobs.space.used_bytes == 0


def test_an_unsynced_blob_is_served_and_synced_later(blobs: BlobStore) -> None:
    blobs.adopt_unsynced(work_file(blobs, CONTENT), BLOB)
    assert whole(blobs, BLOB) == CONTENT
    blobs.sync(BLOB.digest)
    assert whole(blobs, BLOB) == CONTENT


def test_a_path_holds_exactly_the_blob(blobs: BlobStore) -> None:
    blobs.put(CONTENT)
    assert blobs.path(BLOB.digest).read_bytes() == CONTENT


def test_a_missing_blob_is_refused_by_name(blobs: BlobStore) -> None:
    for ask in (blobs.open, blobs.path, blobs.sync):
        with pytest.raises(HyperGPUError, match=BLOB.digest) as caught:
            ask(BLOB.digest)
        assert caught.value.reason is Reason.BLOB_UNKNOWN
    assert blobs.size(BLOB.digest) is None


def test_the_same_blob_counts_once(blobs: BlobStore) -> None:
    blobs.put(CONTENT)
    blobs.put(CONTENT)
    blobs.adopt(work_file(blobs, CONTENT), BLOB)
    assert blobs.space.used_bytes == len(CONTENT)


def test_collection_removes_what_is_not_live(blobs: BlobStore) -> None:
    kept = blobs.put(b"kept", keep_s=-1)
    blobs.put(CONTENT, keep_s=-1)
    collected = blobs.collect(frozenset({kept.digest}))
    assert collected.digests == (BLOB.digest,)
    assert collected.freed_bytes == len(CONTENT)
    assert blobs.size(BLOB.digest) is None
    assert whole(blobs, kept) == b"kept"
    assert blobs.space.used_bytes == 4


def test_collection_spares_what_is_too_fresh_to_be_journalled(blobs: BlobStore) -> None:
    blobs.put(CONTENT)
    assert blobs.collect(frozenset()).digests == ()
    assert whole(blobs, BLOB) == CONTENT


def test_collection_spares_what_was_stored_after_its_mark(blobs: BlobStore) -> None:
    older = blobs.put(b"older", keep_s=-1)
    mark = blobs.mark()
    blobs.put(CONTENT, keep_s=-1)
    assert blobs.collect(frozenset(), mark=mark).digests == (older.digest,)
    assert whole(blobs, BLOB) == CONTENT
    assert blobs.collect(frozenset(), mark=blobs.mark()).digests == (BLOB.digest,)


def test_storing_a_blob_again_makes_it_new_for_a_collection(blobs: BlobStore) -> None:
    blobs.put(CONTENT, keep_s=-1)
    mark = blobs.mark()
    blobs.put(CONTENT, keep_s=-1)
    assert blobs.collect(frozenset(), mark=mark).digests == ()


def test_an_open_blob_is_read_to_its_end_when_it_is_collected(blobs: BlobStore) -> None:
    blobs.put(CONTENT, keep_s=-1)
    reader = blobs.open(BLOB.digest)
    blobs.collect(frozenset())
    assert reader.read(1000) == CONTENT
    reader.close()


def test_the_quota_refuses_with_its_figures(blobs: BlobStore) -> None:
    blobs.put(bytes(900))
    with pytest.raises(HyperGPUError, match="900 of the quota of 1000") as caught:
        blobs.put(CONTENT)
    assert caught.value.reason is Reason.DISK_FULL
    assert blobs.size(BLOB.digest) is None
    assert blobs.space.used_bytes == 900


def test_a_full_store_takes_blobs_again_once_room_is_made(blobs: BlobStore) -> None:
    blobs.put(bytes(900), keep_s=-1)
    path = work_file(blobs, CONTENT)
    with refusal(Reason.DISK_FULL):
        blobs.adopt(path, BLOB)
    blobs.collect(frozenset())
    blobs.adopt(path, BLOB)
    assert whole(blobs, BLOB) == CONTENT


def test_many_threads_store_the_same_and_other_blobs(blobs: BlobStore) -> None:
    contents = [b"%d" % (number % 20) for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        stored = list(pool.map(blobs.put, contents))
    assert [whole(blobs, blob) for blob in stored] == contents
    assert blobs.space.used_bytes == 10 + 2 * 10


def test_an_upload_becomes_a_blob(blobs: BlobStore, quarantine: UploadStore) -> None:
    upload = quarantine.open(KEY, BLOB)
    assert upload.append(0, CONTENT[:120]) == 120
    assert upload.append(120, CONTENT[120:]) == 200
    assert upload.finish() == BLOB
    assert whole(blobs, BLOB) == CONTENT
    assert quarantine.committed_offset(KEY) == 0
    assert blobs.space.used_bytes == len(CONTENT)


def test_an_upload_goes_on_after_a_restart(
    blobs: BlobStore, quarantine: UploadStore, tmp_path: Path
) -> None:
    quarantine.open(KEY, BLOB).append(0, CONTENT[:120])
    again = UploadStore(tmp_path, blobs, Space(tmp_path, QUOTA_BYTES))
    assert again.committed_offset(KEY) == 120
    seen: list[bytes | memoryview] = []
    upload = again.open(KEY, BLOB, seen.append)
    upload.append(120, CONTENT[120:])
    upload.finish()
    assert b"".join(seen) == CONTENT
    assert whole(blobs, BLOB) == CONTENT


@pytest.mark.parametrize("offset", [0, 49, 51])
def test_a_gap_or_an_overlap_is_refused(quarantine: UploadStore, offset: int) -> None:
    upload = quarantine.open(KEY, BLOB)
    upload.append(0, CONTENT[:50])
    with refusal(Reason.OFFSET_MISMATCH):
        upload.append(offset, CONTENT[50:60])
    assert upload.append(50, CONTENT[50:60]) == 60


def test_more_than_was_declared_is_refused(quarantine: UploadStore) -> None:
    upload = quarantine.open(KEY, BLOB)
    with refusal(Reason.UPDATE_TOO_LARGE):
        upload.append(0, CONTENT + b"!")
    assert upload.committed_offset == 0


def test_an_unfinished_upload_is_no_blob(blobs: BlobStore, quarantine: UploadStore) -> None:
    upload = quarantine.open(KEY, BLOB)
    upload.append(0, CONTENT[:-1])
    with refusal(Reason.OFFSET_MISMATCH):
        upload.finish()
    assert blobs.size(BLOB.digest) is None
    upload.append(199, CONTENT[199:])
    assert upload.finish() == BLOB


def test_wrong_bytes_are_thrown_away(blobs: BlobStore, quarantine: UploadStore) -> None:
    upload = quarantine.open(KEY, BLOB)
    upload.append(0, bytes(200))
    with refusal(Reason.DIGEST_MISMATCH):
        upload.finish()
    assert quarantine.committed_offset(KEY) == 0
    assert blobs.space.used_bytes == 0


def test_a_newer_attempt_cuts_the_older_one_off(quarantine: UploadStore) -> None:
    older = quarantine.open(KEY, BLOB)
    older.append(0, CONTENT[:10])
    newer = quarantine.open(KEY, BLOB)
    with refusal(Reason.OFFSET_MISMATCH):
        older.append(10, CONTENT[10:20])
    older.close()
    newer.append(10, CONTENT[10:])
    assert newer.finish() == BLOB


def test_a_declared_size_that_does_not_fit_is_refused_before_a_byte(
    blobs: BlobStore, quarantine: UploadStore
) -> None:
    quarantine.open("first", BlobRef(digest_of(bytes(900)), Bytes(900)))
    with refusal(Reason.DISK_FULL):
        quarantine.open(KEY, BLOB)
    assert blobs.space.used_bytes == 900


def test_an_attempt_that_ended_holds_only_what_it_stored(
    blobs: BlobStore, quarantine: UploadStore
) -> None:
    upload = quarantine.open(KEY, BLOB)
    upload.append(0, CONTENT[:50])
    upload.close()
    upload.close()
    assert blobs.space.used_bytes == 50


def test_a_full_quota_at_the_end_keeps_the_upload(
    blobs: BlobStore, quarantine: UploadStore, space: Space
) -> None:
    upload = quarantine.open(KEY, BLOB)
    upload.append(0, CONTENT)
    space.count(900)
    with refusal(Reason.DISK_FULL):
        upload.finish()
    space.give(900)
    assert quarantine.committed_offset(KEY) == 200
    assert quarantine.open(KEY, BLOB).finish() == BLOB
    assert blobs.space.used_bytes == 200


def test_abandoned_uploads_expire_and_open_ones_do_not(
    blobs: BlobStore, quarantine: UploadStore
) -> None:
    abandoned = quarantine.open("abandoned", BLOB)
    abandoned.append(0, CONTENT[:50])
    abandoned.close()
    os.utime(abandoned.path, (1, 1))
    in_progress = quarantine.open(KEY, BLOB)
    os.utime(in_progress.path, (1, 1))
    assert quarantine.expire() == 1
    assert quarantine.committed_offset("abandoned") == 0
    in_progress.append(0, CONTENT)
    assert in_progress.finish() == BLOB
    assert blobs.space.used_bytes == 200


def test_an_owner_has_one_upload_at_a_time(blobs: BlobStore, quarantine: UploadStore) -> None:
    first = quarantine.open("first", BLOB, owner="node")
    first.append(0, CONTENT[:120])
    second = quarantine.open(KEY, BLOB, owner="node")
    other = quarantine.open(KEY, BLOB, owner="other")
    with refusal(Reason.OFFSET_MISMATCH):
        first.append(120, CONTENT[120:])
    second.append(0, CONTENT[:50])
    second.close()
    other.append(0, CONTENT)
    assert quarantine.committed_offset("first", owner="node") == 0
    assert quarantine.committed_offset(KEY, owner="node") == 50
    assert blobs.space.used_bytes == 50 + 200


def test_an_owners_upload_is_known_after_a_restart(
    blobs: BlobStore, quarantine: UploadStore, tmp_path: Path
) -> None:
    quarantine.open("first", BLOB, owner="node").append(0, CONTENT[:120])
    again = UploadStore(tmp_path, blobs, Space(tmp_path, QUOTA_BYTES))
    assert again.committed_offset("first", owner="node") == 120
    again.open(KEY, BLOB, owner="node")
    assert again.committed_offset("first", owner="node") == 0


def test_uploads_of_owners_that_are_kept_stay(blobs: BlobStore, quarantine: UploadStore) -> None:
    kept = quarantine.open(KEY, BLOB, owner="kept")
    unowned = quarantine.open(KEY, BLOB)
    quarantine.open(KEY, BLOB, owner="void").append(0, CONTENT[:50])
    owned = quarantine.owned_uploads()
    later = quarantine.open(KEY, BLOB, owner="later")
    assert quarantine.forget(owned, keeps={"kept"}) == 1
    for upload in (kept, unowned, later):
        upload.append(0, CONTENT[:10])
    assert blobs.space.used_bytes == 3 * len(CONTENT)


def test_a_forgotten_upload_is_gone_with_its_attempt(
    blobs: BlobStore, quarantine: UploadStore
) -> None:
    upload = quarantine.open(KEY, BLOB, owner="node")
    upload.append(0, CONTENT[:50])
    assert quarantine.forget(quarantine.owned_uploads(), keeps=()) == 1
    with refusal(Reason.OFFSET_MISMATCH):
        upload.append(50, CONTENT[50:])
    assert blobs.space.used_bytes == 0
