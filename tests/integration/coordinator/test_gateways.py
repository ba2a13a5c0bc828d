"""Real gateways between a real coordinator and real daemons."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hypergpu.jobfile.spec import JobSpec, TrainingSettings
from tests.gateway_process import GatewayProcess, operator_token
from tests.processes import Cluster, NodeProcess, accepted_updates

ROUNDS = 20


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

    def add_nodes(self, count: int) -> None:
        """Let nodes join at the gateways' address."""
        token = self.gateways[0].token(self.cluster.coordinator)
        for number in range(count):
            node = NodeProcess(self.cluster.folder, f"node-{number}", "null")
            self.cluster.nodes.append(node)
            node.join(token)


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
    paid = Counter((number, node) for number, node, _ in accepted_updates(events))
    assert max(paid.values()) == 1
    assert not [event for event in events if event.kind in {"JobPaused", "NodeLost"}]
