"""Fills nonces that the chain wants next and nothing stored has, and says so."""

from collections.abc import Mapping, Sequence

from coordinator.core.settlement.gaps import Counts, filling, missing
from coordinator.core.settlement.sending import Attempt, TransactionState
from coordinator.shell.chain.sending import Account
from coordinator.shell.journal.ledger.interface import Outbox
from coordinator.shell.journal.ledger.records import OutboxRow, SignedAttempt
from hypergpu.chain.profiles import ChainProfile
from hypergpu.chain.rpc.answers import Block
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.sent.acts import Act


class GapFiller:
    """Used by the pump.

    What fills a nonce is not stored in the outbox, for nothing that is settled builds on it: as
    long as the chain wants the nonce, what an operator's command has signed with it is sent as it
    is, and a void transfer is signed afresh.
    """

    def __init__(
        self, chain: EvmChain, account: Account, outbox: Outbox, profile: ChainProfile
    ) -> None:
        self._chain = chain
        self._account = account
        self._outbox = outbox
        self._profile = profile
        self._sent: dict[int, Attempt] = {}
        self._sent_at = 0

    def fill(self, head: Block, rows: Sequence[OutboxRow], used: int) -> list[str]:
        """What there is to say of nonces that nothing stored has, or something beside an act.

        What can be sent into a gap is sent.

        Args:
            head: The newest block.
            rows: All that is neither final nor given up.
            used: How many of the account's nonces are used.

        Raises:
            RpcError: the chain cannot be asked.
        """
        told = self._dropped(rows, used)
        states = [(row.transaction.nonce, row.state) for row in rows]
        if not missing(used, states, None):
            self._sent = {}
            return told
        newest = self._outbox.newest_final(self._account.name, 1)
        final = newest[0].transaction.nonce if newest else None
        gap = missing(used, states, final)
        if not gap:
            return told
        acts = self._acts(gap)
        plan = filling(gap, self._counts(head, used), acts)
        told.append(
            f"chain {self._account.name.chain_id} waits for nonces {gap[0]} to {gap[-1]} of"
            f" {self._account.name.address}, and nothing that is to be sent has them: {plan.reason}"
        )
        return [*told, *self._send(head, plan.nonces, acts)]

    def _dropped(self, rows: Sequence[OutboxRow], used: int) -> list[str]:
        """What there is to say of acts that are not sent, for their nonce waits with something."""
        waiting = {
            row.transaction.nonce: row for row in rows if row.state is TransactionState.WAITING
        }
        beside = {
            act.draft.nonce: act
            for act in self._account.acts
            if act.draft.nonce >= used and act.draft.nonce in waiting
        }
        return [
            f"{act.what} of an operator's command is not sent: {waiting[nonce].transaction.purpose}"
            f" has its nonce {nonce}. Where it has not taken effect, give it again"
            for nonce, act in beside.items()
            if act.hash not in {each.attempt.hash for each in waiting[nonce].attempts}
        ]

    def _counts(self, head: Block, used: int) -> Counts:
        deep = max(0, head.number - self._profile.depth)
        address = self._account.address
        return Counts(used, self._chain.next_nonce(address), self._chain.next_nonce(address, deep))

    def _acts(self, gap: range) -> dict[int, Act]:
        """The newest of each nonce."""
        given_up = self._outbox.transactions(
            self._account.name, states=[TransactionState.ABANDONED]
        )
        over = {row.transaction.nonce for row in given_up}
        found = {nonce: self._account.acts_at(nonce) for nonce in gap if nonce not in over}
        return {nonce: acts[-1] for nonce, acts in found.items() if acts}

    def _send(self, head: Block, nonces: Sequence[int], acts: Mapping[int, Act]) -> list[str]:
        """Send what fills the first of them; once more where no block takes it.

        A void transfer pays more then, and an act goes as it is.

        Returns:
            What the chain said of those that it did not take.
        """
        is_due = not self._sent or head.number >= self._sent_at + self._profile.bump_blocks
        if not nonces or not is_due:
            return []
        signed = [
            _kept(acts[nonce])
            if nonce in acts
            else self._account.nothing(nonce, head.base_fee_wei, self._sent.get(nonce))
            for nonce in nonces[: self._profile.in_flight_max]
        ]
        answers = self._chain.send([(each.attempt.hash, each.raw) for each in signed])
        self._sent = dict(zip(nonces, (each.attempt for each in signed), strict=False))
        self._sent_at = head.number
        return [f"{each.reception.value}: {each.words}" for each in answers if each.words]


def _kept(act: Act) -> SignedAttempt:
    draft = act.draft
    return SignedAttempt(Attempt(act.hash, draft.max_fee_wei, draft.tip_wei), act.raw)
