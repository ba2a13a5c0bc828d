"""Whatever is stored, collected and deleted in between, a durable blob has its copy."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.shell.store.blobs.store import BlobStore
from coordinator.shell.store.blobs.writing import Space
from coordinator.shell.store.bulk.bucket import S3Bucket, StoredObject
from coordinator.shell.store.bulk.kept_blobs import KeptBlobs
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.units import Bytes

CONTENT = b"a model"
BLOB = BlobRef(digest_of(CONTENT), Bytes(len(CONTENT)))


class MemoryBucket(S3Bucket):
    """Objects in memory; between a call's steps something else happens."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.interrupt: Callable[[], None] = lambda: None

    def write(self, key: str, path: Path) -> None:
        content = path.read_bytes()
        self.interrupt()
        self.contents[key] = content
        self.interrupt()

    def objects(self) -> list[StoredObject]:
        return [StoredObject(key, 0.0, len(each)) for key, each in self.contents.items()]


class InterruptedBlobs(KeptBlobs):
    """Copies before and after each of which something else happens."""

    def keep(self, blob: BlobRef, path: Path) -> None:
        assert isinstance(self.bucket, MemoryBucket)
        self.bucket.interrupt()
        super().keep(blob, path)
        self.bucket.interrupt()


class Steps:
    """A coordinator whose threads take turns as listed: each step runs within the one before it."""

    def __init__(self, folder: Path, steps: list[str]) -> None:
        self._left = steps
        self._deleting: list[list[str]] = []
        self.bucket = MemoryBucket()
        self.bucket.interrupt = self.take_one
        self.kept = InterruptedBlobs(self.bucket)
        self.blobs = BlobStore(folder, Space(folder), self.kept)

    def take_one(self) -> None:
        """Take the next step, if there is any."""
        if self._left:
            getattr(self, self._left.pop())()

    def take_all(self) -> None:
        """Take all steps that are left, and end what was begun."""
        while self._left:
            self.take_one()
        self.begin_deletion()
        while self._deleting:
            self.end_deletion()

    def pause(self) -> None:
        """Let the step before go on."""

    def put(self) -> None:
        self.blobs.put(CONTENT, keep_s=-1)

    def compute(self) -> None:
        path = self.blobs.work_path(f"fold-{len(self._left)}")
        path.write_bytes(CONTENT)
        self.blobs.adopt_unsynced(path, BLOB, keep_s=-1)

    def sync(self) -> None:
        try:
            self.blobs.sync(BLOB.digest)
        except HyperGPUError:  # It was collected.
            assert self.blobs.size(BLOB.digest) is None

    def collect(self) -> None:
        self.blobs.collect(frozenset())

    def begin_deletion(self) -> None:
        self._deleting.append(self.kept.take_forgotten())

    def sweep(self) -> None:
        self._deleting.append(self.kept.begin_deletion(self.bucket.contents))

    def end_deletion(self) -> None:
        for keys in self._deleting[:1]:
            for key in keys:
                self.bucket.contents.pop(key, None)
            self.kept.end_deletion(keys)
            self._deleting.remove(keys)

    def is_safe(self) -> bool:
        """Whether the blob, where it counts as durable, has a copy."""
        is_here = self.blobs.size(BLOB.digest) is not None
        is_durable = is_here and BLOB.digest not in self.blobs.unsynced_blobs
        return not is_durable or CONTENT in self.bucket.contents.values()


STEPS = ("pause", "put", "compute", "sync", "collect", "begin_deletion", "sweep", "end_deletion")
PUT = ("put", *["pause"] * 4)
"""A whole `put` of a blob without a copy."""


@given(steps=st.lists(st.sampled_from(STEPS), max_size=16))
def test_a_durable_blob_has_a_copy_whatever_is_deleted_meanwhile(steps: list[str]) -> None:
    with TemporaryDirectory() as name:
        steps_taken = Steps(Path(name), steps)
        steps_taken.take_all()
        assert steps_taken.is_safe()


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([*PUT, "put", "collect"], id="before its copy is looked for"),
        pytest.param([*PUT, "put", "pause", "collect"], id="between its copy and its file"),
        pytest.param([*PUT, "collect", *PUT], id="before the deletion begins"),
        pytest.param([*PUT, "collect", "begin_deletion", *PUT], id="while it is deleted"),
        pytest.param(
            [*PUT, "collect", "begin_deletion", "sweep", "end_deletion", *PUT], id="while swept"
        ),
    ],
)
def test_a_blob_that_comes_again_while_it_is_collected_has_a_copy(
    tmp_path: Path, steps: list[str]
) -> None:
    steps_taken = Steps(tmp_path, steps[::-1])
    steps_taken.take_all()
    assert steps_taken.is_safe()
    assert steps_taken.blobs.size(BLOB.digest) == BLOB.size_bytes
