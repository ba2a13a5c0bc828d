"""What an operator does on a ledger by the coordinator's key: its bond, and escrow of ended jobs.

The coordinator must not run meanwhile: nonces that are spent here are in no journal, until it finds
them in its folder at its next start.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hypergpu.chain.moments import moment
from hypergpu.chain.rpc.chain import EvmChain, Sent
from hypergpu.chain.sent.acts import ActFile, act_of
from hypergpu.chain.signer import Draft
from hypergpu.cli.ledger.acts.account import AccountOnChain
from hypergpu.cli.ledger.acts.done import Done
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, JobId
from hypergpu.ledger.typed import Domain, job_key, word_bytes
from hypergpu.signature import IdentityKey

_AGAIN = "run this again from then on to take it"


class OwnFolder(NamedTuple):
    """What a coordinator's folder tells while it is off; jobs' names are in its journal alone."""

    acts: ActFile
    jobs: Sequence[JobId]
    """Whose files are there."""


class OperatorOnChain(AccountOnChain):
    """The account of a coordinator, which owns the jobs that it opened."""

    def __init__(self, chain: EvmChain, key: IdentityKey, domain: Domain, own: OwnFolder) -> None:
        """As an account; what is signed is kept in the coordinator's folder."""
        super().__init__(chain, key, domain)
        self._acts, self._jobs = own

    def bond(self, amount: int | None) -> Done:
        """See that the bond is at least an amount: what is missing is posted.

        Args:
            amount: None: what the ledger asks of a coordinator.

        Raises:
            HyperGPUError: ARGUMENT_INVALID, it is too little, or the account lacks tokens.
        """
        least = self.number("MINIMUM_BOND")
        wanted = least if amount is None else amount
        if wanted < least:
            detail = f"a bond of {self.shown(wanted)} opens no job"
            fix = f"post at least {self.shown(least)}"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
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
        return Done(self.owner, hashes, said, {"bond": str(now), "added": str(now - posted)})

    def unbond(self) -> Done:
        """Ask for the bond back, or take it once its wait is over.

        Raises:
            HyperGPUError: ARGUMENT_INVALID, there is none, or jobs count on it.
        """
        posted, jobs, release_at_s = self._bond()
        if not posted:
            detail = f"{self.owner} has no bond on {self.domain.contract}"
            fix = "name the coordinator's folder and its ledger: --data-dir, --ledger-contract"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
        if jobs:
            named = ", ".join(self._counting())
            detail = (
                f"jobs of {self.owner} count on its bond of {self.shown(posted)}, {jobs} in all"
                + (f": {named}" if named else "")
            )
            fix = "end each first, also where its escrow is empty: hypergpu ledger reclaim JOB"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
        amounts = {"bond": str(posted)}
        if not release_at_s:
            name = self.acted(self.calls.abi.call("unbond"), "unbond")
            *_, release_at_s = self._bond()
            said = f"{self.shown(posted)} is unbonding until {moment(release_at_s)}: {_AGAIN}"
            return Done(self.owner, [name], said, amounts, release_at_s)
        if self.now_s < release_at_s:
            said = (
                f"{self.shown(posted)} is unbonding until {moment(release_at_s)}: nothing was"
                f" sent; {_AGAIN}"
            )
            return Done(self.owner, [], said, amounts, release_at_s)
        name = self.acted(self.calls.abi.call("withdrawBond"), "withdrawBond")
        said = f"the bond of {self.shown(posted)} was paid back"
        return Done(self.owner, [name], said, {"withdrawn": str(posted)})

    def reclaim(self, given: str, agree: Callable[[str], object]) -> Done:
        """Announce a job's end, or take its free escrow once that has come, and retire the job.

        Args:
            given: The id of one that this coordinator opened, or the beginning of it.
            agree: Asked before the end is announced, which nobody can take back.

        Raises:
            HyperGPUError: JOB_UNKNOWN, the ledger knows no such job of this key, or several are
                meant.
        """
        job_id = self._named(given)
        job = word_bytes(job_key(Address(self.owner), job_id))
        try:
            held = self.calls.job(self.asked("getJob", job))
        except HyperGPUError as unknown:
            detail = f"{self.domain.contract} knows no {job_id} of {self.owner}: {unknown.detail}"
            known = ", ".join(self._jobs) or "those of no job"
            fix = (
                f"name it by its id or the beginning of it: this folder has the files of {known};"
                " or another folder or ledger: --data-dir, --ledger-contract"
            )
            raise HyperGPUError(Reason.JOB_UNKNOWN, detail, fix=fix) from unknown
        if not held.ends_at_s:
            return self._announced(job_id, job, held.free, agree)
        if self.now_s < held.ends_at_s:
            said = (
                f"{job_id} ends at {moment(held.ends_at_s)}, what is free then, now"
                f" {self.shown(held.free)}, can be taken: nothing was sent; {_AGAIN}"
            )
            return Done(self.owner, [], said, {"free": str(held.free)}, held.ends_at_s)
        return self._taken(job_id, job, held.free)

    def _named(self, given: str) -> JobId:
        """The job that is meant. One whose files are gone needs its whole id."""
        begun = [
            each
            for each in self._jobs
            if given and given in {each[: len(given)], each.removeprefix("job-")[: len(given)]}
        ]
        if given in self._jobs or not begun:
            return JobId(given)
        if len(begun) > 1:
            raise HyperGPUError(Reason.JOB_UNKNOWN, f"{given!r} may be {', '.join(begun)}")
        return begun[0]

    def _counting(self) -> Iterator[JobId]:
        """Of the jobs whose files are there, those that count on the bond."""
        for job_id in self._jobs:
            job = word_bytes(job_key(Address(self.owner), job_id))
            try:
                self.foreseen(self.calls.abi.call("retireJob", job), "retireJob")
            except HyperGPUError as refused:
                if any(f": {name}(" in refused.detail for name in ("AlreadyRetired", "UnknownJob")):
                    continue
            yield job_id

    def _handed_over(self, draft: Draft, what: str) -> tuple[bytes, Sent]:
        act = act_of(self._signer, draft, what)
        return act.hash, self._acts.hand_over(act, self._chain)

    def _announced(
        self, job_id: JobId, job: bytes, free: int, agree: Callable[[str], object]
    ) -> Done:
        agree(
            f"end {job_id} on the ledger for good, in {self.number('UNBONDING')} s? What is neither"
            " recorded nor redeemed by then is not paid. If it still trains, let its coordinator"
            " stop it first, hypergpu job stop: no round of it is begun once its end is announced."
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
            f" {moment(ends_at_s)}; let the coordinator run meanwhile, so that it settles the rest:"
            " it begins no round of the job any more."
            f" {rest}"
        )
        return Done(self.owner, [name], said, {"free": str(free)}, ends_at_s)

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
        return Done(self.owner, hashes, said, {"reclaimed": str(free)})

    def _is_taken(self, call: bytes, what: str) -> bool:
        try:
            self.foreseen(call, what)
        except HyperGPUError:
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
