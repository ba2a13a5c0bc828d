"""Receipts as a pure fold of a job's journal, and the reward rule.

The same rows give the same receipts on every replay, none twice: a round gives a node a receipt
only if it is after the node's last receipted round. A journal that was cut back, or an older copy
of one, therefore repeats no receipt: receipts that were signed before and are shown again by their
nodes are taken over with `adopt`, and the rounds they cover give nothing a second time.

Farm jobs have no rounds: a receipt's round is the number of the lease of its result, and results
are accepted in another order than they were leased. Served models have none either: the round is
the number of a count of tokens. Each row of an accepted bundle or count gives its receipts when it
is folded. Where a journal is folded anew (`folded_anew`) or receipts are adopted,
leases that receipts may cover give nothing a second time.

Facts are the public events that pay depends on. Of a node's receipts in a job,

    score  = units x quality_bps                        of a receipt; of a training, samples
    worth  = unit_price x total_score // 1,000,000      of all receipts of a node in a job
    delta  = min(worth - earned, free escrow)           allotted when a score is recorded

Scores only grow, and everything is derived from a node's running total, so rounding never adds up
and no order of records changes the end. `hypergpu.journal.worth` and the contract compute the same
numbers.
"""

from collections.abc import Mapping
from typing import NamedTuple, get_args

import msgspec
from msgspec.structs import replace

from hypergpu.ids import Digest, JobId, Keccak, NodeId
from hypergpu.jobfile.spec import JobSpec
from hypergpu.journal.events import (
    JobCreatedEvent,
    JobEndedEvent,
    ModelInitialisedEvent,
    ParametersChangedEvent,
    RoundMeasuredEvent,
    decode_event,
    event_kind,
)
from hypergpu.journal.farm_events import (
    BudgetRaisedEvent,
    BundleAcceptedEvent,
    MapCreatedEvent,
    PartConfirmedEvent,
)
from hypergpu.journal.measured_work import MeasuredWork
from hypergpu.journal.serving_events import ServeCreatedEvent, WindowAcceptedEvent
from hypergpu.journal.worth import samples_for, worth
from hypergpu.ledger_terms import Terms, keccak_of
from hypergpu.statements import Contribution, Receipt, contribution_hash
from hypergpu.units import Samples, Wei
from hypergpu.work_units import WorkUnit

Fact = (
    JobCreatedEvent
    | ModelInitialisedEvent
    | ParametersChangedEvent
    | RoundMeasuredEvent
    | MapCreatedEvent
    | ServeCreatedEvent
    | BundleAcceptedEvent
    | PartConfirmedEvent
    | BudgetRaisedEvent
    | WindowAcceptedEvent
    | JobEndedEvent
)
"""Public events that pay depends on."""
FACT_KINDS = frozenset(event_kind(each) for each in get_args(Fact))


def decode(kind: str, body: bytes) -> Fact | None:
    """Decode a journal row; None if pay does not depend on its kind.

    Raises:
        ValueError: The body is not what the kind has.
    """
    event = decode_event(kind, body) if kind in FACT_KINDS else None
    if not isinstance(event, Fact):
        return None
    if isinstance(event, JobCreatedEvent | ParametersChangedEvent):
        _read_spec(event.spec)
    return event


def _read_spec(spec: Mapping[str, object]) -> JobSpec:
    try:
        return msgspec.convert(spec, JobSpec)
    except msgspec.ValidationError as error:
        raise ValueError(f"a job's description cannot be read: {error}") from error


NO_DIGEST = Digest("0" * 64)


class NodeTally(msgspec.Struct, frozen=True, array_like=True):
    """Receipts of one node in one job."""

    count: int = 0
    total_score: int = 0
    last_round: int = -1
    """Newest round with a receipt; of a farm job the highest lease."""
    samples: int = 0
    """In the job's unit."""
    floor_round: int = -1
    """Leases of a farm job up to this one may have receipts that the fold has not seen."""


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
    """Units of all measured work, with and without a receipt; of a training samples."""
    accepted_bundles: int = 0
    """Bundles of a farm job, or counts of a served model, that were accepted."""
    ended_epochs: int = 0
    """Epochs below this take no more receipts."""
    is_over: bool = False

    @property
    def is_farm(self) -> bool:
        """Whether the job's work has no rounds; an epoch is then a number of accepted bundles."""
        return self.terms.unit is not WorkUnit.SAMPLES

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
        case JobCreatedEvent() | MapCreatedEvent() | ServeCreatedEvent():
            return Folded(state or _initial_state(fact))
        case _ if state is None:
            raise ValueError("the first fact of a job is its creation")
        case ModelInitialisedEvent():
            return Folded(replace(state, model=fact.model.blob.digest))
        case ParametersChangedEvent() | BudgetRaisedEvent():
            return Folded(replace(state, escrow=_changed_escrow(fact)))
        case RoundMeasuredEvent():
            return _fold_round(state, fact)
        case BundleAcceptedEvent() | PartConfirmedEvent() | WindowAcceptedEvent():
            return _fold_bundle(state, fact)
        case JobEndedEvent():
            return Folded(_with_end(state))


def _changed_escrow(fact: ParametersChangedEvent | BudgetRaisedEvent) -> Wei:
    if isinstance(fact, BudgetRaisedEvent):
        return fact.budget
    return Wei(_read_spec(fact.spec).escrow)


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
    adopted_tally = replace(
        tally,
        count=max(tally.count, receipt.sequence + 1),
        total_score=max(tally.total_score, receipt.total_score),
        last_round=max(tally.last_round, receipt.round),
        floor_round=tally.floor_round,
    )
    if state.is_farm and receipt.sequence >= tally.count:
        adopted_tally = replace(adopted_tally, floor_round=max(tally.floor_round, receipt.round))
    if adopted_tally == tally:
        return state
    return replace(state, nodes={**state.nodes, receipt.node: adopted_tally})


