"""What a job survives while two coordinators share a database and an object store: each time its
model is that of the undisturbed one, every update is paid once, and `job show` says what was wrong.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from hypergpu.errors import HyperGPUError
from hypergpu.user.client import Coordinator
from hypergpu.user.client.connection import RESTARTING, ConnectionTarget
from hypergpu.user.cluster.s3_server import S3Server
from netsim.emulation.requests import Condition, SetCondition
from netsim.link import UNLIMITED, Shape
from netsim.proxy.process import Forward, ProxiedNode, ProxyPlan, ProxyProcess
from tests.coordinator_pair import SPEC, CoordinatorPair, check_whole, is_round
from tests.polling import first_true
from tests.postgres_server import RestartablePostgres
from tests.processes import CoordinatorProcess
from tests.programs import FAKETIME

pytestmark = pytest.mark.needs("database", "postgres server")

BEGUN = 2
"""Round that is open when a fault comes, which on a busy machine takes some rounds to be there."""
DATABASE_AWAY_S, STORE_AWAY_S = 30.0, 60.0
SKEW = "+10m"
CALL_S = 20.0
POINTS = (
    *("initialise.made", "initialise.stored", "decide.begin:9", "decide.done:12"),
    *("persist.written:9", "act.begin:7", "act.command:9", "act.done:9"),
    *("upload.admitted:5", "upload.complete:5", "upload.stored:5", "upload.accepted:5"),
    *("aggregate.begin:3", "aggregate.folded:3", "aggregate.model_stored:3", "aggregate.stored:3"),
    *("snapshot.begin", "snapshot.written", "evaluate.done", "collect.begin:3", "collect.done:3"),
)
"""Where a coordinator dies, with how often it passes there before."""
Result = TypeVar("Result")


@pytest.fixture
def database() -> Iterator[RestartablePostgres]:
    with RestartablePostgres() as server:
        yield server


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[S3Server]:
    with S3Server(tmp_path / "buckets") as server:
        yield server


@pytest.fixture
def pair(
    tmp_path: Path, database: RestartablePostgres, bucket: S3Server
) -> Iterator[CoordinatorPair]:
    with CoordinatorPair(tmp_path, (database.url(), database.url()), bucket) as coordinator_pair:
        yield coordinator_pair


def undisturbed_digest(pair: CoordinatorPair) -> str:
    """Digest of the job's model when nothing happens."""
    model = pair.cluster.wait_until_finished(pair.cluster.submit(SPEC)).model
    assert model is not None
    return model


def begun_job(pair: CoordinatorPair) -> str:
    """A job that has rounds behind it, and most of them before it."""
    job_id = pair.cluster.submit(SPEC)
    pair.cluster.wait_for(job_id, is_round(BEGUN))
    return job_id


def let_pass(seconds: float) -> None:
    """An outage lasts so long."""
    threading.Event().wait(seconds)


def wait_for_reason(pair: CoordinatorPair, job_id: str, part: str) -> None:
    """Wait until `job show` says so."""

    def is_told() -> bool:
        job_view = pair.cluster.job(job_id).job
        assert part in job_view.reason or job_view.phase != "finished", job_view.reason
        return part in job_view.reason

    first_true(is_told)


def test_a_database_and_an_object_store_that_restart_change_nothing(
    pair: CoordinatorPair, database: RestartablePostgres, bucket: S3Server
) -> None:
    digest = undisturbed_digest(pair)
    job_id = begun_job(pair)
    database.stop()
    database.start()
    check_whole(pair.cluster, job_id, digest)

    job_id = begun_job(pair)
    bucket.stop()
    wait_for_reason(pair, job_id, "object store")
    bucket.start()
    check_whole(pair.cluster, job_id, digest)


@pytest.mark.full
def test_a_job_waits_for_a_database_that_is_away_for_half_a_minute(
    pair: CoordinatorPair, database: RestartablePostgres
) -> None:
    digest = undisturbed_digest(pair)
    job_id = begun_job(pair)
    database.stop()
    let_pass(DATABASE_AWAY_S)
    database.start()
    check_whole(pair.cluster, job_id, digest)
    assert "the database did not answer for" in pair.cluster.job(job_id).takeover


@pytest.mark.full
def test_a_job_waits_for_an_object_store_that_is_away_for_a_minute(
    pair: CoordinatorPair, bucket: S3Server
) -> None:
    digest = undisturbed_digest(pair)
    job_id = begun_job(pair)
    bucket.stop()
    wait_for_reason(pair, job_id, "object store")
    let_pass(STORE_AWAY_S)
    bucket.start()
    check_whole(pair.cluster, job_id, digest)


