"""An Anvil with a settler that is driven by hand, for figures in gas and for pre-signed load."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from benchmarks.ours.metering.plan import COORDINATOR, ESCROW, JOB, UNIT_PRICE
from coordinator.core.settlement.sealing import Metering, SealingRule
from coordinator.shell.chain.escrow import EscrowBook
from coordinator.shell.chain.founding import JobOrder
from coordinator.shell.chain.sending import Account
from coordinator.shell.chain.settler import Settler, SettlingOptions
from coordinator.shell.journal.sql.store import SqlJournal
from hypergpu.chain.local.anvil import AnvilOptions, running_anvil
from hypergpu.chain.profiles import chain_profile
from hypergpu.chain.rpc.answers import Inclusion
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.client import Call, HttpRpc
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.chain.signer import Signer
from hypergpu.digest import digest_of

PROFILE = replace(chain_profile("anvil"), resend_ms=0)
_TURNS_MOST = 100


class Stage:
    """A ledger with an open job; a block is made when it is asked for."""

    def __init__(self, folder: Path, url: str, metering: Metering) -> None:
        self.journal = SqlJournal(str(folder / "stage.sqlite3"))
        self.chain = EvmChain(HttpRpc(HttpTransport(url), PROFILE.pace))
        rule = SealingRule(
            metering=metering,
            interval_ms=0,
            receipts_max=20_000,
            in_flight_max=PROFILE.in_flight_max,
        )
        options = SettlingOptions(profile=PROFILE, rule=rule, lock_folder=folder)
        self.account = Account(Signer(COORDINATOR), self.journal, PROFILE)
        rpc = HttpRpc(HttpTransport(url), PROFILE.pace)
        escrow = EscrowBook(self.journal)
        self.settler = Settler(rpc, self.account, self.journal, options, escrow)
        order = JobOrder(
            job_id=JOB,
            unit_price=UNIT_PRICE,
            escrow=ESCROW,
            guaranteed_bps=1_000,
            epochs=9,
            model=digest_of(b"model"),
            dataset=digest_of(b"dataset"),
        )
        self.settler.turn([order])
        self.rest()

    def mine(self) -> None:
        """Make a block."""
        self.chain.rpc.call(Call("evm_mine"))

    def rest(self) -> None:
        """Turn and mine until nothing is on its way."""
        for _ in range(_TURNS_MOST):
            said = self.settler.turn([])
            if not (said.sealed or said.turn.waiting or said.turn.mined):
                return
            self.mine()
        raise RuntimeError("the chain does not come to rest")

    def inclusions(self, prefix: str) -> list[Inclusion]:
        """Where the transactions for such purposes lie.

        Raises:
            RuntimeError: one of them is in no block, or failed.
        """
        hashes = []
        for purpose in self.journal.purposes(self.account.name, prefix):
            row = self.journal.transaction_for(self.account.name, purpose)
            if row is not None:
                hashes.append(row.attempts[-1].attempt.hash)
        places = self.chain.inclusions(hashes)
        sound = [place for place in places if place is not None and place.is_success]
        if len(sound) != len(hashes):
            raise RuntimeError(f"{len(hashes) - len(sound)} of {prefix} are not on the chain")
        return sound

    def close(self) -> None:
        """Let go of everything."""
        self.settler.close()
        self.chain.rpc.close()
        self.journal.close()


@contextmanager
def stage(folder: Path, metering: Metering, *, block_time_s: int = 0) -> Iterator[Stage]:
    """A stage for as long as the block lasts."""
    folder.mkdir(parents=True, exist_ok=True)
    with running_anvil(AnvilOptions(block_time_s=block_time_s), log=folder / "anvil.log") as anvil:
        made = Stage(folder, anvil.url, metering)
        try:
            yield made
        finally:
            made.close()
