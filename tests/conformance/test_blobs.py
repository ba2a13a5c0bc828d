"""Every store of blobs: whole uploads, uploads in stripes, and what is refused."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coordinator.shell.blobs.store import BlobStore
from coordinator.shell.blobs.upload_store import StripeUpload, UploadStore
from coordinator.shell.blobs.writing import Space
from hypergpu.crypto import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.statements import BlobRef
from hypergpu.streams import Stripe
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


STRIPES = tuple(Stripe(index, 3) for index in range(3))
COUNTS_BYTES = 3 * 8


def open_stripes(quarantine: UploadStore) -> list[StripeUpload]:
    return [quarantine.open_stripe(KEY, BLOB, stripe, owner="node") for stripe in STRIPES]


def bring(upload: StripeUpload, content: bytes = CONTENT) -> None:
    start, end = upload.committed_offset, upload.stripe.end(BLOB.size_bytes)
    upload.append(start, content[start:end])


def committed_offsets(quarantine: UploadStore) -> list[int]:
    return [int(quarantine.committed_stripe(KEY, BLOB, stripe, owner="node")) for stripe in STRIPES]


def test_stripes_begin_where_the_one_before_ends(quarantine: UploadStore) -> None:
    assert [(each.start(200), each.end(200)) for each in STRIPES] == [
        (0, 66),
        (66, 133),
        (133, 200),
    ]
    assert committed_offsets(quarantine) == [0, 66, 133]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_an_upload_is_whole_with_its_last_stripe(
    blobs: BlobStore, quarantine: UploadStore, order: tuple[int, ...]
) -> None:
    uploads = open_stripes(quarantine)
    for number in order[:2]:
        bring(uploads[number])
        assert not uploads[number].gather()
    last = uploads[order[2]]
    bring(last)
    assert last.gather()
    assert last.finish() == BLOB
    assert whole(blobs, BLOB) == CONTENT
    assert blobs.space.used_bytes == len(CONTENT)


def test_of_stripes_that_end_together_one_is_told_to_finish(
    blobs: BlobStore, quarantine: UploadStore
) -> None:
    uploads = open_stripes(quarantine)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(bring, uploads))
        told = list(pool.map(StripeUpload.gather, uploads))
    assert sorted(told) == [False, False, True]
    uploads[told.index(True)].finish()
    assert whole(blobs, BLOB) == CONTENT


def test_the_whole_is_shown_once_and_in_order(quarantine: UploadStore) -> None:
    seen: list[bytes | memoryview] = []
    for stripe in reversed(STRIPES):
        upload = quarantine.open_stripe(KEY, BLOB, stripe, seen.append)
        bring(upload)
        upload.gather()
    assert b"".join(seen) == CONTENT


def test_every_stripe_goes_on_where_it_ended_after_a_restart(
    blobs: BlobStore, quarantine: UploadStore, tmp_path: Path
) -> None:
    first, second, _ = open_stripes(quarantine)
    bring(first)
    second.append(66, CONTENT[66:100])
    again = UploadStore(tmp_path, blobs, Space(tmp_path, QUOTA_BYTES))
    assert committed_offsets(again) == [66, 100, 133]
    uploads = open_stripes(again)
    for upload in uploads[1:]:
        bring(upload)
    assert uploads[0].gather()
    uploads[0].finish()
    assert whole(blobs, BLOB) == CONTENT
    assert committed_offsets(again) == [0, 66, 133]


def test_stripes_that_were_left_go_on_without_a_restart(
    blobs: BlobStore, quarantine: UploadStore
) -> None:
    for upload in open_stripes(quarantine):
        bring(upload)
        upload.close()
        upload.close()
    assert committed_offsets(quarantine) == [66, 133, 200]
    last = open_stripes(quarantine)[2]
    assert last.gather()
    last.finish()
    assert whole(blobs, BLOB) == CONTENT


@pytest.mark.parametrize("offset", [0, 65, 67])
def test_a_gap_or_an_overlap_within_a_stripe_is_refused(
    quarantine: UploadStore, offset: int
) -> None:
    second = open_stripes(quarantine)[1]
    with refusal(Reason.OFFSET_MISMATCH):
        second.append(offset, b"x")
    assert second.append(66, b"x") == 67


def test_more_than_the_stripe_is_refused(quarantine: UploadStore) -> None:
    second = open_stripes(quarantine)[1]
    with refusal(Reason.UPDATE_TOO_LARGE):
        second.append(66, CONTENT[66:134])
    assert committed_offsets(quarantine) == [0, 66, 133]


def test_a_newer_attempt_cuts_off_the_older_one_at_its_own_stripe_alone(
    blobs: BlobStore, quarantine: UploadStore
) -> None:
    uploads = open_stripes(quarantine)
    newer = quarantine.open_stripe(KEY, BLOB, STRIPES[1], owner="node")
    with refusal(Reason.OFFSET_MISMATCH):
        uploads[1].append(66, CONTENT[66:133])
    uploads[1].close()
    for upload in (uploads[0], newer, uploads[2]):
        bring(upload)
    assert newer.gather()
    newer.finish()
    assert whole(blobs, BLOB) == CONTENT


def test_a_stripe_that_was_cut_off_is_not_told_to_finish(quarantine: UploadStore) -> None:
    uploads = open_stripes(quarantine)
    for upload in uploads:
        bring(upload)
    quarantine.open_stripe(KEY, BLOB, STRIPES[0], owner="node")
    with refusal(Reason.OFFSET_MISMATCH):
        uploads[0].gather()


def test_wrong_bytes_are_thrown_away_with_every_stripe(
    blobs: BlobStore, quarantine: UploadStore
) -> None:
    uploads = open_stripes(quarantine)
    for upload in uploads:
        bring(upload, bytes(200))
    assert uploads[0].gather()
    with refusal(Reason.DIGEST_MISMATCH):
        uploads[0].finish()
    assert committed_offsets(quarantine) == [0, 66, 133]
    assert blobs.space.used_bytes == 0


def test_a_discarded_upload_is_gone_for_its_other_stripes(
    blobs: BlobStore, quarantine: UploadStore
) -> None:
    uploads = open_stripes(quarantine)
    bring(uploads[0])
    uploads[0].discard()
    with refusal(Reason.OFFSET_MISMATCH):
        uploads[1].append(66, b"x")
    assert blobs.space.used_bytes == 0


def test_a_full_quota_at_the_end_keeps_every_stripe(
    blobs: BlobStore, quarantine: UploadStore, space: Space
) -> None:
    uploads = open_stripes(quarantine)
    for upload in uploads:
        bring(upload)
    assert uploads[0].gather()
    space.count(900)
    with refusal(Reason.DISK_FULL):
        uploads[0].finish()
    space.give(900)
    assert committed_offsets(quarantine) == [66, 133, 200]
    again = open_stripes(quarantine)[1]
    assert again.gather()
    again.finish()
    assert whole(blobs, BLOB) == CONTENT
    assert blobs.space.used_bytes == 200


def test_the_space_of_every_stripe_is_counted_before_it_comes(
    blobs: BlobStore, quarantine: UploadStore, tmp_path: Path
) -> None:
    open_stripes(quarantine)[0].append(0, b"x")
    assert blobs.space.used_bytes == len(CONTENT) + COUNTS_BYTES
    after_restart = Space(tmp_path, QUOTA_BYTES)
    UploadStore(tmp_path, blobs, after_restart)
    assert after_restart.used_bytes == len(CONTENT) + COUNTS_BYTES


def test_an_owner_that_cuts_its_upload_otherwise_begins_anew(
    blobs: BlobStore, quarantine: UploadStore
) -> None:
    bring(open_stripes(quarantine)[0])
    quarantine.open_stripe(KEY, BLOB, Stripe(0, 2), owner="node")
    assert committed_offsets(quarantine) == [0, 66, 133]
    plain = quarantine.open(KEY, BLOB, owner="node")
    plain.append(0, CONTENT)
    plain.finish()
    assert whole(blobs, BLOB) == CONTENT
    assert blobs.space.used_bytes == len(CONTENT)


def test_abandoned_stripes_expire_and_open_ones_do_not(
    blobs: BlobStore, quarantine: UploadStore
) -> None:
    uploads = open_stripes(quarantine)
    os.utime(uploads[0].path, (1, 1))
    assert quarantine.expire() == 0
    for upload in uploads:
        upload.close()
    os.utime(uploads[0].path, (1, 1))
    assert quarantine.expire() == 1
    assert blobs.space.used_bytes == 0


@pytest.mark.parametrize("damage", [b"", b"short", CONTENT + bytes(5), bytes(200 + 99)])
def test_a_file_that_is_no_such_upload_begins_anew(
    blobs: BlobStore, quarantine: UploadStore, damage: bytes
) -> None:
    uploads = open_stripes(quarantine)
    bring(uploads[0])
    for upload in uploads:
        upload.close()
    uploads[0].path.write_bytes(damage)
    assert committed_offsets(quarantine) == [0, 66, 133]
    uploads = open_stripes(quarantine)
    for upload in uploads:
        bring(upload)
    assert uploads[2].gather()
    uploads[2].finish()
    assert whole(blobs, BLOB) == CONTENT
