import os
import re
import sqlite3
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace
from sqlalchemy import text

from coordinator.shell.store.journal.engines import journal_url, make_engine
from coordinator.shell.store.journal.journal import Journal
from coordinator.shell.store.journal.records import (
    Entry,
    JournalError,
    JournalUnreadableError,
    JournalVersionError,
)
from hypergpu.ids import JobId, NodeId

JOB = JobId("job-00000000000a")
NODE = NodeId("0x" + "a1" * 20)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.sqlite3"


def entry(sequence: int) -> Entry:
    return Entry(JOB, sequence, sequence, "RoundRecorded", b"{}" * 200)


def fill(path: Path, count: int) -> None:
    journal = Journal(str(path))
    for sequence in range(count):
        journal.append([entry(sequence)])
    journal.advance_nonce(NODE, 5)
    journal.close()


def surviving_rows(journal: Journal) -> int:
    """How many rows are left, after checking that the journal goes on behind them."""
    entries = journal.recover(JOB).entries
    assert entries == tuple(entry(sequence) for sequence in range(len(entries)))
    journal.append([entry(len(entries))])
    assert journal.recover(JOB).damages == ()
    journal.close()
    return len(entries)


def test_a_journal_from_before_pauses_gets_their_table(path: Path) -> None:
    Journal(str(path)).close()
    engine = make_engine(journal_url(str(path)))
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE pauses"))
    engine.dispose()
    journal = Journal(str(path))
    journal.set_pause(NODE, "paused by its owner")
    journal.close()
    again = Journal(str(path))
    assert again.pauses() == {NODE: "paused by its owner"}
    again.set_pause(NODE, "")
    assert again.pauses() == {}
    again.close()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("UPDATE journal SET version = 9", "a newer hypergpu.*pip install --upgrade hypergpu"),
        ("DROP TABLE journal", "an older hypergpu.*use another folder"),
    ],
)
def test_a_journal_of_another_version_is_refused_with_the_fix(
    path: Path, change: str, problem: str
) -> None:
    Journal(str(path)).close()
    engine = make_engine(journal_url(str(path)))
    with engine.begin() as connection:
        connection.execute(text(change))
    engine.dispose()
    with pytest.raises(JournalVersionError, match=problem):
        Journal(str(path))


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://user:hunter2@host/db"])
def test_other_places_are_refused_with_the_choices_and_without_the_password(url: str) -> None:
    with pytest.raises(JournalError, match="the journal cannot be kept") as failure:
        Journal(url)
    assert "hunter2" not in str(failure.value)


def test_a_commit_waits_for_the_disk_and_locks_are_waited_for_longer_than_ten_seconds(
    path: Path,
) -> None:
    engine = make_engine(journal_url(str(path)))
    with engine.connect() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "busy_timeout")
        }
    engine.dispose()
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "busy_timeout": 30_000}


@pytest.mark.parametrize("held_s", [1.0, pytest.param(10.0, marks=pytest.mark.full)])
def test_eight_hundred_updates_at_once_wait_for_a_lock_and_none_is_lost(
    path: Path, held_s: float
) -> None:
    journal = Journal(str(path))
    jobs = [JobId(f"job-{number:012x}") for number in range(8)]

    def write(job_id: JobId) -> None:
        for sequence in range(100):
            journal.append([replace(entry(sequence), job_id=job_id)])

    lock_holder = closing(sqlite3.connect(path, isolation_level=None))
    with lock_holder as other, ThreadPoolExecutor(8) as pool:
        other.execute("BEGIN IMMEDIATE")
        writes = [pool.submit(write, job_id) for job_id in jobs]
        assert not wait(writes, timeout=held_s).done
        other.execute("ROLLBACK")
        for each in writes:
            each.result()
    assert [len(journal.read(job_id).entries) for job_id in jobs] == [100] * 8
    journal.close()


def test_a_truncated_database_is_found_and_what_is_left_goes_on(path: Path) -> None:
    fill(path, 400)
    os.truncate(path, path.stat().st_size * 3 // 4)
    journal = Journal(str(path))
    assert re.search("was damaged.*rows could be saved.*damaged-1", journal.findings[0])
    assert 0 < surviving_rows(journal) < 400
    assert path.with_name(path.name + ".damaged-1").exists()


def test_a_database_that_is_no_database_is_refused_untouched(path: Path) -> None:
    fill(path, 3)
    garbage = b"\0" * path.stat().st_size
    path.write_bytes(garbage)
    with pytest.raises(JournalUnreadableError, match="restore a backup"):
        Journal(str(path))
    assert path.read_bytes() == garbage


@pytest.mark.parametrize("seed", range(24))
def test_a_flipped_byte_anywhere_is_never_believed(path: Path, seed: int) -> None:
    fill(path, 60)
    content = bytearray(path.read_bytes())
    content[(seed * 7919 + 100) % len(content)] ^= 0xFF
    path.write_bytes(content)
    try:
        journal = Journal(str(path))
    except JournalError:
        return
    assert 0 <= surviving_rows(journal) <= 60


def test_a_tail_that_sqlite_drops_without_a_word_is_found(path: Path) -> None:
    journal = Journal(str(path))
    for sequence in range(50):
        journal.append([entry(sequence)])
    wal = path.with_name(path.name + "-wal")
    database, log = path.read_bytes(), wal.read_bytes()
    journal.close()
    # As a power cut or a bad sector leaves it: the second half of the log is gone.
    path.write_bytes(database)
    wal.write_bytes(log[: len(log) // 2])
    again = Journal(str(path))
    assert re.search(r"lost \d+ transactions? at its end", again.findings[0])
    assert 0 < surviving_rows(again) < 50
    once_more = Journal(str(path))
    assert once_more.findings == ()
    once_more.close()


def test_a_sound_journal_opens_without_findings(path: Path) -> None:
    fill(path, 5)
    journal = Journal(str(path))
    assert journal.findings == ()
    assert surviving_rows(journal) == 5
