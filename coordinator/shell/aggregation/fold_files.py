"""What a fold is asked and answers, and its files: digested while they are read or written, in a
fixed ring of buffers, on a thread beside the arithmetic. Knows no arithmetic.

Files that are digested while they are read or written, a span at a time, beside the arithmetic.

Memory is a fixed ring of buffers. Hashing and writing happen on a thread of the ring's own, in
order; NumPy, BLAKE3 and file calls all release the interpreter lock, so they overlap with the
arithmetic.
"""

import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np

from coordinator.core.training.trust.weights import WHOLE
from hypergpu.crypto import RunningDigest
from hypergpu.ids import Digest
from hypergpu.jobfile.spec import Outer
from hypergpu.tensors.codec import update_bytes
from hypergpu.tensors.layout import Float32s, Layout, Octets
from hypergpu.units import Bytes, are, several

Reuse = Callable[[Path, int], bool]
"""Puts a file of exactly that size at that path, to be written over; False when it has none."""


class StoredBlob(msgspec.Struct, frozen=True):
    """A file and the digest that its bytes should have."""

    path: Path
    digest: Digest


class StoredUpdate(msgspec.Struct, frozen=True):
    """An accepted update and its weight in the mean."""

    path: Path
    digest: Digest
    weight: int
    """Weight against the others; an update of none is omitted."""
    codec: str
    """How it is encoded; the updates of one round may differ."""
    clip: int = WHOLE
    """What it is multiplied by besides, in 1/65,536."""


class FoldRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One outer step to take."""

    layout: Layout
    down: str
    """Codec of the delta; with fp32 there is none."""
    outer: Outer
    """Nesterov SGD's learning rate and momentum, or a plain step."""
    scale: float = 1.0
    """Multiplies the mean pseudo-gradient, not the statistics (FedNova's factor)."""
    base_model: StoredBlob
    outer_state: StoredBlob | None
    """None before the first outer step, or when the step before left none."""
    updates: tuple[StoredUpdate, ...]
    """In slot order."""
    output_dir: Path
    """On the file system of the blob store, so that adopting a file is a rename."""


class FoldedFile(msgspec.Struct, frozen=True):
    """A file that the fold wrote under a name of its own; not synced yet."""

    path: Path
    digest: Digest
    size_bytes: Bytes


class OmittedUpdate(msgspec.Struct, frozen=True):
    """An update that is not in the sum."""

    index: int
    """Its place in `FoldRequest.updates`."""
    reason: str


class FoldResult(msgspec.Struct, frozen=True, kw_only=True):
    """The next model and what belongs to it. The caller adopts or deletes the files."""

    model: FoldedFile
    outer_state: FoldedFile | None
    delta: FoldedFile | None
    omitted: tuple[OmittedUpdate, ...] = ()

    @property
    def files(self) -> tuple[FoldedFile, ...]:
        """Every file that was written."""
        return tuple(file for file in (self.model, self.outer_state, self.delta) if file)


class FoldError(Exception):
    """The fold cannot be done. Nothing is left in the output directory."""


class NoUpdatesError(FoldError):
    """No update is left to fold."""

    def __init__(self, omitted: tuple[OmittedUpdate, ...]) -> None:
        reasons = "; ".join(f"update {each.index}: {each.reason}" for each in omitted)
        super().__init__(f"no update is left to fold: {reasons or 'none was given'}")
        self.omitted = omitted


class BaseDamagedError(FoldError):
    """The base model or the outer state is missing or does not have its digest."""

    def __init__(self, blob: StoredBlob, reason: str) -> None:
        super().__init__(f"{blob.path.name}: {reason}")
        self.blob = blob


class DivergedError(FoldError):
    """The outer step left float32's range: the next model would not be finite."""


_CATCH_UP_BYTES = 1 << 20


class Buffer:
    """One buffer of a ring and the queued work that still needs it."""

    def __init__(self, thread: ThreadPoolExecutor | None, size_bytes: int) -> None:
        self._thread = thread
        self._octets = np.empty(size_bytes, np.uint8)
        self._pending: list[Future[None]] = []

    def octets(self, count: int) -> Octets:
        """The buffer's first bytes."""
        return self._octets[:count]

    def floats(self, count: int) -> Float32s:
        """The buffer's first bytes as float32 values."""
        return self._octets[: 4 * count].view(np.float32)

    def queue(self, work: Callable[[], None]) -> None:
        """Queue work that needs the buffer unchanged; without a thread, do it now."""
        if self._thread is None:
            work()
        else:
            self._pending.append(self._thread.submit(work))

    def wait(self) -> None:
        """Wait for the buffer's work; raises what it raised."""
        pending, self._pending = self._pending, []
        for work in pending:
            work.result()


