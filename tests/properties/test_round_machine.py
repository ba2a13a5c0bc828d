from collections.abc import Callable

import msgspec
from hypothesis import event as hypothesis_event
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.core.training.job import events
from coordinator.core.training.job.events import Event
from coordinator.core.training.job.state import AcceptedUpdate, Job
from coordinator.core.training.job.trust_memory import Weighing
from coordinator.core.training.outstanding import outstanding
from coordinator.core.training.transition import rejection, transition
from coordinator.core.work import work_events
from coordinator.core.work.leases import WorkState
from hypergpu.ids import Address, JobId, NodeId
from hypergpu.jobfile.spec import Data, Evaluation, JobSpec, Pay, RoundRule, TrainingSettings
from hypergpu.ledger_terms import Domain, terms_of
from hypergpu.units import Samples
from netsim.virtual.invariants import step_violations, violations
from tests.unit.job_states import (
    at,
    evaluation_ready,
    model,
    new_job,
    node_plan,
    round_plan,
    update,
)

TERMS = terms_of(Address("0x" + "c0" * 20), JobId("job-1"), Domain())
NODES = tuple(NodeId(f"node-{number}") for number in range(5))

FIRST = events.ModelInitialised(at_ms=at(0), model=model(0), partition_sizes=(Samples(50),))

