"""Kills the settling process and reorganises its chain, then compares every node with the chain."""

import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.ours.metering.plan import COORDINATOR, ESCROW, JOB, SAMPLES, STAKED, Plan, Progress
from benchmarks.ours.metering.stakes import enlist
from coordinator.shell.journal.ledger.records import AccountName
from coordinator.shell.journal.sql.store import SqlJournal
from hypergpu.chain.ledger import LedgerCalls
from hypergpu.chain.local.anvil import Anvil
from hypergpu.chain.profiles import chain_profile
from hypergpu.chain.rpc.answers import quantity
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.chain.rpc.client import Call, HttpRpc
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.chain.signer import contract_address
from hypergpu.ids import Address
from hypergpu.ledger.typed import address_bytes, job_key, word_bytes

ROOT = Path(__file__).parents[3]
DEPTHS = (3, 12)
WINDOW_S = 30
KILL, REORGANISE = "kill", "reorganise"
# What the coordinator's first two transactions make.
TOKEN = contract_address(address_bytes(COORDINATOR.node_id), 0)
LEDGER = contract_address(address_bytes(COORDINATOR.node_id), 1)


class Faults(NamedTuple):
    """What goes wrong during a run, at instants that the seed gives."""

    kills: int
    reorganisations: int
    seed: int


class PaymentTimes(NamedTuple):
    """Of each receipt, in seconds, ascending; empty where nodes have no stake."""

    paid: Sequence[float] = ()
    final: Sequence[float] = ()


class Outcome(NamedTuple):
    """What is on the chain in the end."""

    errors: tuple[str, ...]
    """What differs from what was earned; empty when every counter and balance is exact."""
    times: PaymentTimes


