"""The model of a fine-tuning as replicas hold it: a base, and the adapter of one of its rounds."""

import msgspec

from hypergpu.blobs import BlobRef
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId
from hypergpu.tensors.layout import Layout
from hypergpu.workloads.entry import OptionValue

LATEST, BEST = "latest", "best"
"""The newest model of a training, and the best that was evaluated."""
SERVED_WORKLOADS = frozenset({"hf-causal-lm"})
"""Workloads whose models write texts."""
TUNED_BASE_FILES_MOST = 50
VERSIONS_KEPT = 2
"""Newest versions that a replica holds, so that an answer can end on the one it began with."""


class TuningSource(msgspec.Struct, frozen=True, kw_only=True):
    """The training whose model is to be served, as its user names it."""

    job: JobId
    which: str = LATEST
    """`LATEST` or `BEST`."""
    round: int | None = None
    """The model after so many rounds, 0: the base; None: the one that ``which`` names."""
    follows: bool = False
    """Whether replicas take the model of each round to come."""

    def check(self) -> None:
        """Check each field against its limits.

        Raises:
            HyperGPUError: REQUEST_INVALID, with the field and what would be right.
        """
        rules = (
            (0 < len(self.job) <= 100, "job", "the id of a training"),
            (self.which in {LATEST, BEST}, "which", f"{LATEST} or {BEST}"),
            (self.round is None or self.round >= 0, "round", "0 or more"),
            (
                not self.follows or (self.round is None and self.which == LATEST),
                "follows",
                f"with the {LATEST} model alone",
            ),
        )
        for is_right, field, rule in rules:
            if not is_right:
                detail = f"{field} of a served training: {rule}"
                raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix=f"change {field}")


def untrained_adapter(layout: Layout) -> bytes:
    """The adapter of a training before its first step, flat: it changes nothing of the base.

    Factors of `SERVED_WORKLOADS` are all that is trained, and the second one is zero at first.
    """
    return bytes(layout.model_bytes)


class ModelVersion(msgspec.Struct, frozen=True):
    """The model of a training after ``round`` rounds."""

    round: int
    blob: BlobRef
    """The adapter as nodes hold models: flat, in layout order."""


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """All that makes a model of a base, beside the base's files."""

    job: JobId
    """The training."""
    workload: str
    options: dict[str, OptionValue]
    layout: BlobRef
    """Layout of the adapter, as JSON."""
    version: ModelVersion
    follows: bool = False
    """Whether further versions come."""

    @property
    def blobs(self) -> tuple[BlobRef, ...]:
        """Blobs that a replica needs beside the base's files."""
        return (self.layout, self.version.blob)


class VersionDelta(msgspec.Struct, frozen=True):
    """A compressed difference between two versions."""

    base: Digest
    """Digest of the version that it leads on from."""
    blob: BlobRef
    codec: str


class VersionOffer(msgspec.Struct, frozen=True):
    """A version that a replica is to take up."""

    version: ModelVersion
    delta: VersionDelta | None = None
    """None: the whole adapter is there."""

    @property
    def blob(self) -> BlobRef:
        """The blob that the replica's node fetches first."""
        return self.version.blob if self.delta is None else self.delta.blob
