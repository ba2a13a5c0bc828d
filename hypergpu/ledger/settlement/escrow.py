"""Money in and out: the token, credit, bonds, jobs and their escrow.

A job's money moves only from free to reserved (an epoch closes, a voucher is redeemed), from
reserved to wallets or credit, and from reserved back to free (dust, voided shares, advances made
good).
"""

from hypergpu.ids import Address, JobKey
from hypergpu.ledger.settlement.state import (
    AMOUNT_MAX,
    LEDGER,
    Bond,
    Job,
    JobTerms,
    Options,
    State,
    atomic,
    require,
)


class Escrow:
    """Jobs, bonds and credit. ``now_s`` is the block's time; whoever drives the model sets it."""

    def __init__(self, options: Options, now_s: int) -> None:
        self.options = options
        self.now_s = now_s
        self.state = State()

    @property
    def period(self) -> int:
        """Which challenge window it is, counted from 1970."""
        return self.now_s // self.options.window_s

    def job(self, key: JobKey) -> Job:
        """A job that was opened once."""
        require(key in self.state.jobs, "UnknownJob")
        return self.state.jobs[key]

    def spendable(self, job: Job) -> int:
        """What may be reserved now."""
        spent = job.spent if job.period == self.period else 0
        return min(job.free, max(0, job.spend_limit - spent))

    def pause(self) -> None:
        """Stop new work."""
        require(not self.state.is_paused, "EnforcedPause")
        self.state.is_paused = True

    def unpause(self) -> None:
        """End the pause."""
        require(self.state.is_paused, "ExpectedPause")
        self.state.is_paused = False

    @atomic
    def post_bond(self, caller: Address, amount: int) -> None:
        """Add to the caller's bond."""
        require(not self.state.is_paused, "EnforcedPause")
        self._bond(caller).amount += amount
        self._pull(caller, amount)

    @atomic
    def unbond(self, caller: Address) -> None:
        """Start unbonding."""
        bond = self._bond(caller)
        require(not bond.jobs, "JobsRunning")
        bond.release_at_s = self.now_s + self.options.unbonding_s

    @atomic
    def withdraw_bond(self, caller: Address) -> int:
        """Pay the bond out."""
        bond = self._bond(caller)
        require(bond.release_at_s, "NothingToWithdraw")
        require(self.now_s >= bond.release_at_s, "TooEarly")
        self.state.bonds[caller] = Bond()
        self._push(caller, bond.amount)
        return bond.amount

    @atomic
    def withdraw(self, caller: Address, to: Address) -> int:
        """Pay credit out; here a refused transfer reverts."""
        amount = self.state.credit.get(caller, 0)
        require(amount, "NothingToWithdraw")
        self.state.credit[caller] = 0
        require(to not in self.state.refusing, "SafeERC20FailedOperation")
        self._transfer(LEDGER, to, amount)
        return amount

    @atomic
    def allow_owner(self, caller: Address, owner: Address) -> None:
        """Let an account open jobs on the caller's bond."""
        self.state.allowed_owners.setdefault(caller, set()).add(owner)

    @atomic
    def disallow_owner(self, caller: Address, owner: Address) -> None:
        """Let an account open no more jobs on the caller's bond."""
        self.state.allowed_owners.setdefault(caller, set()).discard(owner)

    @atomic
    def open_job(self, caller: Address, key: JobKey, terms: JobTerms, escrow: int) -> None:
        """Open a job. ``key`` is that of the caller and his salt."""
        require(not self.state.is_paused, "EnforcedPause")
        is_sound = int(terms.coordinator, 16) and terms.guaranteed_bps <= 10_000 and terms.epochs
        require(is_sound, "BadTerms")
        require(key not in self.state.jobs, "JobExists")
        allowed = self.state.allowed_owners.get(terms.coordinator, set())
        require(caller in {terms.coordinator, *allowed}, "OwnerNotAllowed")
        bond = self._bond(terms.coordinator)
        require(bond.amount >= self.options.minimum_bond, "BondMissing")
        bond.release_at_s = 0
        bond.jobs += 1
        self.state.jobs[key] = Job(
            owner=caller, terms=terms, spend_limit=terms.spend_limit, free=escrow
        )
        self._pull(caller, escrow)

    @atomic
    def fund(self, caller: Address, key: JobKey, amount: int) -> None:
        """Add to a job's free escrow."""
        require(not self.state.is_paused, "EnforcedPause")
        self._running(key)
        self._release(key, amount)
        self._pull(caller, amount)

    @atomic
    def raise_spend_limit(self, caller: Address, key: JobKey, limit: int) -> None:
        """Let more be reserved in a period."""
        job = self._owned(caller, key)
        require(limit > job.spend_limit, "LimitNotRaised")
        job.spend_limit = limit

    @atomic
    def request_reclaim(self, caller: Address, key: JobKey) -> None:
        """Announce that the owner takes back what is free."""
        job = self._owned(caller, key)
        require(not job.ends_at_s, "AlreadyRequested")
        job.ends_at_s = self.now_s + self.options.unbonding_s + self.options.window_s

    @atomic
    def reclaim(self, caller: Address, key: JobKey) -> int:
        """Pay the free escrow to the owner."""
        job = self._owned(caller, key)
        self._ended(key)
        amount, job.free = job.free, 0
        self._push(caller, amount)
        return amount

    @atomic
    def retire_job(self, key: JobKey) -> None:
        """Count a job as over for its coordinator's bond."""
        job = self._ended(key)
        require(not job.is_retired, "AlreadyRetired")
        job.is_retired = True
        self._bond(job.terms.coordinator).jobs -= 1

    def _bond(self, account: Address) -> Bond:
        return self.state.bonds.setdefault(account, Bond())

    def _owned(self, caller: Address, key: JobKey) -> Job:
        job = self.job(key)
        require(caller == job.owner, "NotOwner")
        return job

    def _running(self, key: JobKey) -> Job:
        job = self.job(key)
        require(not self._is_over(job), "JobEnded")
        return job

    def _is_over(self, job: Job) -> bool:
        """Whether it takes nothing new any more: the last window before its announced end."""
        return bool(job.ends_at_s) and self.now_s >= job.ends_at_s - self.options.window_s

    def _ended(self, key: JobKey) -> Job:
        job = self.job(key)
        require(job.ends_at_s, "JobNotEnded")
        require(self.now_s >= job.ends_at_s, "TooEarly")
        return job

    def _take_sequence(self, caller: Address, key: JobKey, seq: int) -> Job:
        job = self._running(key)
        require(caller == job.terms.coordinator, "NotCoordinator")
        require(seq == job.next_seq, "WrongSequence")
        job.next_seq += 1
        return job

    def _reserve(self, key: JobKey, amount: int) -> None:
        if not amount:
            return
        job = self.job(key)
        require(amount <= self.spendable(job), "SpendLimitExceeded")
        job.spent = (job.spent if job.period == self.period else 0) + amount
        job.period = self.period
        job.free -= amount

    def _release(self, key: JobKey, amount: int) -> None:
        job = self.job(key)
        job.free += amount
        require(job.free <= AMOUNT_MAX, "Panic")

    def _pull(self, payer: Address, amount: int) -> None:
        require(self.state.balances.get(payer, 0) >= amount, "ERC20InsufficientBalance")
        self._transfer(payer, LEDGER, amount)

    def _push(self, to: Address, amount: int) -> None:
        if to in self.state.refusing:
            self.state.credit[to] = self.state.credit.get(to, 0) + amount
        else:
            self._transfer(LEDGER, to, amount)

    def _transfer(self, payer: Address, to: Address, amount: int) -> None:
        balances = self.state.balances
        balances[payer] = balances.get(payer, 0) - amount
        balances[to] = balances.get(to, 0) + amount
