"""Real gateways between a real coordinator and real daemons."""

import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from benchmarks.ours.scale import gateway_sessions
from benchmarks.ours.scale.gateway_sessions import LinkCount
from benchmarks.ours.session_processes import read_answer, session_process, tell
from benchmarks.ours.sessions import SessionSpread
from hypergpu.jobfile.spec import JobSpec, TrainingSettings
from tests import coordinator_pair
from tests.coordinator_pair import check_whole, is_round
from tests.gateway_process import GatewayProcess, operator_token
from tests.polling import first_true
from tests.processes import Cluster, NodeProcess, accepted_updates, json_lines

ROUNDS = 20
SESSIONS, SESSION_PROCESSES = 1_000, 4
_ERRORS = {"JobPaused", "NodeLost", "ShardHandedBack", "UpdateRejected"}
"""Events of a job that something has gone wrong in."""


class Fronted:
    """A coordinator that nodes reach through two gateways at one address."""

    def __init__(self, folder: Path, owner: ExitStack) -> None:
        self.cluster = owner.enter_context(Cluster(folder, is_plaintext=False))
        token = operator_token(self.cluster.coordinator)
        first = GatewayProcess(token, folder / "gateway-0.log")
        owner.callback(first.end)
        second = GatewayProcess(token, folder / "gateway-1.log", *first.ports)
        owner.callback(second.end)
        self.gateways = [first, second]

    def add_nodes(self, count: int, worker: str = "null") -> None:
        """Let nodes join at the gateways' address."""
        token = self.gateways[0].token(self.cluster.coordinator)
        for number in range(count):
            node = NodeProcess(self.cluster.folder, f"node-{number}", worker)
            self.cluster.nodes.append(node)
            node.join(token)


class IdleDaemons:
    """Daemons without work at the gateways' address, many in a process."""

    def __init__(self, front: Fronted, owner: ExitStack) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        folder, token = front.cluster.folder, front.gateways[0].token(front.cluster.coordinator)
        for number in range(SESSION_PROCESSES):
            name = f"daemons-{number}"
            process = session_process(folder, name, gateway_sessions.__name__)
            self._processes.append(owner.enter_context(process))
            count = SESSIONS // SESSION_PROCESSES
            spread = SessionSpread(count, 60.0, str(folder / name), address="", token=token)
            tell(self._processes[-1], msgspec.json.encode(spread).decode())

    def wait_until_connected(self) -> None:
        """Wait for the first heartbeat of each."""
        assert all(read_answer(process, bool) for process in self._processes)

    @property
    def links(self) -> LinkCount:
        """Links of all of them, and those that broke so far."""
        for process in self._processes:
            tell(process, "links")
        counts = [read_answer(process, LinkCount) for process in self._processes]
        return LinkCount(sum(each.connected for each in counts), sum(each.lost for each in counts))


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Fronted]:
    with ExitStack() as owner:
        yield Fronted(tmp_path, owner)


def test_a_job_goes_on_when_a_gateway_is_killed_and_nothing_counts_twice(front: Fronted) -> None:
    cluster = front.cluster
    front.add_nodes(3)
    training = TrainingSettings(rounds=ROUNDS, inner_steps=2, nodes=3)
    job_id = cluster.submit(JobSpec(workload="null", training=training))
    cluster.wait_for(
        job_id, lambda event: event.kind == "RoundRecorded" and event.fields["round"] >= 4
    )
    max(front.gateways, key=lambda each: each.nodes).end()
    job = cluster.wait_until_finished(job_id)
    assert (job.phase, job.round) == ("finished", ROUNDS)
    events = list(cluster.events(job_id))
    pair_counts = Counter((number, node) for number, node, _ in accepted_updates(events))
    assert max(pair_counts.values()) == 1
    assert not [event for event in events if event.kind in {"JobPaused", "NodeLost"}]


@pytest.mark.full
def test_a_killed_gateways_thousand_streams_come_back_and_the_job_does_not_notice(
    front: Fronted,
) -> None:
    cluster, spec = front.cluster, coordinator_pair.SPEC
    front.add_nodes(coordinator_pair.NODES, "numpy")
    digest = cluster.wait_until_finished(cluster.submit(spec)).model
    assert digest is not None
    with ExitStack() as owner:
        idle = IdleDaemons(front, owner)
        idle.wait_until_connected()
        before = idle.links
        assert before.connected == SESSIONS
        job_id = cluster.submit(spec)
        cluster.wait_for(job_id, is_round(coordinator_pair.ROUNDS // 2))
        killed_gateway = max(front.gateways, key=lambda each: each.nodes)
        least_lost = killed_gateway.nodes - coordinator_pair.NODES
        killed_gateway.end()
        check_whole(cluster, job_id, digest)

        def are_back() -> bool:
            now = idle.links
            return now.connected >= SESSIONS and now.lost - before.lost >= least_lost

        first_true(are_back)
    events = list(cluster.events(job_id))
    assert not [event for event in events if event.kind in _ERRORS]
    job = cluster.job(job_id)
    assert (job.job.phase, job.job.updates_rejected) == ("finished", 0)
    lines = json_lines(cluster.folder / "coordinator.log")
    assert not [line for line in lines if line["level"] in {"error", "critical"}]
