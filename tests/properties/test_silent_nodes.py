"""Rounds close as long as one node works, whoever is silent, and lose or double no sample."""

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.core.training.job import events
from coordinator.core.training.job.events import Event
from coordinator.core.training.job.state import Job, Phase
from coordinator.core.training.transition import rejection, transition
from coordinator.core.work import work_events
from hypergpu.ids import NodeId
from hypergpu.jobfile.spec import JobSpec, RoundRule, TrainingSettings
from hypergpu.units import Samples
from netsim.virtual.invariants import step_violations, violations
from tests.unit.job_states import at, fold_event, model, new_job, update_event

ROUNDS = 8
paces = st.lists(st.none() | st.integers(1_000, 60_000), min_size=2, max_size=8).filter(any)
"""What a node's update takes; None: it is silent."""


def advance(job: Job, event: Event) -> Job:
    """The job after a legal event, with its invariants checked."""
    assert not rejection(job, event), event
    step = transition(job, event)
    assert not violations(step.job), (event, violations(step.job))
    assert not step_violations(job, step.job), event
    return step.job


def round_done(job: Job, pace_ms: dict[NodeId, int]) -> Job:
    """Let the open round's nodes deliver in time, and its timers come, until it closes."""
    open_round = job.open_round
    arrivals = sorted(
        (open_round.opened_at_ms + pace_ms[node] * part.inner_steps // 20, node)
        for node, part in open_round.participants.items()
        if node in pace_ms
    )
    for _ in range(10_000):
        if job.phase is not Phase.TRAINING:
            return job
        timer_ms = job.open_round.timer_at_ms
        if arrivals and (not timer_ms or arrivals[0][0] <= timer_ms):
            now_ms, node = arrivals.pop(0)
            lease = job.open_round.participants[node].lease
            job = advance(
                job, update_event(node, round_=open_round.number, lease=lease, at_ms=now_ms)
            )
        else:
            job = advance(job, events.DeadlineReached(at_ms=timer_ms, round=open_round.number))
    raise AssertionError("the round never closes")


@settings(max_examples=150, deadline=None)
@given(paces, st.sampled_from([0.3, 0.6, 0.9]), st.sampled_from([0, 20_000]))
def test_rounds_close_as_long_as_one_node_works(
    paces: list[int | None], quorum: float, deadline_ms: int
) -> None:
    spec = JobSpec(
        workload="digits-softmax",
        training=TrainingSettings(rounds=ROUNDS, inner_steps=20, batch_size=2, nodes=len(paces)),
        round=RoundRule(deadline_ms=deadline_ms, quorum=quorum),
    )
    sizes = (Samples(50), Samples(40))
    job = advance(
        new_job(spec),
        events.ModelInitialised(at_ms=at(0), model=model(0), partition_sizes=sizes),
    )
    pace_ms = {}
    for number, pace in enumerate(paces):
        node = NodeId(f"node-{number}")
        job = advance(job, work_events.NodeJoined(at_ms=at(0), node=node))
        if pace is not None:
            pace_ms[node] = pace
    slowest_ms = max(pace_ms.values())
    for number in range(ROUNDS):
        opened_ms = job.open_round.opened_at_ms
        job = round_done(job, pace_ms)
        took_ms = job.at_ms - opened_ms
        assert took_ms <= max(60_000, 16.5 * slowest_ms) + deadline_ms
        assert job.open_round.accepted_updates
        job = advance(job, fold_event(number, at_ms=job.at_ms + 10))
    silent = job.members.keys() - pace_ms.keys()
    assert not any(job.members[node].standing.is_proven for node in silent)
