"""Scores, pools, rewards, payments and the escrow, recomputed from the receipts."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from hypergpu.ids import NodeId
from hypergpu.ledger import pay
from hypergpu.ledger.advance import NodeMoney
from hypergpu.ledger.audit.facts import AccountFact, EpochFact, JobFact, ShareFact
from hypergpu.ledger.audit.finding import Finding, Kind
from hypergpu.ledger.audit.recorded import Recorded
from hypergpu.ledger.settlement.state import ShareState
from hypergpu.ledger.typed import Voucher, signer
from hypergpu.ledger.voucher import SignedVoucher
from hypergpu.units import Wei, are, several


def payment_findings(
    fact: JobFact, known: Recorded, vouchers: Iterable[SignedVoucher]
) -> Iterator[Finding]:
    """Everything about scores and money that does not add up, and what is still open."""
    promised, faults = _promised(fact, known, vouchers)
    yield from faults
    closed = {epoch.number: epoch for epoch in fact.epochs}
    yield from _unrecorded(fact, known)
    yield from _newer_findings(known)
    scores = _scores(fact, known)
    yield from _share_findings(fact, closed, scores)
    for epoch in fact.epochs:
        own = sum(score for (number, _), score in scores.items() if number == epoch.number)
        yield from _pool_findings(fact, epoch, own)
    yield from _short_findings(fact)
    for account in fact.accounts:
        yield from _account_findings(fact, account, promised.get(account.node))
    yield from _escrow_findings(fact)


def _newer_findings(known: Recorded) -> Iterator[Finding]:
    unread = Counter(known.epochs[number] for number in known.newer & known.epochs.keys())
    for epoch, count in sorted(unread.items()):
        what = (
            f"{several(count, 'receipt')} of epoch {epoch} on the chain {are(count)} newer than"
            " those given: what their batches say is not checked"
        )
        yield Finding(Kind.OPEN, what, epoch=epoch)


def _scores(fact: JobFact, known: Recorded) -> dict[tuple[int, NodeId], int]:
    """What receipts give; the chain's own word where some of them are newer than those given."""
    told = {(share.epoch, share.node): share.score for share in fact.shares}
    summed: dict[tuple[int, NodeId], int] = {}
    for number, epoch in known.epochs.items():
        signed = known.receipts.get(number)
        own = pay.score(signed.receipt.samples, signed.receipt.quality_bps) if signed else 0
        summed[epoch, number[0]] = summed.get((epoch, number[0]), 0) + own
    unread = {(known.epochs[number], number[0]) for number in known.newer & known.epochs.keys()}
    return summed | {place: told.get(place, 0) for place in unread}


def _unrecorded(fact: JobFact, known: Recorded) -> Iterator[Finding]:
    closed = fact.closed_for_good()
    counted = {account.node: account.counted for account in fact.accounts}
    waiting: dict[tuple[NodeId, int], list[int]] = {}
    for (node, sequence), signed in sorted(known.receipts.items()):
        if (node, sequence) in known.epochs:
            continue
        epoch = signed.receipt.epoch
        if epoch in closed:
            what = f"receipt {sequence} is not on the chain, and epoch {epoch} is closed"
            yield Finding(Kind.UNRECORDED, what, node, epoch)
        else:
            waiting.setdefault((node, epoch), []).append(sequence)
    for (node, epoch), missing in waiting.items():
        those = f"{several(len(missing), 'receipt')} from number {missing[0]} on"
        what = f"{those} {are(len(missing))} not on the chain yet"
        yield Finding(Kind.OPEN, what, node, epoch)
    for node, count in counted.items():
        found = sum(number[0] == node for number in known.epochs)
        if found != count:
            what = f"the chain counts {several(count, 'receipt')}, its batches hold {found}"
            yield Finding(Kind.BATCH, what, node)


def _share_findings(
    fact: JobFact,
    closed: Mapping[int, EpochFact],
    scores: Mapping[tuple[int, NodeId], int],
) -> Iterator[Finding]:
    named = {(share.epoch, share.node): share for share in fact.shares}
    for place in sorted(scores.keys() | named.keys()):
        epoch, node = place
        share, score = named.get(place), scores.get(place, 0)
        if share is None or share.score != score:
            found = share.score if share else 0
            what = f"the chain counts a score of {found}, the receipts give {score}"
            yield Finding(Kind.SCORE, what, node, epoch)
        if share is None:
            continue
        if epoch not in closed:
            yield Finding(Kind.OPEN, f"epoch {epoch} is not closed yet", node, epoch)
        else:
            ends_s = fact.window_ends_s(closed[epoch])
            yield from _paid_findings(share, closed[epoch], score, ends_s)


