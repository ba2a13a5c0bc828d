"""What a node does on the ledger by itself: registers, stakes, and takes its stake back."""

from collections.abc import Iterable, Sequence

from hypergpu.chain.ledger import EpochOnChain, NodeAccount, Share
from hypergpu.chain.moments import moment
from hypergpu.cli.ledger.acts.account import AccountOnChain
from hypergpu.cli.ledger.acts.done import Done
from hypergpu.cli.ledger.acts.whereabouts import Seen, next_to_see
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobKey
from hypergpu.ledger.typed import word_bytes


class NodeOnChain(AccountOnChain):
    """One node's account on one ledger."""

    def register(self, stake: int) -> Done:
        """Register the node, with a stake if it is more than 0.

        Raises:
            HyperGPUError: ARGUMENT_INVALID, it is registered, and more stake is another command's.
        """
        number = self._registered_as()
        if number and not stake:
            said = f"it is registered already, as node {number}: nothing was sent"
            return Done(self.owner, [], said)
        if number:
            detail = f"{self.owner} is registered already, as node {number}"
            fix = f"add to its stake: hypergpu ledger stake {stake}"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
        hashes = self.provided(stake) if stake else []
        call = self.calls.abi.call("registerNode", bytes(32), stake)
        hashes.append(self.acted(call, "registerNode"))
        said = f"registered with a stake of {self.shown(stake)}"
        return Done(self.owner, hashes, said, {"staked": str(stake)})

    def stake(self, amount: int) -> Done:
        """Add to the node's stake: its shares are paid at once as far as that covers them.

        Raises:
            HyperGPUError: ARGUMENT_INVALID, it is not registered, or has not so much of the token.
        """
        if not self._registered_as():
            detail = f"{self.owner} is not registered on {self.domain.contract}"
            fix = f"register it with its stake: hypergpu ledger register --stake {amount}"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
        hashes = self.provided(amount)
        hashes.append(self.acted(self.calls.abi.call("stake", amount), "stake"))
        staked, *_ = self.stakes()
        said = f"staked {self.shown(amount)}, {self.shown(staked)} in all"
        return Done(self.owner, hashes, said, {"added": str(amount), "staked": str(staked)})

    def unstake(self, amount: int | None) -> Done:
        """Ask for stake back, or take what was asked for once its wait is over.

        Args:
            amount: None: all that no payment locks.

        Raises:
            HyperGPUError: ARGUMENT_INVALID, there is no stake, or so much of it is not free.
        """
        staked, locked, unbonding, release_at_s = self.stakes()
        if unbonding:
            return self._taken(unbonding, release_at_s)
        free = staked - locked
        if not staked:
            detail = f"{self.owner} has no stake on {self.domain.contract}"
            fix = "name the node and the job it staked for; hypergpu ledger stake AMOUNT stakes"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
        wanted = free if amount is None else amount
        if wanted > free or not free:
            detail = (
                f"{self.shown(free)} of the stake of {self.shown(staked)} is free, the rest is"
                " locked by payments inside their challenge window"
            )
            window_s = self.number("CHALLENGE_WINDOW")
            least = f"ask for at most {self.shown(free)}, or " if free else ""
            fix = f"{least}wait: what was paid is unlocked within {2 * window_s} s"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
        name = self.acted(self.calls.abi.call("unstake", wanted), "unstake")
        staked, _, unbonding, release_at_s = self.stakes()
        said = (
            f"{self.shown(unbonding)} is unbonding and buys no pay at once any more; run this"
            f" again from {moment(release_at_s)} on to take it. {self.shown(staked)} stays staked"
        )
        amounts = {"unbonding": str(unbonding), "staked": str(staked)}
        return Done(self.owner, [name], said, amounts, release_at_s)

    def _taken(self, unbonding: int, release_at_s: int) -> Done:
        """What was asked for before. Asking for more would start its wait anew."""
        staked, *_ = self.stakes()
        amounts = {"unbonding": str(unbonding), "staked": str(staked)}
        if self.now_s < release_at_s:
            said = (
                f"{self.shown(unbonding)} is unbonding until {moment(release_at_s)}: nothing was"
                " sent; run this again from then on to take it"
            )
            return Done(self.owner, [], said, amounts, release_at_s)
        credit = self.credit()
        name = self.acted(self.calls.abi.call("withdrawStake"), "withdrawStake")
        where = "is in the wallet" if self.credit() == credit else "became credit, see `claim`"
        said = f"{self.shown(unbonding)} of stake {where}; {self.shown(staked)} stays staked"
        amounts = {"withdrawn": str(unbonding), "staked": str(staked)}
        return Done(self.owner, [name], said, amounts)

    def _registered_as(self) -> int:
        """The node's number on the ledger; 0: it has none."""
        metrics = self.asked("getNodeMetrics", self.address, [])
        ((number, *_),) = self.calls.abi.answer("getNodeMetrics", metrics)
        return int(number)

    def stakes(self) -> tuple[int, int, int, int]:
        """Staked, of it locked, unbonding beside it, and until when."""
        staked, locked, unbonding, until_s = self.calls.abi.answer(
            "stakeOf", self.asked("stakeOf", self.address)
        )
        return staked, locked, unbonding, until_s

    def credit(self) -> int:
        """What the token would not transfer to the node."""
        return self.number("creditOf", self.address)

    def in_job(self, job: JobKey) -> NodeAccount:
        """The node in a job."""
        return self.calls.account(self.asked("getAccount", word_bytes(job), self.address))

    def shares(self, job: JobKey, epochs: Sequence[int]) -> dict[int, tuple[Share, EpochOnChain]]:
        """The node's share of each of these epochs of a job, and the epoch."""
        name = word_bytes(job)
        shares = self.asked_each("getContribution", [(name, one, self.address) for one in epochs])
        held = self.asked_each("getEpoch", [(name, one) for one in epochs])
        return {
            number: (self.calls.share(share), self.calls.epoch(epoch))
            for number, share, epoch in zip(epochs, shares, held, strict=True)
        }

    def recorded_in(self, job: JobKey, own: Iterable[int]) -> tuple[int, ...]:
        """The epochs of a job that hold receipts of the node.

        Args:
            job: Its key.
            own: The epochs that its receipts name.
        """
        counted = self.in_job(job).counted
        seen: dict[int, Seen] = {}
        wanted = sorted(own)
        while wanted:
            for number, (share, epoch) in self.shares(job, wanted).items():
                seen[number] = Seen(share.receipts, bool(epoch.closed_at_s))
            wanted = next_to_see(seen, counted)
        return tuple(sorted(number for number, epoch in seen.items() if epoch.receipts))
