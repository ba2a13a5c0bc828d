"""Audits: an honest history has nothing wrong in it, and every way of cheating is found."""

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hypergpu.errors import HyperGPUError
from hypergpu.ids import NodeId
from hypergpu.ledger import pay
from hypergpu.ledger.audit.dispute import (
    Claim,
    Dispute,
    decoded_dispute,
    dispute_fault,
    disputes,
    encoded_dispute,
)
from hypergpu.ledger.audit.facts import Form, JobFact
from hypergpu.ledger.audit.finding import Kind
from hypergpu.ledger.audit.verify import verify
from hypergpu.ledger.packing import batch_totals, totals_words
from hypergpu.ledger.receipt import SignedReceipt, Signers
from hypergpu.ledger.settlement.state import RevertedError
from hypergpu.ledger.typed import Domain, Voucher, sign
from hypergpu.ledger.voucher import SignedVoucher
from hypergpu.units import Samples, Wei
from tests.properties.ledger.lives import histories
from tests.properties.ledger.town import (
    COORDINATOR,
    JOB,
    NODES,
    STRANGER,
    UNBONDING_S,
    WINDOW_S,
    Action,
    Town,
    done,
)

DOMAIN = Domain(chain_id=31337)
# Of less than full quality, so that the contract takes a higher score for the same samples.
amounts = st.integers(1_000, 4_000).filter(lambda amount: amount * 31 % 10_001 < 10_000)
SIGNERS = Signers(coordinator=COORDINATOR.address, domain=DOMAIN, made_in=DOMAIN)
# Receipts that are countersigned and left out, and a short escrow, are wrong for real.
HONEST = {Kind.UNRECORDED, Kind.POOL}


@given(history=histories)
@settings(max_examples=100)
def test_whatever_the_contract_allows_adds_up(history: list[Action]) -> None:
    town = Town(1_800_000_000, DOMAIN)
    for action in history:
        try:
            done(town, action)
        except RevertedError:
            continue
    verdict = verify(town.fact(), town.receipts, town.vouchers)
    assert [one for one in verdict.wrong if one.kind not in HONEST] == []
    assert verdict.receipts == len(town.receipts)


def paid_town() -> Town:
    """Two epochs of three nodes, one settled in each form, all paid, nothing left over."""
    town = Town(1_800_000_000, DOMAIN)
    for epoch, form in ((0, "aggregate"), (1, "packed")):
        for number in range(3):
            for amount in (1_500, 2_501 + number):
                done(town, Action("work", who=number, epoch=epoch, amount=amount))
        done(town, Action(form, epoch=epoch, amount=1))
        done(town, Action("close", epoch=epoch))
    done(town, Action("wait", amount=WINDOW_S))
    for epoch in (0, 1):
        done(town, Action("pay", epoch=epoch, several=(0, 1, 2)))
        done(town, Action("sweep", epoch=epoch, several=(0, 1, 2)))
    return town


PAID = paid_town()
FACT = PAID.fact()


def test_a_job_that_is_paid_in_full_has_no_findings() -> None:
    verdict = verify(FACT, PAID.receipts)
    assert verdict.findings == ()
    assert (verdict.receipts, verdict.batches) == (12, 2)


def with_share(fact: JobFact, **changed: int) -> JobFact:
    first, *rest = fact.shares
    return replace(fact, shares=(replace(first, **changed), *rest))


def with_batch(fact: JobFact, **changed: bytes) -> JobFact:
    first, *rest = fact.batches
    return replace(fact, batches=(replace(first, **changed), *rest))


def with_account(fact: JobFact, **changed: int) -> JobFact:
    first, *rest = fact.accounts
    return replace(fact, accounts=(replace(first, **changed), *rest))


def with_epoch(fact: JobFact, **changed: int) -> JobFact:
    first, *rest = fact.epochs
    return replace(fact, epochs=(replace(first, **changed), *rest))


