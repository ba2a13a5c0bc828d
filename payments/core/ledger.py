"""Receipts as a pure fold of a job's journal, and the reward rule.

The same rows give the same receipts on every replay, none twice: a round gives a node a receipt
only if it is after the node's last receipted round. A journal that was cut back, or an older copy
of one, therefore repeats no receipt: receipts that were signed before and are shown again by their
nodes are taken over with `adopt`, and the rounds they cover give nothing a second time.

The journal belongs to the coordinator; only the fields that pay folds are repeated here, so the two
packages share no code. Unknown kinds and unknown fields are skipped. Of a node's receipts in a job,

    score  = samples x quality_bps                      of a receipt
    worth  = unit_price x total_score // 1,000,000      of all receipts of a node in a job
    delta  = min(worth - earned, free escrow)           allotted when a score is recorded

Scores only grow, and everything is derived from a node's running total, so rounding never adds up
and no order of records changes the end. The contract computes the same numbers.
"""

from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from hypergpu.ids import Digest, JobId, Keccak, NodeId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.ledger_terms import Terms, keccak_of
from hypergpu.statements import WHOLE_BPS, Contribution, Receipt, contribution_hash
from hypergpu.units import BasisPoints, Samples, Wei


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
FACT_KINDS = frozenset(_decoders)
"""Kinds of journal rows that pay depends on."""


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


NO_DIGEST = Digest("0" * 64)


class NodeTally(msgspec.Struct, frozen=True, array_like=True):
    """Receipts of one node in one job."""

    count: int = 0
    total_score: int = 0
    last_round: int = -1
    """Newest round with a receipt."""
    samples: int = 0


class LedgerState(msgspec.Struct, frozen=True, kw_only=True):
    """Pay of one job, as far as its journal was folded."""

    job_id: JobId
    terms: Terms
    unit_price: Wei
    escrow: Wei
    """As the job states it now."""
    rounds_per_epoch: int
    planned_epochs: int
    dataset: Digest = NO_DIGEST
    """Digest of the description of the job's data."""
    model: Digest = NO_DIGEST
    """Digest of the job's first model, once there is one."""
    nodes: dict[NodeId, NodeTally] = {}
    last_round: int = -1
    """Newest measured round."""
    measured_samples: Samples = Samples(0)
    """Samples of all measured updates, with and without a receipt."""
    ended_epochs: int = 0
    """Epochs below this take no more receipts."""
    is_over: bool = False

    @property
    def total_score(self) -> int:
        """Sum of all nodes' total scores."""
        return sum(tally.total_score for tally in self.nodes.values())


class UnsignedReceipt(NamedTuple):
    """A receipt that the coordinator has to sign."""

    receipt: Receipt
    contribution: Contribution
    contribution_signature: bytes


class Folded(NamedTuple):
    """Result of folding one row."""

    state: LedgerState
    receipts: tuple[UnsignedReceipt, ...] = ()


def fold(state: LedgerState | None, fact: Fact) -> Folded:
    """Fold one row of a job's journal.

    Args:
        state: None before the job's first row.
        fact: The next row that pay depends on.

    Raises:
        ValueError: The job's first fact is not its creation.
    """
    match fact:
        case CreatedFact():
            return Folded(state or _initial_state(fact))
        case _ if state is None:
            raise ValueError("the first fact of a job is its creation")
        case InitialisedFact():
            return Folded(replace(state, model=fact.model.blob.digest))
        case ChangedFact(spec=spec):
            return Folded(replace(state, escrow=Wei(spec.escrow)))
        case MeasuredFact():
            return _fold_round(state, fact)
        case EndedFact():
            ended = -(-(state.last_round + 1) // state.rounds_per_epoch)
            return Folded(replace(state, is_over=True, ended_epochs=max(state.ended_epochs, ended)))


def adopt(state: LedgerState, receipt: Receipt) -> LedgerState:
    """Take over a receipt that this coordinator signed and its journal no longer knows.

    Idempotent, and independent of the order of receipts.

    Args:
        state: The job's pay.
        receipt: One whose signatures were checked against the job's terms.
    """
    if receipt.job != state.terms.job:
        return state
    tally = state.nodes.get(receipt.node, NodeTally())
    adopted = replace(
        tally,
        count=max(tally.count, receipt.sequence + 1),
        total_score=max(tally.total_score, receipt.total_score),
        last_round=max(tally.last_round, receipt.round),
    )
    if adopted == tally:
        return state
    return replace(state, nodes={**state.nodes, receipt.node: adopted})


def _initial_state(fact: CreatedFact) -> LedgerState:
    spec = fact.spec
    return LedgerState(
        dataset=fact.manifest.digest if fact.manifest else NO_DIGEST,
        job_id=fact.job_id,
        terms=fact.terms,
        unit_price=Wei(spec.pay.unit_price),
        escrow=Wei(spec.escrow),
        rounds_per_epoch=spec.pay.rounds_per_epoch,
        planned_epochs=-(-spec.training.rounds // spec.pay.rounds_per_epoch),
    )


def _fold_round(state: LedgerState, fact: MeasuredFact) -> Folded:
    if fact.round <= state.last_round:
        return Folded(state)
    nodes = dict(state.nodes)
    receipts = []
    for work in fact.updates:
        made = work.contribution
        tally = nodes.get(made.node, NodeTally())
        if made.round <= tally.last_round:
            continue
        receipt = _receipt(work, tally)
        nodes[made.node] = NodeTally(
            receipt.sequence + 1,
            receipt.total_score,
            made.round,
            tally.samples + made.samples,
        )
        receipts.append(UnsignedReceipt(receipt, made, work.signature))
    samples = sum(work.contribution.samples for work in fact.updates)
    state = replace(
        state,
        nodes=nodes,
        last_round=fact.round,
        measured_samples=Samples(state.measured_samples + samples),
        ended_epochs=max(state.ended_epochs, (fact.round + 1) // state.rounds_per_epoch),
    )
    return Folded(state, tuple(receipts))


def _receipt(work: MeasuredWork, tally: NodeTally) -> Receipt:
    made = work.contribution
    return Receipt(
        job=made.job,
        epoch=made.epoch,
        round=made.round,
        node=made.node,
        sequence=tally.count,
        contribution=Keccak(contribution_hash(made).hex()),
        samples=made.samples,
        quality_bps=work.quality_bps,
        evaluator=keccak_of(work.evaluator),
        total_score=tally.total_score + made.samples * work.quality_bps,
    )


PRICED_SCORE = 1_000_000
"""The score that a job's unit price is for: a hundred samples of full quality."""
_SAMPLES_PRICED = PRICED_SCORE // WHOLE_BPS


def worth(unit_price: Wei, total_score: int) -> Wei:
    """Amount that a node has earned with a total score, rounded down."""
    return Wei(unit_price * total_score // PRICED_SCORE)


def funded_samples(
    escrow: Wei, unit_price: Wei, total_score: int, measured_samples: Samples
) -> Samples:
    """Samples since a job's beginning that its escrow covers, the rest at full quality.

    Args:
        escrow: All that was ever set aside for the job.
        unit_price: Above 0.
        total_score: Of all nodes, by the receipts so far.
        measured_samples: Samples whose quality is known.
    """
    left = max(0, escrow - worth(unit_price, total_score))
    return Samples(measured_samples + left * _SAMPLES_PRICED // unit_price)
