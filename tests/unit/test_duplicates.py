"""Secret duplicates of shards: who gets one, what a pair says, and that samples count once."""

import numpy as np
from msgspec.structs import replace

from coordinator.core.training.job import events
from coordinator.core.training.job.commands import Aggregate, AssignShard, DuplicatedShards
from coordinator.core.training.job.state import Job, Phase
from coordinator.core.training.job.trust_memory import DuplicateMemory, TrustMemory, Weighing
from coordinator.core.training.outstanding import outstanding
from coordinator.core.training.plan.decision import NodePlan
from coordinator.core.training.trust.duplicates import (
    ComparedPair,
    RoundWorker,
    draw_duplicates,
    is_trusted,
    judge_pairs,
    slow_nodes,
)
from coordinator.core.training.trust.weights import WHOLE
from coordinator.core.work import work_events
from coordinator.shell.aggregation.evidence import SketchedUpdate, weigh_sketched
from coordinator.shell.aggregation.measurements import HeldOutGradient
from coordinator.shell.aggregation.sketch import WIDTH, Sketch, UpdateSketch
from hypergpu.ids import Digest, NodeId
from hypergpu.jobfile.spec import RoundRule
from tests.unit.job_states import (
    AWARE,
    SPEC,
    after,
    at,
    model,
    only,
    plan_event,
    update,
    waiting,
)

NODES = tuple(NodeId(f"{number:02d}") for number in range(20))
WORKERS = tuple(RoundWorker(node, NodePlan(20, "int4", ""), has_begun=False) for node in NODES)
USUAL = (0.7, 0.7, 0.7)
PAIR = {NODES[0]: NODES[1]}
TRUSTED = DuplicateMemory(matches=dict.fromkeys(NODES, 2))
ROUNDS = 50


class DuplicatedRounds:
    """Twenty nodes whose honest updates are the slope, what their shard adds, and a little noise,
    by as much as was measured with the perceptron on digits.
    """

    def __init__(self, seed: int, lazy: NodeId | None = None) -> None:
        self.seed, self.lazy = seed, lazy
        self.draws = np.random.default_rng(seed)
        self.memory = TrustMemory()
        self.duplicated = 0

    def play_round(self, number: int) -> None:
        draw = f"secret-{self.seed}/{number}"
        pairs = draw_duplicates(draw, self.memory.duplicates, WORKERS, 32)
        self.duplicated += len(pairs)
        slope = self._vector()
        shards = {node: self._vector() for node in NODES}
        sketched_updates = []
        for node in NODES:
            vector = slope + shards[pairs.get(node, node)] + 0.5 * self._vector()
            if node == self.lazy:
                vector = 0.01 * self._vector()
            norm = float(np.sqrt(np.square(vector).sum()))
            sketched_updates.append(SketchedUpdate(node, 20, UpdateSketch(vector, norm, 0.0)))
        gradient = HeldOutGradient(Digest("base"), 1.0, slope)
        weighing = weigh_sketched(
            self.memory, "robust", sketched_updates, gradient, DuplicatedShards(pairs)
        )
        self.memory = weighing.memory
        self.reasons = weighing.reasons

    def _vector(self) -> Sketch:
        return self.draws.normal(size=WIDTH)


def test_duplicates_are_a_twentieth_of_the_work_at_most_and_doubt_no_honest_node() -> None:
    shares = []
    for seed in range(4):
        simulation = DuplicatedRounds(seed)
        for number in range(ROUNDS):
            simulation.play_round(number)
        shares.append(simulation.duplicated / (ROUNDS * len(NODES)))
        assert not simulation.memory.duplicates.doubts
    assert 0 < min(shares) <= max(shares) <= 0.05


def test_a_node_that_does_not_train_its_shard_is_found_out_by_a_duplicate() -> None:
    for seed in range(4):
        simulation = DuplicatedRounds(seed, lazy=NODES[7])
        for number in range(40):
            simulation.play_round(number)
            if simulation.memory.duplicates.doubts.get(NODES[7], 0):
                break
        assert "a duplicate of its shard gave another update" in simulation.reasons[NODES[7]]


def test_a_mismatch_speaks_against_a_stranger_more_where_its_partner_is_trusted() -> None:
    def doubts(memory: DuplicateMemory) -> tuple[int, int]:
        vectors = np.random.default_rng(1).normal(size=(6, WIDTH))
        sketched_updates = [
            SketchedUpdate(node, 20, UpdateSketch(vector, 32.0, 0.0))
            for node, vector in zip(NODES, vectors, strict=False)
        ]
        trust = TrustMemory(duplicates=memory)
        other_work = weigh_sketched(
            trust, "robust", sketched_updates, None, DuplicatedShards(PAIR, frozenset(PAIR))
        )
        assert not other_work.memory.duplicates.doubts
        after_ = weigh_sketched(trust, "robust", sketched_updates, None, DuplicatedShards(PAIR))
        assert after_.votes[NODES[0]] < WHOLE
        found_doubts = after_.memory.duplicates.doubts
        return found_doubts[NODES[0]], found_doubts[NODES[1]]

    stranger, other = doubts(DuplicateMemory(likeness=USUAL))
    accused_doubt, trusted_doubt = doubts(DuplicateMemory(matches={NODES[1]: 2}, likeness=USUAL))
    assert stranger == other < accused_doubt
    assert trusted_doubt < other