@pytest.mark.full
async def test_a_coordinator_that_is_cut_off_from_the_database_is_followed(
    tmp_path: Path, database: RestartablePostgres, bucket: S3Server
) -> None:
    forward = Forward(target_port=database.port)
    node = ProxiedNode(name="first", shape=Shape(link=UNLIMITED), forwards=(forward,))
    async with ProxyProcess(ProxyPlan(nodes=(node,), coordinator=UNLIMITED)) as proxies:
        urls = (database.url(proxies.address("first")[1]), database.url())
        pair = CoordinatorPair(tmp_path, urls, bucket)
        try:
            await asyncio.to_thread(pair.__enter__)
            digest = await asyncio.to_thread(undisturbed_digest, pair)
            job_id = await asyncio.to_thread(begun_job, pair)
            await proxies.obey(SetCondition("first", Condition.CUT))
            await asyncio.to_thread(pair.let_drive, pair.second)
            await asyncio.to_thread(check_whole, pair.cluster, job_id, digest)
            await proxies.obey(SetCondition("first", Condition.OPEN))
            await asyncio.to_thread(pair.first.wait_until_standing_by)
            assert pair.first.address in pair.cluster.job(job_id).takeover
        finally:
            await asyncio.to_thread(pair.end)


def connection_to(pair: CoordinatorPair, coordinator: CoordinatorProcess) -> Coordinator:
    """A connection with this coordinator and no other."""
    assert pair.cluster.token is not None
    return Coordinator(ConnectionTarget(coordinator.address, pair.cluster.token, CALL_S))


@pytest.mark.full
def test_a_coordinator_that_slept_answers_appends_and_signs_nothing(pair: CoordinatorPair) -> None:
    digest = undisturbed_digest(pair)
    job_id = begun_job(pair)
    with (
        connection_to(pair, pair.first) as reader,
        connection_to(pair, pair.first) as writer,
        ThreadPoolExecutor() as threads,
    ):
        for each in (reader, writer):
            each.job(job_id)  # It is connected before the coordinator falls asleep.
        os.kill(pair.first.child.pid, signal.SIGSTOP)
        pending_calls: list[Future[object]] = [
            threads.submit(reader.job, job_id),
            threads.submit(writer.pause, job_id),
            threads.submit(writer.submit, SPEC),
        ]
        pair.let_drive(pair.second)
        os.kill(pair.first.child.pid, signal.SIGCONT)
        pair.first.wait_until_standing_by()
        for call in pending_calls:
            assert isinstance(call.exception(), HyperGPUError)
    check_whole(pair.cluster, job_id, digest)
    with pair.cluster.client() as client:
        assert len(client.jobs()) == 2
        kinds = [each.kind for each in pair.cluster.events(job_id)]
    assert "JobPaused" not in kinds


@pytest.mark.full
@pytest.mark.needs("faketime")
def test_clocks_may_differ_by_ten_minutes(
    tmp_path: Path, database: RestartablePostgres, bucket: S3Server
) -> None:
    library = next(Path("/usr/lib").glob(FAKETIME))
    pair = CoordinatorPair(tmp_path, (database.url(), database.url()), bucket)
    pair.second.environment |= {
        "LD_PRELOAD": str(library),
        "FAKETIME": SKEW,
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    with pair:
        digest = undisturbed_digest(pair)
        job_id = begun_job(pair)
        pair.first.kill()
        pair.let_drive(pair.second)
        check_whole(pair.cluster, job_id, digest)
        # Back to the clock that is behind: receipts, tokens and certificates were made ahead of it.
        pair.first.launch()
        pair.first.wait_until_standing_by()
        job_id = begun_job(pair)
        pair.second.kill()
        pair.let_drive(pair.first)
        check_whole(pair.cluster, job_id, digest)


@pytest.mark.full
def test_the_machine_of_the_active_one_may_go_at_any_instant(pair: CoordinatorPair) -> None:
    digest = undisturbed_digest(pair)
    standing_by, active, is_enough = pair.second, pair.first, threading.Event()
    with ThreadPoolExecutor(1) as threads:
        work = threads.submit(work_until, is_enough, pair, digest)
        try:
            for number, point in enumerate((*POINTS, "")):
                # One that stands by dies there once it drives.
                standing_by.end()
                standing_by.launch(failpoints=point)
                if not number:
                    active.kill()
                wait_until_dead(active, work)
                shutil.rmtree(active.data_dir)
                pair.let_drive(standing_by)
                standing_by, active = active, standing_by
        finally:
            is_enough.set()
        work.result()


def work_until(is_enough: threading.Event, pair: CoordinatorPair, digest: str) -> None:
    """One job after the other, each of which ends whole."""
    while not is_enough.is_set():
        job_id = answer(lambda: pair.cluster.submit(SPEC))
        answer(partial(check_whole, pair.cluster, job_id, digest))


def wait_until_dead(coordinator: CoordinatorProcess, working: Future[None]) -> None:
    """Wait for its end while jobs go on."""
    while coordinator.child.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            coordinator.child.wait(timeout=1)
        if working.done():
            working.result()


def answer(call: Callable[[], Result]) -> Result:
    """What a user gets who asks again while nobody serves."""
    while True:
        try:
            return call()
        except HyperGPUError as away:
            if away.reason not in RESTARTING:
                raise