specs = st.builds(
    lambda strategy, nodes, rounds, deadline_ms, quorum, overlap, pay, source: JobSpec(
        workload="digits-softmax",
        strategy=strategy,
        training=TrainingSettings(rounds=rounds, inner_steps=2, batch_size=3, nodes=nodes),
        round=RoundRule(deadline_ms=deadline_ms, quorum=quorum, overlap=overlap),
        evaluation=Evaluation(every=2, target=0.99 if deadline_ms else 0.0),
        pay=pay,
        data=source,
    ),
    st.sampled_from(["diloco", "aware"]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([0, 50]),
    st.sampled_from([0.1, 0.5, 1.0]),
    st.sampled_from(["none", "eager"]),
    st.sampled_from(
        [
            Pay(),
            Pay(unit_price=700, rounds_per_epoch=1),
            Pay(unit_price=90, rounds_per_epoch=2, escrow=10**6),
        ]
    ),
    st.sampled_from([Data(), Data(source="node", name="wards", path="held-out")]),
)
choices = st.lists(
    st.tuples(
        st.integers(0, 24),
        st.sampled_from(NODES),
        # The long ones bring limits and timers about.
        st.one_of(st.integers(0, 40), st.sampled_from([5_000, 70_000, 700_000])),
    ),
    min_size=40,
    max_size=120,
)


def _job_with_nodes(spec: JobSpec) -> Job:
    """A job with a model and its nodes, so that most of what follows finds it in a round."""
    job = transition(new_job(spec, TERMS), FIRST).job
    for node in NODES[:4]:
        job = transition(job, work_events.NodeJoined(at_ms=at(0), node=node)).job
    return job


def _work_of(job: Job, node: NodeId) -> tuple[int, int]:
    """The round and newest lease of the node, or one that nobody ever held."""
    if job.round is not None and node in job.round.participants:
        return job.round.number, job.round.participants[node].lease
    return (job.model.round if job.model else 0), 999


def _event(job: Job, choice: int, node: NodeId, at_ms: int) -> Event:
    now = at(at_ms)
    round_, lease = _work_of(job, node)
    number = job.model.round if job.model else 0
    makers: list[Callable[[], Event]] = [
        lambda: events.ModelInitialised(at_ms=now, model=model(0), partition_sizes=(Samples(50),)),
        lambda: work_events.NodeJoined(at_ms=now, node=node),
        lambda: work_events.NodeJoined(at_ms=now, node=node),
        lambda: work_events.NodeLost(at_ms=now, node=node, reason="silent"),
        lambda: work_events.NodeDraining(at_ms=now, node=node, reason="asked"),
        lambda: events.UpdateReceived(
            at_ms=now, node=node, round=round_, lease=lease, update=update(f"{node}-{round_}")
        ),
        lambda: events.UpdateReceived(
            at_ms=now,
            node=node,
            round=round_,
            lease=lease,
            update=_update_with_count(f"{node}-{round_}"),
        ),
        lambda: events.UpdateReceived(
            at_ms=now, node=node, round=round_, lease=lease - 1, update=update("stale")
        ),
        lambda: events.ShardHandedBack(
            at_ms=now, node=node, round=round_, lease=lease, reason="full"
        ),
        lambda: events.ShardHandedBack(
            at_ms=now,
            node=node,
            round=round_,
            lease=lease,
            reason="out of memory",
            lacks_memory=True,
        ),
        lambda: events.DeadlineReached(at_ms=now, round=round_),
        lambda: events.AggregateReady(
            at_ms=now, round=number, model=model(number + 1), weighing=_weighing(job, node, at_ms)
        ),
        lambda: events.AggregateReady(
            at_ms=now, round=number, model=model(number + 1), omitted=_unreadable(job, node)
        ),
        lambda: work_events.JobPaused(at_ms=now),
        lambda: work_events.JobResumed(at_ms=now),
        lambda: events.ModelLost(at_ms=now, model=model(number).blob.digest, reason="damaged"),
        lambda: events.AggregateReady(at_ms=now, round=number - 1, model=model(number)),
        lambda: evaluation_ready(number),
        lambda: events.ParametersChanged(at_ms=now, spec=job.spec),
        lambda: work_events.FundingChanged(at_ms=now, funded_units=at_ms // 2, reason="so much"),
        lambda: work_events.FundingChanged(at_ms=now, funded_units=None),
        lambda: work_events.NodeReadmitted(at_ms=now, node=node),
    ]
    # Nothing else happens to a job that plans, so plans come often.
    return makers[choice]() if choice < len(makers) else _plan_event(job, node, at_ms)


def _update_with_count(name: str) -> AcceptedUpdate:
    """An update whose sender says that it has five samples of its own."""
    return replace(update(name), data_samples=Samples(5))


def _plan_event(job: Job, skipped: NodeId, at_ms: int) -> Event:
    """A plan for everybody who has ever been here but one, with other work for each."""
    eager = job.spec.round.overlap == "eager"
    parts = {
        node: replace(
            node_plan(1 + member.slot, "topk64" if member.slot % 2 else "int8", forecast_ms=9),
            # Other plans follow, which give some nodes fewer steps than they may have begun.
            inner_steps=1 + (member.slot + at_ms) % 4,
            prefetch_steps=at_ms % 3 if eager else 0,
        )
        for node, member in job.members.items()
        if node != skipped
    }
    plan = round_plan(job.model.round if job.model else 0, parts, deadline_ms=at_ms % 3 * 20)
    return events.RoundPlanned(at_ms=at(at_ms), plan=replace(plan, resting={skipped: "slow"}))


def _weighing(job: Job, node: NodeId, at_ms: int) -> Weighing:
    """A weighing that gives one node a part of a vote, and learns as much of it."""
    part = at_ms % 3 * 32_768
    memory = replace(
        job.trust, weights={**job.trust.weights, node: part}, rounds=job.trust.rounds + 1
    )
    return Weighing(clips={}, votes={node: part}, reasons={node: "chance"}, memory=memory)


def _unreadable(job: Job, node: NodeId) -> tuple[tuple[NodeId, str], ...]:
    round_ = job.round
    if round_ is None or node not in round_.participants:
        return ()
    return ((node, "damaged"),) if round_.participants[node].work is WorkState.RECEIVED else ()


@settings(max_examples=300, deadline=None)
@given(specs, choices)
def test_no_sequence_of_events_breaks_an_invariant(
    spec: JobSpec, picks: list[tuple[int, NodeId, int]]
) -> None:
    job = _job_with_nodes(spec)
    journal: list[Event] = []
    now_ms = 0
    for choice, node, wait_ms in picks:
        now_ms += wait_ms
        event = _event(job, choice, node, now_ms)
        reason = rejection(job, event)
        step = transition(job, event)
        assert (step.job == job) >= bool(reason)
        if isinstance(event, events.UpdateReceived) and event.lease != _work_of(job, node)[1]:
            assert reason, "a void lease was let through"
        assert not violations(step.job), (event, violations(step.job))
        assert not step_violations(job, step.job), event
        if not reason:
            journal.append(event)
        job = step.job
    stop = work_events.JobStopped(at_ms=at(now_ms))
    stopped_job = transition(job, stop).job
    assert not violations(stopped_job)
    assert not step_violations(job, stopped_job)
    hypothesis_event(f"reached round {job.model.round if job.model else None}")
    hypothesis_event(f"ended {job.phase.value}")
    replayed_job = _job_with_nodes(spec)
    for event in journal:
        replayed_job = transition(replayed_job, event).job
    assert replayed_job == job


@settings(max_examples=50, deadline=None)
@given(specs, choices)
def test_a_state_and_its_journal_survive_being_written_down(
    spec: JobSpec, picks: list[tuple[int, NodeId, int]]
) -> None:
    job = _job_with_nodes(spec)
    for now_ms, (choice, node, _) in enumerate(picks):
        event = _event(job, choice, node, now_ms)
        assert msgspec.json.decode(msgspec.json.encode(event), type=Event) == event
        job = transition(job, event).job
    again = msgspec.json.decode(msgspec.json.encode(job), type=Job)
    assert again == job
    assert outstanding(again) == outstanding(job)