def test_where_no_pair_is_alike_none_tells_anything() -> None:
    whole = Weighing(clips={}, votes={}, reasons={}, memory=TrustMemory())
    for number in range(40):
        pair = ComparedPair((NODES[number % 20], NODES[(number + 1) % 20]), 0.02 * (number % 10))
        whole = judge_pairs(whole, [pair])
    assert not whole.votes
    assert not whole.memory.duplicates.doubts
    assert not whole.memory.duplicates.matches


def test_only_work_of_equal_size_or_known_time_that_nobody_has_begun_is_given_twice() -> None:
    begun_workers = [worker._replace(has_begun=True) for worker in WORKERS]
    other = [each._replace(plan=NodePlan(n, "int4", "")) for n, each in enumerate(WORKERS)]
    for number in range(100):
        assert not draw_duplicates(f"a/{number}", DuplicateMemory(), begun_workers, 32)
        assert not draw_duplicates(f"a/{number}", DuplicateMemory(), other, 32)
    assert not draw_duplicates("", DuplicateMemory(), WORKERS, 32)
    draws = [draw_duplicates(f"a/{number}", TRUSTED, WORKERS, 32) for number in range(100)]
    assert 0 < sum(map(len, draws)) < 100
    assert all(is_trusted(TRUSTED, node) for node in NODES)


FOUR = replace(
    SPEC, training=replace(SPEC.training, nodes=4), round=RoundRule(deadline_ms=1000, quorum=0.5)
)


def with_duplicate() -> Job:
    """A job of four nodes in a round in which one has the shard of another."""
    job = waiting(FOUR)
    for node in NODES[:4]:
        job = after(job, work_events.NodeJoined(at_ms=at(20), node=node))
    for attempt in range(100):
        done_job = job
        for node in NODES[:4]:
            done_job = after(done_job, sent_update(done_job, node))
        fold = events.AggregateReady(at_ms=at(60), round=0, model=model(1), draw=f"draw-{attempt}")
        open_job = after(done_job, fold)
        if open_job.open_round.duplicates:
            return open_job
    raise AssertionError("no draw gave a duplicate")