class BufferRing:
    """Buffers taken in turn, and the thread that works on their content.

    A buffer stays untouched until as many more have been taken as the ring has.
    """

    def __init__(self, count: int, buffer_bytes: int, *, has_thread: bool = True) -> None:
        """Allocate the memory. Without a thread the caller's own one does the work."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fold") if has_thread else None
        self._buffers = [Buffer(self._thread, buffer_bytes) for _ in range(count)]
        self._next = 0

    def take(self) -> Buffer:
        """The buffer that was taken longest ago, once its work is done."""
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        buffer.wait()
        return buffer

    def drain(self) -> None:
        """Wait for all queued work; raises the first error of it."""
        for buffer in self._buffers:
            buffer.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)


class InputError(Exception):
    """A file could not be read as expected."""

    def __init__(self, file: "InputFile", reason: str) -> None:
        super().__init__(reason)
        self.file = file
        self.reason = reason


class InputFile:
    """A file of known size and digest. It is opened for each read: a fold may name thousands."""

    def __init__(self, path: Path, digest: Digest) -> None:
        self._path = path
        self._digest = digest
        self._running = RunningDigest()
        self._covered_bytes = 0
        self.is_digested = True
        """Whether what is read is digested; else somebody else does."""
        self.size_bytes = 0

    def check_size(self, *sizes: int) -> None:
        """Look at its size, in bytes; before any read.

        Raises:
            InputError: It cannot be read or has none of ``sizes``.
        """
        try:
            self.size_bytes = self._path.stat().st_size
        except OSError as error:
            raise InputError(self, f"it cannot be read: {error.strerror}") from error
        if self.size_bytes not in sizes:
            expected = " or ".join(str(size) for size in sizes)
            raise InputError(self, f"it has {self.size_bytes} bytes on disk, not {expected}")

    def read(self, buffer: Buffer, offset: int, count: int) -> Octets:
        """Read ``count`` bytes; what follows the part already digested is digested on the way."""
        octets = buffer.octets(count)
        self._fill(octets, offset)
        if self.is_digested and offset == self._covered_bytes:
            self._covered_bytes += count
            buffer.queue(lambda: self._running.update(octets.data))
        return octets

    def check_digest(self) -> None:
        """Digest what was not read in order, then compare. The ring must be drained.

        Raises:
            InputError: The digest is another.
        """
        scratch = np.empty(_CATCH_UP_BYTES, np.uint8)
        while self._covered_bytes < self.size_bytes:
            piece = scratch[: self.size_bytes - self._covered_bytes]
            self._fill(piece, self._covered_bytes)
            self._running.update(piece.data)
            self._covered_bytes += piece.size
        if self._running.digest() != self._digest:
            raise InputError(self, "its bytes on disk do not have its digest")

    def _fill(self, octets: Octets, offset: int) -> None:
        try:
            with self._path.open("rb", buffering=0) as file:
                file.seek(offset)
                filled = 0
                while filled < octets.size:
                    count = file.readinto(octets[filled:].data)
                    if not count:
                        raise InputError(self, "it became shorter while it was read")
                    filled += count
        except OSError as error:
            raise InputError(self, f"it cannot be read: {error.strerror}") from error


class OutputFile:
    """A new file under a name of its own. Its digest is taken as it is written."""

    def __init__(self, path: Path, on_failure: ExitStack) -> None:
        """Open it, also one that is to be written over from end to end.

        Unwinding ``on_failure``, once its ring is idle, deletes it.
        """
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._path = path
        self._running = RunningDigest()
        self._covered_bytes = 0
        self._size_bytes = 0
        on_failure.callback(self._discard)

    def write(self, buffer: Buffer, offset: int, octets: Octets) -> None:
        """Queue a write of a buffer's bytes at any offset. Every byte must come once."""
        is_next = offset == self._covered_bytes
        self._covered_bytes += octets.size if is_next else 0
        self._size_bytes = max(self._size_bytes, offset + octets.size)
        buffer.queue(lambda: self._store(octets, offset, self._running if is_next else None))

    def close(self) -> FoldedFile:
        """Close the file and name it; not synced. The ring must be drained."""
        while self._covered_bytes < self._size_bytes:
            piece = os.pread(self._descriptor, _CATCH_UP_BYTES, self._covered_bytes)
            self._running.update(piece)
            self._covered_bytes += len(piece)
        os.close(self._descriptor)
        self._descriptor = -1
        return FoldedFile(self._path, self._running.digest(), self._running.size_bytes)

    def _discard(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._path.unlink(missing_ok=True)

    def _store(self, octets: Octets, offset: int, running: RunningDigest | None) -> None:
        stored = 0
        while stored < octets.size:
            stored += os.pwrite(self._descriptor, octets[stored:].data, offset + stored)
        if running is not None:
            running.update(octets.data)


class DamagedUpdatesError(Exception):
    """Some updates cannot be part of the sum."""

    def __init__(self, omitted: tuple[OmittedUpdate, ...]) -> None:
        super().__init__(f"{several(len(omitted), 'update')} {are(len(omitted))} damaged")
        self.omitted = omitted


class FoldInputs:
    """Base model, outer state and the updates that are kept, in slot order."""

    def __init__(self, request: FoldRequest, kept: Sequence[int]) -> None:
        self._request = request
        self._kept = kept
        self.base = InputFile(request.base_model.path, request.base_model.digest)
        state = request.outer_state
        self.state = InputFile(state.path, state.digest) if state else None
        updates = [request.updates[index] for index in kept]
        self.updates = [InputFile(update.path, update.digest) for update in updates]
        self.weights = [update.weight for update in updates]
        self.clips = [update.clip for update in updates]
        self.codecs = [update.codec for update in updates]

    @property
    def has_parameters(self) -> bool:
        """Whether the outer state holds the exact parameters: nodes hold something else."""
        return self.state is not None and self._request.down != "fp32"

    @property
    def has_momentum(self) -> bool:
        """Whether the outer state holds momentum, which it does not after a step without any."""
        return self.state is not None and self.state.size_bytes > self.momentum_start

    @property
    def momentum_start(self) -> int:
        """Where momentum begins in the outer state."""
        return 4 * self._request.layout.parameters_count if self.has_parameters else 0

    def check_sizes(self) -> None:
        """Look at every size before anything is read.

        Raises:
            BaseDamagedError: The base or the outer state is missing or has another size.
            DamagedUpdatesError: Some updates do.
        """
        layout = self._request.layout
        vector_bytes = 4 * layout.parameters_count
        sizes: dict[InputFile, tuple[int, ...]] = {self.base: (layout.model_bytes,)}
        if self.state is not None:
            both = 2 * vector_bytes if self.has_parameters else vector_bytes
            sizes[self.state] = (vector_bytes, both)
        for update, codec in zip(self.updates, self.codecs, strict=True):
            sizes[update] = (update_bytes(layout, codec),)
        self._check(lambda file: file.check_size(*sizes[file]))

    def skip_digests(self) -> None:
        """Digest nothing of what is read from now on."""
        for file in (self.base, *([self.state] if self.state else ()), *self.updates):
            file.is_digested = False

    def check_digests(self) -> None:
        """Compare every digest once everything is read; errors as `check_sizes`."""
        self._check(InputFile.check_digest)

    def raise_damaged(self, errors: Sequence[InputError]) -> None:
        """Raise the meaning of failed reads; a damaged base comes before damaged updates."""
        reasons = {error.file: error.reason for error in errors}
        for file, blob in (
            (self.base, self._request.base_model),
            (self.state, self._request.outer_state),
        ):
            if file in reasons and blob is not None:
                raise BaseDamagedError(blob, reasons[file])
        omitted = tuple(
            OmittedUpdate(index, reasons[update])
            for index, update in zip(self._kept, self.updates, strict=True)
            if update in reasons
        )
        if omitted:
            raise DamagedUpdatesError(omitted)

    def _check(self, check: Callable[[InputFile], None]) -> None:
        errors: list[InputError] = []
        for file in (self.base, *([self.state] if self.state else ()), *self.updates):
            try:
                check(file)
            except InputError as error:
                errors.append(error)
        self.raise_damaged(errors)


class SharedOutput(OutputFile):
    """Part of a file that others write parts of, too. It is there, and nobody digests it here."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, ExitStack())

    def write(self, buffer: Buffer, offset: int, octets: Octets) -> None:
        """Queue a write of a buffer's bytes at any offset."""
        buffer.queue(lambda: self._store(octets, offset, None))

    def release(self) -> None:
        """Close the file. The ring must be drained."""
        os.close(self._descriptor)


def output_sizes(request: FoldRequest) -> dict[str, int]:
    """Bytes of each file that a fold writes, by its name in `FoldResult`.

    Nodes that fetch whole models hold the exact parameters, so that neither a delta nor a second
    copy of the parameters is of use; and no momentum is kept where none is applied.
    """
    layout, has_parameters = request.layout, request.down != "fp32"
    vectors = has_parameters + (request.outer.momentum != 0)
    sizes: dict[str, int] = {"model": layout.model_bytes}
    if vectors:
        sizes["outer_state"] = 4 * layout.parameters_count * vectors
    if has_parameters:
        sizes["delta"] = update_bytes(layout, request.down)
    return sizes


def work_path(folder: Path) -> Path:
    """A path that nobody has."""
    return folder / f"fold-{secrets.token_hex(8)}.tmp"


class FoldOutputs:
    """The next model and, where the settings call for them, its outer state and its delta."""

    def __init__(self, request: FoldRequest, create: Callable[[str, int], OutputFile]) -> None:
        """Open them.

        Args:
            request: What is folded.
            create: Opens the file of a name in `output_sizes`, of so many bytes.
        """
        self.has_momentum = request.outer.momentum != 0
        has_parameters = request.down != "fp32"
        self.momentum_start = 4 * request.layout.parameters_count if has_parameters else 0
        sizes = output_sizes(request)
        self.model = create("model", sizes["model"])
        self.state = create("outer_state", sizes["outer_state"]) if "outer_state" in sizes else None
        self.delta = create("delta", sizes["delta"]) if "delta" in sizes else None

    def close(self) -> FoldResult:
        """Close and name all of them. Nothing may be queued any more."""
        return FoldResult(
            model=self.model.close(),
            outer_state=self.state.close() if self.state else None,
            delta=self.delta.close() if self.delta else None,
        )
