"""Takes what a node is owed for a job, without anybody's help: every part that is to be had now."""

from collections.abc import Iterator

from hypergpu.chain.ledger import SHARE_DUE, NodeAccount
from hypergpu.chain.moments import moment
from hypergpu.cli.ledger.acts.done import Done
from hypergpu.cli.ledger.acts.node import NodeOnChain
from hypergpu.cli.ledger.holding import Held
from hypergpu.ids import Address
from hypergpu.ledger.typed import Voucher, address_bytes, chain_form, word_bytes
from hypergpu.refusal import Reason, RefusalError


def claimed(node: NodeOnChain, held: Held, to: Address | None = None) -> Done:
    """Release what a voucher claimed, take shares that are due and credit, redeem what is new.

    Args:
        node: Whose key is at hand.
        held: Of the job.
        to: Where credit goes; None: to the node itself.

    Raises:
        RefusalError: ARGUMENT_INVALID, there is nothing to be claimed, or the ledger refuses it;
            ESCROW_SHORT, the job's escrow has nothing left. It says what was done before that.
    """
    claim = _Claim(node, held)
    try:
        claim.release()
        claim.take_shares()
        claim.withdraw(to or Address(node.node))
        claim.redeem()
    except RefusalError as refused:
        if not claim.hashes:
            raise
        detail = f"{refused.detail}; before that: {'; '.join(claim.parts + claim.hashes)}"
        raise RefusalError(refused.reason, detail, fix=refused.fix) from refused
    return claim.done()