UNEQUAL = {
    node: NodePlan(steps, "int4", "", forecast_ms=at(1000), step_us=1_000_000 // steps)
    for node, steps in zip(NODES, (160, 80, 40, 10), strict=False)
}
PLANNED = replace(AWARE, training=replace(AWARE.training, rounds=200, nodes=4))


def with_compared_speeds() -> Job:
    """A planned job of four unequal nodes in a round in which two are compared."""
    job = waiting(PLANNED)
    for node in UNEQUAL:
        job = after(job, work_events.NodeJoined(at_ms=at(20), node=node))
    job = after(job, plan_event(0, UNEQUAL))
    for node in UNEQUAL:
        job = after(job, sent_update(job, node))
    for attempt in range(100):
        fold = events.AggregateReady(at_ms=at(60), round=0, model=model(1), draw=f"draw-{attempt}")
        open_job = after(job, fold, plan_event(1, UNEQUAL, at_ms=100))
        if open_job.open_round.duplicates:
            return open_job
    raise AssertionError("no draw gave a duplicate")


def test_of_two_unequal_nodes_that_are_compared_the_faster_one_does_less_and_is_timed() -> None:
    job = with_compared_speeds()
    ((own, other),) = job.open_round.duplicates.items()
    slow, fast = sorted((own, other), key=lambda node: UNEQUAL[node].inner_steps)
    parts = job.open_round.participants
    assert parts[fast].inner_steps == parts[slow].inner_steps == UNEQUAL[slow].inner_steps
    assert parts[fast].plan.forecast_ms < parts[slow].plan.forecast_ms == 1000
    for node in UNEQUAL:
        if node != fast:
            job = after(job, sent_update(job, node))
    in_time = parts[fast].plan.forecast_ms
    for elapsed_ms, slow_now in ((in_time, frozenset()), (2000 + in_time, {fast})):
        done_job = after(
            replace(job, at_ms=at(100 + elapsed_ms)), sent_update_at(job, fast, elapsed_ms)
        )
        assert only(outstanding(done_job), Aggregate).duplicates.slow == slow_now


def test_nobody_is_late_in_a_pair_of_which_one_ran_out_of_memory() -> None:
    job = with_compared_speeds()
    fast, _ = faster_and_slower(job)
    round_ = job.open_round
    assert slow_nodes(round_, at(2500)) == {fast}
    part = round_.participants[fast]
    refitted_part = replace(part, plan=replace(part.plan, micro_batch=1))
    parts = {**round_.participants, fast: refitted_part}
    assert not slow_nodes(replace(round_, participants=parts), at(2500))


def faster_and_slower(job: Job) -> tuple[NodeId, NodeId]:
    """The two that are compared."""
    ((own, other),) = job.open_round.duplicates.items()
    slow, fast = sorted((own, other), key=lambda node: UNEQUAL[node].inner_steps)
    return fast, slow


def after_round(job: Job, *absent: NodeId) -> Job:
    """The job in its next round, which has no draw that would compare anybody by chance."""
    number = job.open_round.number
    for node in UNEQUAL:
        if node not in absent:
            job = after(job, sent_update(job, node))
    if job.phase is Phase.TRAINING:
        timer = events.DeadlineReached(at_ms=at(job.open_round.timer_at_ms), round=number)
        job = after(job, timer)
    fold = events.AggregateReady(
        at_ms=job.at_ms, round=number, model=model(number + 1), draw=NOBODY
    )
    return after(job, fold, plan_event(number + 1, UNEQUAL, at_ms=job.at_ms))


def unlucky_draw() -> str:
    workers = [RoundWorker(node, plan, has_begun=False) for node, plan in UNEQUAL.items()]
    draws = (f"nobody-{number}" for number in range(1000))
    return next(it for it in draws if not draw_duplicates(it, DuplicateMemory(), workers, 4))


NOBODY = unlucky_draw()


def test_who_leaves_a_comparison_is_compared_in_its_next_rounds_until_it_stays() -> None:
    job = with_compared_speeds()
    fast, _ = faster_and_slower(job)
    for _ in range(2):
        lease = job.open_round.participants[fast].lease
        number = job.open_round.number
        hand_back = events.ShardHandedBack(
            at_ms=job.at_ms, node=fast, round=number, lease=lease, reason="busy"
        )
        job = after_round(after(job, hand_back), fast)
        assert job.open_round.partner(fast) is not None
    job = after_round(job)
    assert not job.trust.duplicates.due
    assert not job.open_round.duplicates


def test_no_pause_and_no_restart_makes_a_node_seem_slow_and_it_is_timed_again() -> None:
    compared_job = with_compared_speeds()
    fast, slow = faster_and_slower(compared_job)
    paused_job = after(
        compared_job, work_events.JobPaused(at_ms=at(150)), work_events.JobResumed(at_ms=at(150))
    )
    restarted_job = after(
        compared_job, work_events.CoordinatorChanged(at_ms=at(150), reason="started again")
    )
    for job in (paused_job, restarted_job):
        for node in UNEQUAL:
            if node != fast:
                job = after(job, sent_update(job, node))  # noqa: PLW2901
        late = replace(job, at_ms=at(5000))
        done_job = after(late, replace(sent_update(late, fast), at_ms=at(5000)))
        assert not only(outstanding(done_job), Aggregate).duplicates.slow
        fold = events.AggregateReady(at_ms=at(5000), round=1, model=model(2), draw=NOBODY)
        done_job = after(done_job, fold, plan_event(2, UNEQUAL, at_ms=5000))
        assert done_job.open_round.partner(fast) is not None
        assert slow not in done_job.trust.duplicates.due


def sent_update_at(job: Job, node: NodeId, elapsed_ms: int) -> events.UpdateReceived:
    return replace(sent_update(job, node), at_ms=at(100 + elapsed_ms))


def sent_update(job: Job, node: NodeId) -> events.UpdateReceived:
    round_ = job.open_round
    lease = round_.participants[node].lease
    return events.UpdateReceived(
        at_ms=job.at_ms,
        node=node,
        round=round_.number,
        lease=lease,
        update=update(f"{node}-{round_.number}"),
    )


def test_a_duplicate_is_the_same_work_counted_once_and_halved_in_the_fold() -> None:
    job = with_duplicate()
    ((own, other),) = job.open_round.duplicates.items()
    tasks = {it.node: it.assignment.task for it in outstanding(job) if isinstance(it, AssignShard)}
    assert tasks[own] == tasks[other]
    before = job.tally.samples
    for node in NODES[:4]:
        job = after(job, sent_update(job, node))
    assert job.tally.samples - before == 3 * 8
    assert job.tally.samples_twice == 8
    weights = {it.node: it.weight for it in only(outstanding(job), Aggregate).updates}
    single = {weight for node, weight in weights.items() if node not in (own, other)}
    assert single == {weights[own] + weights[other]}


def test_a_duplicate_that_is_lost_leaves_the_shard_with_the_other() -> None:
    job = with_duplicate()
    ((own, other),) = job.open_round.duplicates.items()
    shard = job.open_round.participants[other].shard
    job = after(job, work_events.NodeLost(at_ms=job.at_ms, node=own, reason="gone"))
    assert not job.open_round.orphans
    job = after(job, work_events.NodeLost(at_ms=job.at_ms, node=other, reason="gone"))
    assert job.open_round.orphans == (shard,)


def test_a_cut_duplicate_returns_no_sample_that_the_other_covers() -> None:
    job = with_duplicate()
    ((own, other),) = job.open_round.duplicates.items()
    for node in NODES[:4]:
        if node != own:
            job = after(job, sent_update(job, node))
    late = at(job.open_round.timer_at_ms)
    job = after(job, events.DeadlineReached(at_ms=late, round=1))
    assert job.open_round.participants[own].update is None
    assert not any(stream.returned for stream in job.streams)
    assert other in job.open_round.participants
