import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coordinator.shell.blobs.space import Space
from coordinator.shell.blobs.store import BlobStore
from coordinator.shell.blobs.stripes import StripeUpload
from coordinator.shell.blobs.upload_store import UploadStore
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.statements.assignment import BlobRef
from hypergpu.units import Bytes
from hypergpu.wire.bulk import Stripe

QUOTA_BYTES = 1000
CONTENT = bytes(range(200))
BLOB = BlobRef(digest_of(CONTENT), Bytes(len(CONTENT)))
KEY = "job/1/node/7"
STRIPES = tuple(Stripe(index, 3) for index in range(3))
COUNTS_BYTES = 3 * 8


@pytest.fixture
def space(tmp_path: Path) -> Space:
    return Space(tmp_path, QUOTA_BYTES)


@pytest.fixture
def blobs(tmp_path: Path, space: Space) -> BlobStore:
    return BlobStore(tmp_path, space)


@pytest.fixture
def quarantine(tmp_path: Path, blobs: BlobStore, space: Space) -> UploadStore:
    return UploadStore(tmp_path, blobs, space)


def refusal(reason: Reason) -> pytest.RaisesExc[HyperGPUError]:
    return pytest.RaisesExc(HyperGPUError, check=lambda error: error.reason is reason)


def whole(blobs: BlobStore, blob: BlobRef = BLOB) -> bytes:
    reader = blobs.open(blob.digest)
    content = reader.read(blob.size_bytes + 1)
    reader.close()
    return content


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
    assert whole(blobs) == CONTENT
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
    assert whole(blobs) == CONTENT


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
    assert whole(blobs) == CONTENT
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
    assert whole(blobs) == CONTENT


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
    assert whole(blobs) == CONTENT


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
    assert whole(blobs) == CONTENT
    assert blobs.space.used_bytes == 200


def test_a_declared_size_that_does_not_fit_is_refused_before_a_byte(
    blobs: BlobStore, quarantine: UploadStore
) -> None:
    quarantine.open("first", BlobRef(digest_of(bytes(900)), Bytes(900)))
    with refusal(Reason.DISK_FULL):
        open_stripes(quarantine)
    assert blobs.space.used_bytes == 900


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
    assert whole(blobs) == CONTENT
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
    assert whole(blobs) == CONTENT
