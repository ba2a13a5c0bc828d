"""Data folders that coordinators of earlier versions left: finished jobs are shown and settled, and
what ran goes on from its next round.
"""

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hypergpu.jobfile.spec import JobSpec
from hypergpu.user.client.values import JobView
from tests.processes import Cluster

VECTORS = Path(__file__).parents[2] / "vectors" / "journals"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A coordinator on what one of commit 100fc45f left, with its local chain and no node yet."""
    cluster = Cluster(tmp_path_factory.mktemp("earlier"))
    with tarfile.open(VECTORS / "100fc45f.tar.xz") as archive:
        # Python 3.11.2, which Debian 12 has, knows no filters.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(cluster.folder)  # noqa: S202 - the project's own file
    cluster.coordinator.environment["HYPERGPU_CHAIN"] = "anvil"
    with cluster:
        yield cluster


def jobs(cluster: Cluster) -> dict[str, JobView]:
    with cluster.client() as client:
        return {job.name: job for job in client.jobs()}


def spec_of(cluster: Cluster, name: str) -> JobSpec:
    with cluster.client() as client:
        return client.spec(jobs(cluster)[name].id)


def test_a_finished_job_is_shown_and_exported(cluster: Cluster, tmp_path: Path) -> None:
    job = jobs(cluster)["finished"]
    assert (job.phase, job.round, job.rounds, job.updates_accepted) == ("finished", 3, 3, 6)
    assert job.metric == pytest.approx(0.8563, abs=1e-4)
    with cluster.client() as client:
        assert client.export(job.id, tmp_path / "model").digest == job.model


def test_jobs_keep_the_strategy_and_the_settings_that_they_began_with(cluster: Cluster) -> None:
    running_spec, planned_spec = spec_of(cluster, "running"), spec_of(cluster, "planned")
    assert (running_spec.strategy, running_spec.codec.up, running_spec.round.deadline_ms) == (
        "diloco",
        "int8",
        60_000,
    )
    assert (planned_spec.strategy, planned_spec.codec.up, planned_spec.aware.stated_keys) == (
        "aware",
        "int4",
        (),
    )


def test_jobs_go_on_from_the_next_round_and_are_settled(cluster: Cluster) -> None:
    before = jobs(cluster)
    assert before["running"].round == 7
    cluster.add_nodes(2)
    with cluster.client() as client:
        client.resume(before["planned"].id)
    events = {name: [*cluster.events(before[name].id)] for name in ("running", "planned")}

    measured_rounds = {
        name: [event.fields["round"] for event in each if event.kind == "RoundMeasured"]
        for name, each in events.items()
    }
    assert measured_rounds["running"] == list(range(12))
    assert measured_rounds["planned"] == list(range(jobs(cluster)["planned"].round))
    fixed_plans = [event.fields for event in events["running"] if event.kind == "RoundPlanned"]
    plan_fields = [event.fields for event in events["planned"] if event.kind == "RoundPlanned"]
    assert not fixed_plans
    assert plan_fields
    assert {job.phase for job in jobs(cluster).values()} == {"finished"}
    with cluster.client() as client:
        ledger = client.ledger(before["running"].id)
    assert len(ledger.nodes) == 4
    assert sum(node.receipts for node in ledger.nodes) == 24
