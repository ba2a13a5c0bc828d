"""Counts of tokens: numbered once, signed once, paid once, and bounded by a budget."""

from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.ours.metering.host import COORDINATOR
from coordinator.core.serving.budget import spent_reason, units_most
from coordinator.core.serving.commands import RequestSignature
from coordinator.core.serving.counting import UNSIGNED_MOST
from coordinator.core.serving.events import (
    CountsClosed,
    SettlementDue,
    WindowAccepted,
    WindowCounted,
    WindowRefused,
)
from coordinator.core.serving.kind import SERVING
from coordinator.core.serving.state import ServeJob, ServePhase
from coordinator.core.work import work_events
from coordinator.core.work.funding import Funding
from coordinator.core.work.work_commands import AssignWork, WriteRecord
from coordinator.core.work.work_events import JobEnded
from hypergpu.assignment import Lease
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.ids import NodeId
from hypergpu.ledger_terms import Domain, terms_of
from hypergpu.packed_work import pack_work
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.stage_work import STAGE_KIND, ModelCut, span_blobs
from hypergpu.serving.calls import ModelCall
from hypergpu.serving.serve_request import COUNT_KIND, SignedCount
from hypergpu.token_counts import TokenCount, chain_digest, first_link, next_link
from hypergpu.units import Milliseconds, Wei
from hypergpu.work_units import WorkUnit
from tests.kinds.serving.walk import BASE, created_model, signed_window, walk_by_seed
from tests.unit.job_states import ALICE, BOB

LATER = Milliseconds(10)
PRICE = Wei(100)
LAYERS = 9


def model_with(*nodes: NodeId, budget: int = 0) -> ServeJob:
    """A model on nodes; its 100 tokens cost 100 where there is a budget."""
    price = PRICE if budget else Wei(0)
    creation = created_model(
        has_receipts=True, replicas=len(nodes), unit_price=price, budget=Wei(budget)
    )
    job: ServeJob = SERVING.transition(None, creation).job
    for node in nodes:
        job = SERVING.transition(job, work_events.NodeJoined(at_ms=LATER, node=node)).job
    return job


def ring_model(unit: WorkUnit, **request: Any) -> ServeJob:
    """A model of nine layers that is to be held in stages, with a node."""
    cut = ModelCut(layers=LAYERS, hidden_size=4, layer_bytes=1, end_bytes=1, stages=2)
    names = span_blobs(LayerSpan(0, LAYERS), LAYERS)
    (blob,) = BASE.values()
    creation = created_model(
        files=dict.fromkeys(names, blob), engine=STAGE_KIND, cut=cut, unit=unit, **request
    )
    terms = terms_of(COORDINATOR.address, creation.job_id, Domain(), unit)
    job: ServeJob = SERVING.transition(None, replace(creation, terms=terms)).job
    job = SERVING.transition(job, work_events.NodeJoined(at_ms=LATER, node=ALICE)).job
    return replace(job, next_lease=2)


def count_event(job: ServeJob, node: NodeId, tokens: int = 100) -> WindowCounted:
    """The event of a count of new tokens."""
    lease = job.leases[node].lease if node in job.leases else 1
    return WindowCounted(
        at_ms=LATER,
        node=node,
        lease=lease,
        count=TokenCount(0, tokens, 1),
        answers=digest_of(b"answers"),
        salt="00",
    )


@pytest.mark.parametrize("seed", range(60))
def test_each_count_is_accepted_or_refused_once_and_the_job_ends_when_all_are(seed: int) -> None:
    walk = walk_by_seed(seed)
    counts = [event for event in walk.journal if isinstance(event, WindowCounted)]
    acceptances = [event for event in walk.journal if isinstance(event, WindowAccepted)]
    refusals = [event for event in walk.journal if isinstance(event, WindowRefused)]
    last = walk.jobs[-1]
    numbers = [event.window for event in acceptances]
    assert len(set(numbers)) == len(numbers)
    assert last.paid_units == sum(event.units for event in acceptances)
    assert len(counts) == len(acceptances) + len(refusals) + len(last.windows)
    ends = [event for event in walk.journal if isinstance(event, JobEnded)]
    assert len(ends) == (last.phase is ServePhase.STOPPED)
    assert not ends or not last.windows
    assert not counts or last.has_receipts


