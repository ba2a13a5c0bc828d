"""Jobs that began under the rule of before go on under it, and new ones begin under the new."""

import msgspec
from msgspec.structs import replace

from coordinator.core.training.job import events
from coordinator.core.training.job.trust_memory import PayMemory, TrustMemory, Weighing
from coordinator.core.training.transition import transition
from coordinator.core.training.trust.weights import WHOLE, known_votes
from coordinator.core.work.work_commands import WriteRecord
from hypergpu.ids import JobId
from tests.unit.job_states import ALICE, BOB, SPEC, after, at, both_updates, fold_event, training

CREATED = events.JobCreated(at_ms=at(0), job_id=JobId("job-1"), spec=SPEC, judges_own_samples=True)
MEMORY_BEFORE = {
    "weights": {ALICE: 20_000, BOB: 90_000},
    "rounds": 7,
    "signal": 0.5,
    "signal_most": 0.75,
    "strength": 0.25,
    "loss": 1.5,
}


def test_a_new_job_is_judged_by_own_samples() -> None:
    job = transition(None, CREATED).job
    assert job.trust == TrustMemory(by_own_samples=True)


def test_a_job_that_began_before_updates_were_tried_goes_on_without_trials() -> None:
    row = msgspec.to_builtins(replace(CREATED, tries_updates=True))
    assert transition(None, msgspec.convert(row, events.JobCreated)).job.trust.pay == PayMemory()
    del row["tries_updates"]
    job = transition(None, msgspec.convert(row, events.JobCreated)).job
    assert job.trust == TrustMemory(by_own_samples=True)


def test_a_job_that_began_before_looks_counted_for_rounds_goes_on_without() -> None:
    row = msgspec.to_builtins(replace(CREATED, counts_looks=True))
    assert transition(None, msgspec.convert(row, events.JobCreated)).job.trust.unseen == {}
    del row["counts_looks"]
    assert transition(None, msgspec.convert(row, events.JobCreated)).job.trust.unseen is None


def test_a_job_that_began_before_honest_updates_kept_a_part_goes_on_without() -> None:
    row = msgspec.to_builtins(replace(CREATED, use_least=WHOLE // 5))
    assert transition(None, msgspec.convert(row, events.JobCreated)).job.trust.use_least
    del row["use_least"]
    assert not transition(None, msgspec.convert(row, events.JobCreated)).job.trust.use_least


def test_a_job_that_an_older_version_journalled_goes_on_under_its_rule() -> None:
    row = msgspec.to_builtins(CREATED)
    del row["judges_own_samples"]
    job = transition(None, msgspec.convert(row, events.JobCreated)).job
    assert job.trust == TrustMemory()
    assert not job.trust.by_own_samples


def test_a_round_that_an_older_version_weighed_is_paid_by_its_votes() -> None:
    weighing = {
        "clips": {},
        "votes": {ALICE: WHOLE // 4},
        "reasons": {ALICE: "its influence is low"},
        "memory": MEMORY_BEFORE,
    }
    row = {**msgspec.to_builtins(fold_event(0)), "weighing": weighing}
    step = transition(after(training(), *both_updates()), msgspec.convert(row, events.Event))
    records = [each.record for each in step.commands if isinstance(each, WriteRecord)]
    (record,) = [each for each in records if isinstance(each, events.RoundMeasured)]
    qualities = {each.contribution.node: each.quality_bps for each in record.updates}
    assert qualities == {ALICE: 2_500, BOB: 10_000}
    assert record.updates[0].reason == "its influence is low"
    assert not step.job.trust.by_own_samples
    assert step.job.trust.weights == MEMORY_BEFORE["weights"]


def test_a_round_by_own_samples_is_paid_by_honesty_and_not_by_votes() -> None:
    memory = TrustMemory(by_own_samples=True, honesty={ALICE: WHOLE, BOB: 0})
    weighing = Weighing(
        clips={},
        votes={ALICE: WHOLE // 4, BOB: 0},
        reasons={},
        memory=memory,
        pay={BOB: 0},
        pay_reasons={BOB: "on samples of its own shard its update does nothing"},
    )
    row = {**msgspec.to_builtins(fold_event(0)), "weighing": msgspec.to_builtins(weighing)}
    step = transition(after(training(), *both_updates()), msgspec.convert(row, events.Event))
    records = [each.record for each in step.commands if isinstance(each, WriteRecord)]
    (record,) = [each for each in records if isinstance(each, events.RoundMeasured)]
    assert [each.quality_bps for each in record.updates] == [10_000, 0]
    assert "own shard" in record.updates[1].reason
    assert step.job.trust == memory


def test_what_is_not_folded_any_more_is_paid_by_the_memory_of_its_rule() -> None:
    before = msgspec.convert(MEMORY_BEFORE, TrustMemory)
    assert known_votes(before, [ALICE])[ALICE] < WHOLE
    now = TrustMemory(by_own_samples=True, rounds=7, honesty={ALICE: WHOLE, BOB: 0})
    assert known_votes(now, [ALICE, BOB]) == {ALICE: WHOLE, BOB: 0}