def _paid_findings(
    share: ShareFact, epoch: EpochFact, score: int, window_ends_s: int
) -> Iterator[Finding]:
    due = pay.reward(epoch.pool, score, epoch.total_score)
    where = (share.node, share.epoch)
    if share.reward != due:
        yield Finding(Kind.PAY, f"its share is {share.reward}, the receipts give {due}", *where)
    if share.paid > share.reward:
        what = f"{share.paid} was paid for a share of {share.reward}"
        yield Finding(Kind.PAY, what, *where)
    if share.state is ShareState.DUE:
        what = f"a share of {share.reward} is not paid yet"
        yield Finding(Kind.OPEN, what, *where, at_s=window_ends_s)


def _pool_findings(fact: JobFact, epoch: EpochFact, own: int) -> Iterator[Finding]:
    if epoch.total_score != own:
        what = f"the chain totals a score of {epoch.total_score}, the receipts give {own}"
        yield Finding(Kind.SCORE, what, epoch=epoch.number)
    worth = _worth(fact, epoch)
    if epoch.pool > worth:
        what = f"the pool is {epoch.pool}, its score is worth {worth}"
        yield Finding(Kind.POOL, what, epoch=epoch.number)
    shares = sum(share.reward for share in fact.shares if share.epoch == epoch.number)
    if shares > epoch.pool:
        what = f"the pool is {epoch.pool}, its shares come to {shares}"
        yield Finding(Kind.POOL, what, epoch=epoch.number)


