"""What an operator does on a ledger by the coordinator's key: its bond, and escrow of ended jobs.

Nonces that are spent here are not the journal's, so the coordinator must not run meanwhile, and one
that has settled before is started with ``--retry-failed`` afterwards.
"""

from collections.abc import Callable

from hypergpu.chain.moments import moment
from hypergpu.cli.ledger.acts.account import AccountOnChain
from hypergpu.cli.ledger.acts.done import Done
from hypergpu.ids import Address, JobId
from hypergpu.ledger.typed import job_key, word_bytes
from hypergpu.refusal import Reason, RefusalError

_AGAIN = "run this again from then on to take it"


class OperatorOnChain(AccountOnChain):
    """The account of a coordinator, which owns the jobs that it opened."""

    def bond(self, amount: int | None) -> Done:
        """See that the bond is at least an amount: what is missing is posted.

        Args:
            amount: None: what the ledger asks of a coordinator.

        Raises:
            RefusalError: ARGUMENT_INVALID, it is too little, or the account lacks tokens.
        """
        least = self.number("MINIMUM_BOND")
        wanted = least if amount is None else amount
        if wanted < least:
            detail = f"a bond of {self.shown(wanted)} opens no job"
            fix = f"post at least {self.shown(least)}"
            raise RefusalError(Reason.ARGUMENT_INVALID, detail, fix=fix)
        posted, _, release_at_s = self._bond()
        hashes: list[str] = []
        if posted < wanted:
            hashes = self.provided(wanted - posted)
            call = self.calls.post_bond(wanted - posted).call
            hashes.append(self.acted(call, "postBond"))
        now, _, _ = self._bond()
        said = f"the bond is {self.shown(now)}" if hashes else self._standing(now)
        if release_at_s:
            said += "; it was asked back, which ends when a job is opened on it"
        return Done(self.node, hashes, said, {"bond": str(now), "added": str(now - posted)})

    def unbond(self) -> Done:
        """Ask for the bond back, or take it once its wait is over.

        Raises:
            RefusalError: ARGUMENT_INVALID, there is none, or jobs count on it.
        """
        posted, jobs, release_at_s = self._bond()
        if not posted:
            detail = f"{self.node} has no bond on {self.domain.contract}"
            fix = "name the coordinator's folder and its ledger: --data-dir, --ledger-contract"
            raise RefusalError(Reason.ARGUMENT_INVALID, detail, fix=fix)
        if jobs:
            detail = f"jobs of {self.node} count on its bond of {self.shown(posted)}, {jobs} in all"
            fix = "end each first, also where its escrow is empty: hypergpu ledger reclaim JOB"
            raise RefusalError(Reason.ARGUMENT_INVALID, detail, fix=fix)
        amounts = {"bond": str(posted)}
        if not release_at_s:
            name = self.acted(self.calls.abi.call("unbond"), "unbond")
            *_, release_at_s = self._bond()
            said = f"{self.shown(posted)} is unbonding until {moment(release_at_s)}: {_AGAIN}"
            return Done(self.node, [name], said, amounts, release_at_s)
        if self.now_s < release_at_s:
            said = (
                f"{self.shown(posted)} is unbonding until {moment(release_at_s)}: nothing was"
                f" sent; {_AGAIN}"
            )
            return Done(self.node, [], said, amounts, release_at_s)
        name = self.acted(self.calls.abi.call("withdrawBond"), "withdrawBond")
        said = f"the bond of {self.shown(posted)} was paid back"
        return Done(self.node, [name], said, {"withdrawn": str(posted)})

    def reclaim(self, job_id: JobId, agree: Callable[[str], object]) -> Done:
        """Announce a job's end, or take its free escrow once that has come, and retire the job.

        Args:
            job_id: One that this coordinator opened.
            agree: Asked before the end is announced, which nobody can take back.

        Raises:
            RefusalError: ARGUMENT_INVALID, the ledger knows no such job of this key.
        """
        job = word_bytes(job_key(Address(self.node), job_id))
        try:
            held = self.calls.job(self.asked("getJob", job))
        except RefusalError as unknown:
            detail = f"{self.domain.contract} knows no {job_id} of {self.node}: {unknown.detail}"
            fix = "name the job, its coordinator's folder and its ledger: see hypergpu ledger show"
            raise RefusalError(Reason.JOB_UNKNOWN, detail, fix=fix) from unknown
        if not held.ends_at_s:
            return self._announced(job_id, job, held.free, agree)
        if self.now_s < held.ends_at_s:
            said = (
                f"{job_id} ends at {moment(held.ends_at_s)}, what is free then, now"
                f" {self.shown(held.free)}, can be taken: nothing was sent; {_AGAIN}"
            )
            return Done(self.node, [], said, {"free": str(held.free)}, held.ends_at_s)
        return self._taken(job_id, job, held.free)

    def _announced(
        self, job_id: JobId, job: bytes, free: int, agree: Callable[[str], object]
    ) -> Done:
        agree(
            f"end {job_id} on the ledger for good, in {self.number('UNBONDING')} s? What is neither"
            " recorded nor redeemed by then is not paid."
        )
        name = self.acted(self.calls.abi.call("requestReclaim", job), "requestReclaim")
        ends_at_s = self.calls.job(self.asked("getJob", job)).ends_at_s
        last_at_s = ends_at_s - self.number("CHALLENGE_WINDOW")
        rest = (
            f"Of the {self.shown(free)} that is free now, what is left then is yours: {_AGAIN}"
            if free
            else "Nothing of it is free now: run this again then, and it counts on no bond any more"
        )
        said = (
            f"{job_id} takes receipts and vouchers until {moment(last_at_s)} and ends at"
            f" {moment(ends_at_s)}; let the coordinator run meanwhile, so that it settles the rest."
            f" {rest}"
        )
        return Done(self.node, [name], said, {"free": str(free)}, ends_at_s)

    def _taken(self, job_id: JobId, job: bytes, free: int) -> Done:
        hashes = []
        retire = self.calls.abi.call("retireJob", job)
        if self._is_taken(retire, "retireJob"):
            hashes.append(self.acted(retire, "retireJob"))
        if free:
            hashes.append(self.acted(self.calls.abi.call("reclaim", job), "reclaim"))
        said = (
            f"{self.shown(free)} of {job_id} was paid back"
            if free
            else f"nothing of {job_id} is free" + (": nothing was sent" if not hashes else "")
        )
        _, jobs, _ = self._bond()
        said += f"; jobs that count on the bond: {jobs}"
        return Done(self.node, hashes, said, {"reclaimed": str(free)})

    def _is_taken(self, call: bytes, what: str) -> bool:
        try:
            self.foreseen(call, what)
        except RefusalError:
            return False
        return True

    def _standing(self, bond: int) -> str:
        return f"the bond is {self.shown(bond)} already: nothing was sent"

    def _bond(self) -> tuple[int, int, int]:
        """The bond, the jobs that count on it, and when it can be taken."""
        posted, jobs, release_at_s = self.calls.abi.answer(
            "bondOf", self.asked("bondOf", self.address)
        )
        return posted, jobs, release_at_s
