"""Jobs in every phase and events of every kind: the rows and columns of the pair table."""

from typing import TypeVar

from coordinator.core.training.job import events
from coordinator.core.training.job.commands import Command
from coordinator.core.training.job.events import Event
from coordinator.core.training.job.state import AcceptedUpdate, Job, Model, Phase
from coordinator.core.training.plan.decision import NodePlan, PlanMemory, RoundPlan
from coordinator.core.training.transition import transition
from coordinator.core.work import work_events
from hypergpu.blobs import BlobRef
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.jobfile.spec import Evaluation, JobSpec, RoundRule, TrainingSettings
from hypergpu.ledger_terms import Terms
from hypergpu.units import Bytes, Milliseconds, Samples

CommandKind = TypeVar("CommandKind", bound=Command)
ALICE, BOB, CAROL = NodeId("alice"), NodeId("bob"), NodeId("carol")
SPEC = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=3, inner_steps=2, batch_size=4, nodes=2),
    round=RoundRule(deadline_ms=1000, quorum=0.5),
    evaluation=Evaluation(every=2),
)
AWARE = JobSpec(
    workload="digits-softmax",
    strategy="aware",
    training=TrainingSettings(rounds=3, inner_steps=2, batch_size=4, nodes=2),
    evaluation=Evaluation(every=2),
)
"""48 samples of work."""


def at(at_ms: int) -> Milliseconds:
    return Milliseconds(at_ms)


def model(number: int) -> Model:
    """The model after ``number`` rounds, named after it."""
    return Model(number, BlobRef(Digest(f"model-{number}"), Bytes(8)))


def update(name: str, size: int = 4) -> AcceptedUpdate:
    """What the shell reports of an update; the machine fills in samples and steps."""
    return AcceptedUpdate(BlobRef(Digest(name), Bytes(size)), Samples(0), 0, loss_last=1.5)


def update_event(node: NodeId, *, round_: int, lease: int, at_ms: int = 50) -> Event:
    """An update of ``node`` under ``lease``."""
    name = f"update-{node}-{round_}"
    return events.UpdateReceived(
        at_ms=at(at_ms), node=node, round=round_, lease=lease, update=update(name)
    )


def both_updates(round_: int = 0, *, first_lease: int = 1, at_ms: int = 50) -> tuple[Event, Event]:
    """The updates of Alice and Bob, who hold consecutive leases."""
    return (
        update_event(ALICE, round_=round_, lease=first_lease, at_ms=at_ms),
        update_event(BOB, round_=round_, lease=first_lease + 1, at_ms=at_ms),
    )


def fold_event(round_: int, *, at_ms: int = 60) -> Event:
    """The fold of a round is done."""
    return events.AggregateReady(at_ms=at(at_ms), round=round_, model=model(round_ + 1))


def only(commands: tuple[Command, ...], kind: type[CommandKind]) -> CommandKind:
    """The one command of a kind."""
    (command,) = [command for command in commands if isinstance(command, kind)]
    return command


def after(job: Job | None, *happened: Event) -> Job:
    """The job after these events, each of which must be legal."""
    for event in happened:
        step = transition(job, event)
        assert step.job != job, f"{event} changed nothing"
        job = step.job
    assert job is not None
    return job


def new_job(spec: JobSpec = SPEC, terms: Terms = Terms()) -> Job:  # noqa: B008  frozen
    """A job that waits for its first model."""
    job_id = JobId("job-1")
    return after(None, events.JobCreated(at_ms=at(0), job_id=job_id, spec=spec, terms=terms))


def waiting(spec: JobSpec = SPEC) -> Job:
    """A job that has a model and no node."""
    first = events.ModelInitialised(at_ms=at(10), model=model(0), partition_sizes=(Samples(100),))
    return after(new_job(spec), first)


def training(spec: JobSpec = SPEC) -> Job:
    """A job in round 0: Alice under lease 1, Bob under lease 2."""
    return after(
        waiting(spec),
        work_events.NodeJoined(at_ms=at(20), node=ALICE),
        work_events.NodeJoined(at_ms=at(30), node=BOB),
    )


def node_plan(inner_steps: int = 2, codec: str = "int4", *, forecast_ms: int = 0) -> NodePlan:
    """One node's part."""
    reason = f"H={inner_steps}, {codec}, as planned"
    return NodePlan(inner_steps, codec, reason, at(forecast_ms))


def round_plan(number: int, nodes: dict[NodeId, NodePlan], *, deadline_ms: int = 0) -> RoundPlan:
    """A plan of these parts."""
    return RoundPlan(
        round=number,
        nodes=nodes,
        resting={},
        deadline_ms=at(deadline_ms),
        down="int4",
        is_sparse=False,
        memory=PlanMemory(inner_steps=2, changed_at_round=number, is_sparse=False),
        reason="as the test has it",
    )