class _Claim:
    """One go at it, with what came of it so far."""

    def __init__(self, node: NodeOnChain, held: Held) -> None:
        self._node = node
        self._held = held
        self._job = word_bytes(held.terms.job)
        self.hashes: list[str] = []
        self.parts: list[str] = []
        self._amounts: dict[str, int] = {}
        self._ready_at_s: list[int] = []
        self._coming = 0
        """In shares that can be paid later, without the voucher."""

    def release(self) -> None:
        """Have a claim paid whose window is over."""
        account = self._account()
        if not account.pending or self._node.now_s < account.release_at_s:
            return
        call = self._node.calls.abi.call("releaseVoucher", self._job, self._node.address)
        self._taken("released", "of an earlier claim", call, "releaseVoucher", account.pending)

    def take_shares(self) -> None:
        """Have shares of closed epochs paid that nobody has paid yet."""
        for epoch, closed_at_s in self._due():
            share = self._node.calls.share(
                self._node.asked("getContribution", self._job, epoch, self._node.address)
            )
            call = self._node.calls.pay(self._held.terms.job, epoch, [self._node.node]).call
            final_at_s = closed_at_s + self._node.number("CHALLENGE_WINDOW")
            is_final = final_at_s <= self._node.now_s
            if not is_final and not int.from_bytes(self._node.foreseen(call, "pay")):
                shown = self._node.shown(share.reward)
                self.parts.append(
                    f"{shown} for epoch {epoch} can be paid from {moment(final_at_s)} on"
                )
                self._ready_at_s.append(final_at_s)
                self._coming += share.reward
                continue
            before = self._account().paid
            self.hashes.append(self._node.acted(call, "distributePayments"))
            paid = self._account().paid - before
            self._amounts["shares"] = self._amounts.get("shares", 0) + paid
            self.parts.append(f"{self._node.shown(paid)} was paid for epoch {epoch}")

    def withdraw(self, to: Address) -> None:
        """Take what the token would not transfer before."""
        credit = self._node.credit()
        if not credit:
            return
        call = self._node.calls.abi.call("withdraw", address_bytes(to))
        shown = self._node.shown(credit)
        try:
            self._node.foreseen(call, "withdraw")
        except RefusalError as refused:
            self._amounts["credit"] = credit
            self.parts.append(
                f"{shown} stays credit, the token refuses to transfer it to {to}: name another"
                f" address with --to ({refused.detail})"
            )
            return
        self.hashes.append(self._node.acted(call, "withdraw"))
        self._amounts["withdrawn"] = credit
        self.parts.append(f"credit of {shown} went to {to}")

    def redeem(self) -> None:
        """Claim what the newest voucher promises beyond all that was paid or is pending."""
        account = self._account()
        if account.pending:
            self._tell_pending(account)
        if self._held.voucher is None:
            if not self.parts:
                detail = f"this node holds no voucher of {self._held.job_id}, and nothing is due"
                raise RefusalError(Reason.ARGUMENT_INVALID, detail, fix="see hypergpu node wallet")
            return
        voucher = self._held.voucher.voucher
        left = voucher.amount - account.paid - account.pending - account.voided
        if left <= self._coming:
            if not self.parts:
                self.parts.append(self._all_paid(voucher, account))
        elif account.pending:
            self.parts.append(f"{self._node.shown(left)} more can be claimed after that")
        else:
            self._redeem(voucher, left)

    def done(self) -> Done:
        """What came of it."""
        account = self._account()
        self._amounts |= {"paid": account.paid, "pending": account.pending}
        self._amounts.setdefault("credit", self._node.credit())
        amounts = {name: str(amount) for name, amount in self._amounts.items()}
        ready_at_s = min(self._ready_at_s, default=None)
        return Done(self._node.node, self.hashes, "; ".join(self.parts), amounts, ready_at_s)

    def _redeem(self, voucher: Voucher, left: int) -> None:
        job = self._node.calls.job(self._node.asked("getJob", self._job))
        shown = self._node.shown
        if not job.spendable:
            detail = (
                f"{shown(left)} of the voucher is not paid, and the escrow of"
                f" {self._held.job_id} has nothing left to claim it from"
            )
            fix = (
                "wait until its owner raises it; or show it to others: hypergpu ledger dispute"
                if not job.free
                else "wait for the next challenge window: the job's owner has set a limit for each"
            )
            raise RefusalError(Reason.ESCROW_SHORT, detail, fix=fix)
        signature = self._held.voucher.signature if self._held.voucher else b""
        fields = (self._job, address_bytes(voucher.node), voucher.sequence, voucher.amount)
        call = self._node.calls.abi.call("redeemVoucher", fields, chain_form(signature))
        self.hashes.append(self._node.acted(call, "redeemVoucher"))
        account = self._account()
        self._amounts["redeemed"] = account.pending
        self.parts.append(f"a voucher of {shown(voucher.amount)} was redeemed")
        self._tell_pending(account)
        if account.pending < left:
            rest = shown(left - account.pending)
            self.parts.append(f"the escrow had no more: {rest} of the voucher is still to be had")

    def _taken(self, name: str, what: str, call: bytes, function: str, amount: int) -> None:
        """Have an amount paid, and see whether the token let it through to the wallet."""
        credit = self._node.credit()
        self.hashes.append(self._node.acted(call, function))
        self._amounts[name] = amount
        is_credit = self._node.credit() > credit
        where = "became credit, the token refused it" if is_credit else "was paid"
        self.parts.append(f"{self._node.shown(amount)} {what} {where}")

    def _tell_pending(self, account: NodeAccount) -> None:
        self._ready_at_s.append(account.release_at_s)
        self.parts.append(
            f"{self._node.shown(account.pending)} is pending until {moment(account.release_at_s)}:"
            " run this again from then on to take it"
        )

    def _all_paid(self, voucher: Voucher, account: NodeAccount) -> str:
        voided = f" and arbiters voided {self._node.shown(account.voided)}" * bool(account.voided)
        return (
            f"nothing is left to be claimed: {self._node.shown(account.paid)} was paid{voided},"
            f" the newest voucher is for {self._node.shown(voucher.amount)}"
        )

    def _due(self) -> Iterator[tuple[int, int]]:
        """Closed epochs in which a share of the node is due, and when each was closed."""
        calls, node = self._node.calls, self._node
        for epoch in sorted({signed.receipt.epoch for signed in self._held.receipts}):
            share = calls.share(node.asked("getContribution", self._job, epoch, node.address))
            if share.state != SHARE_DUE:
                continue
            held = calls.epoch(node.asked("getEpoch", self._job, epoch))
            if held.closed_at_s:
                yield epoch, held.closed_at_s

    def _account(self) -> NodeAccount:
        return self._node.in_job(self._held.terms.job)
