"""A transaction that was signed again for a higher fee is named by what a block has taken."""

from msgspec.structs import replace

from coordinator.core.settlement.sending import TransactionState
from coordinator.shell.chain.site import opening_purpose
from coordinator.shell.journal.ledger.records import OutboxRow
from coordinator.shell.servicers.user.owing import transaction_message
from hypergpu.cli.ledger.reading import settled_on
from hypergpu.ledger.terms import terms_of
from hypergpu.ledger.typed import Domain
from tests.chain.ground import JOB, Ground
from tests.signed_receipts import COORDINATOR

HIGH_WEI = 50 * 10**9
LOW_WEI = 10**9
ALL = tuple(TransactionState)


def newest(ground: Ground) -> OutboxRow:
    return ground.journal.transactions(ground.settler.site.account, states=ALL)[-1]


def bumped(ground: Ground) -> OutboxRow:
    """A batch that was signed twice, neither of which is in a block."""
    ground.options = replace(ground.options, profile=replace(ground.options.profile, bump_blocks=2))
    ground.opened()
    ground.earn(0, range(1))
    ground.turn()
    while len(newest(ground).attempts) == 1:
        ground.ask("anvil_setNextBlockBaseFeePerGas", hex(HIGH_WEI))
        ground.mine()
        ground.turn()
    return newest(ground)


def test_an_older_signing_that_a_block_took_is_the_one_that_is_shown(ground: Ground) -> None:
    older, dearer = bumped(ground).attempts
    assert newest(ground).hash == dearer.attempt.hash

    # The pool has lost the dearer one, and a block takes the older.
    ground.ask("anvil_dropTransaction", "0x" + dearer.attempt.hash.hex())
    for sent in ([], [(older.attempt.hash, older.raw)]):
        ground.chain.send(sent)
        ground.ask("anvil_setNextBlockBaseFeePerGas", hex(LOW_WEI))
        ground.mine()
    ground.turn()
    nonce = newest(ground).transaction.nonce
    ground.crash()
    for state in (TransactionState.MINED, TransactionState.FINAL):
        (row,) = [
            each
            for each in ground.journal.transactions(ground.settler.site.account, states=[state])
            if each.transaction.nonce == nonce
        ]
        assert row.block is not None
        assert row.hash == older.attempt.hash
        told = transaction_message(row)
        (place,) = ground.chain.inclusions([bytes.fromhex(told.hash.removeprefix("0x"))])
        assert place is not None
        assert place.block_number == told.block
        assert list(told.attempts) == [f"0x{each.attempt.hash.hex()}" for each in (older, dearer)]
        ground.end(0, is_last=True)
        ground.settle()
    ground.check_exact(1)


def test_a_job_of_no_chain_is_found_by_whichever_signing_opened_it(ground: Ground) -> None:
    ground.opened()
    site = ground.settler.site
    opening = ground.journal.transaction_for(site.account, opening_purpose(JOB))
    assert opening is not None
    terms = terms_of(COORDINATOR.address, JOB, Domain())
    hashes = [f"0x{opening.hash.hex()}", "0x" + "11" * 32]
    assert settled_on(ground.chain, terms, hashes) == site.domain
    assert settled_on(ground.chain, terms, hashes[::-1]) == site.domain
    assert settled_on(ground.chain, terms, hashes[1:]) is None
    assert settled_on(ground.chain, terms, []) is None
