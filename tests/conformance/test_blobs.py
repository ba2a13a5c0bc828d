"""Every store of blobs, and uploads until they are blobs: what counts, and what is refused."""

import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from coordinator.shell.store.blobs.spares import SPARE_BYTES_MIN
from coordinator.shell.store.blobs.store import BlobStore, open_locked
from coordinator.shell.store.blobs.upload_store import (
    QUARANTINE,
    OpenUpload,
    UploadStore,
    upload_name,
)
from coordinator.shell.store.blobs.writing import Space
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.part_file import PartFile
from hypergpu.units import Bytes

QUOTA_BYTES = 1000
CONTENT = bytes(range(200))
BLOB = BlobRef(digest_of(CONTENT), Bytes(len(CONTENT)))
NAME = upload_name("job/1/node/7")


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
    return blobs.path(blob.digest).read_bytes()


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
    for ask in (blobs.path, blobs.sync):
        with pytest.raises(HyperGPUError, match=BLOB.digest) as failure:
            ask(BLOB.digest)
        assert failure.value.reason is Reason.BLOB_UNKNOWN
    assert blobs.size(BLOB.digest) is None


def test_the_same_blob_counts_once(blobs: BlobStore) -> None:
    blobs.put(CONTENT)
    blobs.put(CONTENT)
    blobs.adopt(work_file(blobs, CONTENT), BLOB)
    assert blobs.space.used_bytes == len(CONTENT)


def test_collection_removes_what_is_not_live(blobs: BlobStore) -> None:
    kept_blob = blobs.put(b"kept", keep_s=-1)
    blobs.put(CONTENT, keep_s=-1)
    collection = blobs.collect(frozenset({kept_blob.digest}))
    assert collection.digests == (BLOB.digest,)
    assert collection.freed_bytes == len(CONTENT)
    assert blobs.size(BLOB.digest) is None
    assert whole(blobs, kept_blob) == b"kept"
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
    reader = open_locked(blobs.path(BLOB.digest))
    assert reader is not None
    blobs.collect(frozenset())
    assert reader.read() == CONTENT
    reader.close()


def test_the_quota_refuses_with_its_figures(blobs: BlobStore) -> None:
    blobs.put(bytes(900))
    with pytest.raises(HyperGPUError, match="900 of the quota of 1000") as failure:
        blobs.put(CONTENT)
    assert failure.value.reason is Reason.DISK_FULL
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
        stored_blobs = list(pool.map(blobs.put, contents))
    assert [whole(blobs, blob) for blob in stored_blobs] == contents
    assert blobs.space.used_bytes == 10 + 2 * 10


def bring(tmp_path: Path, upload: OpenUpload, *spans: tuple[int, int]) -> None:
    """Write ranges as a bulk process does."""
    part = PartFile(tmp_path / QUARANTINE / upload.name, upload.size_bytes)
    for start, end in spans:
        part.write(start, CONTENT[start:end])
    part.close()


def missing(uploads: UploadStore, name: str = NAME) -> list[tuple[int, int]]:
    return [(start, end) for start, end in uploads.open(name, BLOB).missing]


def finish(uploads: UploadStore, name: str = NAME) -> None:
    uploads.finish(uploads.seal(name, BLOB), BLOB)


def test_an_upload_becomes_a_blob(
    tmp_path: Path, blobs: BlobStore, quarantine: UploadStore
) -> None:
    pieces: list[bytes] = []
    bring(tmp_path, quarantine.open(NAME, BLOB), (120, 200), (0, 60), (50, 120))
    quarantine.finish(quarantine.seal(NAME, BLOB), BLOB, observe=pieces.append)
    assert b"".join(pieces) == CONTENT
    assert whole(blobs, BLOB) == CONTENT
    assert missing(quarantine) == [(0, 200)]


def test_an_upload_goes_on_after_a_restart(
    tmp_path: Path, blobs: BlobStore, quarantine: UploadStore
) -> None:
    bring(tmp_path, quarantine.open(NAME, BLOB), (0, 50), (100, 120))
    space = Space(tmp_path, QUOTA_BYTES)
    again = UploadStore(tmp_path, blobs, space)
    assert space.used_bytes > 0
    assert missing(again) == [(50, 100), (120, 200)]
    bring(tmp_path, again.open(NAME, BLOB), (50, 200))
    finish(again)
    assert whole(blobs, BLOB) == CONTENT


@pytest.mark.parametrize("is_checked", [False, True])
def test_a_sealed_upload_is_whole_after_a_kill(
    tmp_path: Path, blobs: BlobStore, quarantine: UploadStore, *, is_checked: bool
) -> None:
    bring(tmp_path, quarantine.open(NAME, BLOB), (0, 200))
    sealed_path = quarantine.seal(NAME, BLOB)
    if is_checked:
        os.truncate(sealed_path, BLOB.size_bytes)
    again = UploadStore(tmp_path, blobs, Space(tmp_path, QUOTA_BYTES))
    assert missing(again) == []
    finish(again)
    assert whole(blobs, BLOB) == CONTENT


