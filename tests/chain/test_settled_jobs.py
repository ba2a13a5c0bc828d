"""A coordinator with an Anvil of its own pays what a job earns on the chain, to the last unit."""

from collections.abc import Iterator

import pytest

from hypergpu.cli.demo.settlement import settled
from hypergpu.cli.ledger.showing import ledger_of, verification_of
from hypergpu.spec import Evaluation, JobSpec, Pay, Training
from tests.processes import Cluster

SPEC = JobSpec(
    workload="digits-softmax",
    training=Training(rounds=6, inner_steps=5, nodes=2),
    evaluation=Evaluation(every=3),
    pay=Pay(unit_price=1_000_000, rounds_per_epoch=2),
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("settled"), "--chain", "anvil") as cluster:
        cluster.add_nodes(2)
        yield cluster


def test_what_a_job_earns_is_paid_to_the_last_unit(cluster: Cluster) -> None:
    job_id = cluster.submit(SPEC)
    assert cluster.finished(job_id).phase == "finished"
    with cluster.coordinator.client() as client:
        paid = settled(client, job_id)
        view = ledger_of(client, job_id)
        found = verification_of(client, job_id)
    assert paid.receipts == 12
    assert paid.paid == paid.earned == int(view.spent) > 0
    assert view.chain_id == 31337
    assert found.faults == []
    assert found.batches is not None
    assert found.batches >= 3
    assert all(node.paid == node.earned == node.vouched for node in view.nodes)


def test_a_coordinator_killed_while_it_settles_pays_once(cluster: Cluster) -> None:
    job_id = cluster.submit(SPEC)
    assert cluster.finished(job_id).phase == "finished"
    cluster.coordinator.kill()
    cluster.coordinator.start()
    with cluster.coordinator.client() as client:
        paid = settled(client, job_id)
    assert paid.paid == paid.earned > 0
