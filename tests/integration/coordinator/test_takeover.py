"""Two coordinators on one PostgreSQL and one object store: one dies with its folder, one sleeps."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hypergpu.jobfile.rules import with_strategy
from hypergpu.jobfile.spec import TrainingSettings
from hypergpu.user.client import JobView
from hypergpu.user.cluster.s3_server import S3Server
from tests.conformance.journal_stores import postgres_schema
from tests.coordinator_pair import NODES, ROUNDS, SPEC, CoordinatorPair, check_whole, is_round
from tests.processes import Happening

pytestmark = pytest.mark.needs("database")


@pytest.fixture
def pair(tmp_path: Path, s3_server: S3Server) -> Iterator[CoordinatorPair]:
    with (
        postgres_schema() as url,
        CoordinatorPair(tmp_path, (url, url), s3_server) as coordinator_pair,
    ):
        yield coordinator_pair


@pytest.mark.full
def test_a_standby_goes_on_where_the_active_one_died_or_slept(pair: CoordinatorPair) -> None:
    cluster = pair.cluster
    undisturbed_model = cluster.wait_until_finished(cluster.submit(SPEC)).model
    assert undisturbed_model is not None

    job_id = cluster.submit(SPEC)
    cluster.wait_for(job_id, is_round(ROUNDS // 2))
    pair.first.kill()
    shutil.rmtree(pair.first.data_dir)
    pair.let_drive(pair.second)
    check_whole(cluster, job_id, undisturbed_model)
    assert pair.first.address in cluster.job(job_id).takeover

    pair.first.launch()
    pair.first.wait_until_standing_by()
    job_id = cluster.submit(SPEC)
    cluster.wait_for(job_id, is_round(ROUNDS // 2))
    os.kill(pair.second.child.pid, signal.SIGSTOP)
    pair.let_drive(pair.first)
    os.kill(pair.second.child.pid, signal.SIGCONT)
    pair.second.wait_until_standing_by()
    check_whole(cluster, job_id, undisturbed_model)

    # The one that slept drives again where the other one ends.
    pair.first.terminate()
    pair.let_drive(pair.second)
    assert cluster.job(job_id).job.model == undisturbed_model


SLOW = {"HYPERGPU_NODE_WORKER_STEP_FLOOR_MS": "400"}
QUICK = {"HYPERGPU_NODE_WORKER_STEP_FLOOR_MS": "20"}
"""A step of the others' takes a twentieth of the slow node's."""


@pytest.mark.full
def test_a_standby_folds_the_update_of_a_lease_that_was_under_way_as_it_took_over(
    pair: CoordinatorPair,
) -> None:
    cluster = pair.cluster
    for node in cluster.nodes:
        node.kill()
    cluster.add_nodes(NODES, settings=QUICK)
    cluster.add_nodes(1, settings=SLOW)
    training = TrainingSettings(rounds=40, inner_steps=20, nodes=NODES + 1)
    job_id = cluster.submit(with_strategy(replace(SPEC, training=training), "aware"))
    begun_event = cluster.wait_for(job_id, begins_long_work)
    (slow,) = (node for node, part in parts_of(begun_event).items() if part["rounds"] > 1)
    pair.first.kill()
    pair.let_drive(pair.second)
    cluster.wait_until_finished(job_id)
    events = list(cluster.events(job_id))
    change_index = next(n for n, each in enumerate(events) if each.kind == "CoordinatorChanged")
    number = begun_event.fields["plan"]["round"]
    receive_indices = [
        n
        for n, each in enumerate(events)
        if each.kind == "UpdateReceived"
        and (each.fields["node"], each.fields["round"]) == (slow, number)
    ]
    assert len(receive_indices) == 1
    assert receive_indices[0] > change_index


def parts_of(planned: Happening) -> dict[str, dict[str, Any]]:
    """Each node's part of a planned round."""
    parts: dict[str, dict[str, Any]] = planned.fields["plan"]["nodes"]
    return parts


def begins_long_work(happening: Happening) -> bool:
    """Whether a round is planned in which a measured node begins a lease over several rounds."""
    return happening.kind == "RoundPlanned" and any(
        part["rounds"] > 1 and part["step_us"] for part in parts_of(happening).values()
    )


@pytest.mark.full
def test_coordinators_on_one_database_drive_the_jobs_of_a_pool_each(
    tmp_path: Path, s3_server: S3Server
) -> None:
    with ExitStack() as pools:
        urls = [pools.enter_context(postgres_schema()) for _ in range(2)]
        folders = [tmp_path / name for name in ("vision", "text")]
        for folder in folders:
            folder.mkdir()
        pairs = [
            pools.enter_context(CoordinatorPair(folder, (url, url), s3_server))
            for folder, url in zip(folders, urls, strict=True)
        ]
        jobs = [pair.cluster.submit(SPEC) for pair in pairs]
        for pair, job_id in zip(pairs, jobs, strict=True):
            pair.cluster.wait_for(job_id, is_round(1))
        for pair in pairs:
            pair.first.kill()
        models = []
        for pair, job_id in zip(pairs, jobs, strict=True):
            pair.let_drive(pair.second)
            models.append(pair.cluster.wait_until_finished(job_id).model)
            assert [job.id for job in jobs_of(pair)] == [job_id]
        assert models[0] == models[1] is not None


def jobs_of(pair: CoordinatorPair) -> list[JobView]:
    """What a pool's operator sees."""
    with pair.cluster.client() as client:
        return list(client.jobs())