def _worth(fact: JobFact, epoch: EpochFact) -> Wei:
    return Wei(fact.unit_price * epoch.total_score // pay.PRICED_SCORE)


def _short_findings(fact: JobFact) -> Iterator[Finding]:
    """Epochs whose pools were less than their worth, until all nodes have the rest.

    A redeemed voucher leaves less for the epochs that are closed before its node's shares make it
    good. That is nobody's wrong as long as the escrow has the rest, or will have it again.
    """
    short = [epoch for epoch in fact.epochs if epoch.pool < _worth(fact, epoch)]
    nodes = _nodes_money(fact, short) if short else {}
    lacking = sum(money.lacking for money in nodes.values())
    if not lacking:
        return
    made_good = sum(money.coming for money in nodes.values())
    is_there = lacking <= fact.free + made_good
    for epoch in short:
        is_less = f"its pool is {epoch.pool}, its score is worth {_worth(fact, epoch)}"
        what = f"epoch {epoch.number} fell short: {is_less}"
        if not is_there:
            what += f"; its job lacks {lacking} of such, and {fact.free} is left in its escrow"
        yield Finding(Kind.OPEN if is_there else Kind.POOL, what, epoch=epoch.number)
    for node, money in nodes.items():
        if is_there and money.lacking:
            what = f"its shares lack {money.lacking} of their worth, which its voucher redeems"
            yield Finding(Kind.OPEN, what, node)


def _nodes_money(fact: JobFact, short: Iterable[EpochFact]) -> dict[NodeId, NodeMoney]:
    worths = {epoch.number: (_worth(fact, epoch), epoch.total_score) for epoch in short}
    due: dict[NodeId, int] = {}
    rest: dict[NodeId, int] = {}
    for share in fact.shares:
        if share.state is ShareState.DUE:
            due[share.node] = due.get(share.node, 0) + share.reward
        if share.epoch in worths and share.state is not ShareState.VOID:
            whole = pay.reward(worths[share.epoch][0], share.score, worths[share.epoch][1])
            rest[share.node] = rest.get(share.node, 0) + whole - share.reward
    return {
        account.node: NodeMoney(
            had=account.paid + account.pending,
            earned=account.earned,
            voided=account.voided,
            due=due.get(account.node, 0),
            rest=rest.get(account.node, 0),
        )
        for account in fact.accounts
    }


def _account_findings(
    fact: JobFact, account: AccountFact, promised: Voucher | None
) -> Iterator[Finding]:
    node = account.node
    settled = [share for share in fact.shares if share.node == node]
    earned = sum(share.reward for share in settled if share.state is ShareState.PAID)
    voided = sum(share.reward for share in settled if share.state is ShareState.VOID)
    if account.earned != earned:
        what = f"the chain says {account.earned} was earned, its settled shares are {earned}"
        yield Finding(Kind.PAY, what, node)
    if account.voided != voided:
        what = f"the chain says {account.voided} was voided, its void shares are {voided}"
        yield Finding(Kind.PAY, what, node)
    had = account.paid + account.pending
    if had < account.earned:
        what = f"{had} was paid or is pending, {account.earned} earned"
        yield Finding(Kind.PAY, what, node)
    if account.pending:
        what = f"{account.pending} of its voucher is claimed and pending, not paid"
        yield Finding(Kind.OPEN, what, node, at_s=account.release_at_s)
    ahead = had - account.earned
    paid_ahead = account.paid - account.earned
    if paid_ahead > 0 and not promised:
        what = (
            f"{paid_ahead} was paid ahead of its shares, for a voucher that is not among those"
            " given"
        )
        yield Finding(Kind.OPEN, what, node)
    elif promised and ahead > 0 and had > promised.amount:
        what = (
            f"{account.paid} was paid and {account.pending} is pending, its shares are"
            f" {account.earned}, its voucher {promised.amount}"
        )
        yield Finding(Kind.PAY, what, node)
    if promised and promised.amount > had + account.voided:
        left = promised.amount - had - account.voided
        yield Finding(Kind.OPEN, f"{left} of its voucher can still be claimed", node)


def _promised(
    fact: JobFact, known: Recorded, vouchers: Iterable[SignedVoucher]
) -> tuple[dict[NodeId, Voucher], list[Finding]]:
    separator = fact.domain.separator()
    newest: dict[NodeId, Voucher] = {}
    findings: list[Finding] = []
    for signed in vouchers:
        voucher, node = signed.voucher, signed.voucher.node
        fault = ""
        if voucher.job != fact.job:
            fault = "it is of another job"
        elif signer(separator, voucher, signed.signature) != fact.coordinator:
            fault = f"the coordinator {fact.coordinator} did not sign it"
        elif voucher.amount < (least := _worth_at_least(fact, known, voucher)):
            fault = f"it is worth {voucher.amount}, the receipts it counts at least {least}"
        if fault:
            findings.append(Finding(Kind.VOUCHER, f"a voucher is unsound: {fault}", node))
        elif node not in newest or voucher.amount > newest[node].amount:
            newest[node] = voucher
    return newest, findings


def _worth_at_least(fact: JobFact, known: Recorded, voucher: Voucher) -> Wei:
    """What the receipts that a voucher counts earn for certain, epoch by epoch."""
    scores: dict[int, int] = {}
    for sequence in range(min(voucher.sequence, len(known.receipts))):
        signed = known.receipts.get((voucher.node, sequence))
        if signed is not None:
            own = pay.score(signed.receipt.samples, signed.receipt.quality_bps)
            epoch = signed.receipt.epoch
            scores[epoch] = scores.get(epoch, 0) + own
    return Wei(sum(pay.earned_at_least(fact.unit_price, score) for score in scores.values()))


def _escrow_findings(fact: JobFact) -> Iterator[Finding]:
    """Whether all money that was put in is free, taken back, reserved, pending or paid."""
    settled: dict[int, int] = {}
    shares: dict[int, int] = {}
    for share in fact.shares:
        shares[share.epoch] = shares.get(share.epoch, 0) + share.reward
        if share.state in {ShareState.PAID, ShareState.VOID}:
            settled[share.epoch] = settled.get(share.epoch, 0) + share.reward
    reserved = sum(epoch.pool - settled.get(epoch.number, 0) for epoch in fact.epochs)
    reserved -= sum(
        epoch.pool - shares.get(epoch.number, 0) for epoch in fact.epochs if epoch.is_swept
    )
    paid = sum(account.paid + account.pending for account in fact.accounts)
    there = fact.free + fact.reclaimed + reserved + paid
    if there != fact.deposited:
        what = (
            f"{fact.deposited} was put in; {fact.free} free, {fact.reclaimed} taken back,"
            f" {reserved} reserved and {paid} paid or pending are {there}"
        )
        yield Finding(Kind.ESCROW, what)
