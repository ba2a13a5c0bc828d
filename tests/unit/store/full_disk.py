"""Runs in a process of its own: writes until a file size limit stops it, then goes on without it.

Prints one word a step. Usage: ``full_disk.py journal|blobs|upload FOLDER``.
"""

import resource
import sys
from collections.abc import Callable
from pathlib import Path

from coordinator.shell.store.blobs.store import BlobStore
from coordinator.shell.store.blobs.upload_store import QUARANTINE, UploadStore, upload_name
from coordinator.shell.store.blobs.writing import Space
from coordinator.shell.store.journal.journal import Journal
from coordinator.shell.store.journal.records import Entry
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.ids import JobId
from hypergpu.part_file import PartFile
from hypergpu.units import Bytes

JOB = JobId("job-00000000000a")
LIMIT_BYTES = 300_000
CONTENT = bytes(range(250)) * 2_000


def limit(size_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))


def say(words: str) -> None:
    sys.stdout.write(words + "\n")


def expect_disk_full(write: Callable[[], object]) -> bool:
    try:
        write()
    except HyperGPUError as error:
        say(error.reason.name)
        return True
    return False


def fill_journal(folder: Path) -> None:
    journal = Journal(str(folder / "journal.sqlite3"))
    limit(LIMIT_BYTES)
    count = 0

    def append() -> None:
        journal.append([Entry(JOB, count, count, "RoundRecorded", bytes(20_000))])

    while not expect_disk_full(append):
        count += 1
    expect_disk_full(append)
    limit(resource.RLIM_INFINITY)
    append()
    journal.close()
    reading = Journal(str(folder / "journal.sqlite3")).read(JOB)
    say("whole" if len(reading.entries) == count + 1 and not reading.damage else "damaged")


def fill_blobs(folder: Path) -> None:
    blobs = BlobStore(folder, Space(folder))
    limit(LIMIT_BYTES)
    expect_disk_full(lambda: blobs.put(CONTENT))
    say("empty" if blobs.space.used_bytes == 0 and not any(blobs.files()) else "left over")
    limit(resource.RLIM_INFINITY)
    blob = blobs.put(CONTENT)
    say("whole" if blobs.path(blob.digest).read_bytes() == CONTENT else "damaged")


def fill_upload(folder: Path) -> None:
    space = Space(folder)
    blobs = BlobStore(folder, space)
    blob = BlobRef(digest_of(CONTENT), Bytes(len(CONTENT)))
    uploads, name = UploadStore(folder, blobs, space), upload_name("an upload")
    limit(LIMIT_BYTES)
    expect_disk_full(lambda: uploads.open(name, blob))
    say("empty" if space.used_bytes == 0 else "left over")
    limit(resource.RLIM_INFINITY)
    part = PartFile(folder / QUARANTINE / uploads.open(name, blob).name, blob.size_bytes)
    part.write(0, CONTENT)
    part.close()
    uploads.finish(uploads.seal(name, blob), blob)
    say("whole" if blobs.find(blob.digest) == blob else "damaged")


if __name__ == "__main__":
    fills = {"journal": fill_journal, "blobs": fill_blobs, "upload": fill_upload}
    fills[sys.argv[1]](Path(sys.argv[2]))
