"""The quorum in virtual time: the plan's number is the one that its round opens with, and the
record's the one that it closed with.
"""

import pytest
from msgspec.structs import replace

from coordinator.core.training.job import events
from coordinator.core.training.job.state import Job, Phase
from coordinator.core.training.transition import transition
from coordinator.core.training.waiting import quorum
from coordinator.core.work.work_commands import WriteRecord
from hypergpu.ids import JobId
from hypergpu.jobfile.rules import with_strategy
from hypergpu.jobfile.spec import JobSpec, RoundRule, TrainingSettings
from netsim.virtual.simulation import Simulation
from netsim.virtual.worlds import SimulatedWorld, TransferSizes

JOB = JobId("job-0")
CODECS = {
    "fp32": 4_000_000,
    "bf16": 2_000_000,
    "int8": 1_000_000,
    "int4": 510_000,
    "topk256": 130_000,
    "topk64": 30_000,
    "topk16": 8_000,
}
STATED = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=20, inner_steps=20, batch_size=8, nodes=6),
)


def _journal(strategy: str, seed: int) -> tuple[events.Event, ...]:
    spec = with_strategy(STATED, strategy)
    rule = RoundRule(deadline_ms=15_000 if strategy == "diloco" else 0, quorum=0.55)
    simulated_world = SimulatedWorld(
        seed=seed,
        nodes=6,
        jobs=(replace(spec, round=rule),),
        sizes=TransferSizes(CODECS["int4"], CODECS["int4"], CODECS["fp32"], CODECS),
        step_ms=(50, 1_600),
    )
    simulation = Simulation(simulated_world)
    assert simulation.run().phases == {JOB: Phase.FINISHED}
    return tuple(simulation.journals[JOB])


@pytest.mark.parametrize("seed", range(3))
def test_a_planned_round_opens_with_the_quorum_that_its_plan_states(seed: int) -> None:
    job: Job | None = None
    compared_rounds = 0
    for event in _journal("aware", seed):
        job = transition(job, event).job
        if not isinstance(event, events.RoundPlanned) or job.phase is not Phase.TRAINING:
            continue
        given_nodes = event.plan.nodes.keys() & {*job.open_round.participants, *job.long_leases}
        if given_nodes == event.plan.nodes.keys():
            assert event.plan.updates_needed == quorum(job.open_round)
            compared_rounds += 1
    assert compared_rounds >= 10


@pytest.mark.parametrize("strategy", ["aware", "diloco"])
def test_a_record_states_the_quorum_that_closed_its_round(strategy: str) -> None:
    job: Job | None = None
    records: list[events.RoundRecorded] = []
    for event in _journal(strategy, 1):
        step = transition(job, event)
        job = step.job
        written_records = [each.record for each in step.commands if isinstance(each, WriteRecord)]
        records += [each for each in written_records if isinstance(each, events.RoundRecorded)]
    assert len(records) >= 10
    assert all(1 <= each.updates_needed <= each.updates for each in records)
    by_deadline = [each for each in records if "deadline passed" in each.reason]
    assert all(f" {each.updates_needed} needed)" in each.reason for each in by_deadline)
    assert by_deadline or strategy == "aware"