def test_a_count_counts_once_its_node_has_signed_it() -> None:
    job = model_with(ALICE)
    step = SERVING.transition(job, count_event(job, ALICE))
    assert step.commands == (RequestSignature(1),)
    assert SERVING.outstanding(step.job)[-1] == RequestSignature(1)
    event = signed_window(step.job, 1, step.job.windows[1])
    step = SERVING.transition(step.job, event)
    ((record,),) = [[each.record for each in step.commands]]
    assert (record.units, record.works[0].contribution.round) == (100, 1)
    assert step.job.paid_units == 100
    assert "no count 1 to sign" in SERVING.rejection(step.job, event)


def test_a_result_that_is_in_already_is_no_event_and_another_node_s_is_refused() -> None:
    assert SERVING.packed is not None
    job = model_with(ALICE, BOB)
    job = SERVING.transition(job, count_event(job, ALICE)).job
    lease, result = Lease(job.job_id, 1, 1), pack_work(COUNT_KIND, SignedCount(100))
    with pytest.raises(HyperGPUError, match="has no count 1"):
        SERVING.packed.result_event(job, BOB, lease, result)
    assert SERVING.packed.result_event(job, ALICE, lease, result) is not None
    job = SERVING.transition(job, signed_window(job, 1, job.windows[1])).job
    assert SERVING.packed.result_event(job, ALICE, lease, result) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"count": TokenCount(0, 0, 1)}, "at least one unit"),
        ({"count": TokenCount(-8, 100, 1)}, "no negative tokens"),
        ({"lease": 9}, "never had lease 9"),
        ({"node": BOB}, "never had lease"),
    ],
)
def test_a_count_of_nothing_or_of_nobody_is_refused(
    changes: dict[str, object], reason: str
) -> None:
    job = model_with(ALICE)
    assert reason in SERVING.rejection(job, replace(count_event(job, ALICE), **changes))


def test_a_node_that_signs_nothing_loses_its_replica_and_its_oldest_count() -> None:
    job = model_with(ALICE)
    job = SERVING.transition(job, work_events.NodeJoined(at_ms=LATER, node=BOB)).job
    for _ in range(UNSIGNED_MOST):
        job = SERVING.transition(job, count_event(job, ALICE)).job
    step = SERVING.transition(job, count_event(job, ALICE))
    records = [each.record for each in step.commands if isinstance(each, WriteRecord)]
    assert [type(each) for each in records] == [WindowRefused]
    assert 1 not in step.job.windows
    assert list(step.job.leases) == [BOB]
    assert "not signed" in step.job.members[ALICE].exclusion
    assert any(isinstance(each, AssignWork) for each in step.commands)


def test_a_model_that_is_stopped_ends_once_its_last_counts_are_signed() -> None:
    job = model_with(ALICE)
    number = job.next_window
    event = count_event(job, ALICE)
    job = SERVING.transition(job, work_events.JobStopped(at_ms=LATER)).job
    assert (job.phase, job.leases) == (ServePhase.SETTLING, {})
    assert not SERVING.is_complete(job)
    job = SERVING.transition(job, event).job
    job = SERVING.transition(job, CountsClosed(at_ms=LATER)).job
    assert job.phase is ServePhase.SETTLING
    step = SERVING.transition(job, signed_window(job, number, job.windows[number]))
    assert step.job.phase is ServePhase.STOPPED
    kinds = [type(each.record) for each in step.commands]
    assert kinds == [WindowAccepted, JobEnded]


def test_counts_that_nobody_signs_are_given_up_and_the_job_ends() -> None:
    job = model_with(ALICE)
    job = SERVING.transition(job, count_event(job, ALICE)).job
    job = SERVING.transition(job, work_events.JobStopped(at_ms=LATER)).job
    step = SERVING.transition(job, SettlementDue(at_ms=LATER))
    assert [type(each.record) for each in step.commands] == [WindowRefused, JobEnded]
    assert step.job.paid_units == 0


def test_a_budget_bounds_what_is_counted_signed_and_open() -> None:
    job = model_with(ALICE, budget=1_000)
    assert spent_reason(job, needed_units=1_000) == ""
    job = SERVING.transition(job, count_event(job, ALICE, 300)).job
    assert spent_reason(job, needed_units=600, open_units=100) == ""
    assert "covers 1000 tokens, of which 400" in spent_reason(job, 601, open_units=100)
    job = SERVING.transition(job, signed_window(job, 1, job.windows[1])).job
    assert spent_reason(job, 701)
    assert not spent_reason(job, 700)


