"""What an operator's commands have signed is taken into any journal's outbox, once and as it is."""

from coordinator.core.settlement.sending import TransactionState
from coordinator.shell.chain.sending import Account, is_act
from coordinator.shell.journal.ledger.records import OutboxRow
from hypergpu.chain.profiles import chain_profile
from hypergpu.chain.sent.acts import Act, act_of
from hypergpu.chain.signer import Draft, Signer
from tests.conformance.journal_stores import JournalStore
from tests.signed_receipts import COORDINATOR

SIGNER = Signer(COORDINATOR)
PROFILE = chain_profile("anvil")


def act(nonce: int, *, max_fee_wei: int = 2_000) -> Act:
    draft = Draft(
        chain_id=PROFILE.chain_id,
        nonce=nonce,
        to=bytes(20),
        call=b"what it does",
        gas=60_000,
        max_fee_wei=max_fee_wei,
        tip_wei=1,
    )
    return act_of(SIGNER, draft, "postBond")


def started(store: JournalStore, *acts: Act, used: int) -> tuple[OutboxRow, ...]:
    """What a start finds in the outbox once it has looked at what commands have signed."""
    account = Account(SIGNER, store.reopen(), PROFILE)
    account.take_in(acts, used, 0)
    account.begin_at(used, 0)
    rows = store.journal.transactions(account.name, states=[TransactionState.WAITING])
    behind = rows[-1].transaction.nonce + 1 if rows else used
    assert account.next_nonce() == behind
    return rows


def test_it_is_there_after_each_start_with_every_signing(store: JournalStore) -> None:
    first, dearer, second = act(5), act(5, max_fee_wei=3_000), act(6)
    for _ in range(2):
        rows = started(store, first, dearer, second, used=5)
        assert [row.transaction.nonce for row in rows] == [5, 6]
        assert all(is_act(row.transaction) and not row.is_sent for row in rows)
        signings = [(each.attempt.max_fee_wei, each.raw) for each in rows[0].attempts]
        assert signings == [(2_000, first.raw), (3_000, dearer.raw)]
    assert [row.transaction.nonce for row in started(store, act(7), used=8)] == [5, 6, 7]


def test_what_does_not_follow_on_is_left_out(store: JournalStore) -> None:
    assert len(started(store, act(5), used=6)) == 1
    assert len(started(store, act(5), act(8), used=9)) == 1
