"""Files that are there whole or not at all: blobs, their digests, spare files, full disks."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from coordinator.shell.store.blobs.spares import SPARE_BYTES_MIN
from coordinator.shell.store.blobs.store import BlobStore, open_locked
from coordinator.shell.store.blobs.upload_store import QUARANTINE, UploadStore, upload_name
from coordinator.shell.store.blobs.writing import Space
from hypergpu.blobs import BlobRef
from hypergpu.digests import (
    RunningDigest,
    digest_from_wire,
    digest_of,
    digest_of_file,
    digest_to_wire,
    is_digest,
)
from hypergpu.durable import SHARED, fill_durably, write_durably
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.part_file import PartFile
from hypergpu.units import Bytes
from tests.architecture.tree import ROOT, handwritten_files

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
        for ask in (blobs.find, blobs.path):
            with pytest.raises(HyperGPUError) as failure:
                ask(BLOB.digest)
            assert failure.value.reason is Reason.BLOB_UNKNOWN
    assert [line["event"] for line in logs] == ["a damaged blob is set aside"]
    assert blobs.space.used_bytes == 0


def test_a_damaged_blob_is_kept_aside_and_can_be_stored_again(tmp_path: Path) -> None:
    reopen(tmp_path).put(CONTENT)
    (tmp_path / "blobs" / BLOB.digest[:2] / BLOB.digest).write_bytes(b"damaged")
    blobs = reopen(tmp_path)
    with pytest.raises(HyperGPUError, match="were damaged"):
        blobs.path(BLOB.digest)
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
        blobs.path(BlobRef(digest, Bytes(0)).digest)  # type: ignore[arg-type]


def test_a_collection_can_spare_what_an_earlier_process_stored(tmp_path: Path) -> None:
    reopen(tmp_path).put(CONTENT, keep_s=-1)
    blobs = reopen(tmp_path)
    fresh = blobs.put(b"fresh", keep_s=-1)
    assert blobs.collect(frozenset(), spares_older=True).digests == (fresh.digest,)
    assert blobs.collect(frozenset()).digests == (BLOB.digest,)


SIZE_BYTES = SPARE_BYTES_MIN
OLD = b"o" * SIZE_BYTES
NEW = b"n" * SIZE_BYTES
SPARE_BLOB = BlobRef(digest_of(NEW), Bytes(SIZE_BYTES))
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

    def store_blob(self) -> bytes:
        """The new blob."""
        return self.blobs.path(SPARE_BLOB.digest).read_bytes()


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
    reader = open_locked(store.blobs.path(blob.digest))
    assert reader is not None
    store.blobs.collect(frozenset())
    assert not store.blobs.reuse(store.blobs.work_path("over"), SIZE_BYTES)
    assert reader.read() == NEW
    reader.close()


def test_spares_count_as_used_until_room_is_short(tmp_path: Path) -> None:
    store = SpareBench(tmp_path, quota_bytes=SIZE_BYTES + 10)
    assert store.space.used_bytes == SIZE_BYTES
    store.blobs.put(NEW)
    assert store.space.used_bytes == SIZE_BYTES
    assert not store.blobs.reuse(store.blobs.work_path("over"), SIZE_BYTES)


def test_users_files_leave_an_eighth_of_all_space_to_updates(tmp_path: Path) -> None:
    space = Space(tmp_path, 8_000)
    uploads = UploadStore(tmp_path, BlobStore(tmp_path, space), space)
    uploads.open(upload_name("a file"), BlobRef(digest_of(b"a"), Bytes(7_000)))
    with pytest.raises(HyperGPUError, match="1000 of them are kept for jobs") as failure:
        uploads.open(upload_name("another file"), BlobRef(digest_of(b"b"), Bytes(1)))
    assert failure.value.reason is Reason.DISK_FULL
    uploads.open(upload_name("an update", owner="a node"), BlobRef(digest_of(b"c"), Bytes(1_000)))
    assert space.used_bytes == 8_000


def test_an_upload_written_over_an_older_file_becomes_its_own_blob(store: SpareBench) -> None:
    name = upload_name("an upload")
    for start in (HALF, 0):
        upload = store.quarantine.open(name, SPARE_BLOB)
        part = PartFile(store.folder / QUARANTINE / upload.name, upload.size_bytes)
        part.write(start, NEW[start : start + HALF])
        part.close()
    store.quarantine.finish(store.quarantine.seal(name, SPARE_BLOB), SPARE_BLOB)
    assert store.store_blob() == NEW
    assert store.space.used_bytes == SIZE_BYTES
    assert not list((store.folder / QUARANTINE).iterdir())


HOME = Path("hypergpu/durable.py")


def test_a_file_replaces_another_and_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("old")
    write_durably(path, b"new")
    assert path.read_bytes() == b"new"
    assert [each.name for each in tmp_path.iterdir()] == ["key"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_a_crash_left_beside_it_is_taken_away(tmp_path: Path) -> None:
    (tmp_path / ".key.new").write_text("half of i")
    write_durably(tmp_path / "key", b"it", mode=SHARED)
    assert [each.name for each in tmp_path.iterdir()] == ["key"]


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("old")
    (tmp_path / ".key.new").mkdir()
    with pytest.raises(OSError, match="key"):
        write_durably(path, b"new")
    assert path.read_text() == "old"


def test_a_file_that_somebody_else_fills_takes_its_place_whole(tmp_path: Path) -> None:
    def fill(beside: Path) -> None:
        assert not (tmp_path / "end").exists()
        beside.write_text("all")

    fill_durably(tmp_path / "end", fill)
    assert (tmp_path / "end").read_text() == "all"
    assert [each.name for each in tmp_path.iterdir()] == ["end"]


def test_nobody_else_syncs_a_folder_after_a_rename() -> None:
    """Blobs aside, whose files are written over in place."""
    folders = re.compile(r"O_DIRECTORY|os\.open\([^)]*(parent|folder)")
    others = {
        str(path)
        for path in handwritten_files()
        if path.suffix == ".py"
        and path.parts[0] in {"hypergpu", "coordinator", "gpu_node"}
        and "os.fsync" in (text := (ROOT / path).read_text("utf-8"))
        and folders.search(text)
    }
    assert others - {"coordinator/shell/store/blobs/writing.py"} == {str(HOME)}


# The first test vector of the BLAKE3 paper: no input at all.
EMPTY = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def test_a_digest_is_blake3() -> None:
    assert digest_of(b"") == EMPTY


def test_pieces_give_the_digest_of_the_whole() -> None:
    running_digest = RunningDigest()
    for piece in (b"one", bytearray(b"two"), memoryview(b"three")):
        running_digest.update(piece)
    assert running_digest.digest() == digest_of(b"onetwothree")
    assert running_digest.size_bytes == 11


def test_a_file_has_the_digest_of_its_bytes(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10_000
    path = tmp_path / "file"
    path.write_bytes(content)
    assert digest_of_file(path) == digest_of_file(path, threads=3) == digest_of(content)


def test_a_digest_survives_the_wire() -> None:
    assert digest_from_wire(digest_to_wire(digest_of(b"x"))) == digest_of(b"x")


@pytest.mark.parametrize("size", [0, 31, 33])
def test_other_sizes_are_refused_from_the_wire(size: int) -> None:
    with pytest.raises(HyperGPUError, match=f"32 bytes, not {size}") as failure:
        digest_from_wire(bytes(size))
    assert failure.value.reason is Reason.REQUEST_INVALID


@pytest.mark.parametrize("text", ["", EMPTY[:-1], EMPTY.upper(), EMPTY + "\n", "../" + EMPTY[3:]])
def test_text_that_is_no_digest_is_refused(text: str) -> None:
    assert not is_digest(text)


CLONE = Path(__file__).parents[3]


def fill_disk(what: str, folder: Path) -> list[str]:
    script = Path(__file__).with_name("full_disk.py")
    process = subprocess.run(
        [sys.executable, str(script), what, str(folder)],
        cwd=CLONE,
        env={"PYTHONPATH": str(CLONE)},
        capture_output=True,
        text=True,
        check=True,
    )
    return process.stdout.split()


def test_a_journal_that_cannot_grow_refuses_and_recovers_whole(tmp_path: Path) -> None:
    assert fill_disk("journal", tmp_path) == ["DISK_FULL", "DISK_FULL", "whole"]


def test_a_blob_that_does_not_fit_leaves_nothing_and_fits_later(tmp_path: Path) -> None:
    assert fill_disk("blobs", tmp_path) == ["DISK_FULL", "empty", "whole"]


def test_an_upload_that_does_not_fit_on_the_disk_is_refused_before_a_byte(tmp_path: Path) -> None:
    assert fill_disk("upload", tmp_path) == ["DISK_FULL", "empty", "whole"]


def test_the_last_free_bytes_are_left_to_the_journal(tmp_path: Path) -> None:
    with pytest.raises(HyperGPUError, match="are kept free"):
        Space(tmp_path, keep_free_bytes=2**60).take(1)
