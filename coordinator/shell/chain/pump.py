"""Brings what is in the outbox into blocks, and notices when it falls out of them again.

There is no recovery beside this: after a crash, a cut or a reorganisation the next turn looks at
what is stored and at what the chain says, and goes on. What it stores is as of the newest block
when it began: contracts are asked at that block, and a later one is left for the next turn.
"""

from msgspec.structs import replace

from coordinator.core.settlement.epoch import Epoch, Move, Part, PartMoved, transition
from coordinator.core.settlement.sending import (
    Deed,
    Found,
    Pending,
    Ruling,
    SendingRule,
    Sighting,
    TransactionState,
    remembered,
    ruling,
)
from coordinator.shell.chain.nonces.filling import GapFiller
from coordinator.shell.chain.nonces.tracing import NonceTracer, Whose
from coordinator.shell.chain.reading.places import Places
from coordinator.shell.chain.sending import Account
from coordinator.shell.chain.turns import (
    Collected,
    Mending,
    Resting,
    Turn,
    last_words,
    progressed,
)
from coordinator.shell.clock import monotonic_ms
from coordinator.shell.journal.ledger.interface import Outbox
from coordinator.shell.journal.ledger.records import OutboxChange, OutboxRow, Progress
from hypergpu.chain.profiles import ChainProfile
from hypergpu.chain.rpc.answers import Block
from hypergpu.chain.rpc.chain import EvmChain, Reception
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.units import Milliseconds, several

_WATCHED_FINALS = 512
"""How many final transactions are looked at again after a reorganisation that was too deep."""
_AT_ONCE = 4096
_LOOKS_A_RESEND = 2
"""Whole looks at what rests, in the time after which it is sent again."""


FOREIGN_FIX = (
    "stop whoever else sends with this key, then start once with: hypergpu up --retry-failed; what"
    " no block has taken is signed again"
)
_OTHER_CHAIN_FIX = "name the RPC of the chain that was settled on, or restore that chain's state"


class HaltError(HyperGPUError):
    """Sending has stopped for good: going on would build on what did not happen."""

    def __init__(self, detail: str, *, fix: str = "") -> None:
        super().__init__(Reason.SENDING_HALTED, detail, fix=fix)


