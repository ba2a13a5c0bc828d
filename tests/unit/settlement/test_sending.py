import pytest
from msgspec.structs import replace

from coordinator.core.settlement.fees import FeeRule, higher_fee, opening_fee
from coordinator.core.settlement.patience import FIRST_MS, MOST_MS, rest_ms
from coordinator.core.settlement.sending import (
    Attempt,
    BlockName,
    Deed,
    Found,
    Pending,
    SendingRule,
    Sighting,
    TransactionState,
    is_undone,
    remembered,
    ruling,
)
from hypergpu.units import Milliseconds

RULE = SendingRule(depth=3, resend_ms=2_000, bump_blocks=3, foreign_ms=30_000)
NOW = Milliseconds(100_000)
HERE = BlockName(10, b"h" * 32)
ELSEWHERE = BlockName(11, b"e" * 32)
FRESH = Pending(nonce=7, attempts=(Attempt(b"a" * 32, 200, 20),))
SENT = Pending(
    nonce=7, attempts=FRESH.attempts, sent_at_ms=Milliseconds(99_000), first_sent_block=9
)
MINED = Pending(nonce=7, attempts=FRESH.attempts, state=TransactionState.MINED, block=HERE)


def seen(height: int, next_nonce: int = 7) -> Sighting:
    return Sighting(height=height, next_nonce=next_nonce)


def found(height: int, block: BlockName = HERE, *, success: bool = True) -> Sighting:
    return Sighting(
        height=height,
        found=Found(block, is_success=success),
        canonical_hash=block.hash,
        next_nonce=8,
    )


VANISHED = Pending(nonce=7, attempts=FRESH.attempts, vanished_at_ms=Milliseconds(60_000))
JUST_VANISHED = Pending(nonce=7, attempts=FRESH.attempts, vanished_at_ms=Milliseconds(99_000))

BEHIND = replace(seen(10), is_behind_failed=True)

TABLE = {
    "it was never sent": (FRESH, seen(10), Deed.SEND),
    "it was sent a moment ago": (SENT, seen(10), Deed.WAIT),
    "it was sent long ago, and it is not its turn": (
        Pending(nonce=7, attempts=FRESH.attempts, sent_at_ms=Milliseconds(98_000)),
        seen(30, next_nonce=6),
        Deed.SEND,
    ),
    "it was sent a while ago, and hundreds go first": (
        Pending(nonce=607, attempts=FRESH.attempts, sent_at_ms=Milliseconds(95_000)),
        seen(30),
        Deed.WAIT,
    ),
    "it was sent long ago, and hundreds go first": (
        Pending(nonce=607, attempts=FRESH.attempts, sent_at_ms=Milliseconds(94_000)),
        seen(30),
        Deed.SEND,
    ),
    "blocks pass it over though it is its turn": (SENT, seen(12), Deed.BUMP),
    "blocks pass it over while it is not its turn": (SENT, seen(12, next_nonce=6), Deed.WAIT),
    "it is in a block": (SENT, found(10), Deed.NOTE_MINED),
    "it is in a block that is not deep enough": (MINED, found(12), Deed.WAIT),
    "it is deep enough": (MINED, found(13), Deed.FINISH),
    "it was never seen before and is deep enough": (FRESH, found(13), Deed.FINISH),
    "it moved to another block": (MINED, found(12, ELSEWHERE), Deed.NOTE_MINED),
    "its block was reorganised away": (MINED, seen(12), Deed.NOTE_MISSING),
    "its block is deep and no longer the one at its height": (
        MINED,
        Sighting(
            height=20, found=Found(HERE, is_success=True), canonical_hash=b"x" * 32, next_nonce=8
        ),
        Deed.WAIT,
    ),
    "the block at its height is not known": (
        MINED,
        Sighting(height=20, found=Found(HERE, is_success=True), next_nonce=8),
        Deed.WAIT,
    ),
    "it stands behind one that failed": (SENT, BEHIND, Deed.VOID),
    "it stands behind one that failed, and its nonce is being spent on nothing": (
        replace(SENT, attempts=(*SENT.attempts, Attempt(b"v" * 32, 300, 30, is_void=True))),
        BEHIND,
        Deed.WAIT,
    ),
    "it stands behind one that failed and is in a block": (
        SENT,
        replace(found(10), is_behind_failed=True),
        Deed.NOTE_MINED,
    ),
    "it failed": (SENT, found(10, success=False), Deed.HALT),
    "its nonce is used and its receipt is not there": (JUST_VANISHED, seen(10, 8), Deed.WAIT),
    "its nonce was used by somebody else": (VANISHED, seen(10, 8), Deed.HALT),
}


@pytest.mark.parametrize("case", TABLE)
def test_what_is_done_about_a_transaction(case: str) -> None:
    pending, sighting, deed = TABLE[case]
    verdict = ruling(pending, sighting, RULE, NOW)
    assert verdict.deed is deed
    assert verdict.reason


def test_a_used_nonce_without_a_transaction_is_remembered_from_when_it_was_first_seen() -> None:
    first = remembered(SENT, seen(10, 8), NOW)
    later = remembered(first, seen(11, 8), Milliseconds(NOW + 5_000))
    assert first.vanished_at_ms == later.vanished_at_ms == NOW
    assert remembered(later, found(11), NOW).vanished_at_ms is None


def test_a_final_block_is_undone_only_by_another_at_its_height() -> None:
    assert is_undone(HERE, 15, b"x" * 32)
    assert not is_undone(HERE, 15, HERE.hash)
    assert not is_undone(HERE, 15, None)
    assert not is_undone(HERE, 9, b"x" * 32)


FEES = FeeRule(tip_wei=20, max_fee_cap_wei=1_000)


def test_the_first_offer_covers_a_doubled_base_fee_and_the_tip() -> None:
    fee = opening_fee(100, suggested_tip_wei=30, rule=FEES)
    assert (fee.max_fee_wei, fee.tip_wei) == (230, 30)
    assert opening_fee(100, suggested_tip_wei=0, rule=FEES).tip_wei == FEES.tip_wei


def test_no_offer_passes_the_cap() -> None:
    assert opening_fee(10_000, suggested_tip_wei=5_000, rule=FEES).max_fee_wei == 1_000
    assert higher_fee(Attempt(b"", 900, 20), 100, FEES) is None


def test_a_higher_offer_raises_both_parts_by_what_every_pool_wants() -> None:
    fee = higher_fee(Attempt(b"", 230, 30), 100, FEES)
    assert fee is not None
    assert fee.max_fee_wei * 8 >= 230 * 9
    assert fee.tip_wei * 8 >= 30 * 9
    follows = higher_fee(Attempt(b"", 230, 30), 400, FEES)
    assert follows is not None
    assert follows.max_fee_wei == 2 * 400 + fee.tip_wei


def test_rests_double_up_to_a_quarter_of_a_minute_and_honour_what_was_asked() -> None:
    assert rest_ms(0) == 0
    assert [rest_ms(count) for count in (1, 2, 3)] == [FIRST_MS, 2 * FIRST_MS, 4 * FIRST_MS]
    assert rest_ms(10_000) == MOST_MS
    assert rest_ms(1, asked_ms=40_000) == 40_000