def test_an_unfinished_upload_is_no_blob(
    tmp_path: Path, blobs: BlobStore, quarantine: UploadStore
) -> None:
    bring(tmp_path, quarantine.open(NAME, BLOB), (0, 199))
    with refusal(Reason.OFFSET_MISMATCH):
        quarantine.seal(NAME, BLOB)
    assert blobs.size(BLOB.digest) is None
    bring(tmp_path, quarantine.open(NAME, BLOB), (199, 200))
    finish(quarantine)


def test_what_nobody_began_is_not_sealed(quarantine: UploadStore) -> None:
    with refusal(Reason.OFFSET_MISMATCH):
        quarantine.seal(NAME, BLOB)


def test_a_sealed_upload_is_under_no_name_that_can_be_written(
    tmp_path: Path, quarantine: UploadStore
) -> None:
    upload = quarantine.open(NAME, BLOB)
    bring(tmp_path, upload, (0, 200))
    quarantine.seal(NAME, BLOB)
    with pytest.raises(FileNotFoundError):
        bring(tmp_path, upload, (0, 1))


def test_wrong_bytes_are_thrown_away(
    tmp_path: Path, blobs: BlobStore, quarantine: UploadStore
) -> None:
    upload = quarantine.open(NAME, BLOB)
    part = PartFile(tmp_path / QUARANTINE / upload.name, BLOB.size_bytes)
    part.write(0, bytes(200))
    part.close()
    with refusal(Reason.DIGEST_MISMATCH):
        finish(quarantine)
    assert blobs.space.used_bytes == 0
    assert missing(quarantine) == [(0, 200)]


def test_a_flaw_that_the_observer_finds_throws_the_bytes_away(
    tmp_path: Path, blobs: BlobStore, quarantine: UploadStore
) -> None:
    def find_flaw(_: bytes) -> None:
        raise HyperGPUError(Reason.UPDATE_NOT_FINITE, "it is not finite")

    bring(tmp_path, quarantine.open(NAME, BLOB), (0, 200))
    with refusal(Reason.UPDATE_NOT_FINITE):
        quarantine.finish(quarantine.seal(NAME, BLOB), BLOB, observe=find_flaw)
    assert blobs.space.used_bytes == 0


def test_a_declared_size_that_does_not_fit_is_refused_before_a_byte(
    blobs: BlobStore, quarantine: UploadStore
) -> None:
    quarantine.open(upload_name("first"), BlobRef(digest_of(bytes(800)), Bytes(800)))
    with refusal(Reason.DISK_FULL):
        quarantine.open(NAME, BLOB)
    assert blobs.space.used_bytes == 800


def test_a_full_quota_at_the_end_keeps_the_upload(
    tmp_path: Path, blobs: BlobStore, quarantine: UploadStore, space: Space
) -> None:
    bring(tmp_path, quarantine.open(NAME, BLOB), (0, 200))
    sealed_path = quarantine.seal(NAME, BLOB)
    space.count(900)
    with refusal(Reason.DISK_FULL):
        quarantine.finish(sealed_path, BLOB)
    space.give(900)
    assert missing(quarantine) == []
    finish(quarantine)
    assert blobs.space.used_bytes == 200


def test_abandoned_uploads_expire_and_others_do_not(
    tmp_path: Path, blobs: BlobStore, quarantine: UploadStore
) -> None:
    abandoned_upload = quarantine.open(upload_name("abandoned"), BLOB)
    bring(tmp_path, abandoned_upload, (0, 50))
    os.utime(tmp_path / QUARANTINE / abandoned_upload.name, (1, 1))
    bring(tmp_path, quarantine.open(NAME, BLOB), (0, 200))
    assert quarantine.expire() == 1
    finish(quarantine)
    assert blobs.space.used_bytes == 200


def test_an_idle_upload_reserves_what_it_stored_until_it_goes_on(
    tmp_path: Path, blobs: BlobStore, quarantine: UploadStore
) -> None:
    upload = quarantine.open(NAME, BLOB)
    assert quarantine.expire(idle_s=60) == 0
    assert blobs.space.used_bytes == 200
    quarantine.expire(idle_s=-1)
    assert blobs.space.used_bytes == 0
    assert quarantine.open(NAME, BLOB).missing == upload.missing
    assert blobs.space.used_bytes == 200
    bring(tmp_path, upload, (0, 200))
    quarantine.expire(idle_s=-1)
    finish(quarantine)
    assert blobs.space.used_bytes == 200


def test_a_sealed_upload_does_not_expire(
    tmp_path: Path, blobs: BlobStore, quarantine: UploadStore
) -> None:
    bring(tmp_path, quarantine.open(NAME, BLOB), (0, 200))
    sealed_path = quarantine.seal(NAME, BLOB)
    os.utime(sealed_path, (1, 1))
    assert quarantine.expire() == 0
    quarantine.finish(sealed_path, BLOB)
    assert whole(blobs, BLOB) == CONTENT


