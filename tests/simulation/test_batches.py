"""Devices in virtual time whose memory or speed does not bear the job's batch."""

from pathlib import Path

import pytest

from coordinator.core.training.job.commands import AssignShard
from coordinator.core.training.job.events import RoundPlanned
from coordinator.core.training.job.state import Job, Phase
from coordinator.core.training.transition import transition
from coordinator.core.work.work_events import JobPaused
from hypergpu.ids import NodeId
from hypergpu.jobfile.rules import with_strategy
from hypergpu.jobfile.spec import JobSpec, RoundRule, TrainingSettings
from netsim.link import COORDINATOR_LINK, Shape
from netsim.network.world import NodeDescription, WorldDescription
from netsim.network.world_file import read_world_file
from netsim.run.job import job_sizes, run_virtually
from netsim.run.report import summary_lines
from netsim.virtual.simulation import Simulation, WorldOutcome
from netsim.virtual.worlds import TransferSizes, described_world


def world(*nodes: tuple[str, int, float]) -> WorldDescription:
    """Nodes next door by name, most samples at once and time of a step; rounds wait for all."""
    training = TrainingSettings(rounds=6, inner_steps=4, batch_size=64, nodes=len(nodes))
    return WorldDescription(
        name="batches",
        seed=1,
        job=with_strategy(
            JobSpec(workload="digits-softmax", training=training, round=RoundRule(quorum=1.0)),
            "aware",
        ),
        coordinator=COORDINATOR_LINK,
        nodes=tuple(
            NodeDescription(
                name=name,
                group=name,
                shape=Shape(link=COORDINATOR_LINK),
                step_floor_ms=step_ms,
                micro_batch_max=micro_batch_max,
            )
            for name, micro_batch_max, step_ms in nodes
        ),
    )


def test_memory_and_speed_change_batches_and_the_report_tells_why() -> None:
    unequal = world(("desktop", 0, 300), ("laptop", 32, 300), ("old-card", 0, 6000))
    report = run_virtually(unequal)
    assert report.phase == "finished"
    reasons = {
        (each.node, each.batch_size, each.micro_batch): each.reason for each in report.batches
    }
    assert "micro-batch 32 of 64: a larger one ran out of memory" in reasons["laptop", 64, 32]
    old = max(size for node, size, _ in reasons if node == "old-card")
    assert f"batch {old} of 64: as much as its time holds" in reasons["old-card", old, 0]
    assert "no round waits" in reasons["old-card", old, 0]
    assert {node for node, *_ in reasons} == {"laptop", "old-card"}
    text = "\n".join(summary_lines(report))
    assert "batch      round 2, laptop: " in text


def test_nodes_are_assigned_the_rate_that_their_plans_state() -> None:
    unequal = world(("desktop", 0, 300), ("laptop", 32, 300), ("old-card", 0, 6000))
    simulation = Simulation(described_world(unequal, TransferSizes()))
    simulation.run()
    (journal,) = simulation.journals.values()
    job: Job | None = None
    rates: dict[int, set[float]] = {}
    for event in journal:
        step = transition(job, event)
        job = step.job
        for command in step.commands:
            if isinstance(command, AssignShard):
                task = command.assignment.task
                rates.setdefault(task.batch_size, set()).add(task.learning_rate)
                participant = job.participant(command.node)
                assert participant is not None
                assert task.learning_rate == participant.plan.learning_rate or task.batch_size == 64
    assert rates.pop(64) == {0.001}
    assert rates, "the old card has a smaller batch"
    for size, stated_rates in rates.items():
        assert [*stated_rates] == [pytest.approx(0.001 * (size / 64) ** 0.5)]


def test_a_job_whose_every_device_is_too_small_finds_by_itself_what_fits() -> None:
    small = world(("one", 8, 300), ("other", 16, 300))
    simulation = Simulation(described_world(small, TransferSizes()))
    outcome = simulation.run()
    (journal,) = simulation.journals.values()
    assert outcome.violations == ()
    assert [*outcome.phases.values()] == [Phase.FINISHED]
    assert not any(isinstance(event, JobPaused) for event in journal)
    plans = [event.plan for event in journal if isinstance(event, RoundPlanned)]
    parts = [plan.nodes[NodeId("one")] for plan in plans if "one" in plan.nodes]
    assert {part.batch(64) for part in parts} == {64}
    assert [part.micro_batch for part in parts[:2]] == [0, 8]


@pytest.fixture(scope="module")
def unequal_devices() -> WorldOutcome:
    """The example of unequal devices, in virtual time."""
    example = Path(__file__).parents[2] / "examples" / "worlds" / "unequal-devices.toml"
    description = read_world_file(example)
    assert description.job is not None
    return Simulation(described_world(description, job_sizes(description.job))).run()


def test_the_example_of_unequal_devices_uses_a_laptop_whose_memory_is_small(
    unequal_devices: WorldOutcome,
) -> None:
    assert unequal_devices.violations == ()
    for node in ("desktop", "laptop"):
        assert unequal_devices.accepted[NodeId(node)] == unequal_devices.rounds


def test_the_example_of_unequal_devices_uses_an_old_card(unequal_devices: WorldOutcome) -> None:
    # Thirteen times slower: a lease lasts several rounds, and the job has ten.
    assert unequal_devices.accepted[NodeId("old-card")] >= 2
