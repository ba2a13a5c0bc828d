from concurrent.futures import ThreadPoolExecutor

import pytest

from coordinator.shell.journal.journal import Journal
from coordinator.shell.journal.records import (
    Entry,
    JournalConflictError,
    JournalLockedError,
    Recovery,
    RequestClaim,
)
from hypergpu.digest import digest_of
from hypergpu.ids import JobId
from tests.conformance.journal_stores import JournalStore

JOB = JobId("job-00000000000a")
OTHER = JobId("job-00000000000b")


def entry(sequence: int, job_id: JobId = JOB) -> Entry:
    body = b'{"text":"na\xc3\xafve %d"}' % sequence
    return Entry(job_id, sequence, 1000 + sequence, "RoundRecorded", body)


def entries(count: int, job_id: JobId = JOB) -> list[Entry]:
    return [entry(sequence, job_id) for sequence in range(count)]


def claim(name: str, job_id: JobId = JOB) -> RequestClaim:
    return RequestClaim(name, job_id, digest_of(name.encode()))


def test_rows_come_back_as_they_were_appended_after_a_restart(store: JournalStore) -> None:
    store.journal.append(entries(3))
    store.journal.append([entry(3)])
    reading = store.reopen().read(JOB)
    assert reading.entries == tuple(entries(4))
    assert not reading.damage


def test_one_append_writes_several_jobs(store: JournalStore) -> None:
    store.journal.append([entry(0), entry(0, OTHER), entry(1)])
    assert store.journal.read(JOB).entries == tuple(entries(2))
    assert store.journal.read(OTHER).entries == tuple(entries(1, OTHER))
    assert store.journal.jobs() == (JOB, OTHER)


def test_reading_stops_at_its_limit_and_goes_on_from_there(store: JournalStore) -> None:
    store.journal.append(entries(5))
    first = store.journal.read(JOB, limit=3)
    assert first.entries == tuple(entries(3))
    assert not first.damage
    assert store.journal.read(JOB, 3).entries == (entry(3), entry(4))


@pytest.mark.parametrize("from_sequence", [2, 3, 100])
def test_reading_behind_the_end_gives_nothing(store: JournalStore, from_sequence: int) -> None:
    store.journal.append(entries(2))
    reading = store.journal.read(JOB, from_sequence)
    assert reading.entries == ()
    assert not reading.damage


def test_an_unknown_job_has_no_rows_and_no_head(store: JournalStore) -> None:
    assert store.journal.read(JOB).entries == ()
    assert store.journal.jobs() == ()
    assert store.journal.recover(JOB) == Recovery(None, ())


@pytest.mark.parametrize("sequence", [0, 1, 3])
def test_an_append_that_does_not_follow_on_writes_nothing(
    store: JournalStore, sequence: int
) -> None:
    store.journal.append(entries(2))
    with pytest.raises(JournalConflictError, match=f"row {sequence} cannot follow on row 1"):
        store.journal.append([entry(0, OTHER), entry(sequence)], [claim("a request")])
    assert store.journal.read(JOB).entries == tuple(entries(2))
    assert store.journal.jobs() == (JOB,)
    assert store.journal.request("a request") is None


def test_a_request_id_is_taken_once(store: JournalStore) -> None:
    store.journal.append(entries(1), [claim("a request")])
    assert store.reopen().request("a request") == claim("a request")
    with pytest.raises(JournalConflictError, match="'a request' is taken"):
        store.journal.append(entries(1, OTHER), [claim("a request", OTHER)])
    assert store.journal.jobs() == (JOB,)


def test_a_removed_job_leaves_nothing_behind(store: JournalStore) -> None:
    store.journal.append(entries(3), [claim("a request")])
    store.journal.append(entries(1, OTHER))
    store.journal.save_snapshot(JOB, 2, b"{}")
    store.journal.remove_job(JOB)
    journal = store.reopen()
    assert journal.jobs() == (OTHER,)
    assert journal.read(JOB).entries == ()
    assert journal.recover(JOB).snapshot is None
    assert journal.request("a request") is None