def _with_end(state: LedgerState) -> LedgerState:
    turns = state.accepted_bundles if state.is_farm else state.last_round + 1
    ended_epochs = max(state.ended_epochs, -(-turns // state.rounds_per_epoch))
    return replace(state, is_over=True, ended_epochs=ended_epochs)


def _initial_state(fact: JobCreatedEvent | MapCreatedEvent | ServeCreatedEvent) -> LedgerState:
    if isinstance(fact, ServeCreatedEvent):
        return _initial_serve_state(fact)
    if isinstance(fact, MapCreatedEvent):
        return _initial_farm_state(fact)
    spec = _read_spec(fact.spec)
    return LedgerState(
        dataset=fact.manifest.digest if fact.manifest else NO_DIGEST,
        job_id=fact.job_id,
        terms=fact.terms,
        unit_price=Wei(spec.pay.unit_price),
        escrow=Wei(spec.escrow),
        rounds_per_epoch=spec.pay.rounds_per_epoch,
        planned_epochs=-(-spec.training.rounds // spec.pay.rounds_per_epoch),
    )


def _initial_serve_state(fact: ServeCreatedEvent) -> LedgerState:
    """The state of a served model; one of the version before has no receipts."""
    pay = fact.pay
    return LedgerState(
        model=pay.request if pay else NO_DIGEST,
        job_id=fact.job_id,
        terms=fact.terms,
        unit_price=pay.unit_price if pay else Wei(0),
        escrow=pay.budget if pay else Wei(0),
        rounds_per_epoch=pay.windows_per_epoch if pay else 1,
        planned_epochs=1,
    )


def _initial_farm_state(fact: MapCreatedEvent) -> LedgerState:
    pay = fact.pay
    return LedgerState(
        dataset=pay.manifest if pay else NO_DIGEST,
        model=pay.request if pay else NO_DIGEST,
        job_id=fact.job_id,
        terms=fact.terms,
        unit_price=pay.unit_price if pay else Wei(0),
        escrow=pay.budget if pay and pay.unit_price else Wei(0),
        rounds_per_epoch=pay.bundles_per_epoch if pay else 1,
        planned_epochs=1,
    )


def folded_anew(state: LedgerState) -> LedgerState:
    """The state to fold a job's journal with from its beginning, as it is not the one that was
    folded: what has receipts gives none a second time.
    """
    if not state.is_farm:
        return state
    nodes = {
        node: replace(tally, floor_round=tally.last_round) for node, tally in state.nodes.items()
    }
    return replace(state, nodes=nodes, accepted_bundles=0, measured_samples=Samples(0))


def _fold_bundle(
    state: LedgerState, fact: BundleAcceptedEvent | PartConfirmedEvent | WindowAcceptedEvent
) -> Folded:
    nodes, receipts = dict(state.nodes), []
    for work in fact.works:
        contribution = work.contribution
        tally = nodes.get(contribution.node, NodeTally())
        if contribution.job != state.terms.job or contribution.round <= tally.floor_round:
            continue
        receipt = _receipt(work, tally)
        nodes[contribution.node] = NodeTally(
            receipt.sequence + 1,
            receipt.total_score,
            max(tally.last_round, contribution.round),
            tally.samples + contribution.samples,
            tally.floor_round,
        )
        receipts.append(UnsignedReceipt(receipt, contribution, work.signature))
    units = sum(work.contribution.samples for work in fact.works)
    # Votes on a bundle are of its epoch and end none.
    accepted_bundles = state.accepted_bundles + (not isinstance(fact, PartConfirmedEvent))
    state = replace(
        state,
        nodes=nodes,
        accepted_bundles=accepted_bundles,
        measured_samples=Samples(state.measured_samples + units),
        ended_epochs=max(state.ended_epochs, accepted_bundles // state.rounds_per_epoch),
    )
    return Folded(state, tuple(receipts))


def _fold_round(state: LedgerState, fact: RoundMeasuredEvent) -> Folded:
    if fact.round <= state.last_round:
        return Folded(state)
    nodes = dict(state.nodes)
    receipts = []
    for work in fact.updates:
        contribution = work.contribution
        tally = nodes.get(contribution.node, NodeTally())
        if contribution.round <= tally.last_round:
            continue
        receipt = _receipt(work, tally)
        nodes[contribution.node] = NodeTally(
            receipt.sequence + 1,
            receipt.total_score,
            contribution.round,
            tally.samples + contribution.samples,
        )
        receipts.append(UnsignedReceipt(receipt, contribution, work.signature))
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
    contribution = work.contribution
    return Receipt(
        job=contribution.job,
        epoch=contribution.epoch,
        round=contribution.round,
        node=contribution.node,
        sequence=tally.count,
        contribution=Keccak(contribution_hash(contribution).hex()),
        samples=contribution.samples,
        quality_bps=work.quality_bps,
        evaluator=keccak_of(work.evaluator),
        total_score=tally.total_score + work.score,
    )


def funded_samples(
    escrow: Wei, unit_price: Wei, total_score: int, measured_samples: Samples
) -> Samples:
    """Samples, or units, since a job's beginning that its escrow covers, the rest at full quality.

    Args:
        escrow: All that was ever set aside for the job.
        unit_price: Above 0.
        total_score: Of all nodes, by the receipts so far.
        measured_samples: Samples whose quality is known.
    """
    free_escrow = max(0, escrow - worth(unit_price, total_score))
    return Samples(measured_samples + samples_for(unit_price, free_escrow))
