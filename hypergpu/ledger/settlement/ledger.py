"""Recording receipts, closing epochs, paying shares, vouchers and disputes, as the contract does.

`Account.counted` is the one guard against recording a receipt twice: whatever records one starts
there and moves it. `Account.earned + advance` is the one guard against paying twice: shares raise
``earned`` and use up the advance first, vouchers raise the advance.
"""

from collections.abc import Sequence
from itertools import pairwise

from hypergpu.ids import Address, JobKey
from hypergpu.ledger import pay
from hypergpu.ledger.packing import (
    NodeTotals,
    next_digest,
    totals_words,
    unpacked,
)
from hypergpu.ledger.settlement.stakes import Stakes
from hypergpu.ledger.settlement.state import (
    Account,
    Epoch,
    Share,
    ShareState,
    atomic,
    require,
)
from hypergpu.ledger.typed import Receipt, Voucher, struct_hash
from hypergpu.units import Samples, Wei

PAYEES_MAX = 250
PROVERS_PART = 10


class TrainingLedger(Stakes):
    """The whole contract. Signatures are taken to be good: the tests of the contract forge them."""

    def account(self, key: JobKey, node: Address) -> Account:
        """A node in a job."""
        return self.state.accounts.setdefault((key, node), Account())

    def share(self, key: JobKey, epoch: int, node: Address) -> Share:
        """A node's share of an epoch."""
        return self.state.shares.setdefault((key, epoch, node), Share())

    def epoch(self, key: JobKey, number: int) -> Epoch:
        """An epoch of a job."""
        return self.state.epochs.setdefault((key, number), Epoch())

    def reward(self, key: JobKey, epoch: int, node: Address) -> int:
        """A node's share of a closed epoch's pool; 0 while it is open."""
        held = self.epoch(key, epoch)
        own = self.share(key, epoch, node).score
        return pay.reward(Wei(held.pool), own, held.total_score) if held.closed_at_s else 0

    @atomic
    def submit_contribution(self, receipt: Receipt, epoch: int) -> None:
        """Force one receipt in. Anyone may."""
        key, node = receipt.job, Address(receipt.node)
        self._running(key)
        require(receipt.quality_bps <= pay.WHOLE_BPS, "QualityOutOfRange")
        require(epoch >= receipt.epoch, "EpochIsClosed")
        if epoch > receipt.epoch:
            self._closed(key, receipt.epoch)
            self._closed(key, epoch - 1)
        require(receipt.sequence == self.account(key, node).counted, "NotNext")
        score = pay.score(receipt.samples, receipt.quality_bps)
        totals = NodeTotals(receipt.node, receipt.sequence, 1, receipt.samples, score)
        self._record(key, epoch, totals)
        self._raise_total(key, epoch, score)

    @atomic
    def submit_aggregate(
        self,
        caller: Address,
        key: JobKey,
        epoch: int,
        seq: int,
        root: bytes,
        totals: Sequence[NodeTotals],
    ) -> None:
        """Record a batch by its sums; a node that does not start at ``counted`` is skipped."""
        require(not self.state.is_paused, "EnforcedPause")
        job = self._take_sequence(caller, key, seq)
        score = 0
        for one in totals:
            is_sound = one.receipts and one.score <= one.samples * pay.WHOLE_BPS
            require(is_sound, "BadTotals")
            if one.first_sequence == self.account(key, Address(one.node)).counted:
                self._record(key, epoch, one)
                score += one.score
        self._raise_total(key, epoch, score)
        content = totals_words(totals)
        job.digest = next_digest(job.digest, seq=seq, epoch=epoch, root=root, content=content)

    @atomic
    def submit_contributions(
        self, caller: Address, key: JobKey, epoch: int, seq: int, root: bytes, content: bytes
    ) -> None:
        """Record a packed batch; receipts below ``counted`` are passed over."""
        require(not self.state.is_paused, "EnforcedPause")
        job = self._take_sequence(caller, key, seq)
        score = 0
        for run in unpacked(content):
            counted = self.account(key, Address(run.node)).counted
            first = max(run.first_sequence, min(counted, run.first_sequence + len(run.records)))
            records = run.records[first - run.first_sequence :]
            require(all(one.quality_bps <= pay.WHOLE_BPS for one in records), "QualityOutOfRange")
            if first != counted or not records:
                continue
            samples = Samples(sum(one.samples for one in records))
            earned = sum(pay.score(one.samples, one.quality_bps) for one in records)
            self._record(key, epoch, NodeTotals(run.node, first, len(records), samples, earned))
            score += earned
        self._raise_total(key, epoch, score)
        job.digest = next_digest(job.digest, seq=seq, epoch=epoch, root=root, content=content)

    @atomic
    def close_epoch(self, caller: Address, key: JobKey, number: int) -> int:
        """Freeze an epoch's scores and reserve its pool."""
        job, epoch = self.job(key), self.epoch(key, number)
        require(not epoch.closed_at_s, "EpochIsClosed")
        if caller not in {job.terms.coordinator, job.owner}:
            require(epoch.opened_at_s, "NotCoordinator")
            is_late = self.now_s >= epoch.opened_at_s + self.options.unbonding_s
            require(is_late or self._is_over(job), "TooEarly")
        price, free = Wei(job.terms.unit_price), Wei(job.free)
        epoch.pool = pay.pool(price, epoch.total_score, free)
        epoch.closed_at_s = self.now_s
        if self._is_over(job):
            job.free -= epoch.pool
        else:
            self._reserve(key, epoch.pool)
        return epoch.pool

    @atomic
    def distribute_payments(self, key: JobKey, number: int, nodes: Sequence[Address]) -> int:
        """Pay the shares that can be paid now."""
        require(len(nodes) <= PAYEES_MAX, "TooManyNodes")
        is_final = self._is_final(self._closed(key, number))
        require(is_final or not self.state.is_paused, "TooEarly")
        return sum(self._settle(key, number, node, is_final=is_final) for node in nodes)

    @atomic
    def sweep_dust(self, key: JobKey, number: int, nodes: Sequence[Address]) -> int:
        """Return what rounding left of a pool."""
        epoch = self._closed(key, number)
        require(not epoch.is_swept, "AlreadySwept")
        is_ascending = all(one < other for one, other in pairwise(nodes))
        require(is_ascending, "NotAscending")
        scores = [self.share(key, number, node).score for node in nodes]
        require(sum(scores) == epoch.total_score, "NodesMissing")
        shares = (pay.reward(Wei(epoch.pool), own, epoch.total_score) for own in scores)
        dust = epoch.pool - sum(shares)
        epoch.is_swept = True
        self._release(key, dust)
        return dust

    @atomic
    def redeem_voucher(self, caller: Address, voucher: Voucher) -> int:
        """Claim what a voucher promises beyond everything paid."""
        key, node = voucher.job, Address(voucher.node)
        require(caller == node, "NotNode")
        job, account = self.job(key), self.account(key, node)
        require(not account.is_barred, "NodeIsBarred")
        require(not account.pending, "ClaimPending")
        had = account.earned + account.advance + account.voided
        require(voucher.amount > had, "NothingDue")
        amount = min(voucher.amount - had, self.spendable(job))
        require(amount, "NothingDue")
        self._reserve(key, amount)
        account.advance += amount
        account.pending = amount
        account.release_at_s = self.now_s + self.options.window_s
        return amount

    @atomic
    def release_voucher(self, key: JobKey, node: Address) -> None:
        """Pay a pending claim once its window is over."""
        account = self.account(key, node)
        require(account.pending, "NothingDue")
        require(self.now_s >= account.release_at_s, "TooEarly")
        amount, account.pending = account.pending, 0
        self._push(node, amount)

    @atomic
    def void_contribution(self, key: JobKey, number: int, node: Address, penalty: int) -> int:
        """Take a share back inside its window, as a quorum of arbiters signed."""
        epoch, share = self._closed(key, number), self.share(key, number, node)
        require(not self._is_final(epoch), "WindowOver")
        require(share.state in {ShareState.DUE, ShareState.PAID}, "NothingToVoid")
        reward, account = self.reward(key, number, node), self.account(key, node)
        account.voided += reward
        returned = reward
        if share.state is ShareState.PAID:
            returned = share.paid
            account.earned -= reward
            account.advance += reward - share.paid
            if account.is_barred:
                returned += self._stop_claim(account)
            self._seize_locked(node, share.paid, share.paid_in)
        share.state, share.paid = ShareState.VOID, 0
        self._release(key, returned)
        self._push(self.options.treasury, self._seize_free(node, penalty))
        return returned

    @atomic
    def void_voucher(self, key: JobKey, node: Address) -> int:
        """Return what shares have not made good of a pending claim; refuse vouchers from now on."""
        account = self.account(key, node)
        returned = self._stop_claim(account)
        self._release(key, returned)
        account.is_barred = True
        return returned

    @atomic
    def prove_equivocation(self, caller: Address, first: Receipt, second: Receipt) -> int:
        """Show that the coordinator signed two receipts for one number: it loses its bond."""
        is_same = (first.job, first.node, first.sequence) == (
            second.job,
            second.node,
            second.sequence,
        )
        require(is_same and struct_hash(first) != struct_hash(second), "NoEquivocation")
        bond = self._bond(self.job(first.job).terms.coordinator)
        slashed, bond.amount = bond.amount, 0
        require(slashed, "NothingDue")
        self._push(caller, slashed // PROVERS_PART)
        self._push(self.options.treasury, slashed - slashed // PROVERS_PART)
        return slashed

    def _stop_claim(self, account: Account) -> int:
        if self.now_s >= account.release_at_s:
            return 0
        returned = min(account.pending, account.advance)
        account.pending -= returned
        account.advance -= returned
        return returned

    def _record(self, key: JobKey, epoch: int, totals: NodeTotals) -> None:
        node = Address(totals.node)
        share, account = self.share(key, epoch, node), self.account(key, node)
        share.score += totals.score
        share.receipts += totals.receipts
        share.state = ShareState.DUE
        account.counted += totals.receipts
        account.samples += totals.samples

    def _raise_total(self, key: JobKey, number: int, score: int) -> None:
        epoch = self.epoch(key, number)
        require(not epoch.closed_at_s, "EpochIsClosed")
        epoch.opened_at_s = epoch.opened_at_s or self.now_s
        epoch.total_score += score

    def _closed(self, key: JobKey, number: int) -> Epoch:
        epoch = self.epoch(key, number)
        require(epoch.closed_at_s, "EpochIsOpen")
        return epoch

    def _is_final(self, epoch: Epoch) -> bool:
        return self.now_s >= epoch.closed_at_s + self.options.window_s

    def _settle(self, key: JobKey, number: int, node: Address, *, is_final: bool) -> int:
        share, account = self.share(key, number, node), self.account(key, node)
        if share.state is not ShareState.DUE:
            return 0
        reward = self.reward(key, number, node)
        used = min(account.advance, reward)
        paid = reward - used
        if not is_final:
            if not self._is_locked(node, paid):
                return 0
            share.paid_in = self.period % 2**16
        share.state, share.paid = ShareState.PAID, paid
        account.earned += reward
        account.advance -= used
        self._release(key, used)
        self._push(node, paid)
        return paid
