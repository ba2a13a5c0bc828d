from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from coordinator.shell.journal.records import (
    NodeRecord,
    TokenRecord,
    UpdateCount,
)
from hypergpu.ids import NodeId, TokenId
from hypergpu.wire.token import Role
from tests.conformance.journal_stores import JournalStore

NODE = NodeId("0x" + "a1" * 20)
OTHER = NodeId("0x" + "b2" * 20)
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
    assert (store.journal.nonce(NODE), store.journal.nonce(OTHER)) == (6, 0)


def test_one_of_many_racing_claims_to_a_nonce_wins(store: JournalStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda _: store.journal.advance_nonce(NODE, 9), range(32)))
    assert sum(won) == 1


def test_a_node_comes_back_as_it_was_recorded(store: JournalStore) -> None:
    store.journal.record_node(RECORD)
    assert store.reopen().nodes() == (RECORD,)


def test_a_node_that_joins_again_keeps_its_history(store: JournalStore) -> None:
    store.journal.record_node(RECORD)
    store.journal.record_activity({}, {NODE: UpdateCount(accepted=3, refused=1)})
    store.journal.set_revoked(NODE, is_revoked=True)
    again = replace(RECORD, software="0.2.0", first_seen_ms=99, last_seen_ms=99)
    store.journal.record_node(again)
    history = {"first_seen_ms": 10, "is_revoked": True, "updates_accepted": 3, "updates_refused": 1}
    assert store.journal.nodes() == (replace(again, **history),)
    assert not store.journal.set_revoked(OTHER, is_revoked=True)


def test_last_sights_are_stored_and_strangers_passed_over(store: JournalStore) -> None:
    store.journal.record_node(RECORD)
    one = UpdateCount(accepted=1)
    store.journal.record_activity({NODE: 500, OTHER: 600}, {NODE: one, OTHER: one})
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
    spent = [store.journal.spend_token(TOKEN.token_id, node, 1_500) for node in nodes]
    assert spent == [True, True, False]
    assert store.journal.has_joined(TOKEN.token_id, nodes[0])
    assert not store.journal.has_joined(TOKEN.token_id, nodes[2])


def test_a_node_spends_a_token_once_however_often_it_joins(store: JournalStore) -> None:
    store.journal.add_token(replace(TOKEN, uses_left=1))
    late_s = 9_000
    assert store.journal.spend_token(TOKEN.token_id, NODE, 1_500)
    assert store.reopen().spend_token(TOKEN.token_id, NODE, late_s)
    assert not store.journal.spend_token(TOKEN.token_id, OTHER, 1_500)


def test_racing_joins_cannot_share_the_last_use(store: JournalStore) -> None:
    store.journal.add_token(TOKEN)
    nodes = [NodeId(f"0x{number:040x}") for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        spent = pool.map(lambda node: store.journal.spend_token(TOKEN.token_id, node, 1_500), nodes)
    assert sum(spent) == 2


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
    unlimited = replace(TOKEN, token_id=TokenId("ba9876543210"), uses_left=None, expires_s=0)
    store.journal.add_token(unlimited)
    nodes = [NodeId(f"0x{number:040x}") for number in range(5)]
    assert all(store.journal.spend_token(unlimited.token_id, node, 10**9) for node in nodes)
