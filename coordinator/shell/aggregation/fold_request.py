"""What a fold is asked and answers, and the errors that end it."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from coordinator.core.training.trust.weights import WHOLE
from hypergpu.ids import Digest
from hypergpu.jobfile.spec import Outer
from hypergpu.tensors.layout import Layout
from hypergpu.units import Bytes

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