class Run:
    """The process, its chain, and what is still to go wrong."""

    def __init__(self, plan: Plan, anvil: Anvil, faults: Faults) -> None:
        self.chain = EvmChain(HttpRpc(HttpTransport(anvil.url)))
        self._plan = plan
        chance = random.Random(faults.seed)
        count = faults.kills + faults.reorganisations
        kinds = [KILL] * faults.kills + [REORGANISE] * faults.reorganisations
        chance.shuffle(kinds)
        at = sorted(chance.sample(range(plan.receipts // 20, plan.receipts), count))
        self._todo = list(zip(at, kinds, strict=True))
        self._depths = iter(DEPTHS * faults.reorganisations)
        self._aged_at = -1
        self._is_enlisted = not plan.has_stakes
        self._since: int | None = None
        """The last block that stays: play money is given by no transaction, so that nobody would
        give again what goes with a block."""

    @property
    def outstanding(self) -> int:
        """How many faults are still to happen."""
        return len(self._todo)

    def through(self) -> Progress:
        """Run to the end, started again after each kill. Gives what it said last."""
        while True:
            child = _started(self._plan)
            try:
                last = self._watched(child)
            finally:
                _ended(child)
            if last is not None:
                return last

    def _watched(self, child: "subprocess.Popen[bytes]") -> Progress | None:
        """Follow the process until it is done, which it says, or is to be killed."""
        for progress in _lines(child):
            if progress.halted or progress.is_done:
                return progress
            self._help(progress)
            if self._todo and progress.kept >= self._todo[0][0]:
                if self._todo[0][1] == KILL:
                    self._todo.pop(0)
                    return None
                self._reorganise()
        raise RuntimeError(f"the settling process ended with {child.wait()}")

    def _reorganise(self) -> None:
        """Replace the newest blocks, once there are some that may be."""
        height = self.chain.head().number
        if self._since is None or height <= self._since:
            return
        self._todo.pop(0)
        depth = min(next(self._depths), height - self._since)
        self.chain.rpc.call(Call("anvil_reorg", (depth, [])))

    def _help(self, progress: Progress) -> None:
        if not self._is_enlisted and self.chain.code(LEDGER):
            enlist(self.chain, TOKEN, LEDGER, self._plan.node_keys())
            Path(self._plan.folder, STAKED).touch()
            self._is_enlisted = True
        if progress.contract and self._is_enlisted and self._since is None:
            # The account had its play money before it signed the contract's deployment.
            self._since = self.chain.head().number + 1
        if progress.is_sealed and progress.deferred:
            self._age()

    def _age(self) -> None:
        """Nodes without stake wait for the window: it passes with the next block.

        Each epoch has a window of its own, and the last is closed after others are over.
        """
        height = self.chain.head().number
        if height > self._aged_at:
            self.chain.rpc.call(Call("evm_increaseTime", (WINDOW_S + 1,)))
            self._aged_at = height


def run_through(plan: Plan, anvil: Anvil, faults: Faults) -> Outcome:
    """Run the process to its end through kills and reorganisations, and look at the chain."""
    run = Run(plan, anvil, faults)
    last = run.through()
    errors = (last.halted,) if last.halted else tuple(differences(plan, run.chain))
    if run.outstanding:
        errors += (f"{run.outstanding} faults did not happen",)
    times = PaymentTimes(*payment_times(plan, run.chain)) if plan.has_stakes else PaymentTimes()
    run.chain.rpc.close()
    return Outcome(errors, times)


def payment_times(plan: Plan, chain: EvmChain) -> tuple[list[float], list[float]]:
    """For each receipt the seconds until its payment was seen in a block, and until that block had
    as many on top as make it final (by the chain's clock, which ticks in seconds).
    """
    journal = SqlJournal(str(Path(plan.folder, "journal.sqlite3")))
    profile = chain_profile("anvil")
    account = AccountName(profile.chain_id, Address(COORDINATOR.node_id))
    kept = [line.split() for line in Path(plan.folder, "kept.txt").read_text().splitlines()]
    paid_ms: dict[int, int] = {}
    final_ms: dict[int, int] = {}
    for epoch in {int(words[0]) for words in kept}:
        row = journal.transaction_for(account, f"pay/{JOB}/{epoch}/0")
        if row is None or row.block is None or row.mined_ms is None:
            raise RuntimeError(f"epoch {epoch} was not paid")
        (block,) = chain.blocks([row.block.number + profile.depth])
        if block is None:
            raise RuntimeError(f"the payment of epoch {epoch} is not final")
        paid_ms[epoch] = row.mined_ms
        final_ms[epoch] = max(1000 * block.time_s, row.mined_ms)
    journal.close()
    paid, final = [], []
    for number, kept_ms, count in kept:
        paid += [(paid_ms[int(number)] - int(kept_ms)) / 1000] * int(count)
        final += [(final_ms[int(number)] - int(kept_ms)) / 1000] * int(count)
    return sorted(paid), sorted(final)


def differences(plan: Plan, chain: EvmChain) -> Iterator[str]:
    """What the chain says otherwise than the receipts."""
    calls = LedgerCalls()
    job = word_bytes(job_key(COORDINATOR.node_id, JOB))
    total = 0
    for key in plan.node_keys():
        node = address_bytes(key.node_id)
        account = calls.account(chain.read(LEDGER, calls.abi.call("getAccount", job, node)))
        balance = chain.read(TOKEN, calls.token.call("balanceOf", node))
        wallet = quantity("0x" + balance.hex())
        total += wallet
        found = (account.counted, account.samples, account.earned, account.paid, wallet)
        owed = plan.owed // plan.nodes
        wanted = (plan.receipts_each, plan.receipts_each * SAMPLES, owed, owed, owed)
        if found != wanted:
            yield f"{key.node_id}: counted, samples, earned, paid, wallet are {found}, not {wanted}"
    free = calls.job(chain.read(LEDGER, calls.abi.call("getJob", job))).free
    if free != ESCROW - total:
        yield f"the escrow has {free} left, {ESCROW - total} were not paid"


def _started(plan: Plan) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "benchmarks.ours.metering.settling"]
    with Path(plan.folder, "settling.log").open("ab") as log:
        return subprocess.Popen(
            [*command, msgspec.json.encode(plan).decode()],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=log,
        )


def _lines(child: "subprocess.Popen[bytes]") -> Iterator[Progress]:
    if child.stdout is not None:
        for line in child.stdout:
            if line.endswith(b"\n"):
                yield msgspec.json.decode(line, type=Progress)


def _ended(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    if child.stdout is not None:
        child.stdout.close()
    child.wait()
