"""Two coordinators on one PostgreSQL and one object store: one dies with its folder, one sleeps."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hypergpu.cluster.s3_server import BUCKET, S3Server
from hypergpu.jobfile.spec import JobSpec, TrainingSettings
from tests.conformance.journal_stores import postgres_schema
from tests.processes import (
    Cluster,
    CoordinatorProcess,
    Happening,
    accepted_updates,
)

ROUNDS, NODES = 8, 2
SPEC = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=ROUNDS, inner_steps=20, nodes=NODES),
)


class CoordinatorPair:
    """Two coordinators that may each drive, and nodes."""

    def __init__(self, folder: Path, url: str, server: S3Server) -> None:
        passphrase = folder / "passphrase"
        passphrase.write_text("two words\n")
        passphrase.chmod(0o600)
        flags = (
            *("--takeover", "--database-url", url, "--passphrase-file", str(passphrase)),
            *("--blobs", f"s3://{BUCKET}/takeover", "--heartbeat-interval-ms", "1000"),
        )
        self.cluster = Cluster(folder / "first", *flags, is_plaintext=False)
        self.first = self.cluster.coordinator
        self.second = CoordinatorProcess(folder / "second", *flags, is_plaintext=False)
        for each in (self.first, self.second):
            each.environment = dict(server.environment)

    def let_drive(self, coordinator: CoordinatorProcess) -> None:
        """Wait until a standby serves, and ask it from now on."""
        coordinator.wait_until_serving()
        self.cluster.coordinator = coordinator


@pytest.fixture
def pair(tmp_path: Path, s3_server: S3Server) -> Iterator[CoordinatorPair]:
    with postgres_schema() as url:
        made = CoordinatorPair(tmp_path, url, s3_server)
        try:
            with made.cluster:
                made.second.launch()
                made.second.wait_until_standing_by()
                made.cluster.add_nodes(NODES)
                yield made
        finally:
            made.first.end()
            made.second.end()


def is_round(number: int) -> Callable[[Happening], bool]:
    return lambda happening: (
        happening.kind == "RoundRecorded" and happening.fields["round"] >= number
    )


def check_whole(cluster: Cluster, job_id: str, digest: str) -> None:
    """The job is the undisturbed one: every update is accepted, measured and paid once."""
    job = cluster.wait_until_finished(job_id)
    events = list(cluster.events(job_id))
    accepted = [(number, node) for number, node, _ in accepted_updates(events)]
    assert len(accepted) == len(set(accepted)) == ROUNDS * NODES
    assert job.model == digest
    with cluster.coordinator.client() as client:
        # Receipts follow the journal, a moment behind it.
        while not (ledger := client.ledger(job_id)).is_over:
            pass
    assert [account.receipts for account in ledger.nodes] == [ROUNDS] * NODES


@pytest.mark.full
def test_a_standby_goes_on_where_the_active_one_died_or_slept(pair: CoordinatorPair) -> None:
    cluster = pair.cluster
    undisturbed = cluster.wait_until_finished(cluster.submit(SPEC)).model
    assert undisturbed is not None

    job_id = cluster.submit(SPEC)
    cluster.wait_for(job_id, is_round(ROUNDS // 2))
    pair.first.kill()
    shutil.rmtree(pair.first.data_dir)
    pair.let_drive(pair.second)
    check_whole(cluster, job_id, undisturbed)
    assert pair.first.address in cluster.job(job_id).takeover

    pair.first.launch()
    pair.first.wait_until_standing_by()
    job_id = cluster.submit(SPEC)
    cluster.wait_for(job_id, is_round(ROUNDS // 2))
    os.kill(pair.second.child.pid, signal.SIGSTOP)
    pair.let_drive(pair.first)
    os.kill(pair.second.child.pid, signal.SIGCONT)
    pair.second.wait_until_standing_by()
    check_whole(cluster, job_id, undisturbed)

    # The one that slept drives again where the other one ends.
    pair.first.terminate()
    pair.let_drive(pair.second)
    assert cluster.job(job_id).job.model == undisturbed
