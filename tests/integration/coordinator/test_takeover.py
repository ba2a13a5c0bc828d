"""Two coordinators on one PostgreSQL and one object store: one dies with its folder, one sleeps."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hypergpu.cluster.s3_server import S3Server
from tests.conformance.journal_stores import postgres_schema
from tests.coordinator_pair import ROUNDS, SPEC, CoordinatorPair, check_whole, is_round


@pytest.fixture
def pair(tmp_path: Path, s3_server: S3Server) -> Iterator[CoordinatorPair]:
    with postgres_schema() as url, CoordinatorPair(tmp_path, (url, url), s3_server) as made:
        yield made


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