class Pump:
    """Used by one thread."""

    def __init__(self, chain: EvmChain, account: Account, outbox: Outbox, profile: ChainProfile):
        self._chain = chain
        self._account = account
        self._outbox = outbox
        self._profile = profile
        self._places = Places(chain)
        self._gaps = GapFiller(chain, account, outbox, profile)
        self._tracer = NonceTracer(chain, account.address)
        self._rule = SendingRule(
            depth=profile.depth,
            resend_ms=profile.resend_ms,
            bump_blocks=profile.bump_blocks,
            foreign_ms=max(30_000, 10 * profile.block_ms),
        )
        self._remembered: dict[int, Pending] = {}
        """What this process knows of its transactions beside what is stored: when it sent them."""
        self._resting: Resting | None = None
        self.head: Block | None = None
        """The newest block when its last turn began."""

    def turn(self) -> Turn:
        """Look at everything once and act.

        Raises:
            RpcError: the chain cannot be asked; nothing was changed that would not be true.
            HaltError: a transaction failed, or the key was used by somebody else.
        """
        return self._turned(Collected)

    def mend(self) -> Turn:
        """The same, stopping at no failed transaction: each nonce behind it is spent on nothing.

        Raises:
            RpcError: as `turn`.
            HaltError: what is on the chain is not what was sent there.
        """
        return self._turned(Mending)

    def _turned(self, collected: type[Collected]) -> Turn:
        self.head = head = self._chain.head()
        resting, self._resting = self._resting, None
        if resting is not None and self._is_as_before(resting, head):
            self._resting = resting
            return resting.again()
        turn = collected(head)
        stored = self._account.next_nonce()
        rows = self._look_and_act(turn)
        outcome = turn.outcome(rows)
        if turn.is_clear:
            until_ms = Milliseconds(monotonic_ms() + self._rule.resend_ms // _LOOKS_A_RESEND)
            self._resting = Resting(outcome, stored, until_ms)
        return outcome

    def _is_as_before(self, resting: Resting, head: Block) -> bool:
        return (
            head.hash == resting.outcome.head.hash
            and monotonic_ms() < resting.until_ms
            and self._account.next_nonce() == resting.next_nonce
        )

    def _look_and_act(self, turn: Collected) -> tuple[OutboxRow, ...]:
        """Look at every transaction that is not final. Returns them as they were before."""
        head = turn.head
        self._watch_finals(turn)
        states = [TransactionState.WAITING, TransactionState.MINED, TransactionState.FAILED]
        rows = self._outbox.transactions(self._account.name, states=states, limit=_AT_ONCE)
        self._forget_all_but({row.transaction.nonce for row in rows})
        next_nonce = self._chain.next_nonce(self._account.address)
        found = self._places.found(turn, rows, next_nonce)
        failed = turn.first_to_mend(rows)
        to_send = []
        for row in rows:
            nonce = row.transaction.nonce
            place = found.get(nonce)
            if turn.leave_ahead(row, place):
                self._forget_missing(nonce)
                continue
            seen = Sighting(
                height=head.number,
                found=place,
                canonical_hash=turn.canonical_hash(place.block.number) if place else None,
                next_nonce=next_nonce,
                is_behind_failed=failed is not None and nonce >= failed,
            )
            verdict = self._ruling(turn, row, seen)
            self._note(turn, row, seen, verdict)
            turn.judge(nonce, seen, verdict)
            if verdict.deed is Deed.HALT and turn.is_mending and failed is None:
                failed = nonce
            may_go = seen.is_behind_failed or not turn.is_held
            has_room = nonce < next_nonce + self._profile.in_flight_max
            if verdict.deed in _SENDING and may_go and has_room:
                to_send.append((row, verdict))
            if turn.halt:
                break
        self._act(turn, to_send)
        turn.complaints += self._gaps.fill(head, rows, next_nonce)
        return rows

    def _act(self, turn: Collected, to_send: list[tuple[OutboxRow, Ruling]]) -> None:
        self._write(turn)
        if turn.halt:
            raise HaltError(turn.halt, fix=turn.halt_fix)
        self._send(turn, to_send)

    def _forget_missing(self, nonce: int) -> None:
        """Its receipt is there: it was not spent by somebody else."""
        if known := self._remembered.get(nonce):
            self._remembered[nonce] = replace(known, vanished_at_ms=None)

    def _ruling(self, turn: Collected, row: OutboxRow, seen: Sighting) -> Ruling:
        nonce, now_ms = row.transaction.nonce, monotonic_ms()
        known = self._remembered.get(nonce) or Pending(
            nonce=nonce, attempts=tuple(each.attempt for each in row.attempts)
        )
        pending = remembered(replace(known, state=row.state, block=row.block), seen, now_ms)
        self._remembered[nonce] = pending
        found = ruling(pending, seen, self._rule, now_ms)
        is_foreign = found.deed is Deed.HALT and seen.found is None
        return self._traced(turn, row, found) if is_foreign else found

    def _traced(self, turn: Collected, row: OutboxRow, foreign: Ruling) -> Ruling:
        """Halt for somebody else's nonce only where its block does not hold what was sent."""
        whose, words = self._tracer.trace(row, turn.head)
        if whose is not Whose.OURS:
            return Ruling(Deed.HALT, f"{foreign.reason} ({words})")
        transaction = row.transaction
        turn.complaints.append(f"{transaction.purpose} ({transaction.nonce}) waits: {words}")
        return Ruling(Deed.WAIT, words)

    def _note(self, turn: Collected, row: OutboxRow, seen: Sighting, verdict: Ruling) -> None:
        """Take down what a ruling changes in what is stored."""
        place = seen.found
        block = place.block if place else None
        if verdict.deed is Deed.HALT:
            if not turn.is_mending:
                turn.halt = last_words(row, verdict.reason)
                turn.halt_fix = FOREIGN_FIX if block is None else ""
            if (row.state, row.block) != (TransactionState.FAILED, block):
                turn.progress.append(progressed(row, TransactionState.FAILED, place))
        elif verdict.deed is Deed.NOTE_MISSING:
            self._move(turn, row, TransactionState.WAITING, None)
            self._remembered.pop(row.transaction.nonce, None)
        elif place is not None and verdict.deed is Deed.NOTE_MINED:
            self._move(turn, row, TransactionState.MINED, place)
        elif place is not None and verdict.deed is Deed.FINISH:
            self._move(turn, row, TransactionState.FINAL, place)

    def _move(
        self, turn: Collected, row: OutboxRow, state: TransactionState, place: Found | None
    ) -> None:
        turn.progress.append(progressed(row, state, place))
        turn.states[row.transaction.nonce] = state
        if state is TransactionState.WAITING:
            turn.moves.append((row, Move.MISSING))
            return
        if not row.is_sent:
            # The process ended between sending it and noting that.
            turn.moves.append((row, Move.SENT))
        if row.state is not TransactionState.MINED:
            turn.moves.append((row, Move.MINED))
        if state is TransactionState.FINAL:
            turn.moves.append((row, Move.FINISHED))

    def _watch_finals(self, turn: Collected) -> None:
        """Take back what a reorganisation undid that was deeper than the profile's depth."""
        newest = self._outbox.newest_final(self._account.name, 1)
        if not self._places.undone(turn, newest):
            turn.look_behind(newest)
            return
        finals = self._outbox.newest_final(self._account.name, _WATCHED_FINALS)
        undone = self._places.undone(turn, finals)
        if len(undone) == _WATCHED_FINALS:
            raise HaltError(
                f"none of the last {_WATCHED_FINALS} final transactions is on the chain at "
                f"{self._chain.where}: it is another chain, or it was begun anew",
                fix=_OTHER_CHAIN_FIX,
            )
        turn.complaints.append(
            f"a reorganisation undid {several(len(undone), 'final transaction')}:"
            " the same bytes are sent again"
        )
        turn.progress += [progressed(row, TransactionState.WAITING, None) for row in undone]
        turn.moves += [(row, Move.UNDONE) for row in undone]
        self._write(turn)

    def _send(self, turn: Collected, wanted: list[tuple[OutboxRow, Ruling]]) -> None:
        outgoing = [
            row if verdict.deed is Deed.SEND else self._signed_again(turn, row, verdict)
            for row, verdict in wanted
        ]
        newest = [row.attempts[-1] for row in outgoing]
        answers = self._chain.send([(each.attempt.hash, each.raw) for each in newest])
        now_ms = monotonic_ms()
        for row, answer in zip(outgoing, answers, strict=True):
            self._sent(turn, row, now_ms)
            if answer.reception in _COMPLAINED:
                turn.complaints.append(
                    f"transaction {row.transaction.nonce} ({row.transaction.purpose}): "
                    f"{answer.reception.value}: {answer.words}"
                )
        self._write(turn)

    def _signed_again(self, turn: Collected, row: OutboxRow, verdict: Ruling) -> OutboxRow:
        """The transaction with a signing that costs more, stored before anybody sees it."""
        nonce, base_fee_wei = row.transaction.nonce, turn.head.base_fee_wei
        signs = self._account.void if verdict.deed is Deed.VOID else self._account.dearer
        fresh = signs(row, base_fee_wei)
        if fresh is None:
            turn.complaints.append(
                f"transaction {nonce} ({row.transaction.purpose}) is stuck: {verdict.reason}, and "
                "the fee cap of the chain's profile is reached"
            )
            return row
        change = OutboxChange(account=self._account.name, attempts=((nonce, fresh),))
        self._outbox.write(change)
        self._remembered.pop(nonce, None)
        return replace(row, attempts=(*row.attempts, fresh))

    def _sent(self, turn: Collected, row: OutboxRow, now_ms: Milliseconds) -> None:
        nonce = row.transaction.nonce
        known = self._remembered.get(nonce)
        attempts = tuple(each.attempt for each in row.attempts)
        since = known.first_sent_block if known else None
        self._remembered[nonce] = Pending(
            nonce=nonce,
            attempts=attempts,
            sent_at_ms=now_ms,
            first_sent_block=turn.head.number if since is None else since,
        )
        if not row.is_sent:
            turn.progress.append(
                Progress(nonce, TransactionState.WAITING, True, None, row.mined_ms)
            )
            turn.moves.append((row, Move.SENT))

    def _write(self, turn: Collected) -> None:
        if not turn.progress:
            return
        change = OutboxChange(
            account=self._account.name,
            progress=tuple(turn.progress),
            epochs=self._epochs_after(turn.moves),
        )
        self._outbox.write(change)
        turn.counts.update(move.value for _, move in turn.moves)
        turn.progress, turn.moves = [], []

    def _epochs_after(self, moves: list[tuple[OutboxRow, Move]]) -> tuple[Epoch, ...]:
        parts = [(row.transaction, move) for row, move in moves if row.transaction.part]
        if not parts:
            return ()
        # One that was final comes back only by a reorganisation that was too deep.
        is_final_too = any(move is Move.UNDONE for _, move in parts)
        epochs = {
            (one.epoch.job_id, one.epoch.number): one.epoch
            for one in self._outbox.epochs(is_final_too=is_final_too)
        }
        touched: dict[tuple[JobId, int], Epoch] = {}
        for transaction, move in parts:
            if transaction.job_id is not None:
                key = (transaction.job_id, transaction.epoch)
                before = touched.get(key) or epochs[key]
                touched[key] = transition(before, PartMoved(Part(transaction.part), move))
        return tuple(touched.values())

    def _forget_all_but(self, nonces: set[int]) -> None:
        self._remembered = {
            nonce: known for nonce, known in self._remembered.items() if nonce in nonces
        }


_SENDING = frozenset({Deed.SEND, Deed.BUMP, Deed.VOID})
_COMPLAINED = frozenset(
    {Reception.FEE_TOO_LOW, Reception.UNFUNDED, Reception.POOL_FULL, Reception.REFUSED}
)
