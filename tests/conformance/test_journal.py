"""Every journal: entries, snapshots, damage, and the registry of nodes and tokens beside them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace
from sqlalchemy import func, select

from coordinator.shell.store.journal.journal import Journal
from coordinator.shell.store.journal.records import (
    Entry,
    JournalConflictError,
    JournalLockedError,
    NodeRecord,
    Recovery,
    RequestClaim,
    TokenRecord,
    UpdateCount,
)
from coordinator.shell.store.journal.schema import ENTRIES
from hypergpu.digests import digest_of
from hypergpu.ids import JobId, NodeId, TokenId
from hypergpu.wire.credentials import Role
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


def test_a_reader_sees_no_row_that_came_after_it_began(store: JournalStore) -> None:
    store.journal.append([entry(0)])
    rows = select(func.count()).select_from(ENTRIES)
    with store.journal.database.reader() as connection:
        assert connection.scalar(rows) == 1
        store.journal.append([entry(1)])
        assert connection.scalar(rows) == 1
    assert len(store.journal.read(JOB).entries) == 2


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
    with pytest.raises(JournalLockedError, match=r"in use by .*stop that one"):
        Journal(store.url)
    store.journal.append(entries(1))


NODE = NodeId("0x" + "a1" * 20)
OTHER_NODE = NodeId("0x" + "b2" * 20)
TOKEN = TokenRecord(
    token_id=TokenId("0123456789ab"),
    role=Role.NODE,
    label="the lab",
    secret_hash=bytes(range(32)),
    created_s=1_000,
    expires_s=2_000,
    uses_left=2,
)
RECORD = NodeRecord(
    node=NODE,
    public_key=bytes(64),
    capabilities_json=b'{"device":"cpu"}',
    software="0.1.0",
    first_seen_ms=10,
    last_seen_ms=20,
)


def test_a_nonce_only_rises(store: JournalStore) -> None:
    assert store.journal.advance_nonce(NODE, 5)
    assert [store.journal.advance_nonce(NODE, nonce) for nonce in (5, 4, 0, -1)] == [False] * 4
    assert store.journal.advance_nonce(NODE, 6)
    assert not store.reopen().advance_nonce(NODE, 6)
    assert not store.journal.advance_nonce(NODE, 2**63)
    assert (store.journal.nonce(NODE), store.journal.nonce(OTHER_NODE)) == (6, 0)


def test_one_of_many_racing_claims_to_a_nonce_wins(store: JournalStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        wins = list(pool.map(lambda _: store.journal.advance_nonce(NODE, 9), range(32)))
    assert sum(wins) == 1


def test_a_node_comes_back_as_it_was_recorded(store: JournalStore) -> None:
    store.journal.record_node(RECORD)
    assert store.reopen().nodes() == (RECORD,)


def test_a_node_that_joins_again_keeps_its_history(store: JournalStore) -> None:
    store.journal.record_node(RECORD)
    store.journal.record_activity({}, {NODE: UpdateCount(accepted=3, rejected=1)})
    store.journal.set_revoked(NODE, is_revoked=True)
    again = replace(RECORD, software="0.2.0", first_seen_ms=99, last_seen_ms=99)
    store.journal.record_node(again)
    history = {
        "first_seen_ms": 10,
        "is_revoked": True,
        "updates_accepted": 3,
        "updates_rejected": 1,
    }
    assert store.journal.nodes() == (replace(again, **history),)
    assert not store.journal.set_revoked(OTHER_NODE, is_revoked=True)


def test_last_sights_are_stored_and_strangers_passed_over(store: JournalStore) -> None:
    store.journal.record_node(RECORD)
    one = UpdateCount(accepted=1)
    store.journal.record_activity({NODE: 500, OTHER_NODE: 600}, {NODE: one, OTHER_NODE: one})
    assert store.journal.nodes() == (replace(RECORD, last_seen_ms=500, updates_accepted=1),)


def test_eight_hundred_concurrent_counts_lose_none(store: JournalStore) -> None:
    store.journal.record_node(RECORD)

    def count(_: int) -> None:
        for _ in range(100):
            store.journal.record_activity({}, {NODE: UpdateCount(accepted=1)})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(count, range(8)))
    (record,) = store.journal.nodes()
    assert record.updates_accepted == 800


def test_a_token_comes_back_as_it_was_added(store: JournalStore) -> None:
    store.journal.add_token(TOKEN)
    assert store.reopen().token(TOKEN.token_id) == TOKEN
    assert store.journal.tokens() == (TOKEN,)


def test_a_token_is_spent_as_often_as_it_says(store: JournalStore) -> None:
    store.journal.add_token(TOKEN)
    nodes = [NodeId(f"0x{number:040x}") for number in range(3)]
    spends = [store.journal.spend_token(TOKEN.token_id, node, 1_500) for node in nodes]
    assert spends == [True, True, False]
    assert store.journal.joined_tokens(nodes[0]) == {TOKEN.token_id}
    assert store.journal.joined_tokens(nodes[2]) == frozenset()


def test_a_node_spends_a_token_once_however_often_it_joins(store: JournalStore) -> None:
    store.journal.add_token(replace(TOKEN, uses_left=1))
    late_s = 9_000
    assert store.journal.spend_token(TOKEN.token_id, NODE, 1_500)
    assert store.reopen().spend_token(TOKEN.token_id, NODE, late_s)
    assert not store.journal.spend_token(TOKEN.token_id, OTHER_NODE, 1_500)


def test_racing_joins_cannot_share_the_last_use(store: JournalStore) -> None:
    store.journal.add_token(TOKEN)
    nodes = [NodeId(f"0x{number:040x}") for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        spends = pool.map(
            lambda node: store.journal.spend_token(TOKEN.token_id, node, 1_500), nodes
        )
    assert sum(spends) == 2


def test_a_revoked_token_is_not_spent_even_by_a_node_that_joined(store: JournalStore) -> None:
    store.journal.add_token(TOKEN)
    store.journal.spend_token(TOKEN.token_id, NODE, 1_500)
    assert store.journal.revoke_token(TOKEN.token_id)
    assert not store.journal.spend_token(TOKEN.token_id, NODE, 1_500)


def test_an_expired_or_unknown_token_is_not_spent_and_one_without_limits_always(
    store: JournalStore,
) -> None:
    assert not store.journal.spend_token(TOKEN.token_id, NODE, 1_500)
    assert not store.journal.revoke_token(TOKEN.token_id)
    store.journal.add_token(TOKEN)
    assert not store.journal.spend_token(TOKEN.token_id, NODE, TOKEN.expires_s)
    unlimited_token = replace(TOKEN, token_id=TokenId("ba9876543210"), uses_left=None, expires_s=0)
    store.journal.add_token(unlimited_token)
    nodes = [NodeId(f"0x{number:040x}") for number in range(5)]
    assert all(store.journal.spend_token(unlimited_token.token_id, node, 10**9) for node in nodes)