def test_a_changed_row_ends_what_can_be_believed(store: JournalStore) -> None:
    store.journal.append(entries(5))
    store.overwrite_body(JOB, 3, b'{"text":"forged"}')
    reading = store.journal.read(JOB)
    assert reading.entries == tuple(entries(3))
    assert "row 3 does not match its chain value" in reading.damage


@pytest.mark.parametrize(
    ("first", "last", "problem"),
    [(2, 2, "row 2 is missing, row 3 follows"), (3, 4, "rows 3 to 4 are missing"), (0, 4, "0 to")],
)
def test_a_missing_row_ends_what_can_be_believed(
    store: JournalStore, first: int, last: int, problem: str
) -> None:
    store.journal.append(entries(5))
    store.drop_rows(JOB, first, last)
    reading = store.journal.read(JOB)
    assert reading.entries == tuple(entries(first))
    assert problem in reading.damage


def test_a_snapshot_ahead_of_the_last_good_row_is_cut_off_with_the_rows(
    store: JournalStore,
) -> None:
    store.journal.append(entries(5))
    store.journal.save_snapshot(JOB, 4, b"late")
    store.overwrite_snapshot(JOB, 4, b"forged")
    store.overwrite_body(JOB, 3, b"{}")
    assert store.journal.recover(JOB).entries == tuple(entries(3))
    store.journal.append([entry(3)])
    assert store.reopen().recover(JOB) == Recovery(None, tuple(entries(4)))


def test_a_snapshot_needs_its_row(store: JournalStore) -> None:
    store.journal.append(entries(2))
    with pytest.raises(JournalConflictError, match="there is no row 2"):
        store.journal.save_snapshot(JOB, 2, b"{}")


def test_a_damaged_snapshot_falls_back_to_the_one_before(store: JournalStore) -> None:
    store.journal.append(entries(6))
    for sequence in (1, 3, 5):
        store.journal.save_snapshot(JOB, sequence, b"state %d" % sequence)
    store.overwrite_snapshot(JOB, 5, b"forged")
    recovery = store.journal.recover(JOB)
    assert recovery.snapshot is not None
    assert recovery.snapshot.state_json == b"state 3"
    assert recovery.entries == (entry(4), entry(5))
    assert "snapshot 5" in recovery.damages[0]
    store.overwrite_snapshot(JOB, 3, b"forged")
    recovery = store.journal.recover(JOB)
    assert (recovery.snapshot, recovery.entries) == (None, tuple(entries(6)))


def test_recovery_cuts_a_damaged_tail_and_the_job_goes_on(store: JournalStore) -> None:
    store.journal.append(entries(6))
    store.journal.save_snapshot(JOB, 2, b"two")
    store.overwrite_body(JOB, 4, b"{}")
    recovery = store.reopen().recover(JOB)
    assert recovery.entries == (entry(3),)
    assert [damage.count("row 4 does not match") for damage in recovery.damages] == [1]
    store.journal.append([entry(4)])
    assert store.journal.recover(JOB).damages == ()


def test_recovery_needs_no_row_before_its_snapshot_and_none_behind_it(store: JournalStore) -> None:
    store.journal.append(entries(6))
    store.journal.save_snapshot(JOB, 3, b"three")
    store.overwrite_body(JOB, 1, b"{}")
    recovery = store.journal.recover(JOB)
    assert (recovery.entries, recovery.damages) == ((entry(4), entry(5)), ())
    store.drop_rows(JOB, 2, 5)
    recovery = store.journal.recover(JOB)
    assert recovery.snapshot is not None
    assert recovery.entries == ()
    store.journal.append([entry(4)])
    assert store.journal.recover(JOB).entries == (entry(4),)


def test_eight_writers_of_a_hundred_appends_lose_none(store: JournalStore) -> None:
    jobs = [JobId(f"job-{number:012x}") for number in range(8)]

    def write(job_id: JobId) -> None:
        for sequence in range(100):
            store.journal.append([entry(sequence, job_id)])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, jobs))
    assert all(store.journal.read(job_id).entries == tuple(entries(100, job_id)) for job_id in jobs)


def test_a_second_coordinator_is_refused(store: JournalStore) -> None:
    with pytest.raises(JournalLockedError, match=r"in use by a.*stop that one"):
        Journal(store.url)
    store.journal.append(entries(1))