@pytest.mark.parametrize(
    ("unit", "layers", "reason"),
    [
        (WorkUnit.TOKENS, 0, ""),
        (WorkUnit.TOKENS, 4, "is counted in tokens"),
        (WorkUnit.LAYER_TOKENS, 4, ""),
        (WorkUnit.LAYER_TOKENS, 0, "1 to 9 layers"),
        (WorkUnit.LAYER_TOKENS, 10, "1 to 9 layers"),
        (WorkUnit.LAYER_TOKENS, -1, "at least one unit"),
    ],
)
def test_a_count_is_in_the_unit_of_its_job_s_terms(
    unit: WorkUnit, layers: int, reason: str
) -> None:
    job = ring_model(unit)
    event = replace(count_event(job, ALICE), lease=1, count=TokenCount(0, 100, 1, layers))
    assert reason in (rejection := SERVING.rejection(job, event))
    assert bool(reason) == bool(rejection)


def test_a_budget_of_a_ring_covers_each_layer_of_a_token() -> None:
    job = ring_model(WorkUnit.LAYER_TOKENS, unit_price=PRICE, budget=Wei(1_000))
    call = ModelCall(tokens=(1,) * 6, new_tokens_most=109)
    needed_units = units_most(call, 128, job.request.units_per_token)
    assert needed_units == (2 + 109) * LAYERS
    assert spent_reason(job, needed_units) == ""
    assert "covers 1000 layer-tokens" in spent_reason(job, needed_units, open_units=2)


def test_a_model_that_is_not_cut_is_counted_in_tokens_and_so_is_no_ring_in_samples() -> None:
    with pytest.raises(HyperGPUError, match="unit of a served model"):
        created_model(unit=WorkUnit.LAYER_TOKENS)
    with pytest.raises(HyperGPUError, match="unit of a served model"):
        ring_model(WorkUnit.SAMPLES)


def test_nobody_holds_a_model_whose_escrow_is_not_there_yet() -> None:
    creation = created_model(has_receipts=True, unit_price=PRICE, budget=Wei(100))
    creation = replace(creation, funding=Funding(0, "the escrow is not on the ledger yet"))
    job: ServeJob = SERVING.transition(None, creation).job
    job = SERVING.transition(job, work_events.NodeJoined(at_ms=LATER, node=ALICE)).job
    assert not job.leases
    assert "not on the ledger yet" in job.reason
    job = SERVING.transition(job, work_events.FundingChanged(at_ms=LATER, funded_units=100)).job
    assert list(job.leases) == [ALICE]


def test_what_a_call_may_take_bounds_whatever_a_replica_says() -> None:
    assert units_most(ModelCall(tokens=(1,) * 40, new_tokens_most=5), 128) == 15
    assert units_most(ModelCall(tokens=(1,) * 40), 128) == 10 + 128
    call = ModelCall(tokens=(1,) * 40, new_tokens_most=20, tokens_out=(7,) * 8)
    assert units_most(call, 128) == 12 + 12
    assert units_most(ModelCall(text="é" * 10, new_tokens_most=1), 128) == 9 + 1


def test_a_chain_follows_from_salt_calls_and_tokens_alone() -> None:
    links = first_link(b"salt")
    whole = next_link(next_link(links, b"one", [1, 2]), b"two", [3])
    assert chain_digest(whole) == chain_digest(
        next_link(next_link(first_link(b"salt"), b"one", (1, 2)), b"two", (3,))
    )
    others = [
        next_link(next_link(links, b"one", [1]), b"two", [2, 3]),
        next_link(next_link(links, b"two", [3]), b"one", [1, 2]),
        next_link(next_link(first_link(b"pepper"), b"one", [1, 2]), b"two", [3]),
    ]
    assert whole not in others


def test_four_tokens_of_prompts_are_one_unit_rounded_up_once() -> None:
    half = TokenCount(prompt_tokens=2, new_tokens=1, answers=1)
    assert (half.units, half.plus(half).units) == (2, 3)