def plan_event(number: int, nodes: dict[NodeId, NodePlan], *, at_ms: int = 40) -> Event:
    """The plan of a round has been made."""
    return events.RoundPlanned(at_ms=at(at_ms), plan=round_plan(number, nodes, deadline_ms=1000))


def planning(spec: JobSpec = AWARE) -> Job:
    """A job whose round 0 is being planned, with Alice and Bob."""
    return after(
        waiting(spec),
        work_events.NodeJoined(at_ms=at(20), node=ALICE),
        work_events.NodeJoined(at_ms=at(30), node=BOB),
    )


def aggregating(spec: JobSpec = SPEC) -> Job:
    """A job whose round 0 has closed with both updates."""
    return after(
        training(spec),
        update_event(ALICE, round_=0, lease=1),
        update_event(BOB, round_=0, lease=2),
    )


def finishing() -> Job:
    """A job that waits for its last evaluation."""
    job = training()
    for number in range(SPEC.training.rounds):
        lease = 2 * number + 1
        job = after(
            job,
            update_event(ALICE, round_=number, lease=lease),
            update_event(BOB, round_=number, lease=lease + 1),
            events.AggregateReady(at_ms=at(60), round=number, model=model(number + 1)),
        )
    return job


def evaluation_ready(number: int) -> Event:
    """A good evaluation of the model after ``number`` rounds."""
    return events.EvaluationReady(
        at_ms=at(90),
        round=number,
        model=model(number).blob.digest,
        loss=0.1,
        metric=0.99,
        metric_name="accuracy",
    )


def states() -> dict[Phase, Job]:
    """One job in each phase."""
    pause = work_events.JobPaused(at_ms=at(70))
    stop = work_events.JobStopped(at_ms=at(70))
    fail = events.PreparationFailed(at_ms=at(5), reason="no such folder")
    return {
        Phase.PREPARING: new_job(),
        Phase.WAITING: waiting(),
        Phase.PLANNING: planning(),
        Phase.TRAINING: training(),
        Phase.AGGREGATING: aggregating(),
        Phase.PAUSED: after(training(), pause),
        Phase.FINISHING: finishing(),
        Phase.FINISHED: after(finishing(), evaluation_ready(3), evaluation_ready(2)),
        Phase.STOPPED: after(training(), stop),
        Phase.FAILED: after(new_job(), fail),
    }


def all_events() -> tuple[Event, ...]:
    """One event of each kind, as it could come from a shell while round 0 is open."""
    now = at(2000)
    return (
        events.JobCreated(at_ms=now, job_id=JobId("job-1"), spec=SPEC),
        events.ModelInitialised(at_ms=now, model=model(0), partition_sizes=(Samples(100),)),
        events.PreparationFailed(at_ms=now, reason="no such folder"),
        work_events.NodeJoined(at_ms=now, node=CAROL),
        work_events.NodeLost(at_ms=now, node=ALICE, reason="silent for 15 s"),
        work_events.NodeDraining(at_ms=now, node=ALICE, reason="its owner asked"),
        work_events.NodePaused(at_ms=now, node=ALICE, reason="paused by its owner"),
        work_events.NodeReadmitted(at_ms=now, node=ALICE),
        plan_event(0, {ALICE: node_plan(), BOB: node_plan()}, at_ms=2000),
        update_event(ALICE, round_=0, lease=1, at_ms=2000),
        events.UpdateRejected(at_ms=now, node=ALICE, round=0, reason="not finite"),
        events.ShardHandedBack(at_ms=now, node=ALICE, round=0, lease=1, reason="out of memory"),
        events.MemoryFitted(
            at_ms=now,
            node=ALICE,
            round=0,
            micro_batch=2,
            checkpoints_activations=False,
            reason="micro-batch 2 of 4: a larger one ran out of memory",
        ),
        events.DeadlineReached(at_ms=now, round=0),
        events.AggregateReady(at_ms=now, round=0, model=model(1)),
        events.ModelLost(at_ms=now, model=model(0).blob.digest, reason="flipped bit"),
        evaluation_ready(3),
        events.EvaluationFailed(at_ms=now, round=3, reason="the evaluator died"),
        work_events.JobPaused(at_ms=now),
        work_events.JobResumed(at_ms=now),
        work_events.JobStopped(at_ms=now),
        events.ParametersChanged(at_ms=now, spec=SPEC),
        events.RoundRecorded(
            at_ms=now,
            round=0,
            participants=2,
            updates=2,
            samples=Samples(16),
            bytes_up=Bytes(8),
            bytes_down=Bytes(0),
            duration_ms=at(20),
            loss=1.5,
            samples_per_s=800.0,
            reason="every expected update is there",
        ),
        work_events.FundingChanged(at_ms=now, funded_units=0, reason="the escrow is used up"),
        events.RoundMeasured(at_ms=now, round=0, updates=()),
        work_events.CoordinatorChanged(at_ms=now, reason="b.example.org goes on"),
        work_events.JobEnded(at_ms=now, phase="stopped", reason="stopped by its user"),
    )
