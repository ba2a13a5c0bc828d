"""Several coordinators on one PostgreSQL: who drives, and what becomes of one that slept."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, create_engine, select, text, update

from coordinator.core.hub.tenure import Claimant, Tenure
from coordinator.shell.app.takeover import is_away
from coordinator.shell.store.journal.engines import journal_url
from coordinator.shell.store.journal.journal import Journal
from coordinator.shell.store.journal.records import (
    Entry,
    JournalLockedError,
    JournalUnreadableError,
    TenureLostError,
)
from coordinator.shell.store.journal.schema import TENURE
from coordinator.shell.store.journal.tenure import TenureClaim, refuse_to_wait
from hypergpu.ids import JobId
from hypergpu.units import Milliseconds
from tests.conformance.journal_stores import postgres_schema

pytestmark = pytest.mark.needs("database")

JOB = JobId("job-00000000000a")
LONG = Milliseconds(60_000)


def row(sequence: int) -> Entry:
    return Entry(JOB, sequence, 0, "RoundRecorded", b"{}")


def alone(name: str, length_ms: int) -> TenureClaim:
    """The claim of one beside whom nobody stands by."""
    length = Milliseconds(length_ms)
    return TenureClaim(
        Claimant(name, f"{name}.example.org:7700", length, is_alone=True), refuse_to_wait
    )


def claim(name: str, wait: Callable[[Tenure], None] = refuse_to_wait) -> TenureClaim:
    return TenureClaim(Claimant(name, f"{name}.example.org:7700", LONG), wait)


@pytest.fixture
def url() -> Iterator[str]:
    with postgres_schema() as schema_url:
        yield schema_url


@pytest.fixture
def server(url: str) -> Iterator[Engine]:
    engine = create_engine(journal_url(url))
    yield engine
    engine.dispose()


def let_tenure_run_out(server: Engine) -> None:
    """What the database's clock does in time."""
    with server.begin() as connection:
        connection.execute(update(TENURE).values(until_ms=0))


def number(server: Engine) -> int:
    with server.begin() as connection:
        return int(connection.execute(select(TENURE.c.number)).scalar_one())


def test_a_second_coordinator_is_told_who_drives(url: str) -> None:
    journal = Journal(url, claim("first"))
    with pytest.raises(JournalLockedError, match=r"first\.example\.org:7700.*--takeover"):
        Journal(url, claim("second"))
    journal.append([row(0)])
    journal.close()


def test_a_tenure_that_was_given_back_is_taken_at_once(url: str, server: Engine) -> None:
    Journal(url, claim("first")).close()
    second = Journal(url, claim("second"))
    assert second.database.follows_another
    second.close()
    assert number(server) == 2


def test_a_coordinator_takes_its_own_tenure_again(url: str) -> None:
    killed_journal = Journal(url, claim("first"))
    again = Journal(url, claim("first"))
    assert not again.database.follows_another
    again.append([row(0)])
    again.close()
    killed_journal.close()


def test_a_writer_whose_tenure_was_taken_writes_and_signs_no_more(url: str, server: Engine) -> None:
    reasons: list[str] = []
    sleeper = Journal(url, claim("first"))
    assert sleeper.database.tenure is not None
    sleeper.database.tenure.tell(reasons.append)
    let_tenure_run_out(server)
    successor = Journal(url, claim("second"))
    for _ in range(2):
        with pytest.raises(TenureLostError, match="this coordinator drives no more"):
            sleeper.append([row(0)])
    with pytest.raises(TenureLostError), server.begin() as connection:
        sleeper.database.fence(connection)
    assert len(reasons) == 1
    successor.append([row(0)])
    assert len(successor.read(JOB).entries) == 1
    sleeper.close()
    successor.append([row(1)])
    successor.close()


def test_one_alone_outlives_its_tenure_until_another_takes_it(url: str) -> None:
    # Over by its own clock as soon as it was taken.
    journal = Journal(url, alone("first", 0))
    journal.database.check_driving()
    journal.append([row(0)])
    successor = Journal(url, alone("second", 60_000))
    with pytest.raises(TenureLostError):
        journal.append([row(1)])
    successor.append([row(1)])
    journal.close()
    successor.close()


def test_a_claim_waits_for_a_write_under_the_tenure_before(url: str, server: Engine) -> None:
    writer = Journal(url, claim("first"))
    with ThreadPoolExecutor() as threads:
        with writer.database.writer():
            let_tenure_run_out(server)
            second_claim = threads.submit(Journal, url, claim("second", lambda _: None))
            # The database has the claim wait: it is among those that wait for a lock.
            waiting_locks = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
            with server.connect() as connection:
                while not connection.scalar(waiting_locks) and not second_claim.done():
                    connection.rollback()
            assert not second_claim.done()
        second_claim.result().close()
    writer.close()


def test_of_many_claimants_one_drives(url: str, server: Engine) -> None:
    def take(name: str) -> Journal | None:
        try:
            return Journal(url, claim(name))
        except JournalLockedError:
            return None

    with ThreadPoolExecutor(6) as threads:
        journals = list(threads.map(take, "abcdef"))
    (driver,) = [journal for journal in journals if journal is not None]
    assert number(server) == 1
    driver.append([row(0)])
    driver.close()


def test_a_server_that_cuts_connections_is_met_again(url: str, server: Engine) -> None:
    name = f"cut-{secrets.token_hex(8)}"
    journal = Journal(f"{url}&application_name={name}", claim("first"))
    cut = text(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = :name"
    )
    with server.begin() as connection:
        assert connection.execute(cut, {"name": name}).all()
    journal.append([row(0)])
    assert len(journal.read(JOB).entries) == 1
    journal.close()


def write_while_cut_off(journal: Journal, server: Engine) -> None:
    """A transaction in whose middle the server ends the connection."""
    own = text("SELECT pg_backend_pid()")
    with journal.database.writer() as connection:
        pid = connection.scalar(own)
        with server.begin() as other:
            other.execute(text(f"SELECT pg_terminate_backend({pid})"))
        connection.scalar(own)


def test_a_server_that_cuts_a_write_off_is_known_to_be_away(url: str, server: Engine) -> None:
    journal = Journal(url, claim("first"))
    with pytest.raises(JournalUnreadableError) as failure:
        write_while_cut_off(journal, server)
    assert is_away(failure.value)
    journal.append([row(0)])
    journal.close()


_WRITER = """
import sys
from coordinator.core.hub.tenure import Claimant
from coordinator.shell.store.journal.journal import Journal
from coordinator.shell.store.journal.tenure import TenureClaim, refuse_to_wait

claimant = Claimant("first", "first.example.org:7700", 1000)
journal = Journal(sys.argv[1], TenureClaim(claimant, refuse_to_wait))
with journal.database.writer():
    print("writing", flush=True)
    sys.stdin.readline()
"""


def test_a_process_that_stops_in_a_write_holds_nobody_up(url: str) -> None:
    """The server ends its transaction, and it finds that out when it goes on."""
    child = subprocess.Popen(
        [sys.executable, "-c", _WRITER, url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    os.kill(child.pid, signal.SIGSTOP)
    successor = Journal(url, claim("second", lambda _: None))
    os.kill(child.pid, signal.SIGCONT)
    _, output = child.communicate("go on\n", timeout=60)
    assert child.returncode != 0
    assert "JournalUnreadableError" in output or "TenureLostError" in output
    successor.append([row(0)])
    successor.close()
