"""Health as the coordinator keeps it: fed by rounds and readings, stored by node."""

from pathlib import Path

import pytest

from coordinator.core.hub.health import NEWCOMER, HealthEvidence, HealthRecord, after_round
from coordinator.core.network.reading import Estimate, NodeReading
from coordinator.core.training.job.events import AggregateReady
from coordinator.core.training.job.trust_memory import TrustMemory, Weighing
from coordinator.shell.app.periodic_work import store_health
from coordinator.shell.driver.decisions import decide
from coordinator.shell.driver.inbox import SubmittedEvent
from coordinator.shell.kinds.table import KINDS
from coordinator.shell.nodes.allocator import NodeAllocator
from coordinator.shell.nodes.fleet_health import FORGOTTEN_DAYS, FleetHealth
from hypergpu.ids import NodeId
from tests.unit.shell.whole_shell import (
    JOB,
    NODE,
    NOW,
    begin_job,
    driving,
    model,
    receive_update,
    services_in,
)

OTHER = NodeId("0x" + "b2" * 20)


class Clock:
    """Unix seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1_790_000_000

    def __call__(self) -> int:
        return self.now_s


def bad_record(clock: Clock) -> HealthRecord:
    """The record of a node that its reliability excludes."""
    record = HealthRecord()
    for _ in range(40):
        record = after_round(record, 0.0, None, clock())
    return record


async def folded_round(folder: Path, weighing: Weighing | None) -> list[HealthEvidence]:
    """What the driver tells of a round with one update after its fold."""
    services = services_in(folder)
    async with driving(services):
        await begin_job(services)
        await receive_update(services, 0)
        runtimes = services.driver.runtimes
        event = AggregateReady(at_ms=NOW, round=0, model=model(1), weighing=weighing)
        verdict = services.driver.submit(JOB, event)
        decision = decide(runtimes, [SubmittedEvent(JOB, event, verdict)], KINDS)
        await verdict
    return decision.evidence


async def test_a_folded_round_tells_reliability_and_quality_of_its_nodes(tmp_path: Path) -> None:
    useless = Weighing(clips={}, votes={NODE: 0}, reasons={}, memory=TrustMemory(), useless=(NODE,))
    health = FleetHealth()
    health.record_evidence(await folded_round(tmp_path, useless), {})
    parts = health.parts(NODE)
    assert parts.reliability > NEWCOMER > parts.quality


async def test_a_round_without_evidence_leaves_the_quality_as_it_was(tmp_path: Path) -> None:
    blind = Weighing(clips={}, votes={}, reasons={}, memory=TrustMemory(), no_evidence="none")
    health = FleetHealth()
    health.record_evidence(await folded_round(tmp_path, blind), {})
    assert health.parts(NODE).quality == NEWCOMER


async def test_an_idle_node_has_a_health_with_a_history_and_a_reason() -> None:
    clock = Clock()
    health = FleetHealth(clock=clock)
    for _ in range(10):
        clock.now_s += 60
        await health.look([NODE], {})
    health_view = health.health(NODE)
    assert health_view.history.step_minutes == 1
    assert len(health_view.history.points) == 10
    assert health_view.parts.uptime > NEWCOMER
    assert health_view.parts.level == "normal"
    assert health_view.reason


async def test_a_line_far_below_the_fleets_lowers_the_speed_and_excludes_nobody() -> None:
    def reading(bits_per_s: float) -> NodeReading:
        goodput = Estimate(mean=bits_per_s, count=3)
        return NodeReading(up_bits_per_s=goodput, down_bits_per_s=goodput)

    slow, third = reading(1e5), NodeId("0x" + "c3" * 20)
    health = FleetHealth()
    await health.look([NODE, OTHER, third], {NODE: slow, OTHER: reading(1e8), third: reading(1e8)})
    assert health.parts(NODE).speed == 0.0
    assert health.exclusion(NODE) is None
    assert health.rank(NODE) < health.rank(OTHER)


def test_speeds_of_different_workloads_are_not_compared() -> None:
    health = FleetHealth()
    health.record_rate(NODE, "gpt/1", 1.0)
    health.record_rate(OTHER, "mlp/1", 10_000.0)
    speeds = [health.parts(node).speed for node in (NODE, OTHER)]
    assert speeds == pytest.approx([NEWCOMER, NEWCOMER])


async def test_the_end_of_an_exclusion_is_told_by_the_look_that_finds_it() -> None:
    clock = Clock()
    health = FleetHealth({NODE: bad_record(clock)}, clock)
    exclusion = health.exclusion(NODE)
    assert exclusion is not None
    assert await health.look([NODE], {}), "it was not known before"
    assert not await health.look([NODE], {})
    clock.now_s = exclusion.until_s
    assert await health.look([NODE], {})
    assert health.exclusion(NODE) is None


async def test_health_outlives_a_restart(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    services.health.record_rate(NODE, "mlp/1", 100.0)
    await services.health.look([NODE], {})
    async with driving(services):
        await store_health(services.driver, services.health)
    before = services.health.records[NODE]
    assert services.health.records_to_store(9) == {}
    assert services.journal.health() == {NODE: before}


async def test_few_records_are_written_at_a_time_the_longest_unstored_first() -> None:
    clock = Clock()
    health = FleetHealth(clock=clock)
    await health.look([NODE, OTHER], {})
    first = health.records_to_store(most=1)
    health.mark_stored(first)
    clock.now_s += 60
    await health.look([NODE, OTHER], {})
    assert health.records_to_store(most=1).keys() == {NODE, OTHER} - first.keys()


async def test_a_node_that_was_away_for_a_month_is_forgotten(tmp_path: Path) -> None:
    clock, services = Clock(), services_in(tmp_path)
    services = services.replace(health=FleetHealth(clock=clock))
    await services.health.look([NODE], {})
    async with driving(services):
        await store_health(services.driver, services.health)
        clock.now_s += (FORGOTTEN_DAYS * 24 * 60 + 1) * 60
        await services.health.look([], {})
        await store_health(services.driver, services.health)
    assert services.health.records == {}
    assert services.journal.health() == {}


async def test_an_excluded_node_says_why_it_is_idle(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    clock = Clock()
    health = FleetHealth({NODE: bad_record(clock)}, clock)
    allocator = NodeAllocator(services.driver, services.nodes, services.journal, health=health)
    assert "its reliability fell below 0.2" in allocator.idle_reason(NODE)


@pytest.mark.parametrize("stored", [b"{}", b"[1]", b'{"minutes": 7}'])
def test_a_record_of_another_version_begins_anew(tmp_path: Path, stored: bytes) -> None:
    from sqlalchemy import insert

    from coordinator.shell.store.journal.schema import HEALTH

    journal = services_in(tmp_path).journal
    with journal.database.writer() as connection:
        connection.execute(insert(HEALTH), {"node": NODE, "record_json": stored})
    assert journal.health().get(NODE, HealthRecord()) == HealthRecord()
