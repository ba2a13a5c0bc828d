"""Takes what a node is owed for a job, without anybody's help: every part that is to be had now."""

from collections.abc import Iterator, Sequence
from functools import cached_property

from hypergpu.chain.ledger import EpochOnChain, JobOnChain, NodeAccount, Share
from hypergpu.chain.moments import moment
from hypergpu.cli.ledger.acts.done import Done
from hypergpu.cli.ledger.acts.node import NodeOnChain
from hypergpu.cli.ledger.holding import Held
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address
from hypergpu.ledger.pay import earned_at_least
from hypergpu.ledger.settlement.state import ShareState
from hypergpu.ledger.typed import Voucher, address_bytes, chain_form, word_bytes
from hypergpu.units import Wei


def claimed(node: NodeOnChain, held: Held, to: Address | None = None) -> Done:
    """Release what a voucher claimed, take shares that are due and credit, redeem what is new.

    Epochs that nobody closed are closed before that, where the ledger lets the node and shares of
    them come to more than the voucher.

    Args:
        node: Whose key is at hand.
        held: Of the job.
        to: Where credit goes; None: to the node itself.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, there is nothing to be claimed, or the ledger refuses it;
            ESCROW_SHORT, the job's escrow has nothing left. It says what was done before that.
    """
    claim = _Claim(node, held)
    try:
        claim.release()
        claim.close()
        claim.take_shares()
        claim.withdraw(to or Address(node.owner))
        claim.redeem()
    except HyperGPUError as refused:
        if not claim.hashes:
            raise
        detail = f"{refused.detail}; before that: {'; '.join(claim.parts + claim.hashes)}"
        raise HyperGPUError(refused.reason, detail, fix=refused.fix) from refused
    return claim.done()


class _Claim:
    """One go at it, with what came of it so far."""

    def __init__(self, node: NodeOnChain, held: Held) -> None:
        self._node = node
        # A voucher that was signed for no chain is worth nothing to any ledger.
        self._held = held if held.terms.domain.chain_id else held._replace(voucher=None)
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

    def close(self) -> None:
        """Close what the coordinator left open, where that brings more than the voucher."""
        due = list(self._due())
        if self._worth(due) <= self._promised():
            return
        for epoch, _, held in due:
            if held.closed_at_s:
                continue
            call = self._node.calls.close(self._held.terms.job, epoch).call
            try:
                self._node.foreseen(call, "closeEpoch")
            except HyperGPUError as refused:
                self._tell_open(epoch, held, refused)
                continue
            self.hashes.append(self._node.acted(call, "closeEpoch"))
            self.parts.append(f"epoch {epoch}, which its coordinator had left open, was closed")

    def take_shares(self) -> None:
        """Have shares of closed epochs paid that nobody has paid yet."""
        for epoch, share, held in self._due():
            if not held.closed_at_s:
                continue
            call = self._node.calls.pay(self._held.terms.job, epoch, [self._node.owner]).call
            final_at_s = held.closed_at_s + self._node.number("CHALLENGE_WINDOW")
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
        except HyperGPUError as refused:
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
                fix = "see hypergpu node wallet"
                if not self._held.terms.domain.chain_id:
                    detail += f" on {self._node.domain.contract}; the job was signed for no chain"
                    fix = "wait until its coordinator settles it there: hypergpu ledger show"
                raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
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
        return Done(self._node.owner, self.hashes, "; ".join(self.parts), amounts, ready_at_s)

    def _redeem(self, voucher: Voucher, left: int) -> None:
        job = self._on_ledger()
        shown = self._node.shown
        if not job.spendable:
            detail = (
                f"{shown(left)} of the voucher is not paid, and the escrow of"
                f" {self._held.job_id} has nothing left to claim it from"
            )
            raise HyperGPUError(Reason.ESCROW_SHORT, detail, fix=self._fix_of_short(job))
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

    def _fix_of_short(self, job: JobOnChain) -> str:
        """What is to be done where nothing of the escrow may be had."""
        if job.free:
            return "wait for the next challenge window: the job's owner has set a limit for each"
        over_at_s = job.ends_at_s - self._node.number("CHALLENGE_WINDOW")
        if job.ends_at_s and over_at_s <= self._node.now_s:
            return (
                f"show it to others: hypergpu ledger dispute. The job ended on {moment(over_at_s)},"
                " and nothing comes into its escrow any more but what others give back"
            )
        return "wait until its owner raises it; or show it to others: hypergpu ledger dispute"

    def _taken(self, name: str, what: str, call: bytes, function: str, amount: int) -> None:
        """Have an amount paid, and see whether the token let it through to the wallet."""
        credit = self._node.credit()
        self.hashes.append(self._node.acted(call, function))
        self._amounts[name] = amount
        is_credit = self._node.credit() > credit
        where = "became credit, the token refused it" if is_credit else "was paid"
        self.parts.append(f"{self._node.shown(amount)} {what} {where}")

    def _tell_open(self, epoch: int, held: EpochOnChain, refused: HyperGPUError) -> None:
        from_s = held.opened_at_s + self._node.number("UNBONDING")
        if from_s <= self._node.now_s:
            self.parts.append(f"epoch {epoch} stays open: {refused.detail}")
            return
        self._ready_at_s.append(from_s)
        self.parts.append(
            f"epoch {epoch} is open: if its coordinator does not close it, this does from"
            f" {moment(from_s)} on"
        )

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

    def _due(self) -> Iterator[tuple[int, Share, EpochOnChain]]:
        """Epochs, open or closed, in which a share of the node is recorded and not paid."""
        of_job = self._node.shares(self._held.terms.job, self._recorded_in)
        for epoch, (share, held) in of_job.items():
            if share.state == ShareState.DUE.value:
                yield epoch, share, held

    @cached_property
    def _recorded_in(self) -> tuple[int, ...]:
        own = {signed.receipt.epoch for signed in self._held.receipts}
        return self._node.recorded_in(self._held.terms.job, own)

    def _worth(self, due: Sequence[tuple[int, Share, EpochOnChain]]) -> int:
        """What the node's recorded receipts come to at least, once all epochs are closed."""
        price = Wei(self._on_ledger().unit_price)
        rewards = (
            share.reward if held.closed_at_s else earned_at_least(price, share.score)
            for _, share, held in due
        )
        return self._account().earned + sum(rewards)

    def _promised(self) -> int:
        """What it has, and what its voucher brings."""
        account = self._account()
        vouched = self._held.voucher.voucher.amount if self._held.voucher else 0
        return max(account.paid + account.pending, vouched)

    def _on_ledger(self) -> JobOnChain:
        return self._node.calls.job(self._node.asked("getJob", self._job))

    def _account(self) -> NodeAccount:
        return self._node.in_job(self._held.terms.job)