CHEATS: dict[str, tuple[Callable[[JobFact], JobFact], Kind]] = {
    "a score": (lambda fact: with_share(fact, score=fact.shares[0].score - 1), Kind.SCORE),
    "a reward": (lambda fact: with_share(fact, reward=fact.shares[0].reward - 1), Kind.PAY),
    "paid twice": (lambda fact: with_share(fact, paid=fact.shares[0].paid * 2), Kind.PAY),
    "a root": (lambda fact: with_batch(fact, root=bytes(32)), Kind.BATCH),
    "a sum": (lambda fact: with_batch(fact, content=bytes(160)), Kind.BATCH),
    "half a sum": (lambda fact: with_batch(fact, content=bytes(100)), Kind.BATCH),
    "a batch": (lambda fact: replace(fact, batches=fact.batches[1:]), Kind.BATCH),
    "the digest": (lambda fact: replace(fact, digest=bytes(32)), Kind.BATCH),
    "the count": (lambda fact: with_account(fact, counted=1), Kind.BATCH),
    "earnings": (lambda fact: with_account(fact, earned=1), Kind.PAY),
    "a payment too many": (
        lambda fact: with_account(fact, paid=fact.accounts[0].paid + 1),
        Kind.ESCROW,
    ),
    "a payment too few": (lambda fact: with_account(fact, paid=1), Kind.PAY),
    "a total": (lambda fact: with_epoch(fact, total_score=1), Kind.SCORE),
    "a pool too large": (lambda fact: with_epoch(fact, pool=fact.epochs[0].pool + 1), Kind.POOL),
    "a pool too small": (lambda fact: with_epoch(fact, pool=1), Kind.POOL),
    "the escrow": (lambda fact: replace(fact, free=Wei(fact.free - 1)), Kind.ESCROW),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_figure_that_was_changed_is_found(cheat: str) -> None:
    change, kind = CHEATS[cheat]
    assert kind in {finding.kind for finding in verify(change(FACT), PAID.receipts).wrong}


@given(
    node=st.integers(0, 2), samples=st.integers(0, 99), score=st.integers(0, 99), drawn=st.data()
)
@settings(max_examples=50)
def test_sums_that_the_contract_took_and_the_root_does_not_bear_are_told_with_both_figures(
    node: int, samples: int, score: int, drawn: st.DataObject
) -> None:
    town = Town(1_800_000_000, DOMAIN)
    for number in range(3):
        done(town, Action("work", who=number, amount=drawn.draw(amounts)))
    chosen, root = town.batch(Action("aggregate", amount=1))
    honest = batch_totals(chosen)
    totals = list(honest)
    totals[node] = replace(
        totals[node], samples=totals[node].samples + samples, score=totals[node].score + score
    )
    town.ledger.submit_aggregate(COORDINATOR.address, JOB, 0, 0, root, totals)
    town.note(Action("aggregate"), Form.AGGREGATE, root, totals_words(totals), ())
    told = [one for one in verify(town.fact(), town.receipts).wrong if one.kind is Kind.BATCH]
    if not samples and not score:
        assert told == []
        return
    (finding,) = told
    assert finding.node == honest[node].node
    assert finding.text == (
        f"batch 0: its sums for {finding.node} are {totals[node].samples} samples and a score of"
        f" {totals[node].score}, the receipts under its root come to {honest[node].samples} and"
        f" {honest[node].score}"
    )


def test_receipts_that_were_changed_or_kept_back_are_found() -> None:
    first, *rest = PAID.receipts
    forged = replace(first, receipt=replace(first.receipt, samples=Samples(1)))
    found = {finding.kind for finding in verify(FACT, [forged, *rest]).wrong}
    assert Kind.RECEIPT in found
    assert {one.kind for one in verify(FACT, rest).wrong} >= {Kind.BATCH, Kind.SCORE}


def placed(fact: JobFact) -> JobFact:
    """Each batch in a block of its own: the first in 10, the second in 11."""
    batches = tuple(replace(one, block=10 + one.seq) for one in fact.batches)
    return replace(fact, batches=batches)


OLDER = [one for one in PAID.receipts if one.receipt.epoch == 0]


def test_receipts_that_were_read_before_the_chain_lack_what_is_newer_and_are_sound() -> None:
    fact = placed(FACT)
    for newer_from in (0, 10, 11):
        verdict = verify(fact, OLDER, newer_from=newer_from)
        assert verdict.wrong == ()
        assert (verdict.batches, verdict.newer) == (1, 6)
        (finding,) = verdict.open
        assert "6 receipts of epoch 1 on the chain are newer than those given" in finding.text
    assert {one.kind for one in verify(fact, OLDER).wrong} == {Kind.BATCH, Kind.SCORE, Kind.PAY}


def test_what_was_there_to_be_given_is_missed_however_old_the_receipts_are_said_to_be() -> None:
    fact = placed(FACT)
    # The block that they are of had recorded it, or a later one of the same node is there.
    assert {one.kind for one in verify(fact, OLDER, newer_from=12).wrong} >= {Kind.BATCH}
    first, *rest = PAID.receipts
    assert {one.kind for one in verify(fact, rest, newer_from=0).wrong} >= {Kind.BATCH}
    assert first.receipt.sequence == 0


@pytest.mark.parametrize("cheat", CHEATS)
def test_no_age_hides_a_figure_of_what_was_given(cheat: str) -> None:
    change, kind = CHEATS[cheat]
    verdict = verify(change(placed(FACT)), PAID.receipts, newer_from=0)
    assert kind in {finding.kind for finding in verdict.wrong}


def closed_by(fact: JobFact, *who: str, after_s: int = UNBONDING_S) -> JobFact:
    """With each epoch closed so long after its first record."""
    epochs = tuple(
        replace(one, closed_by=each, closed_at_s=one.opened_at_s + after_s)
        for one, each in zip(fact.epochs, who, strict=True)
    )
    return replace(fact, epochs=epochs)


OWN, OTHER = COORDINATOR.address, STRANGER.address


@pytest.mark.parametrize(
    ("fact", "kind"),
    [
        (closed_by(FACT, OTHER, OTHER), Kind.OPEN),
        (closed_by(FACT, OWN, OTHER), Kind.UNRECORDED),
        (closed_by(FACT, OTHER, OWN), Kind.UNRECORDED),
        (closed_by(FACT, OTHER, OTHER, after_s=UNBONDING_S - 1), Kind.UNRECORDED),
        (replace(closed_by(FACT, OTHER, OTHER), unbonding_s=0), Kind.OPEN),
    ],
    ids=["strangers", "the first", "the last", "before anybody may", "nobody knows when"],
)
def test_what_came_after_a_strangers_close_waits_for_the_coordinators_next_one(
    fact: JobFact, kind: Kind
) -> None:
    (finding,) = verify(fact, [*PAID.receipts, other_receipt(4)]).findings
    assert (finding.kind, finding.node) == (kind, NODES[0].node_id)


@pytest.mark.parametrize(("early_s", "good"), [(1, {0, 1}), (0, set())])
def test_anybody_may_close_in_the_window_before_the_jobs_end(early_s: int, good: set[int]) -> None:
    closed = closed_by(FACT, OTHER, OTHER, after_s=10)
    over_s = closed.epochs[0].closed_at_s + early_s
    assert replace(closed, ends_at_s=over_s + WINDOW_S).closed_for_good() == good


def test_what_strangers_closed_is_left_out_once_the_epoch_after_the_next_is_recorded() -> None:
    fact = replace(closed_by(FACT, OTHER, OTHER), recorded_at_s=FACT.time_s)
    assert not fact.leaves_out(0)
    last = replace(fact.batches[-1], seq=2, epoch=2)
    assert replace(fact, batches=(*fact.batches, last)).leaves_out(0)


def other_receipt(sequence: int, amount: int = 77) -> SignedReceipt:
    return PAID.signed(NODES[0], sequence, Action("work", epoch=0, amount=amount))


def test_a_coordinator_that_signs_two_receipts_for_one_number_is_found() -> None:
    receipts = [*PAID.receipts, other_receipt(0)]
    assert {one.kind for one in verify(FACT, receipts).wrong} == {Kind.EQUIVOCATION}
    (bundle,) = bundles(FACT, receipts)
    assert bundle.claim is Claim.EQUIVOCATION


def test_a_receipt_that_never_reached_the_chain_is_found() -> None:
    receipts = [*PAID.receipts, other_receipt(4)]
    assert {one.kind for one in verify(FACT, receipts).wrong} == {Kind.UNRECORDED}
    (bundle,) = bundles(FACT, receipts)
    assert bundle.claim is Claim.UNRECORDED
    counted = replace(bundle, chain=replace(bundle.chain, counted=5))
    assert "among the 5 that are counted" in dispute_fault(counted)


@pytest.mark.parametrize(
    ("changed", "is_left_out"),
    [
        ({}, False),
        ({"time_s": 1_000 + WINDOW_S - 1}, False),
        ({"time_s": 1_000 + WINDOW_S}, True),
        ({"ends_at_s": 5_000}, True),
        ({"epochs": FACT.epochs}, True),
        ({"batches": FACT.batches}, True),
    ],
)
def test_receipts_of_an_open_epoch_are_left_out_once_they_cannot_be_on_their_way(
    changed: dict[str, object], *, is_left_out: bool
) -> None:
    fresh = replace(FACT, epochs=(), batches=FACT.batches[:1], time_s=1_000, recorded_at_s=1_000)
    assert replace(fresh, **changed).leaves_out(0) is is_left_out


def signed_voucher(amount: int, *, by: object = COORDINATOR) -> SignedVoucher:
    node = NodeId(NODES[0].node_id)
    voucher = Voucher(job=JOB, node=node, sequence=4, amount=Wei(amount))
    key = COORDINATOR if by is COORDINATOR else STRANGER
    return SignedVoucher(voucher, sign(key, DOMAIN.separator(), voucher))


def test_vouchers_are_held_against_receipts_and_pay() -> None:
    earned = next(one.earned for one in FACT.accounts if one.node == NODES[0].node_id)

    def kinds(voucher: SignedVoucher) -> set[Kind]:
        return {one.kind for one in verify(FACT, PAID.receipts, [voucher]).findings}

    assert kinds(signed_voucher(earned)) == set()
    assert kinds(signed_voucher(earned + 1)) == {Kind.OPEN}
    assert kinds(signed_voucher(earned - 3)) == {Kind.VOUCHER}
    assert kinds(signed_voucher(earned, by=STRANGER)) == {Kind.VOUCHER}


def test_pay_ahead_of_the_shares_is_held_against_the_voucher() -> None:
    node, held = NODES[0].node_id, next(a for a in FACT.accounts if a.node == NODES[0].node_id)
    ahead = replace(held, paid=Wei(held.paid + 500))
    others = tuple(one for one in FACT.accounts if one.node != node)
    fact = replace(FACT, accounts=(ahead, *others), deposited=Wei(FACT.deposited + 500))
    (finding,) = verify(fact, PAID.receipts).findings
    assert finding.kind is Kind.OPEN
    assert "500 was paid ahead of its shares" in finding.text
    assert verify(fact, PAID.receipts, [signed_voucher(ahead.paid)]).findings == ()
    (finding,) = verify(fact, PAID.receipts, [signed_voucher(held.paid)]).findings
    assert finding.kind is Kind.PAY


def open_town(*history: Action) -> Town:
    """A closed epoch that nobody was paid for, and what was done beside it."""
    town = Town(1_800_000_000, DOMAIN)
    for action in (
        *(Action("work", who=number, amount=1_500) for number in range(3)),
        Action("aggregate", amount=1),
        Action("close"),
        *history,
    ):
        done(town, action)
    return town


def test_a_share_that_is_not_paid_is_told_with_its_node_epoch_and_time() -> None:
    town = open_town()
    fact = town.fact()
    closed_at_s = town.ledger.state.epochs[JOB, 0].closed_at_s
    told = verify(fact, town.receipts).findings
    assert {(one.kind, one.node, one.epoch, one.at_s) for one in told} == {
        (Kind.OPEN, node.node_id, 0, closed_at_s + WINDOW_S) for node in NODES
    }
    first = next(one for one in told if one.node == NODES[0].node_id)
    share = next(one for one in fact.shares if one.node == NODES[0].node_id)
    assert first.said == f"{NODES[0].node_id}, epoch 0: a share of {share.reward} is not paid yet"


@pytest.mark.parametrize(("free", "kind"), [(10**6, Kind.OPEN), (0, Kind.POOL)])
def test_a_short_pool_is_nobodys_wrong_as_long_as_the_escrow_has_the_rest(
    free: int, kind: Kind
) -> None:
    town = open_town()
    fact = town.fact()
    (epoch,) = fact.epochs
    pool = Wei(epoch.pool // 2)
    shares = tuple(
        replace(share, reward=pay.reward(pool, share.score, epoch.total_score))
        for share in fact.shares
    )
    fact = replace(fact, free=Wei(free), epochs=(replace(epoch, pool=pool),), shares=shares)
    told = verify(fact, town.receipts).findings
    (finding,) = [one for one in told if one.text.startswith("epoch 0 fell short: its pool is")]
    assert finding.kind is kind
    lacking = [one.node for one in told if "which its voucher redeems" in one.text]
    assert lacking == ([node.node_id for node in NODES] if kind is Kind.OPEN else [])


@pytest.mark.parametrize("is_given", [True, False], ids=["voucher given", "voucher not given"])
def test_a_claim_that_is_pending_is_told_as_open_with_its_time_and_not_as_paid(
    *, is_given: bool
) -> None:
    # The first of the people who are nodes, by the place that the town gives it.
    claim = Action("redeem", who=3, amount=1_000)
    town = open_town(claim)
    (account,) = [one for one in town.fact().accounts if one.pending]
    assert (account.paid, account.pending) == (0, 1_000)
    verdict = verify(town.fact(), town.receipts, town.vouchers if is_given else ())
    assert verdict.wrong == ()
    told = [one for one in verdict.open if "share" not in one.text]
    assert [(one.node, one.at_s) for one in told] == [(account.node, town.ledger.now_s + WINDOW_S)]
    assert told[0].said == (f"{account.node}: 1000 of its voucher is claimed and pending, not paid")

    done(town, Action("wait", amount=WINDOW_S))
    done(town, Action("release", who=claim.who))
    verdict = verify(town.fact(), town.receipts, town.vouchers if is_given else ())
    told = [one for one in verdict.open if "share" not in one.text.replace("its shares", "")]
    assert [one.text for one in told] == (
        []
        if is_given
        else ["1000 was paid ahead of its shares, for a voucher that is not among those given"]
    )


def test_receipts_that_wait_are_counted_for_their_node_and_epoch() -> None:
    town = Town(1_800_000_000, DOMAIN)
    for _ in range(3):
        done(town, Action("work", who=0, epoch=1, amount=1_500))
    (finding,) = verify(town.fact(), town.receipts).findings
    assert finding.said == (
        f"{NODES[0].node_id}, epoch 1: 3 receipts from number 0 on are not on the chain yet"
    )


def bundles(
    fact: JobFact, receipts: list[SignedReceipt], *vouchers: SignedVoucher
) -> list[Dispute]:
    node = NodeId(NODES[0].node_id)
    made = disputes(fact, receipts, vouchers, node=node, signers=SIGNERS)
    for bundle in made:
        assert decoded_dispute(encoded_dispute(bundle), source="bundle") == bundle
    return list(made)


def test_who_was_paid_as_he_should_be_has_no_dispute() -> None:
    assert bundles(FACT, PAID.receipts) == []


def test_a_node_that_was_paid_too_little_can_show_it() -> None:
    place = next(n for n, one in enumerate(FACT.shares) if one.node == NODES[0].node_id)
    shares = list(FACT.shares)
    shares[place] = replace(shares[place], score=shares[place].score - 1)
    (bundle,) = bundles(replace(FACT, shares=tuple(shares)), PAID.receipts)
    assert bundle.claim is Claim.UNDERPAID
    assert len(bundle.receipts) == 2
    for broken, why in (
        (replace(bundle, receipts=bundle.receipts[1:]), "give no more than"),
        (replace(bundle, receipts=()), "holds no receipt"),
        (replace(bundle, receipts=bundle.receipts * 2), "comes twice"),
        (replace(bundle, format="x"), "its format is"),
        (replace(bundle, node=NodeId(STRANGER.node_id)), "another job or node"),
        (
            replace(bundle, receipts=(replace(bundle.receipts[0], proof=()),)),
            "not proven by its root",
        ),
        (replace(bundle, receipts=(replace(bundle.receipts[0], root=b""),)), "without a proof"),
        (replace(bundle, signers=replace(SIGNERS, coordinator=STRANGER.address)), "is unsound"),
    ):
        assert why in dispute_fault(broken)


def test_a_voucher_that_the_escrow_no_longer_covers_is_a_dispute() -> None:
    promised = signed_voucher(10**9)
    (bundle,) = bundles(FACT, PAID.receipts, promised)
    assert bundle.claim is Claim.VOUCHER
    covered = replace(bundle, chain=replace(bundle.chain, free=Wei(10**9)))
    assert "can be redeemed" in dispute_fault(covered)
    paid = replace(bundle, chain=replace(bundle.chain, paid=Wei(10**9)))
    assert "was paid" in dispute_fault(paid)
    assert bundles(FACT, PAID.receipts, signed_voucher(10**9, by=STRANGER)) == []


@given(content=st.binary(max_size=200))
@example(content=b'{"x":' + b"[" * 100_000)
@example(content=b'{"claim":"\xff"}')
def test_bytes_from_outside_are_no_dispute(content: bytes) -> None:
    with pytest.raises(HyperGPUError, match="is no dispute"):
        decoded_dispute(content, source="f")
