from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from coordinator.shell.blobs.space import Space
from coordinator.shell.blobs.store import BlobStore
from coordinator.shell.blobs.upload_store import UploadStore
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.statements.assignment import BlobRef
from hypergpu.units import Bytes

CONTENT = bytes(range(256)) * 100
BLOB = BlobRef(digest_of(CONTENT), Bytes(len(CONTENT)))


def reopen(folder: Path) -> BlobStore:
    return BlobStore(folder, Space(folder))


def flip(content: bytes) -> bytes:
    return content[:5000] + bytes([content[5000] ^ 1]) + content[5001:]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flipped": flip,
    "truncated": lambda content: content[:-1],
    "emptied": lambda _: b"",
    "grown": lambda content: content + b"!",
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_a_damaged_blob_is_never_served(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "blobs" / BLOB.digest[:2] / BLOB.digest
    reopen(tmp_path).put(CONTENT)
    path.write_bytes(DAMAGES[damage](CONTENT))
    blobs = reopen(tmp_path)
    with capture_logs() as logs:
        for ask in (blobs.open, blobs.path):
            with pytest.raises(HyperGPUError) as caught:
                ask(BLOB.digest)
            assert caught.value.reason is Reason.BLOB_UNKNOWN
    assert [line["event"] for line in logs] == ["a damaged blob is set aside"]
    assert blobs.space.used_bytes == 0


def test_a_damaged_blob_is_kept_aside_and_can_be_stored_again(tmp_path: Path) -> None:
    reopen(tmp_path).put(CONTENT)
    (tmp_path / "blobs" / BLOB.digest[:2] / BLOB.digest).write_bytes(b"damaged")
    blobs = reopen(tmp_path)
    with pytest.raises(HyperGPUError, match="were damaged"):
        blobs.open(BLOB.digest)
    assert [path.read_bytes() for path in (tmp_path / "damaged").iterdir()] == [b"damaged"]
    blobs.put(CONTENT)
    assert blobs.path(BLOB.digest).read_bytes() == CONTENT


def test_blobs_survive_a_restart_with_their_sizes(tmp_path: Path) -> None:
    reopen(tmp_path).put(CONTENT)
    blobs = reopen(tmp_path)
    assert blobs.space.used_bytes == len(CONTENT)
    assert blobs.path(BLOB.digest).read_bytes() == CONTENT


def test_half_written_files_are_gone_after_a_restart(tmp_path: Path) -> None:
    left_over = reopen(tmp_path).work_path("half-written")
    left_over.write_bytes(b"half")
    reopen(tmp_path)
    assert not left_over.exists()


def test_a_durable_blob_is_not_replaced_by_one_that_is_not(tmp_path: Path) -> None:
    blobs = reopen(tmp_path)
    blobs.put(CONTENT)
    before = blobs.path(BLOB.digest).stat().st_ino
    again = blobs.work_path("again")
    again.write_bytes(CONTENT)
    blobs.adopt_unsynced(again, BLOB)
    assert blobs.path(BLOB.digest).stat().st_ino == before


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", BLOB.digest.upper()])
def test_a_name_that_is_no_digest_reaches_no_file(tmp_path: Path, digest: str) -> None:
    blobs = reopen(tmp_path)
    with pytest.raises(HyperGPUError, match="no digest"):
        blobs.open(BlobRef(digest, Bytes(0)).digest)  # type: ignore[arg-type]


def test_a_crash_while_an_upload_becomes_a_blob_loses_nothing(tmp_path: Path) -> None:
    space = Space(tmp_path)
    blobs = BlobStore(tmp_path, space)
    upload = UploadStore(tmp_path, blobs, space).open("key", BLOB)
    upload.append(0, CONTENT)
    # The name that a finished upload has between the quarantine and the blobs.
    upload.path.rename(upload.path.with_name(upload.path.name + ".finished"))
    again = UploadStore(tmp_path, blobs, Space(tmp_path))
    assert again.committed_offset("key") == len(CONTENT)
    assert again.open("key", BLOB).finish() == BLOB


def test_a_collection_can_spare_what_an_earlier_process_stored(tmp_path: Path) -> None:
    reopen(tmp_path).put(CONTENT, keep_s=-1)
    blobs = reopen(tmp_path)
    fresh = blobs.put(b"fresh", keep_s=-1)
    assert blobs.collect(frozenset(), spares_older=True).digests == (fresh.digest,)
    assert blobs.collect(frozenset()).digests == (BLOB.digest,)
