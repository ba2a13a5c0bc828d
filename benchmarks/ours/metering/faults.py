"""Receipts to money: exactly once through kills and reorganisations, and how many a second."""

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import msgspec
from coincurve import PrivateKey, PublicKey

from benchmarks.ours.metering.gas import ask_anvil, connect, contract_at, register_nodes
from benchmarks.ours.metering.host import (
    COORDINATOR,
    JOB,
    QUALITY_BPS,
    SAMPLES,
    JobPlan,
    RunningPayments,
    SettlementRun,
    run_payments,
    worth_of,
)
from benchmarks.ours.metering.process import KEPT, STAKED
from hypergpu.crypto import keccak
from hypergpu.journal.events import RoundMeasuredEvent
from hypergpu.ledger_terms import Terms, job_key, separator_of
from hypergpu.statements import is_signed_by
from payments.shell.anvil import AnvilOptions, running_anvil
from payments.shell.ethereum import created_address

ROOT = Path(__file__).parents[3]
DEPTHS = (3, 12)
KILL, REORGANISE = "kill", "reorganise"
_SETTLED_WITHIN_S = 120.0
_LOOK_S = 0.03
_SEEN_BLOCKS = 16
_FIRST_BLOCKS = 16


class FaultSchedule(NamedTuple):
    """FaultSchedule of a run, at instants that the seed gives."""

    kills: int
    reorganisations: int
    seed: int


class FaultOutcome(NamedTuple):
    """State of the chain in the end."""

    errors: tuple[str, ...]
    """Differences from the job's work; empty when every counter and balance is exact."""
    paid_s: list[float]
    """For each round, ascending: from its row in the journal to the block that pays it."""


class SettledChain:
    """The coordinator's contracts: its first two transactions make them."""

    def __init__(self, url: str) -> None:
        self.web3 = connect(url)
        token, ledger = (created_address(COORDINATOR.address, nonce) for nonce in range(2))
        self.token = contract_at(self.web3, "TestToken", token)
        self.ledger = contract_at(self.web3, "TrainingLedger", ledger)
        self.job = bytes.fromhex(job_key(COORDINATOR.address, JOB))

    def differences(self, plan: SettlementRun) -> Iterator[str]:
        """Everything that the chain says otherwise than the plan."""
        job = plan.job
        score, worth = job.rounds * SAMPLES * QUALITY_BPS, worth_of(job.rounds)
        for key in job.keys:
            node = self.web3.to_checksum_address(key.address)
            account = self.ledger.functions.getAccount(self.job, node).call()
            actual = (*account, self.token.functions.balanceOf(node).call())
            plan_entry = (job.rounds, score, worth, worth)
            if actual != plan_entry:
                yield f"{node}: counted, score, earned and wallet are {actual}, not {plan_entry}"
        free = self.ledger.functions.getJob(self.job).call()[2]
        if free != job.escrow - job.nodes * worth:
            yield f"the escrow has {free} left, not {job.escrow - job.nodes * worth}"


class PaymentWatch:
    """Watches the chain in a thread and notes when each block's payments were first seen."""

    def __init__(self, url: str) -> None:
        self._chain = SettledChain(url)
        self._seen: dict[tuple[bytes, int, str], float] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._is_over.set()
        self._thread.join()

    def epochs(self) -> dict[int, float]:
        """When the last node of each epoch was paid, by the blocks that stayed."""
        paid_at_s: dict[int, float] = {}
        for event in self._events(0):
            for node in _payees(event):
                epoch = event["args"]["epoch"]
                seen_s = self._seen[bytes(event["blockHash"]), epoch, node]
                paid_at_s[epoch] = max(paid_at_s.get(epoch, 0.0), seen_s)
        return paid_at_s

    def _events(self, first: int) -> Any:
        return self._chain.ledger.events.PaymentsDistributed().get_logs(from_block=first)

    def _watch(self) -> None:
        last = b""
        while not self._is_over.wait(_LOOK_S):
            head = self._chain.web3.eth.get_block("latest")
            if bytes(head["hash"]) == last:
                continue
            last = bytes(head["hash"])
            for event in self._events(max(0, head["number"] - _SEEN_BLOCKS)):
                for node in _payees(event):
                    key = bytes(event["blockHash"]), event["args"]["epoch"], node
                    self._seen.setdefault(key, time.time())


