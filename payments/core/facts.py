"""The kinds of journal rows that pay depends on, decoded by schema.

The journal belongs to the coordinator; this module repeats only the fields that pay folds, so the
two packages share no code. Unknown kinds and unknown fields are skipped.
"""

import msgspec

from hypergpu.ids import Digest, JobId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.statements.contribution import Contribution
from hypergpu.statements.domain import Terms
from hypergpu.units import BasisPoints


class BlobName(msgspec.Struct, frozen=True):
    """A blob of the job."""

    digest: Digest


class CreatedFact(msgspec.Struct, frozen=True):
    """Row ``JobCreated``."""

    job_id: JobId
    spec: JobSpec
    terms: Terms
    manifest: BlobName | None = None
    """Description of the job's data."""


class FirstModel(msgspec.Struct, frozen=True):
    """The job's first parameters."""

    blob: BlobName


class InitialisedFact(msgspec.Struct, frozen=True):
    """Row ``ModelInitialised``."""

    model: FirstModel


class ChangedFact(msgspec.Struct, frozen=True):
    """Row ``ParametersChanged``; ``spec`` is the whole result."""

    spec: JobSpec


class MeasuredWork(msgspec.Struct, frozen=True):
    """An accepted update whose quality is final."""

    contribution: Contribution
    signature: bytes
    """The node's signature of the contribution."""
    quality_bps: BasisPoints
    evaluator: str
    """Short name of the measurement."""


class MeasuredFact(msgspec.Struct, frozen=True):
    """Row ``RoundMeasured``: rounds come in ascending order, each once."""

    round: int
    updates: tuple[MeasuredWork, ...]


class EndedFact(msgspec.Struct, frozen=True):
    """Row ``JobEnded``: no round is measured after it."""

    phase: str
    reason: str


Fact = CreatedFact | InitialisedFact | ChangedFact | MeasuredFact | EndedFact

_decoders: dict[str, msgspec.json.Decoder[Fact]] = {
    "JobCreated": msgspec.json.Decoder(CreatedFact),
    "ModelInitialised": msgspec.json.Decoder(InitialisedFact),
    "ParametersChanged": msgspec.json.Decoder(ChangedFact),
    "RoundMeasured": msgspec.json.Decoder(MeasuredFact),
    "JobEnded": msgspec.json.Decoder(EndedFact),
}


def decode(kind: str, body: bytes) -> Fact | None:
    """Decode a journal row; None if pay does not depend on its kind.

    Raises:
        ValueError: The body is not what the kind has.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        return None
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeError) as broken:
        raise ValueError(f"a journal row {kind} cannot be read: {broken}") from broken