def test_a_sealed_upload_makes_room_for_a_newer_one_of_its_owner(
    tmp_path: Path, blobs: BlobStore, quarantine: UploadStore, space: Space
) -> None:
    first, second = upload_name("first", owner="node"), upload_name("second", owner="node")
    bring(tmp_path, quarantine.open(first, BLOB), (0, 200))
    sealed_path = quarantine.seal(first, BLOB)
    quarantine.open(second, BLOB)
    space.count(700)
    with refusal(Reason.DISK_FULL):
        quarantine.finish(sealed_path, BLOB)
    space.give(700)
    assert not sealed_path.exists()
    assert quarantine.forget(quarantine.owned_uploads(), keeps=()) == 1
    assert blobs.space.used_bytes == 0


def test_an_owner_has_one_upload_at_a_time(
    tmp_path: Path, blobs: BlobStore, quarantine: UploadStore
) -> None:
    first = upload_name("first", owner="node")
    bring(tmp_path, quarantine.open(first, BLOB), (0, 120))
    for owner in ("node", "other"):
        bring(tmp_path, quarantine.open(upload_name("next", owner=owner), BLOB), (0, 50))
    assert blobs.space.used_bytes == 2 * 200
    assert missing(quarantine, upload_name("next", owner="other")) == [(50, 200)]
    assert missing(quarantine, first) == [(0, 200)]


def test_an_owners_upload_is_known_after_a_restart(
    tmp_path: Path, blobs: BlobStore, quarantine: UploadStore
) -> None:
    first = upload_name("first", owner="node")
    bring(tmp_path, quarantine.open(first, BLOB), (0, 120))
    space = Space(tmp_path, QUOTA_BYTES)
    again = UploadStore(tmp_path, blobs, space)
    again.open(upload_name("next", owner="node"), BLOB)
    assert space.used_bytes == 200


def test_uploads_of_owners_that_are_kept_stay(blobs: BlobStore, quarantine: UploadStore) -> None:
    for owner in ("kept", "", "void"):
        quarantine.open(upload_name("an upload", owner=owner), BLOB)
    owned_paths = quarantine.owned_uploads()
    quarantine.open(upload_name("an upload", owner="later"), BLOB)
    assert quarantine.forget(owned_paths, keeps={"kept"}) == 1
    assert blobs.space.used_bytes == 3 * len(CONTENT)


def test_a_writer_sees_that_its_upload_was_forgotten(
    tmp_path: Path, quarantine: UploadStore
) -> None:
    upload = quarantine.open(upload_name("an upload", owner="node"), BLOB)
    part = PartFile(tmp_path / QUARANTINE / upload.name, BLOB.size_bytes)
    assert not part.is_deleted
    quarantine.forget(quarantine.owned_uploads(), keeps=())
    assert part.is_deleted
    part.close()


@pytest.mark.parametrize(
    ("damage", "left"),
    [
        (b"", [(0, 200)]),
        (b"short", [(0, 200)]),
        (CONTENT, [(0, 200)]),
        (CONTENT + bytes(5), [(0, 200)]),
        (CONTENT + bytes(99), [(0, 200)]),
        (CONTENT + bytes(8) + struct.pack(">QQQQ", 0, 1 << 40, 7, 9) + b"torn", [(0, 7), (9, 200)]),
    ],
)
def test_only_records_that_hold_count(
    tmp_path: Path, quarantine: UploadStore, damage: bytes, left: list[tuple[int, int]]
) -> None:
    path = tmp_path / QUARANTINE / quarantine.open(NAME, BLOB).name
    path.write_bytes(damage)
    assert missing(quarantine) == left


def test_a_spare_file_holds_nothing_of_the_upload_that_takes_it(tmp_path: Path) -> None:
    space = Space(tmp_path, 0)
    blobs = BlobStore(tmp_path, space)
    uploads = UploadStore(tmp_path, blobs, space)
    old = blobs.put(bytes(SPARE_BYTES_MIN), keep_s=-1)
    blobs.collect(frozenset())
    assert space.used_bytes == old.size_bytes
    fresh = BlobRef(digest_of(b"other"), old.size_bytes)
    assert uploads.open(NAME, fresh).missing == ((0, old.size_bytes),)
    assert space.used_bytes == old.size_bytes


def test_an_idle_upload_is_reserved_again_before_it_is_fetched(
    blobs: BlobStore, quarantine: UploadStore
) -> None:
    quarantine.open(NAME, BLOB)
    quarantine.expire(idle_s=-1)
    blobs.put(bytes(900))
    with refusal(Reason.DISK_FULL):
        quarantine.reopen(NAME, BLOB)
    with refusal(Reason.OFFSET_MISMATCH):
        quarantine.reopen(upload_name("nobody's"), BLOB)
