"""A chain whose blocks a test makes by hand, with a journal and a settler beside it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from coordinator.core.settlement.epoch import Epoch
from coordinator.core.settlement.sealing import Metering, SealingRule
from coordinator.core.settlement.sending import TransactionState
from coordinator.shell.chain.escrow import Advanced, EscrowBook
from coordinator.shell.chain.founding import JobOrder
from coordinator.shell.chain.sending import Account
from coordinator.shell.chain.settler import Settler, SettlingOptions
from coordinator.shell.chain.turns import Turn
from coordinator.shell.journal.ledger.records import Earnings, EpochEnd
from coordinator.shell.journal.sql.store import SqlJournal
from hypergpu.chain.ledger import NodeAccount
from hypergpu.chain.local.anvil import Anvil, AnvilOptions
from hypergpu.chain.profiles import chain_profile
from hypergpu.chain.rpc.answers import quantity
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.client import Call, HttpRpc
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.chain.signer import Draft, Signer
from hypergpu.digest import digest_of
from hypergpu.ids import JobId, NodeId
from hypergpu.ledger.typed import address_bytes, word_bytes
from hypergpu.signature import IdentityKey
from tests.signed_receipts import COORDINATOR, Work, node_key, receipt_record

JOB = JobId("job-00000000000a")
ESCROW = 10**9
UNIT_PRICE = 1_000
NODES = [node_key(number) for number in range(4)]
TURNS_MOST = 200
WITHIN_S = 60.0
"""For an answer of a chain that says nothing, or is kept from the processor."""
WAITING = [TransactionState.WAITING]
RULE = SealingRule(metering=Metering.BATCHED, interval_ms=0, in_flight_max=256)
PROFILE = replace(chain_profile("anvil"), resend_ms=0)
ORDER = JobOrder(
    job_id=JOB,
    unit_price=UNIT_PRICE,
    escrow=ESCROW,
    guaranteed_bps=1_000,
    epochs=3,
    model=digest_of(b"model"),
    dataset=digest_of(b"dataset"),
)


class TimelessAnvil(Anvil):
    """Its clock stands still but for `Ground.let_pass`, however long a test takes."""

    def start(self) -> None:
        """Start it, and stop its clock."""
        super().start()
        rpc = HttpRpc(HttpTransport(self.url, timeout_s=WITHIN_S))
        rpc.call(Call("anvil_setBlockTimestampInterval", (0,)))
        rpc.close()


class Ground:
    """An Anvil that makes a block when it is asked to, and a journal that outlives settlers."""

    def __init__(self, folder: Path, anvil: Anvil) -> None:
        self.folder = folder
        self.anvil = anvil
        self.journal = SqlJournal(str(folder / "journal.sqlite3"))
        self.options = SettlingOptions(profile=PROFILE, rule=RULE, lock_folder=folder)
        self.rarely_blocks = 1
        self.url = anvil.url
        self.chain = EvmChain(HttpRpc(HttpTransport(anvil.url, timeout_s=WITHIN_S)))
        self._settler: Settler | None = None

    def ask(self, method: str, *parameters: object) -> object:
        """Call the chain's own RPC, whatever stands before it for the settler."""
        return self.chain.rpc.call(Call(method, parameters))

    def mine(self, blocks: int = 1) -> None:
        """Make some blocks, in no time."""
        for _ in range(blocks):
            self.ask("evm_mine")

    def let_pass(self, seconds: int) -> None:
        """Have the next block come so much later than the newest one."""
        self.ask("evm_setNextBlockTimestamp", self.chain.head().time_s + seconds)

    @property
    def settler(self) -> Settler:
        """The one that runs; another after `crash`."""
        if self._settler is None:
            self._transport = HttpTransport(self.url, timeout_s=WITHIN_S)
            rpc = HttpRpc(self._transport, PROFILE.pace)
            account = Account(Signer(COORDINATOR), self.journal, self.options.profile)
            self.escrow = EscrowBook(self.journal, rarely_blocks=self.rarely_blocks)
            self._settler = Settler(rpc, account, self.journal, self.options, self.escrow)
        return self._settler

    def crash(self) -> None:
        """Lose everything that is not in the journal."""
        if self._settler is not None:
            self._settler.close()
        self._settler = None

    def start_with(self, **changed: object) -> None:
        """Lose everything that is not in the journal, and start again with other options."""
        self.options = replace(self.options, **changed)
        self.crash()

    def retry_failed(self) -> None:
        """Start once more, with what the message of a halt says."""
        self.start_with(retries_failed=True)

    def trust_rpc(self) -> None:
        """Let the half minute be over for which a missing receipt may be the RPC's fault."""
        pump = self.settler._pump
        pump._rule = replace(pump._rule, foreign_ms=0)

    def lose_patience(self) -> None:
        """Have the settler that runs wait for no answer that does not come at once."""
        self._transport._timeout_s = 0.2

    def turn(self, *orders: JobOrder) -> Turn:
        """One turn."""
        return self.settler.turn(orders)[0]

    def opened(self, order: JobOrder = ORDER) -> "Ground":
        """With a ledger on the chain and a job on the ledger, both final."""
        self.turn(order)
        self.until(lambda turn: turn.waiting == 0 and turn.mined == 0)
        return self

    def until(self, is_reached: Callable[[Turn], bool]) -> Turn:
        """Turn and mine until a turn finds what is asked for."""
        for _ in range(TURNS_MOST):
            turn = self.turn()
            if is_reached(turn):
                return turn
            self.mine()
        raise AssertionError(f"not reached: {self.turn()}, {self.epochs()}")

    def earn(
        self, epoch: int, sequences: Sequence[int], *, nodes: Sequence[IdentityKey] = NODES
    ) -> None:
        """Keep receipts of each node."""
        domain = None if self._settler is None else self._settler.site.domain
        receipts = tuple(
            receipt_record(JOB, Work(node=node, sequence=sequence, epoch=epoch), domain=domain)
            for node in nodes
            for sequence in sequences
        )
        self.journal.append([], (), Earnings(receipts))

    def expect(self, round_cost: int, holders: Sequence[IdentityKey] = ()) -> None:
        """Tell the settler that runs what a round costs, and who has a voucher and no receipt."""
        nodes = frozenset(node.node_id for node in holders)
        self.escrow.expect(JOB, Advanced(round_cost, nodes))

    def end(self, epoch: int, *, is_last: bool = False) -> None:
        """The job leaves an epoch."""
        self.journal.append([], (), Earnings(ends=(EpochEnd(JOB, epoch, is_last=is_last),)))

    def epochs(self) -> list[Epoch]:
        """Every epoch."""
        return [record.epoch for record in self.journal.epochs(is_final_too=True)]

    def rest(self) -> None:
        """Go on until nothing is left to be done before somebody's window is over."""
        self.turn()
        self.until(
            lambda turn: (
                turn.waiting == 0
                and turn.mined == 0
                and not any(one.is_count_due or one.is_check_due for one in self.epochs())
                and not self.journal.transactions(self.settler.site.account, states=WAITING)
            )
        )

    def settle(self) -> None:
        """Go on until every epoch is final, past the window that nodes without stake wait for."""
        while self.journal.epochs() or self.journal.unsealed(1):
            self.rest()
            self.let_pass(PROFILE.window_s + 1)
            self.mine()

    def send_as(self, key: IdentityKey, call: bytes = b"", *, nonce: int | None = None) -> bytes:
        """Send a transaction that the settler knows nothing of, for a fee that wins.

        Args:
            key: Whose.
            call: Of the ledger; empty: nothing is called.
            nonce: None: the account's next.

        Returns:
            Its hash. No block is made.
        """
        signer = Signer(key)
        draft = Draft(
            chain_id=PROFILE.chain_id,
            nonce=self.chain.next_nonce(signer.address) if nonce is None else nonce,
            to=self.settler.site.contract if call else signer.address,
            call=call,
            gas=500_000 if call else 21_000,
            max_fee_wei=10**12,
            tip_wei=10**11,
        )
        signed = signer.sign(draft)
        self.chain.send([signed])
        return signed.hash

    def spend_nonce(self) -> None:
        """Have the coordinator's key used by somebody else, in a block of its own."""
        self.send_as(COORDINATOR)
        self.mine()

    def act_as(self, key: IdentityKey, call: bytes) -> None:
        """Have somebody call the ledger without the settler, and see that it takes effect."""
        self.ask("anvil_setBalance", key.node_id, hex(10**18))
        name = self.send_as(key, call)
        self.mine()
        (place,) = self.chain.inclusions([name])
        assert place is not None
        assert place.is_success

    def force_in(self, sequence: int) -> None:
        """Record a receipt of the first node in epoch 0 without the coordinator, as anyone may."""
        record = self.journal.receipt(JOB, NODES[0].node_id, sequence)
        assert record is not None
        self.act_as(NODES[0], self.settler.site.calls.record_one(record.signed, 0).call)

    def account(self, node: NodeId) -> NodeAccount:
        """What the ledger says of a node in the job."""
        site = self.settler.site
        call = site.calls.abi.call("getAccount", word_bytes(site.job_key(JOB)), address_bytes(node))
        return site.calls.account(self.chain.read(site.contract, call))

    def wallet(self, address: bytes) -> int:
        """How much of the token somebody has."""
        site = self.settler.site
        call = site.calls.token.call("balanceOf", address)
        return quantity("0x" + self.chain.read(site.token(), call).hex())

    def check_exact(self, receipts_each: int, *, samples: int = 320, bps: int = 9_000) -> None:
        """Every node's counters and wallet are what its receipts say, and the escrow the rest."""
        paid = 0
        for node in NODES:
            account = self.account(node.node_id)
            wallet = self.wallet(address_bytes(node.node_id))
            assert account.counted == receipts_each
            assert account.samples == receipts_each * samples
            assert account.paid == account.earned == wallet
            paid += wallet
        assert paid == len(NODES) * receipts_each * samples * bps * UNIT_PRICE // 10**6
        job = self.settler.site.job(JOB)
        assert job is not None
        assert job.free == ESCROW - paid

    def close(self) -> None:
        """End it."""
        self.crash()
        self.chain.rpc.close()
        self.journal.close()


@contextmanager
def hand_made(folder: Path) -> Iterator[Ground]:
    """A ground for as long as the block lasts."""
    anvil = TimelessAnvil(AnvilOptions(block_time_s=0), log=folder / "anvil.log")
    anvil.start()
    ground = Ground(folder, anvil)
    try:
        yield ground
    finally:
        ground.close()
        anvil.stop()