def run_through(plan: SettlementRun, faults: FaultSchedule) -> FaultOutcome:
    """Run the process through kills and reorganisations until all is paid."""
    chain, payments = SettledChain(plan.url), PaymentWatch(plan.url)
    try:
        run = _Run(plan, chain, faults)
        run.finish()
        errors = tuple(chain.differences(plan))
    finally:
        payments.stop()
    if run.faults:
        errors += (f"{len(run.faults)} faults did not happen",)
    paid_s = payments.epochs()
    lines = [line.split() for line in Path(plan.folder, KEPT).read_text().splitlines()]
    waits_s = [paid_s[int(epoch)] - int(kept_ms) / 1000 for epoch, kept_ms in lines]
    return FaultOutcome(errors, sorted(waits_s))


class _Run:
    """The process, and the faults that are still to happen."""

    def __init__(self, plan: SettlementRun, chain: SettledChain, faults: FaultSchedule) -> None:
        self._plan = plan
        self._chain = chain
        chance = random.Random(faults.seed)
        count = faults.kills + faults.reorganisations
        kinds = [KILL] * faults.kills + [REORGANISE] * faults.reorganisations
        chance.shuffle(kinds)
        at = sorted(chance.sample(range(plan.receipts // 20, plan.receipts), count))
        self.faults = list(zip(at, kinds, strict=True))
        self._depths = iter(DEPTHS * faults.reorganisations)
        self._first_block: int | None = None
        """The first block that may go: play money and stakes are sent by nobody again."""

    def finish(self) -> None:
        """Run, started again after each kill, until the chain has paid everything.

        Raises:
            RuntimeError: The process ended by itself.
        """
        while True:
            child = _start(self._plan)
            try:
                if self._watch(child):
                    return
            finally:
                _kill(child)

    def _watch(self, child: "subprocess.Popen[bytes]") -> bool:
        """Follow the process until everything is paid or it takes too long; False: kill it."""
        give_up_at_s = 0.0
        for line in child.stdout or ():
            kept_count = int(line) if line.endswith(b"\n") else 0
            if self._first_block is None:
                self._stake()
            if self.faults and kept_count >= self.faults[0][0]:
                if self.faults[0][1] == KILL:
                    self.faults.pop(0)
                    return False
                self._reorganise()
            if kept_count == self._plan.receipts:
                give_up_at_s = give_up_at_s or time.monotonic() + _SETTLED_WITHIN_S
                if self._is_paid() or time.monotonic() > give_up_at_s:
                    return True
        raise RuntimeError(f"the settling process ended with {child.wait()}")

    def _is_paid(self) -> bool:
        return next(self._chain.differences(self._plan), None) is None

    def _stake(self) -> None:
        """Give each node its stake once the job is open, in blocks that stay."""
        register_nodes(self._chain.web3, self._chain.token, self._chain.ledger, self._plan.job.keys)
        ask_anvil(self._chain.web3, "anvil_mine", hex(_FIRST_BLOCKS))
        self._first_block = self._chain.web3.eth.block_number + 1
        Path(self._plan.folder, STAKED).touch()

    def _reorganise(self) -> None:
        """Replace the newest blocks, once there are some that may go."""
        first, head = self._first_block or 0, self._chain.web3.eth.block_number
        if head > first:
            self.faults.pop(0)
            ask_anvil(self._chain.web3, "anvil_reorg", min(next(self._depths), head - first), [])


def _payees(event: Any) -> list[str]:
    arguments = event["args"]
    payments = zip(arguments["nodes"], arguments["amounts"], strict=True)
    return [node for node, amount in payments if amount]


def _start(plan: SettlementRun) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "benchmarks.ours.metering.process"]
    with Path(plan.folder, "process.log").open("ab") as log:
        return subprocess.Popen(
            [*command, msgspec.json.encode(plan).decode()],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=log,
        )


def _kill(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    if child.stdout is not None:
        child.stdout.close()
    child.wait()


Round = tuple[str, RoundMeasuredEvent]
_AT_ONCE = 100
"""Rounds that are ready at once, and are written in one go."""
_SIGNATURES = 4_000
_SPEED_LOOK_S = 0.02


def signatures_per_s() -> float:
    """How often libsecp256k1 recovers one signer and signs once, on every core at a time."""
    key, digest = PrivateKey(keccak(b"a limit's key")), keccak(b"a receipt")
    signature = key.sign_recoverable(digest, hasher=None)

    def on_one_core(times: int) -> None:
        for _ in range(times):
            PublicKey.from_signature_and_message(signature, digest, hasher=None)
            key.sign_recoverable(digest, hasher=None)

    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        begun_s = time.monotonic()
        list(pool.map(on_one_core, [_SIGNATURES] * cores))
        return _SIGNATURES * cores / (time.monotonic() - begun_s)


def receipts_per_s(plan: SettlementRun) -> float:
    """Verify, journal, fold, sign, keep and send: until the last receipt is in a block."""
    return asyncio.run(_measure(plan))


def receipts_on_anvil_per_s(folder: Path, rounds: int, metering: str) -> float:
    """Receipts a second of one epoch that does not end, on a chain of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    with running_anvil(AnvilOptions(), log_file=folder / "anvil.log") as anvil:
        plan = SettlementRun(
            folder=str(folder),
            url=anvil.url,
            job=JobPlan(rounds=rounds, rounds_per_epoch=rounds + 1),
            metering="each" if metering == "each" else "batched",
        )
        return receipts_per_s(plan)


async def _measure(plan: SettlementRun) -> float:
    async with run_payments(plan) as here:
        rounds = [plan.job.round_row(number, here.terms) for number in range(plan.job.rounds)]
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(here.payments.wake)

        begun_s = time.monotonic()
        await asyncio.to_thread(_take_in, plan, rounds, here, wake)
        await asyncio.to_thread(_wait_until_counted, plan)
        return plan.receipts / (time.monotonic() - begun_s)


def _take_in(
    plan: SettlementRun, rounds: Sequence[Round], here: RunningPayments, wake: Callable[[], None]
) -> None:
    """Verify in one thread and journal in another, as a coordinator does."""
    verified_rounds: Queue[Sequence[Round]] = Queue(1)
    with ThreadPoolExecutor(1) as verifier:
        verification = verifier.submit(_verify, rounds, here.terms, verified_rounds)
        for _ in range(0, len(rounds), _AT_ONCE):
            here.host.append(plan.job.job_id, verified_rounds.get())
            wake()
        verification.result()
    here.end(plan)
    wake()


def _verify(rounds: Sequence[Round], terms: Terms, verified: "Queue[Sequence[Round]]") -> None:
    separator = separator_of(terms.domain)
    for first in range(0, len(rounds), _AT_ONCE):
        ready = rounds[first : first + _AT_ONCE]
        for work in (work for _, measurement in ready for work in measurement.updates):
            contribution = work.contribution
            if not is_signed_by(contribution.node, separator, contribution, work.signature):
                raise RuntimeError("a contribution's signature is wrong")
        verified.put(ready)


def _wait_until_counted(plan: SettlementRun) -> None:
    chain = SettledChain(plan.url)
    nodes = [chain.web3.to_checksum_address(key.address) for key in plan.job.keys]
    account = chain.ledger.functions.getAccount
    while any(account(chain.job, node).call()[0] != plan.job.rounds for node in nodes):
        time.sleep(_SPEED_LOOK_S)
