"""A watcher of telemetry is told what changed, the newest of it, a bounded piece at a time."""

from pathlib import Path

from coordinator.core.network.reading import RoundTrip
from coordinator.shell.nodes.known_nodes import KnownNodes
from coordinator.shell.service.telemetry import LOOK_MS, NODES_A_MESSAGE, NewestLevels
from coordinator.shell.store.journal.records import NodeRecord
from coordinator.shell.translate import NodeProgress
from hypergpu.ids import NodeId
from hypergpu.phases import WorkPhase
from hypergpu.units import Microseconds, Milliseconds
from hypergpu.v1 import job_pb2
from tests.unit.shell.whole_shell import (
    JOB,
    NODE,
    WholeShell,
    begin_job,
    connect_node,
    driving,
    services_in,
)


class WatchedNodes:
    """Newest levels of nodes, with a watcher that reads when it is told to."""

    def __init__(self, services: WholeShell, *nodes: NodeId) -> None:
        self.services, self.known = services, KnownNodes(services.journal)
        for node in nodes:
            self.known.admit(NodeRecord(node, b"", b"{}", "test", 0, 0))
        self._levels = NewestLevels(services.fleet, services.jobs, self.known)
        self._told: dict[NodeId, int] = {}
        self._looks = 0

    def look(self) -> None:
        self._looks += 1
        self._levels.refresh(Milliseconds(self._looks * LOOK_MS))

    def read(self, own: frozenset[NodeId] | None = None) -> list[job_pb2.NodeLevels]:
        return self._levels.news(self._told, own)

    def tell_progress(self, steps_done: int, phase: WorkPhase, node: NodeId = NODE) -> None:
        round_ = self.services.jobs[JOB].job.round
        assert round_ is not None
        lease = round_.participants[node].lease
        progress = NodeProgress(JOB, round_.number, lease, steps_done, 9, float("nan"), phase)
        self.services.nodes.record_progress(node, progress)


def round_trip(took_us: int) -> RoundTrip:
    return RoundTrip(Milliseconds(took_us), Microseconds(took_us))


def node_ids(count: int) -> list[NodeId]:
    return [NodeId(f"0x{number:040x}") for number in range(count)]


async def test_a_watcher_is_told_what_changed_and_after_a_stall_only_the_newest(
    tmp_path: Path,
) -> None:
    services = services_in(tmp_path)
    node_watch = WatchedNodes(services, NODE)
    connect_node(services)
    async with driving(services):
        await begin_job(services)
        node_watch.look()
        (first,) = node_watch.read()
        assert (first.state, first.job_id, first.participant.state) == ("working", JOB, "pending")
        assert not first.HasField("round_trip_us")

        node_watch.look()
        assert node_watch.read() == []  # The loss is NaN in both.

        for steps in range(1, 6):
            services.readings.observe(NODE, round_trip(40_000 + steps))
            node_watch.tell_progress(steps, WorkPhase.TRAIN)
            node_watch.look()
        (newest,) = node_watch.read()
        assert (newest.participant.steps_done, newest.participant.phase) == (5, "train")
        assert newest.round_trip_us == 40_000
        assert node_watch.read() == []


def test_all_nodes_are_told_in_pieces_and_each_watcher_sees_its_own(tmp_path: Path) -> None:
    nodes = node_ids(120)
    node_watch = WatchedNodes(services_in(tmp_path), *nodes)
    node_watch.look()
    own = frozenset(nodes[100:])
    assert {each.node_id for each in node_watch.read(own)} == own
    sizes = [len(node_watch.read()) for _ in range(3)]
    assert sizes == [NODES_A_MESSAGE, NODES_A_MESSAGE, 0]


def test_states_are_told_at_once_and_readings_of_many_nodes_by_turns(tmp_path: Path) -> None:
    nodes = node_ids(120)
    services = services_in(tmp_path)
    node_watch = WatchedNodes(services, *nodes)
    node_watch.look()
    while node_watch.read():
        pass
    node_watch.known.revoke(nodes[7])
    for node in nodes:
        services.readings.observe(node, round_trip(30_000))
    pieces = []
    for _ in range(4):
        node_watch.look()
        pieces.append(node_watch.read())
    assert [each.state for each in pieces[0] if each.node_id == nodes[7]] == ["revoked"]
    assert max(map(len, pieces)) <= 120 // 4 + 1
    assert {each.node_id for piece in pieces for each in piece} == set(nodes)


def test_an_idle_node_is_told_with_its_health(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    node_watch = WatchedNodes(services, NODE)
    connect_node(services)
    node_watch.look()
    (levels,) = node_watch.read()
    assert (levels.health.value, levels.health.level, levels.health.reliability) == (
        0.75,
        "normal",
        0.75,
    )
    for _ in range(8):
        services.health.record_rate(NODE, "mlp/1", 1.0)
        services.health.record_rate(NodeId("0x" + "b2" * 20), "mlp/1", 64.0)
    node_watch.look()
    (levels,) = node_watch.read()
    assert levels.health.speed == 0.38
    assert levels.health.reason == "speed 0.38 lowers it most"
